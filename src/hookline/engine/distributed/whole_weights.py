"""Hold the whole weights of a model on each rank that FSDP or tensor parallelism shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.distributed.rendezvous import gather_json, group_ranks
from hookline.engine.distributed.tensor_parallel import ShardingRanks, gather_stacked
from hookline.engine.torch_private.distributed import (
    gather_full,
    has_process_group,
    is_dtensor,
    keep_unsharded,
    sharding_kind,
    wraps_fsdp1,
)
from hookline.engine.torch_private.hooks import HookDict, hook_dict
from hookline.engine.torch_private.modules import tensor_tables, wrapper_chain


def meet_sharding_ranks(model: nn.Module, question: str) -> None:
    """Wait for the ranks over which the weights of a model are sharded, before a collective.

    Raises:
        RanksError: a rank does not come. Without this, the others would wait for it in torch.
    """
    if has_process_group() and sharding_kind(model):
        for group, _ in ShardingRanks.of(model).groups:
            gather_json(question, None, group_ranks(group, question))


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[Mapping[int, Tensor]]:
    """Hold the whole weights on each rank, and compute as a model that is not sharded.

    Entering is a collective of all ranks, before which they meet: `meet_sharding_ranks`. What runs
    in the block gathers nothing.

    Args:
        model: the model, with the wrapper that FSDP1 has put around it.

    Yields:
        The DTensors that tensor parallelism has made, by the id of the whole tensor.
    """
    with _whole_fsdp1_weights(model), keep_unsharded(model), _whole_dtensors(model) as split:
        yield split


# -- FSDP1 ----------------------------------------------------------------------------------------


@contextmanager
def _whole_fsdp1_weights(model: nn.Module) -> Iterator[None]:
    """Gather the weights that FSDP1 shards. Its wrappers then call what they wrap, and no more."""
    wrappers: list[Any] = [module for module in model.modules() if wraps_fsdp1(module)]
    with ExitStack() as stack:
        if wrappers and wrappers[0].training_state.name != "SUMMON_FULL_PARAMS":
            summon = wrappers[0].summon_full_params
            stack.enter_context(summon(model, writeback=False))
        for wrapper in wrappers:
            wrapper.__dict__["forward"] = wrapper_chain(wrapper)[1]
            stack.callback(wrapper.__dict__.pop, "forward", None)
        yield


# -- tensor parallelism ---------------------------------------------------------------------------

# The packages whose hooks (torch) and forwards (transformers' tp_plan) split and join values.
_SPLITTING = ("torch.distributed.tensor", "transformers.distributed")


@contextmanager
def _whole_dtensors(model: nn.Module) -> Iterator[Mapping[int, Tensor]]:
    """Put whole tensors in place of DTensors, and take off what splits and joins values."""
    places = list(_dtensors(model))
    wholes: dict[int, Tensor] = {}  # a tied weight is one tensor
    with ExitStack() as stack:
        for table, name, tensor in places:
            if id(tensor) not in wholes:
                wholes[id(tensor)] = _gather_whole(tensor)
            stack.callback(table.__setitem__, name, tensor)
            table[name] = wholes[id(tensor)]
        for module in model.modules() if places else ():
            for kind in ("forward_pre", "forward"):
                _remove_splitting_hooks(hook_dict(module, kind), stack)
            if _is_splitting_hook(forward := module.__dict__.get("forward")):
                stack.callback(module.__dict__.__setitem__, "forward", forward)
                del module.__dict__["forward"]
        yield {id(wholes[id(tensor)]): tensor for _, _, tensor in places}


def _dtensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the parameters and buffers that are DTensors, each with its table and name."""
    tables: list[Any] = [table for _, *both in tensor_tables(model) for table in both]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and is_dtensor(tensor):
                yield table, name, tensor


def _gather_whole(tensor: Tensor) -> Tensor:
    whole = gather_full(tensor.detach())
    return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole


def _remove_splitting_hooks(table: HookDict, stack: ExitStack) -> None:
    """Take the hooks that split and join values off a module, until a stack unwinds."""
    hooks = list(table.items())
    taken = [key for key, hook in hooks if _is_splitting_hook(hook)]
    for key in taken:
        del table[key]
    if taken:
        stack.callback(_restore_hooks, table, hooks, taken)


def _restore_hooks(table: HookDict, hooks: list[tuple[Any, Any]], taken: list[Any]) -> None:
    """Put hooks back in their old order. The hooks that came meanwhile follow."""
    current = dict(table)
    table.clear()
    table.update((key, hook) for key, hook in hooks if key in taken or key in current)
    table.update(current)


def _is_splitting_hook(call: Any) -> bool:
    function = getattr(call, "func", call)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(_SPLITTING)


def gather_last_dim(part: Tensor, weight: Tensor | None, width: int) -> Tensor:
    """Join the parts of a value that the ranks have in its last dimension: a collective.

    Args:
        part: what a layer gets on this rank: a DTensor, this rank's part, or the whole.
        weight: the weight of the layer, which tensor parallelism may split over its inputs: a
            DTensor; None for another layer.
        width: the last dimension of the whole.
    """
    if is_dtensor(part):
        return gather_full(part)
    if weight is None or part.shape[-1] == width:
        return part
    for dim, placement in enumerate(weight.placements):  # type: ignore[attr-defined]
        if placement.is_shard(weight.dim() - 1):
            group = weight.device_mesh.get_group(dim)  # type: ignore[attr-defined]
            part = torch.cat(list(gather_stacked(part, group)), -1)
    return part
