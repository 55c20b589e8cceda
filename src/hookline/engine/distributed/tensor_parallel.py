"""The ranks that work on one part of the batch together, as tensor parallelism splits weights."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hookline.engine.torch_private.distributed import (
    fsdp1_dtensor_layouts,
    fsdp1_groups,
    fsdp2_parameter_pairs,
    is_dtensor,
    is_partial_dtensor,
)


def tensor_parallel_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that tensor parallelism splits: DTensors, but not FSDP2's alone."""
    by_fsdp = {id(part) for pair in _fsdp2_pairs(model) for part in pair}
    return [
        parameter
        for parameter in model.parameters()
        if is_dtensor(parameter)
        and (id(parameter) not in by_fsdp or parameter.device_mesh.ndim > 1)  # type: ignore[attr-defined]
    ]


def tensor_parallel_ranks(model: nn.Module) -> list[int]:
    """Return the ranks over which tensor parallelism splits weights together with this one.

    They get the same part of the batch. After a forward, weights that FSDP2 shards are known, too.

    Returns:
        The ranks, this one included; none if tensor parallelism splits nothing.
    """
    pairs = _fsdp2_pairs(model)
    by_fsdp = {id(part) for pair in pairs for part in pair}
    tensors: list[Any] = [tensor for tensor in model.parameters() if id(tensor) not in by_fsdp]
    tensors += [unsharded for _, unsharded in pairs if unsharded is not None]
    layouts = [(tensor.device_mesh, tensor.placements) for tensor in tensors if is_dtensor(tensor)]
    layouts += [(layout.mesh, layout.placements) for layout in fsdp1_dtensor_layouts(model)]
    ranks: set[int] = set()
    for mesh, placements in layouts:
        ranks.update(
            _ranks_along(mesh, [dim for dim, of in enumerate(placements) if of.is_shard()])
        )
    return sorted(ranks)


def _ranks_along(mesh: Any, dims: list[int]) -> list[int]:
    """Return the ranks that differ from this one along some dimensions of a mesh only."""
    here = mesh.get_coordinate()
    if here is None or not dims:
        return []
    place = tuple(slice(None) if dim in dims else at for dim, at in enumerate(here))
    ranks: list[int] = mesh.mesh[place].flatten().tolist()
    return ranks


def _fsdp2_pairs(model: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    return [pair for module in model.modules() for pair in fsdp2_parameter_pairs(module)]


@final
class ShardingRanks(NamedTuple):
    """The ranks over which the weights of a model are sharded."""

    groups: tuple[tuple[Any, torch.device], ...]  # process groups, and the device of each
    covers_job: bool  # whether together they are all ranks of the job

    @classmethod
    def of(cls, model: nn.Module) -> ShardingRanks:
        """Return the groups in which ranks make each pass of a model together.

        A stage of a pipeline is sharded over some ranks of the job only. Those of another stage
        wait for its values.
        """
        shards = [shard for shard, _ in _fsdp2_pairs(model)]
        meshes = [t.device_mesh for t in [*shards, *model.parameters()] if is_dtensor(t)]  # type: ignore[attr-defined]
        meshes += [layout.mesh for layout in fsdp1_dtensor_layouts(model)]
        pairs = fsdp1_groups(model)
        job = {rank for group, _ in pairs for rank in dist.get_process_group_ranks(group)}
        for mesh in dict.fromkeys(meshes):
            if mesh.get_coordinate() is not None:  # this rank is in it
                pairs += [
                    (group, torch.device(mesh.device_type)) for group in mesh.get_all_groups()
                ]
                job.update(mesh.mesh.flatten().tolist())
        # Groups of the same ranks appear once, in the order of the weights.
        by_ranks = {tuple(dist.get_process_group_ranks(pair[0])): pair for pair in reversed(pairs)}
        groups = tuple(pair for ranks, pair in reversed(by_ranks.items()) if len(ranks) > 1)
        return cls(groups, len(job) == dist.get_world_size())


def reduce_partial(tensor: Tensor) -> Tensor:
    """Sum a DTensor of summands over ranks, as an optimizer does: a collective of its mesh.

    A tensor that is no summand is returned as it is.
    """
    if not is_partial_dtensor(tensor):
        return tensor
    spread: Any = tensor
    # Found where a DTensor exists, so this imports nothing new.
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    placements = [
        replicate if placement.is_partial() else placement for placement in spread.placements
    ]
    whole: Tensor = spread.redistribute(placements=placements)
    return whole


def gather_stacked(tensor: Tensor, group: Any) -> Tensor:
    """Gather a tensor from each rank of a group and stack the tensors: a collective."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
