"""Repeat a run of a model: put back what the run began with, and compare the second run with it.

A `RunStart` holds what a run began with. Whatever the second run shows counts only as far as
`RunComparison` has found both runs equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.engine import (
    every_tensor,
    own_buffers,
    path_text,
)
from hookline.engine.pytree import tree
from hookline.statistics.finiteness import Measure, detach_local_numbers, is_measurable, probe_sum
from hookline.statistics.flat_numbers import to_float64
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.verbs.shared.model_state import (
    Buffer,
    buffers_with_numbers,
    restore_modes_buffers_rng,
    tensor_version,
)
from hookline.verbs.shared.run_model import copy_inputs
from hookline.verbs.shared.run_settings import (
    Autocast,
    RandomStates,
    current_autocast,
    generators_of,
    use_autocast,
)

# -- the start of a run --------------------------------------------------------------------------


@final
class RunStart:
    """Hold what a run of a model began with: references, and few copies."""

    __slots__ = (
        "_copies", "_has_grad", "_is_inference", "_random", "_tensors", "args", "autocast",
        "kwargs",
    )  # fmt: skip

    def __init__(self, root: nn.Module, args: Any, kwargs: Any, changing: ChangingBuffers) -> None:
        if changing.copies_inputs:
            args, kwargs = copy_inputs((args, kwargs))
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self._tensors = [
            (tensor, tensor_version(tensor)) for tensor in every_tensor((args, kwargs))
        ]
        self.autocast: Autocast = current_autocast()
        self._has_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._copies = changing.copy_changing(root)
        self._random = RandomStates(changing.generators)

    def are_inputs_overwritten(self) -> bool:
        """Tell whether an input has been overwritten in place since the run began."""
        return any(tensor_version(tensor) != before for tensor, before in self._tensors)

    def why_not_repeatable(self) -> str | None:
        """Say why the run cannot be repeated; None if it can."""
        tensors = every_tensor((self.args, self.kwargs))
        if list(map(id, tensors)) != [id(tensor) for tensor, _ in self._tensors]:
            return "an argument of the model was changed by the run, such as a cache that grows"
        if self.are_inputs_overwritten():
            return "an input of the model was overwritten in place after the run began"
        return None

    @contextmanager
    def restore_state(self, root: nn.Module) -> Iterator[None]:
        """Put buffers, random states and modes as they were when the run began, for the block."""
        with restore_modes_buffers_rng(list(root.modules())):
            for table, name, copy in self._copies:
                buffer = table.get(name)
                if buffer is not None and buffer.shape == copy.shape:
                    table[name] = copy.clone()
            self._random.restore()
            with (
                use_autocast(self.autocast),
                torch.inference_mode(self._is_inference),
                torch.set_grad_enabled(self._has_grad),
            ):
                yield

    def buffer_before(self, module: nn.Module, name: str) -> Tensor | None:
        """Return a buffer as it was when the run began; None if the run has not changed it."""
        table = own_buffers(module)
        copies = (copy for other, key, copy in self._copies if other is table and key == name)
        return next(copies, None)


_Place = tuple[dict[str, Tensor | None], str]


@final
class ChangingBuffers:
    """The buffers of a model that its forward writes to, as batch norm does.

    All buffers are copied until the first run in each mode has ended. From then on, only those that
    have changed in that run are.

    Attributes:
        copies_inputs: whether an earlier run has overwritten its inputs, so that copies are kept.
        generators: the random generators that are attributes of the model's modules.
    """

    __slots__ = (
        "_all", "_changing", "_is_training", "_lock", "_versions", "copies_inputs", "generators",
    )  # fmt: skip

    def __init__(self) -> None:
        self.copies_inputs: bool = False
        self.generators: list[torch.Generator] = []
        self._all: list[_Place] = []
        self._changing: list[_Place] = []
        self._is_training: bool | None = None
        self._versions: list[tuple[int, int | None]] | None = None
        self._lock = fork_safe_lock()  # runs may begin in several threads

    def copy_changing(self, root: nn.Module) -> list[Buffer]:
        """Copy the buffers that the run may change."""
        with self._lock:
            if self._is_training is not root.training:
                self._is_training = root.training
                modules = list(root.modules())
                self.generators = generators_of(modules)
                self._all = [(table, name) for table, name, _ in buffers_with_numbers(modules)]
                self._versions = [_identity_and_version(*place) for place in self._all]
            return _copy_buffers(self._changing if self._versions is None else self._all)

    def find_changed(self) -> None:
        """Learn which buffers a run has changed that has ended."""
        with self._lock:
            before, self._versions = self._versions, None
            if before is not None:
                self._changing = _changed_places(self._all, before)


def _copy_buffers(places: list[_Place]) -> list[Buffer]:
    tensors = [(table, name, table.get(name)) for table, name in places]
    return [
        (table, name, tensor.detach().clone())
        for table, name, tensor in tensors
        if tensor is not None
    ]


def _changed_places(places: list[_Place], before: list[tuple[int, int | None]]) -> list[_Place]:
    pairs = zip(places, before, strict=True)
    return [place for place, was in pairs if _identity_and_version(*place) != was]


def _identity_and_version(table: dict[str, Tensor | None], name: str) -> tuple[int, int | None]:
    buffer = table.get(name)
    return id(buffer), None if buffer is None else tensor_version(buffer)


# -- the second run beside the first -------------------------------------------------------------

# Rounding makes the sums of equal runs differ, by at most this share of the sum of magnitudes.
_ROUNDING = 1e-4
_ROUNDING_OF_HALF = 1e-3

# For each output of a run: the number of its site, a number, and how it was measured (None: by
# compiled code).
Sums = list[tuple[int, Tensor, Measure | None]]


@final
class RunComparison:
    """Compare a repeated run with the first run, output by output.

    `paths` has the path of each site, by number.
    """

    __slots__ = ("_first", "_last_equal", "_n_calls", "difference")

    def __init__(self, sums: Sums, paths: Sequence[str]) -> None:
        self._first: dict[str, deque[tuple[Tensor, Measure | None]]] = {}
        for number, first, measure in sums:
            self._first.setdefault(paths[number], deque()).append((first, measure))
        self._n_calls = dict.fromkeys(self._first, 0)
        # The number of operations before the last number that is not finite in both runs.
        self._last_equal = -1
        self.difference: str | None = None

    def compare_output(self, path: str, output: Any, n_operations: int) -> None:
        """Compare an output after so many operations of the repeated run with that of the first."""
        pending = self._first.get(path)
        if pending is None or self.difference is not None:
            return
        call, self._n_calls[path] = self._n_calls[path], self._n_calls[path] + 1
        if not pending:
            self._record_difference(path, call)
            return
        first, measure = pending.popleft()
        again = (measure or probe_sum)(output)
        if again is None or not _are_same(first, again, output, is_compiled=measure is None):
            self._record_difference(path, call)
        elif not first.isfinite():
            self._last_equal = n_operations

    def skip_output(self, path: str) -> None:
        """Compare no number of an output: it holds memory that was never written."""
        if self._first.get(path):
            self._first[path].popleft()
            self._n_calls[path] += 1

    def check_missing_calls(self, paths: set[str]) -> None:
        """Notice calls that the repeated run has not made; `paths` are the modules it watched."""
        for path, pending in self._first.items():
            if pending and path in paths and self.difference is None:
                self._record_difference(path, self._n_calls[path])

    def are_equal_until(self, number: int) -> bool:
        """Tell whether both runs were the same until they passed on what this operation made."""
        return self.difference is None or number <= self._last_equal

    def _record_difference(self, path: str, call: int) -> None:
        self.difference = path_text(path) + (f"#{call}" if call else "")


def _are_same(first: Tensor, again: Tensor, output: Any, *, is_compiled: bool) -> bool:
    if is_compiled:
        # It computes in another order and draws other random numbers.
        return bool(first.isnan()) == bool(again.isnan())
    if torch.equal(first, again) or (bool(first.isnan()) and bool(again.isnan())):
        return True
    if not (first.isfinite() and again.isfinite()):
        return False
    parts = [
        detach_local_numbers(tensor) for _, tensor in tree.tensors(output) if is_measurable(tensor)
    ]
    size = sum(float(to_float64(tensor.abs()).sum()) for tensor in parts)
    is_half = any(tensor.dtype.itemsize <= 2 for tensor in parts)
    return abs(float(again - first)) <= size * (_ROUNDING_OF_HALF if is_half else _ROUNDING)
