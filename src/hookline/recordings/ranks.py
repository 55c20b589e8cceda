"""One value of the parts that the processes of a distributed job hold.

Only what is named here talks to other ranks; each of it after all have met, so that a rank that
does not come, or has something else, is an error on every rank and no hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.engine import (
    Site,
    full_value,
    gather_json,
    is_dtensor,
    local_part,
    ranks_of,
    say_by_rank,
)
from hookline.engine.pytree import tree
from hookline.errors import AmbiguousError, HooklineError, RanksError

OPS = ("mean", "sum", "max", "min")


@final
@dataclass(frozen=True)
class Collective:
    """A question to all ranks of a group.

    Args:
        question: as a person would write it.
        sites: what this rank has selected.
        group: the process group; None is all ranks.
        timeout: how long ranks wait for one another, in seconds.
    """

    question: str
    sites: tuple[Site, ...]
    group: Any
    timeout: float

    def check_ranks_match(self, find: Callable[[], Any]) -> tuple[Any, list[list[dict[str, Any]]]]:
        """This rank's value, and of each rank what tensors its value has.

        Raises:
            RanksError: on every rank: one of them has no such value, or one of another structure.
        """
        ranks = ranks_of(self.group, self.question)
        value, error = None, None
        try:
            value = find()
        except HooklineError as caught:
            error = caught
        said = {
            "sites": [str(site) for site in self.sites],
            "error": None if error is None else str(error).partition("\n")[0],
            "parts": [_describe(part) for part in _parts(value)],
        }
        everyone = gather_json(self.question, said, ranks, self.timeout)
        if any(one["error"] for one in everyone):
            raise RanksError(self._refusal(ranks, everyone)) from error
        parts = [one["parts"] for one in everyone]
        kinds = [
            [(part["kind"], part["dtype"], len(part["shape"])) for part in one] for one in parts
        ]
        if any(kind != kinds[0] for kind in kinds):
            texts = [", ".join(map(_text, one)) or "no tensor" for one in parts]
            raise RanksError(
                f"{self.question}: the ranks' values are not of one kind:"
                f" {say_by_rank(ranks, texts)}.\nRecord the same, in the same way, on every rank."
            )
        return value, parts

    def _refusal(self, ranks: list[int], everyone: list[dict[str, Any]]) -> str:
        errors = [one["error"] or "has it" for one in everyone]
        message = f"{self.question} needs a value on every rank. {say_by_rank(ranks, errors)}"
        selected = [", ".join(one["sites"][:8]) or "nothing" for one in everyone]
        if len(set(selected)) > 1:
            message += f"\nSelected: {say_by_rank(ranks, selected)}."
        return (
            f"{message}\nSelect and run the same on every rank; where only some of them have the"
            " module, as in a pipeline, give those as group=, or look it up there."
        )

    def wait(self, work: Any) -> None:
        """Wait for a collective.

        Raises:
            RanksError: a rank was lost meanwhile.
        """
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> RanksError:
        """What to say when a rank came, and then went away."""
        return RanksError(
            f"{self.question}: a rank was lost while values were exchanged"
            f" ({str(error).splitlines()[0][:120]}).\nLook at the output of the others: one has"
            " died, or called something else."
        )


def full(ask: Collective, find: Callable[[], Any], dim: int | None) -> Any:
    """The whole of a value of which each rank has a part: a collective."""
    value, parts = ask.check_ranks_match(find)
    _check_dim(ask, [[part for part in one if part["kind"] == "plain"] for one in parts], dim)
    number = iter(range(len(parts[0])))

    def gather(tensor: Tensor) -> Tensor:
        index = next(number)
        if not is_dtensor(tensor):
            shapes = [one[index]["shape"] for one in parts]
            return torch.cat(_gather(ask, tensor, shapes), dim or 0)
        try:
            return full_value(tensor)
        except RuntimeError as error:
            raise ask.lost(error) from error

    return tree.map_tensors(gather, value)


def reduced(ask: Collective, find: Callable[[], Any], op: str) -> Any:
    """A value reduced over ranks, element by element: a collective."""
    check_op(op)
    value, parts = ask.check_ranks_match(find)
    for one in zip(*parts, strict=True):
        shapes = [_text(part) for part in one]
        if one[0]["kind"] == "dtensor":
            raise RanksError(
                f"{ask.question}: it is a DTensor, whose parts are not one and the same value."
                "\nGather it, run.full(...), and reduce that; or reduce when recording:"
                " keep=lambda t: t.norm() keeps a number of each rank's part."
            )
        if len(set(shapes)) > 1:
            raise RanksError(
                f"{ask.question} takes values of one shape, and there are"
                f" {say_by_rank(ranks_of(ask.group, ask.question), shapes)}."
                "\nReduce when recording, keep=lambda t: t.float().mean(), or join them:"
                " run.full(..., dim=0)."
            )
    if isinstance(value, int | float):
        return _reduce(ask, torch.tensor(value, dtype=_number_dtype(value)), op).item()
    return tree.map_tensors(lambda tensor: _reduce(ask, tensor, op), value)


def _reduce(ask: Collective, tensor: Tensor, op: str) -> Tensor:
    if op in ("max", "min"):  # some backends lose a NaN on the way
        n_ranks = dist.get_world_size(ask.group)
        return _combine(_gather(ask, tensor, [list(tensor.shape)] * n_ranks), op)
    total = _wide(tensor, op).to(_device(ask.group), copy=True).contiguous()
    try:
        work = dist.all_reduce(total, group=ask.group, async_op=True)
    except RuntimeError as error:
        raise ask.lost(error) from error
    ask.wait(work)
    total = total.to(tensor.device)
    return total / dist.get_world_size(ask.group) if op == "mean" else total


def joined(values: Sequence[Any], dim: int | None, question: str) -> Any:
    """What `full` gives, of values that are all here: of an opened recording."""
    kinds = [[_describe(part) for part in _parts(value)] for value in values]
    _check_dim(Collective(question, (), None, 0.0), kinds, dim)
    columns = iter(list(zip(*[_parts(value) for value in values], strict=True)))
    return tree.map_tensors(lambda _: torch.cat(next(columns), dim or 0), values[0])


def combined(values: Sequence[Any], op: str) -> Any:
    """What `reduced` gives, of values that are all here."""
    check_op(op)
    if isinstance(values[0], int | float):
        dtype = _number_dtype(values[0])
        return _combine([torch.tensor(value, dtype=dtype) for value in values], op).item()
    columns = iter(list(zip(*[_parts(value) for value in values], strict=True)))
    return tree.map_tensors(lambda _: _combine(next(columns), op), values[0])


def check_op(op: str) -> None:
    """Refuse an unknown way to reduce.

    Raises:
        ValueError: it is none of `OPS`.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} is unknown; it is one of {', '.join(map(repr, OPS))}.")


