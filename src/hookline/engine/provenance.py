"""Say where values come from: versions, device, model, and the flags that change numbers."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import nn

from hookline.engine.run_settings import precision_here
from hookline.util.version import VERSION

_PACKAGES = ("timm", "torchvision", "transformers")  # noted where they were imported
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


@final
@dataclass(frozen=True)
class Provenance:
    """The origin of the values of a recording, a store or a run."""

    # The versions of hookline, Python, torch, and of timm, torchvision and transformers where they
    # were imported.
    versions: Mapping[str, str] = field(default_factory=dict)
    # The devices of the model, with the name of a GPU; empty in folders that do not tell.
    device: str = ""
    fingerprint: str = ""  # a fingerprint of the model; empty in folders that do not tell
    # Torch's settings that change numbers, as texts: the seed, the precision of float32 products,
    # deterministic algorithms, and the kernels of attention that may be chosen. What a pass ran
    # under is `run.passes[0].settings`.
    flags: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def versions_here() -> dict[str, str]:
    """Return the versions that results depend on; of packages, of those that were imported."""
    versions = {
        "hookline": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in _PACKAGES:
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


def device_of(model: nn.Module) -> str:
    """Return the devices of a model's parameters and buffers, as in "cuda:0 (NVIDIA H100)"."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return ", ".join(
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
        for device in devices
    )


def flags_here() -> dict[str, str]:
    """Return torch's settings in this process that change numbers."""
    backends = torch.backends.cuda
    kernels = [name for name in _KERNELS if getattr(backends, f"{name}_sdp_enabled")()]
    return {
        "seed": str(torch.initial_seed()),
        **precision_here(),
        "deterministic algorithms": "on" if torch.are_deterministic_algorithms_enabled() else "off",
        "attention kernels on CUDA": ", ".join(kernels) or "none",
    }
