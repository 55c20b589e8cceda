"""Gather and reduce values over the ranks of a distributed job.

Before exchanging values, all ranks exchange descriptions of them. A missing rank or a different
value therefore raises an error on every rank instead of a hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.display.text import listed, type_and_line
from hookline.engine import (
    Site,
    failures_by_rank,
    format_by_rank,
    gather_full,
    gather_json,
    group_ranks,
    is_dtensor,
    layout_json,
    local_part,
    publish_failure,
)
from hookline.errors import AmbiguousError, HooklineError, RanksError
from hookline.files.safetensors_file import view_as_bytes
from hookline.recordings.join_dtensor_parts import (
    DTensorLayout,
    Part,
    ReplicaFingerprint,
    fingerprint_replica,
    guess_layout_text,
    join_each_replica,
    join_parts,
    warn_of_unequal_replicas,
)
from hookline.recordings.match_rank_values import (
    COMBINED,
    Node,
    RankValue,
    check_equal_leaves,
    check_same_structure,
    node_text,
    nodes_across_ranks,
)

OPS = ("mean", "sum", "max", "min")


@final
@dataclass(frozen=True)
class CollectiveLookup:
    """A look-up that all ranks of a group make together."""

    question: str  # the look-up as code, for messages
    sites: tuple[Site, ...]  # the sites that this rank selected
    group: Any  # the process group; None means all ranks
    timeout: float  # the time that ranks wait for one another, in seconds

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return group_ranks(self.group, self.question)

    def gather_nodes(
        self, look_up: Callable[[], Any], *, compares_copies: bool = False
    ) -> tuple[RankValue, list[list[Node]]]:
        """Return this rank's value, and each rank's nodes. A collective.

        Args:
            look_up: looks the value up.
            compares_copies: whether a warning says that copies of a DTensor's part differ.

        Raises:
            RanksError: on every rank, if a rank has no such value or one of another structure.
        """
        ranks, error = self.ranks, None
        try:
            value = RankValue(look_up())
        except Exception as caught:
            value, error = RankValue(None), caught
        answer = {
            "sites": [str(site) for site in self.sites],
            "error": None if error is None else _error_text(error),
            "nodes": value.nodes,
            "copies": list(map(_fingerprint_copy, value.tensors)) if compares_copies else [],
        }
        answers = gather_json(self.question, answer, ranks, self.timeout, is_of_a_step=True)
        if error is not None and not isinstance(error, HooklineError):
            raise error
        if any(rank["error"] for rank in answers):
            raise RanksError(self._no_value_text(ranks, answers)) from error
        nodes = [rank["nodes"] for rank in answers]
        check_same_structure(self.question, ranks, nodes)
        warn_of_unequal_replicas(self.question, ranks, [rank["copies"] for rank in answers])
        return value, nodes

    def _no_value_text(self, ranks: list[int], answers: list[dict[str, Any]]) -> str:
        errors = [answer["error"] or "has it" for answer in answers]
        message = f"{self.question} needs a value on every rank. {format_by_rank(ranks, errors)}"
        selected = [listed(answer["sites"], 8) or "nothing" for answer in answers]
        if len(set(selected)) > 1:
            message += f"\nSelected: {format_by_rank(ranks, selected)}."
        return (
            f"{message}\nSelect and run the same sites on every rank. If only some ranks have the"
            " module, as in a pipeline, pass their group as group=."
        )

    @contextmanager
    def convert_lost_rank_errors(self) -> Iterator[None]:
        """Turn the error of a rank that is lost in the block into a RanksError."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            publish_failure(type_and_line(error))
            raise
        except RuntimeError as error:
            failed = failures_by_rank(group_ranks(self.group, self.question))
            said = format_by_rank(failed, failed.values()) or str(error).splitlines()[0][:120]
            raise RanksError(
                f"{self.question}: a rank was lost while values were exchanged ({said})."
                "\nLook at the output of the other ranks: one died or called another collective."
            ) from error

    def wait(self, work: Any) -> None:
        """Wait for a collective."""
        work.wait(timedelta(seconds=self.timeout))


def _fingerprint_copy(tensor: Tensor) -> ReplicaFingerprint:
    layout = DTensorLayout.from_json(layout_json(tensor)) if is_dtensor(tensor) else None
    return None if layout is None else fingerprint_replica(layout, local_part(tensor))