def _combine(tensors: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack([_wide(tensor, op) for tensor in tensors])
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    total = stacked.sum(0)
    return total / len(tensors) if op == "mean" else total


def _wide(tensor: Tensor, op: str) -> Tensor:
    """In a dtype in which a sum over ranks is still right."""
    if op in ("max", "min"):
        return tensor
    if tensor.is_floating_point():
        return tensor if tensor.dtype is torch.float64 else tensor.float()
    if tensor.is_complex():
        return tensor
    return tensor.to(torch.float64 if op == "mean" else torch.int64)


def _number_dtype(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _parts(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    tree.map_tensors(note, value)  # the same walk by which they are gathered
    return found


def _describe(tensor: Tensor) -> dict[str, Any]:
    kind = "dtensor" if is_dtensor(tensor) else "plain"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"kind": kind, "dtype": dtype, "shape": list(tensor.shape)}


def _text(part: dict[str, Any]) -> str:
    name = "DTensor" if part["kind"] == "dtensor" else "Tensor"
    return f"{name}{part['shape']} {part['dtype']}"


def _check_dim(ask: Collective, parts: list[list[dict[str, Any]]], dim: int | None) -> None:
    for one in zip(*parts, strict=True):
        shapes = [part["shape"] for part in one]
        there = " and ".join(dict.fromkeys(str(shape) for shape in shapes))
        if dim is None:
            raise AmbiguousError(
                f"{ask.question}: each rank has a plain tensor, {there}, and nothing says how they"
                " make a whole.\nWrite dim=0 where each has a part of the batch (DDP, FSDP), or the"
                " dimension that tensor parallelism splits, such as dim=-1; where all have the"
                " same, what one has is the whole."
            )
        n_dims = len(shapes[0])
        if not -n_dims <= dim < n_dims:
            raise ValueError(
                f"{ask.question}: dim must be a dimension of {there}, got {dim}."
                "\nNumbers of each rank are reduced: run.reduced(..., op='mean')."
            )
        rest = [[n for k, n in enumerate(shape) if k != dim % n_dims] for shape in shapes]
        if any(one != rest[0] for one in rest):
            raise ValueError(
                f"{ask.question}: {there} cannot be joined along dimension {dim}: they differ"
                " in others."
            )


def _gather(ask: Collective, tensor: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    """A plain tensor of each rank, whatever their shapes: a collective."""
    tensor = local_part(tensor).detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.contiguous().view(-1).view(torch.uint8).to(_device(ask.group))
    sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
    mine = flat.new_zeros(max(sizes))  # all take part with as much as the largest
    mine[: flat.numel()] = flat
    found = [torch.empty_like(mine) for _ in sizes]
    if mine.numel():
        try:
            work = dist.all_gather(found, mine, group=ask.group, async_op=True)
        except RuntimeError as error:
            raise ask.lost(error) from error
        ask.wait(work)
    whole = []
    for part, size, shape in zip(found, sizes, shapes, strict=True):
        data = part[:size].view(real.dtype)
        if tensor.is_complex():
            data = torch.view_as_complex(data.view(-1, 2))
        whole.append(data.view(shape).to(tensor.device))
    return whole


def _device(group: Any) -> torch.device:
    """Where a group's values have to lie for it to exchange them."""
    backend = str(dist.get_backend(group))
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
