"""Tell the runs in which a GPU multiplied float32 in TF32, with 10 bits of the mantissa."""

from __future__ import annotations

from itertools import islice

import torch

from hookline.engine.pytree import tree
from hookline.verbs.compare.read_sides import Side

IN_TF32 = "a GPU multiplied in TF32"
_OLDEST = 8, 0  # the capability of Ampere, the first with TF32


def tf32_flags_of(side: Side) -> list[str]:
    """Return the flags of torch that had a GPU compute a side in TF32; empty if none did."""
    kinds = set(side.modules.values())
    flags = [flag for settings in side.settings for flag in settings.tf32_flags(kinds)]
    return list(dict.fromkeys(flags)) if flags and _ran_on_tf32_gpu(side) else []


def _ran_on_tf32_gpu(side: Side) -> bool:
    """Tell whether a side was computed on a GPU that has TF32, as far as known."""
    if side.is_read_from_folder:
        return any("cuda" in model.device for model in side.identify() if model is not None)
    values = (tensor for entry in side.entries for _, tensor in tree.tensors(entry.outline()))
    model = side.living_model  # whose values may have been kept on the CPU
    parameters = iter(()) if model is None else model.parameters()
    firsts = (tensor for tensors in (values, parameters) for tensor in islice(tensors, 1))
    return any(has_tf32(tensor.device) for tensor in firsts)


def has_tf32(device: torch.device) -> bool:
    """Tell whether a device can multiply in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OLDEST
