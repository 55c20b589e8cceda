"""Compare a repeated run of a model with the first, by the outputs that both have measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import path_text
from hookline.engine.pytree import tree
from hookline.verbs.check.finiteness import Measure, flat, is_measurable, total

# Rounding makes the sums of equal runs differ, by at most this share of the sum of magnitudes.
_ROUNDING = 1e-4
_ROUNDING_OF_HALF = 1e-3

Sums = Sequence[tuple[int, Tensor, Measure | None]]


@final
class Likeness:
    """Compare a repeated run with the first run, output by output.

    Args:
        sums: the numbers that the first run measured, as in `Run.sums`.
        paths: the path of each site, by number.

    Attributes:
        difference: the first output that differs, as text; None if none does.
    """

    __slots__ = ("_first", "_lasts", "_n_seen", "difference")

    def __init__(self, sums: Sums, paths: Sequence[str]) -> None:
        self._first: dict[str, deque[tuple[Tensor, Measure | None]]] = {}
        for number, first, measure in sums:
            self._first.setdefault(paths[number], deque()).append((first, measure))
        self._n_seen = dict.fromkeys(self._first, 0)
        # The number of operations before the last number that is not finite in both runs.
        self._lasts = -1
        self.difference: str | None = None

    def compare(self, path: str, output: Any, n_operations: int) -> None:
        """Compare an output of the repeated run with the same of the first.

        Args:
            path: the module's path.
            output: its output.
            n_operations: the number of operations that the repeated run has run.
        """
        pending = self._first.get(path)
        if pending is None or self.difference is not None:
            return
        call, self._n_seen[path] = self._n_seen[path], self._n_seen[path] + 1
        if not pending:
            self._differs(path, call)
            return
        first, measure = pending.popleft()
        again = (measure or total)(output)
        if again is None or not _are_same(first, again, output, is_compiled=measure is None):
            self._differs(path, call)
        elif not first.isfinite():
            self._lasts = n_operations

    def end(self, paths: set[str]) -> None:
        """Notice the calls that the repeated run has not made.

        Args:
            paths: the modules whose calls could be seen.
        """
        for path, pending in self._first.items():
            if pending and path in paths and self.difference is None:
                self._differs(path, self._n_seen[path])

    def proves(self, number: int) -> bool:
        """Tell whether both runs were the same until they passed on what an operation made.

        Args:
            number: the number of the operation.
        """
        return self.difference is None or number <= self._lasts

    def _differs(self, path: str, call: int) -> None:
        self.difference = path_text(path) + (f"#{call}" if call else "")


def _are_same(first: Tensor, again: Tensor, output: Any, *, is_compiled: bool) -> bool:
    if is_compiled:
        # It computes in another order and draws other random numbers.
        return bool(first.isnan()) == bool(again.isnan())
    if torch.equal(first, again) or (bool(first.isnan()) and bool(again.isnan())):
        return True
    if not (first.isfinite() and again.isfinite()):
        return False
    parts = [flat(tensor) for _, tensor in tree.tensors(output) if is_measurable(tensor)]
    size = sum(float(tensor.abs().double().sum()) for tensor in parts)
    is_half = any(tensor.dtype.itemsize <= 2 for tensor in parts)
    return abs(float(again - first)) <= size * (_ROUNDING_OF_HALF if is_half else _ROUNDING)
