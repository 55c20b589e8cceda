"""Check that a model with whole weights computes what it computes with split ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hookline.display.text import type_and_line
from hookline.engine import gather_full
from hookline.engine.pytree import tree
from hookline.errors import AttachError
from hookline.verbs.anatomy.identities import relative_error, tolerance
from hookline.verbs.shared.run_model import call_model, copy_inputs

# Ranks sum in another order, and each layer adds to the difference. Other code is off by far more.
_CLOSE = 1e-3
_FIX = (
    "\nName the parts before parallelize_module, or without tp_plan: parts = hl.anatomy(model)."
    " Their sites stay the same: [str(site) for site in parts['pattern']]."
)


def refuse_plain_shards(model: nn.Module) -> None:
    """Refuse a model whose parts of weights do not say what they are parts of.

    Raises:
        AttachError: transformers has split the model, and made no DTensors.
    """
    if any("_hf_tp_plan" in module.__dict__ for module in model.modules()):
        raise AttachError(
            "hl.anatomy must be given a model whose weights are whole or DTensors, got"
            f" {type(model).__name__}, which transformers before 5.16 has split by tp_plan.{_FIX}"
        )


def run_output(model: nn.Module, inputs: Any) -> dict[tree.Leaf, Tensor]:
    """Run a model, and return the floating tensors of its output by leaf; DTensors are gathered."""
    return {
        leaf: gather_full(tensor).detach()
        for leaf, tensor in tree.tensors(call_model(model, copy_inputs(inputs)))
        if tensor.is_floating_point() and tensor.numel()
    }


def check_same_output(model: nn.Module, inputs: Any, split_out: dict[tree.Leaf, Tensor]) -> None:
    """Run a model with whole weights, and compare its output with that of split weights.

    Args:
        model: the model, which has whole weights now.
        inputs: the input.
        split_out: the output that the model had with weights that tensor parallelism splits.

    Raises:
        AttachError: the model fails, or has another output.
    """
    kind = type(model).__name__
    try:
        whole = run_output(model, inputs)
    except Exception as reason:
        raise AttachError(
            "hl.anatomy must be given a model that also runs with whole weights, because it proves"
            f" the names with these, got {kind}, which raises {type_and_line(reason)}.{_FIX}"
        ) from reason
    off = max((_shard_error(out, whole.get(leaf)) for leaf, out in split_out.items()), default=0.0)
    bound = max((tolerance(part.dtype) for part in split_out.values()), default=0.0)
    if off > max(bound, _CLOSE):
        raise AttachError(
            "hl.anatomy must be given a model that has the same output with whole weights, because"
            f" it proves the names with these, got {kind}, whose output is off by {off:.1e}.{_FIX}"
        )


def _shard_error(shard: Tensor, whole: Tensor | None) -> float:
    """Return the error of an output, or of the part of it that this rank has in one dimension."""
    if whole is None or shard.dim() != whole.dim():
        return float("inf")
    dims = [dim for dim in range(shard.dim()) if shard.shape[dim] != whole.shape[dim]]
    n_shares = -(-whole.shape[dims[0]] // shard.shape[dims[0]]) if dims else 1
    shares = whole.chunk(n_shares, *dims[:1])
    return min(relative_error(shard, share) for share in shares)
