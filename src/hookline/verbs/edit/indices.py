"""The values of `at=` and `steps=`: positions of tokens, and steps of `generate`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from hookline.errors import AttachError


@final
@dataclass(slots=True, eq=False)
class Indices:
    """The numbers that a caller has given, and those of them that have not occurred yet."""

    name: str  # the argument's name, `at` or `steps`
    numbers: tuple[int, ...] | None  # the integers; None for a slice
    span: slice | None  # the slice; None for integers
    _missing: set[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self._missing = {None} if self.numbers is None else set(self.numbers)

    @property
    def counts_from_end(self) -> bool:
        """Tell whether a number is negative."""
        span = self.span or slice(None)
        numbers = (span.start, span.stop) if self.numbers is None else self.numbers
        return any(number is not None and number < 0 for number in numbers)

    def match_tokens(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """Choose from positions, and note which of the numbers have occurred.

        Args:
            positions: the position of each token, or -1 for padding.
            lengths: the length of each token's sequence so far, from which negative numbers count.

        Returns:
            A mask of the positions' shape.
        """
        if self.numbers is None:
            mask = self._span_mask(positions, lengths)
            if self._missing and bool(mask.any()):
                self._missing.clear()
            return mask
        mask = torch.zeros_like(positions, dtype=torch.bool)
        for number in self.numbers:
            wanted = lengths + number if number < 0 else torch.full_like(positions, number)
            is_here = (positions == wanted) & (wanted >= 0)
            if number in self._missing and bool(is_here.any()):
                self._missing.discard(number)
            mask |= is_here
        return mask

    def _span_mask(self, positions: Tensor, lengths: Tensor) -> Tensor:
        span = self.span or slice(None)

        def bound(number: int | None, default: Tensor) -> Tensor:
            if number is None:
                return default
            if number < 0:
                return (lengths + number).clamp(min=0)
            return torch.full_like(positions, number)

        start = bound(span.start, torch.zeros_like(positions))
        stop = bound(span.stop, lengths)
        is_inside = (positions >= start) & (positions < stop)
        return is_inside & ((positions - start) % (span.step or 1) == 0)

    def match_step(self, step: int) -> bool:
        """Tell whether a step is chosen, and note that it has occurred."""
        return bool(self.match_tokens(*torch.tensor([step, step + 1], device="cpu")))

    def unmet_text(self) -> str:
        """Write the numbers that have not occurred; an empty text if there are none."""
        if not self._missing:
            return ""
        if self.numbers is None:
            return str(self)
        return f"{self.name}={', '.join(map(str, [n for n in self.numbers if n in self._missing]))}"

    def __str__(self) -> str:
        if self.span is not None:
            step = "" if self.span.step is None else f", {self.span.step}"
            return f"{self.name}=slice({self.span.start}, {self.span.stop}{step})"
        return f"{self.name}={', '.join(map(str, self.numbers or ()))}"


def parse_indices(name: str, given: Any, *, allows_negative: bool) -> Indices | None:
    """Read the argument; None if it was not given.

    Raises:
        AttachError: the argument is not an integer, a slice or a list of integers, or a number in
            it is negative and may not be.
    """
    if given is None:
        return None
    read = _parse_slice(name, given) if isinstance(given, slice) else _parse_numbers(name, given)
    if read.counts_from_end and not allows_negative:
        raise AttachError(
            f"{name} must not be negative, because the last step is not known beforehand, got"
            f" {given!r}.\nCount from the first step, which is 0: {name}=slice(1, None)."
        )
    if read.span is not None and read.span.step is not None and read.span.step < 1:
        raise AttachError(
            f"{name} must be a slice with a positive step, got {given!r}."
            f"\nWrite {name}=slice(start, stop)."
        )
    return read


def _parse_slice(name: str, given: slice) -> Indices:
    ends = (given.start, given.stop, given.step)
    span = slice(*[None if end is None else _checked_integer(name, end) for end in ends])
    return Indices(name, None, span)


def _parse_numbers(name: str, given: Any) -> Indices:
    whole = _to_python_numbers(given)
    is_single = isinstance(whole, str | bytes) or not isinstance(whole, Iterable)
    numbers = dict.fromkeys(_checked_integer(name, n) for n in ([whole] if is_single else whole))
    if not numbers:
        raise AttachError(f"{name} must name at least one number, got {given!r}.\nLeave it out.")
    return Indices(name, tuple(numbers), None)


def _to_python_numbers(given: Any) -> Any:
    """Return the numbers of a tensor or an array as those of Python, which tell True from 1."""
    return given.tolist() if hasattr(given, "tolist") else given


def _checked_integer(name: str, number: Any) -> int:
    try:
        plain = _to_python_numbers(number)
        if isinstance(plain, bool):
            raise TypeError
        return operator.index(plain)
    except TypeError:
        raise AttachError(
            f"{name} must be an integer, a slice or a list of integers, got {number!r}."
            f"\nWrite {name}=0, {name}=[0, 2] or {name}=slice(1, None)."
        ) from None