def _error_text(error: Exception) -> str:
    """Return what other ranks are told of an error."""
    if isinstance(error, HooklineError):
        return str(error).partition("\n")[0]
    return type_and_line(error)


def gather_value(collective: CollectiveLookup, look_up: Callable[[], Any], dim: int | None) -> Any:
    """Gather a value of which each rank has a part. A collective."""
    value, nodes = collective.gather_nodes(look_up, compares_copies=True)
    check_equal_leaves(collective.question, collective.ranks, nodes, "number")
    _check_dim(collective.question, nodes_across_ranks(nodes, "plain", "array"), dim)
    wholes = []
    for tensor, column in zip(value.tensors, nodes_across_ranks(nodes), strict=True):
        if is_dtensor(tensor):
            with collective.convert_lost_rank_errors():
                wholes.append(gather_full(tensor))
        else:
            shapes = [node["shape"] for node in column]
            wholes.append(torch.cat(_all_gather_tensor(collective, tensor, shapes), dim or 0))
    return value.rebuild(wholes)


def reduce_over_ranks(collective: CollectiveLookup, look_up: Callable[[], Any], op: str) -> Any:
    """Reduce a value over ranks, element by element. A collective."""
    check_op(op)
    value, nodes = collective.gather_nodes(look_up)
    _check_reducible(collective.question, collective.ranks, nodes, op)
    tensors = [_all_reduce_tensor(collective, tensor, op) for tensor in value.tensors]
    return value.rebuild(tensors, _reduce_numbers(nodes, op))


def _all_reduce_tensor(collective: CollectiveLookup, tensor: Tensor, op: str) -> Tensor:
    if op in ("max", "min"):  # some backends drop a NaN in a max or min reduction
        n_ranks = dist.get_world_size(collective.group)
        return _reduce_tensors(
            _all_gather_tensor(collective, tensor, [list(tensor.shape)] * n_ranks), op
        )
    total = _widen(tensor, op).to(_exchange_device(collective.group), copy=True).contiguous()
    with collective.convert_lost_rank_errors():
        collective.wait(dist.all_reduce(total, group=collective.group, async_op=True))
    total = total.to(tensor.device)
    return total / dist.get_world_size(collective.group) if op == "mean" else total


def join_saved_ranks(
    values: Sequence[Any], part_by_id: Mapping[int, Part], dim: int | None, question: str
) -> Any:
    """Join the values of all ranks of an opened recording, as `gather_value` does.

    `part_by_id` has the tensors that were parts of DTensors, with their layouts, by their `id()`.
    """
    ranks = list(range(len(values)))
    apart, nodes, of_tensors = _disassemble(values, ranks, question)
    check_equal_leaves(question, ranks, nodes, "number")
    of_dtensors = [_dtensor_parts(column, part_by_id, dim, question) for column in of_tensors]
    plain = [
        column
        for column, whole in zip(nodes_across_ranks(nodes), of_dtensors, strict=True)
        if whole is None
    ]
    _check_dim(question, plain, dim)
    for parts in filter(None, of_dtensors):
        texts = [fingerprint_replica(layout, tensor) for layout, tensor in parts]
        warn_of_unequal_replicas(question, ranks, [[text] for text in texts])
    return apart[0].rebuild(
        torch.cat(column, dim or 0) if part is None else join_parts(part, dim, question)
        for column, part in zip(of_tensors, of_dtensors, strict=True)
    )


def join_by_replica(
    values: Mapping[int, Any], part_by_id: Mapping[int, Part], dim: int | str | None, question: str
) -> dict[int, Any]:
    """Return the value of each rank, with the whole of each DTensor in place of the rank's part.

    Ranks whose parts make up one value of DTensors have this value once, at the first of them. In a
    mesh, each replica is a value of its own. `dim` also joins plain tensors beside DTensors.

    Args:
        values: the value of each rank of an opened recording, by its number.
        part_by_id: the tensors that were parts of DTensors, with their layouts, by their `id()`.
        dim: the dimension along which the wholes of several meshes are concatenated, or how they
            are reduced; None to keep them apart.
        question: the look-up as code, for messages.
    """
    apart, nodes, of_tensors = _disassemble(values.values(), list(values), question)
    check_equal_leaves(question, list(values), nodes, "number")
    of_dtensors = [_dtensor_parts(column, part_by_id, None, question) for column in of_tensors]
    if not any(of_dtensors):
        return dict(values)
    merge: Callable[[Sequence[Tensor]], Tensor] | None = None
    if dim is not None:
        merge = (
            partial(_reduce_tensors, op=dim)
            if isinstance(dim, str)
            else partial(torch.cat, dim=dim)
        )
    made: dict[tuple[int, ...], tuple[int, Any]] = {}
    wholes: list[Sequence[Tensor]] = []
    for parts, column in zip(of_dtensors, of_tensors, strict=True):
        if parts is not None:
            wholes.append(join_each_replica(parts, merge, question))
        else:
            wholes.append(column if merge is None else [merge(column)] * len(column))
    for rank, value, tensors in zip(values, apart, zip(*wholes, strict=True), strict=True):
        made.setdefault(tuple(map(id, tensors)), (rank, value.rebuild(tensors)))
    return dict(made.values())


def _disassemble(
    values: Iterable[Any], ranks: list[int], question: str
) -> tuple[list[RankValue], list[list[Node]], list[tuple[Tensor, ...]]]:
    """Take the values of ranks apart, which must be of one structure; return nodes and tensors."""
    apart = [RankValue(value) for value in values]
    nodes = [value.nodes for value in apart]
    check_same_structure(question, ranks, nodes)
    return apart, nodes, list(zip(*[value.tensors for value in apart], strict=True))


def _dtensor_parts(
    tensors: Sequence[Tensor], part_by_id: Mapping[int, Part], dim: int | None, question: str
) -> list[Part] | None:
    """Return the parts of a DTensor; None for plain tensors, and where `dim` joins them."""
    parts = [part_by_id[id(tensor)] for tensor in tensors if id(tensor) in part_by_id]
    if len(parts) < len(tensors):
        return None
    unknown = parts[0][0].unjoinable_placement
    if unknown and dim is None:
        raise RanksError(
            f"{question}: placements must be Shard, Replicate, or Partial with a known reduction,"
            f" got {unknown}.\n{guess_layout_text(parts, question)}"
        )
    return None if unknown else parts


def reduce_saved_ranks(values: Sequence[Any], op: str, question: str, *, is_sharded: bool) -> Any:
    """Reduce the values of all ranks of an opened recording, as `reduce_over_ranks` does.

    `is_sharded` tells whether the values were shards of DTensors.
    """
    check_op(op)
    ranks = list(range(len(values)))
    apart, nodes, of_tensors = _disassemble(values, ranks, question)
    if is_sharded:
        nodes = [
            [{**node, "kind": "dtensor"} if node["kind"] == "plain" else node for node in of_rank]
            for of_rank in nodes
        ]
    _check_reducible(question, ranks, nodes, op)
    tensors = [_reduce_tensors(column, op) for column in of_tensors]
    return apart[0].rebuild(tensors, _reduce_numbers(nodes, op))


def _reduce_numbers(nodes: Sequence[list[Node]], op: str) -> list[float | complex]:
    """Reduce the numbers of all ranks, each with one dtype for all."""
    return [
        _reduce_number([n["value"] for n in column], op)
        for column in nodes_across_ranks(nodes, "number")
    ]


def _reduce_number(values: list[Any], op: str) -> float | complex:
    if all(isinstance(value, int) for value in values):  # of any size
        if op in ("max", "min"):
            return int(max(values) if op == "max" else min(values))
        return int(sum(values)) if op == "sum" else float(sum(values) / len(values))
    is_complex = any(isinstance(value, list) for value in values)
    numbers = [complex(*v) if isinstance(v, list) else float(v) for v in values]
    dtype = torch.complex128 if is_complex else torch.float64
    parts = [*torch.tensor(numbers, dtype=dtype, device="cpu")]
    total: float | complex = _reduce_tensors(parts, op).item()
    return total


def _check_reducible(question: str, ranks: list[int], nodes: Sequence[list[Node]], op: str) -> None:
    """Refuse shards of DTensors, tensors of several shapes, and an order of complex numbers."""
    for column in nodes_across_ranks(nodes):
        shapes = [node_text(node) for node in column]
        if column[0]["kind"] == "dtensor":
            raise RanksError(
                f"{question} reduces a value that every rank has, got a DTensor, whose shards"
                " are different parts.\nGather it with run.full(...) and reduce the result, or"
                " reduce each shard when recording: keep=lambda t: t.norm()."
            )
        if len(set(shapes)) > 1:
            raise RanksError(
                f"{question}: the ranks' values must have one shape, got"
                f" {format_by_rank(ranks, shapes)}."
                "\nReduce when recording, keep=lambda t: t.float().mean(), or join them:"
                " run.full(..., dim=0)."
            )
    for node in (node for column in nodes_across_ranks(nodes, *COMBINED) for node in column):
        is_complex = isinstance(node.get("value"), list) or node["dtype"].startswith("complex")
        if is_complex and op in ("max", "min"):
            raise RanksError(
                f"{question} needs real numbers, which have an order, got {node_text(node)}."
                "\nWrite op='mean' or op='sum', or record the magnitude: keep=lambda t: t.abs()."
            )


def check_op(op: str) -> None:
    """Check that a reduction is one of `OPS`."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(map(repr, OPS))}, got {op!r}.")


def _reduce_tensors(tensors: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack([_widen(tensor, op) for tensor in tensors])
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    total = stacked.sum(0)
    return total / len(tensors) if op == "mean" else total


def _widen(tensor: Tensor, op: str) -> Tensor:
    """Cast a tensor to a dtype that is wide enough for a sum over ranks."""
    if op in ("max", "min"):
        return tensor
    if tensor.is_floating_point():
        return tensor if tensor.dtype is torch.float64 else tensor.float()
    if tensor.is_complex():
        return tensor
    return tensor.to(torch.float64 if op == "mean" else torch.int64)


def _check_dim(question: str, plain: list[tuple[Node, ...]], dim: int | None) -> None:
    for column in plain:
        shapes = [node["shape"] for node in column]
        texts = " and ".join(dict.fromkeys(str(shape) for shape in shapes))
        if dim is None:
            raise AmbiguousError(
                f"{question}: each rank has a plain tensor, {texts}, so dim must say how to"
                " join them.\nWrite dim=0 if each rank has a part of the batch (DDP, FSDP), or the"
                " dimension that tensor parallelism splits, such as dim=-1.\nIf all ranks have the"
                " same tensor, look it up on one rank."
            )
        n_dims = len(shapes[0])
        if not -n_dims <= dim < n_dims:
            raise ValueError(
                f"{question}: dim must be a dimension of {texts}, got {dim}."
                "\nReduce a number of each rank instead: run.reduced(..., op='mean')."
            )
        rest = [[n for k, n in enumerate(shape) if k != dim % n_dims] for shape in shapes]
        if any(sizes != rest[0] for sizes in rest):
            raise ValueError(
                f"{question}: {texts} cannot be joined along dimension {dim}: they also differ"
                " in other dimensions."
            )


def _all_gather_tensor(
    collective: CollectiveLookup, tensor: Tensor, shapes: list[list[int]]
) -> list[Tensor]:
    """Gather a plain tensor of each rank; their shapes may differ. A collective."""
    tensor = local_part(tensor).detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = view_as_bytes(real.contiguous()).to(_exchange_device(collective.group))
    sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
    padded = flat.new_zeros(max(sizes))  # all_gather needs one size, so all pad to the largest
    padded[: flat.numel()] = flat
    pieces = [torch.empty_like(padded) for _ in sizes]
    if padded.numel():
        with collective.convert_lost_rank_errors():
            collective.wait(dist.all_gather(pieces, padded, group=collective.group, async_op=True))
    whole = []
    for part, size, shape in zip(pieces, sizes, shapes, strict=True):
        data = part[:size].view(real.dtype)
        if tensor.is_complex():
            data = torch.view_as_complex(data.view(-1, 2))
        whole.append(data.view(shape).to(tensor.device))
    return whole


def _exchange_device(group: Any) -> torch.device:
    """Return the device on which a group's backend exchanges tensors."""
    backend = str(dist.get_backend(group))
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
