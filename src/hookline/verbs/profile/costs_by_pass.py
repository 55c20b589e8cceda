"""Add up the costs of one thread, pass by pass.

The costs of a pass are those from its beginning until the next one. The time between two passes,
such as that of the loss, belongs to the pass before. Old passes are added up, so that a long run
needs no more memory than a short one.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple, final

import numpy
import numpy.typing

from hookline.display.text import plural
from hookline.verbs.profile.call_tree import BACKWARD, CALLS, FORWARD, SLOTS, CallContext

Costs = numpy.typing.NDArray[numpy.float64]

_N_SLOTS = len(SLOTS)
_MOST_NUMBERS = 4_000_000  # of a thread: 32 MB
_FEWEST = 16  # passes that are kept, however many modules there are


@final
class PassCosts:
    """Hold the costs of one pass, and of the code up to the next one.

    Args:
        number: the pass; -1 before the first.
        size: the number of costs.

    Attributes:
        costs: seconds by phase and numbers of calls: `SLOTS` of each context after each other.
        has_failed: True if the forward raised.
        has_gradients: True if gradients were enabled.
    """

    __slots__ = ("costs", "has_failed", "has_gradients", "number")

    def __init__(self, number: int, size: int) -> None:
        self.number: int = number
        self.costs: array[float] = array("d", bytes(size * 8))
        self.has_failed: bool = False
        self.has_gradients: bool = False


class PassSample(NamedTuple):
    """Hold the costs of a pass: the mean over passes that share one backward."""

    number: int  # the first pass
    n_passes: int  # the number of passes
    costs: Costs  # the costs, by context and slot


_NUMBER = attrgetter("number")


@final
class CostsByPass:
    """Keep the costs of the passes of a thread.

    Args:
        read_pending: reads the costs that a device has not given yet.

    Attributes:
        current: the costs that are charged at present.
    """

    def __init__(self, read_pending: Callable[[], None]) -> None:
        self._read_pending = read_pending
        self.current: PassCosts = PassCosts(-1, _N_SLOTS)
        self._closed: deque[PassCosts] = deque()
        # Of the passes that are no longer kept: those that went well, and those that failed.
        self._sums: tuple[Costs, Costs] = _zeros(1), _zeros(1)
        self._n_passes = [0, 0]

    def make_room(self, n_contexts: int) -> None:
        """Make room for the costs of further contexts."""
        missing = n_contexts * _N_SLOTS - len(self.current.costs)
        if missing > 0:
            self.current.costs.frombytes(bytes(missing * 8))

    def begin_pass(self, number: int) -> None:
        """Begin the costs of a pass. The code before the first pass belongs to the first."""
        if self.current.number < 0:
            self.current.number = number
            return
        self._closed.append(self.current)
        self.current = PassCosts(number, len(self.current.costs))
        if len(self._closed) > max(_FEWEST, _MOST_NUMBERS // len(self.current.costs)):
            self._read_pending()
            oldest = self._closed.popleft()
            self._n_passes[oldest.has_failed] += 1
            self._sums = tuple(  # type: ignore[assignment]
                _sum_costs([sums, _cost_matrix(oldest)]) if failed == oldest.has_failed else sums
                for failed, sums in enumerate(self._sums)
            )

    def sum_passes(self, *, failed: bool) -> tuple[int, Costs]:
        """Return the number of passes that failed, or of the others, and the sum of their costs.

        The code of a block without any pass is a part of the costs of passes that did not fail.
        """
        passes = [
            pass_costs for pass_costs in self._kept_passes() if pass_costs.has_failed == failed
        ]
        n_passes = self._n_passes[failed] + sum(pass_costs.number >= 0 for pass_costs in passes)
        return n_passes, _sum_costs([self._sums[failed], *map(_cost_matrix, passes)])

    def samples(self) -> list[PassSample]:
        """Return the costs of the passes that are kept and did not fail, in order.

        Several passes may share a backward, which runs in the time of the last one.
        """
        waiting: list[PassCosts] = []
        samples = []
        for pass_costs in self._kept_passes():
            if pass_costs.number < 0 or pass_costs.has_failed:
                continue
            if not pass_costs.has_gradients:
                samples.append(_mean_sample([pass_costs]))
                continue
            waiting.append(pass_costs)
            if any(pass_costs.costs[BACKWARD::_N_SLOTS]):
                samples.append(_mean_sample(waiting))
                waiting = []
        return sorted(
            [*samples, *(_mean_sample([pass_costs]) for pass_costs in waiting)], key=_NUMBER
        )

    def _kept_passes(self) -> Iterator[PassCosts]:
        yield from self._closed
        yield self.current


def _zeros(n_contexts: int) -> Costs:
    return numpy.zeros((n_contexts, _N_SLOTS))


def _cost_matrix(pass_costs: PassCosts) -> Costs:
    return numpy.array(pass_costs.costs).reshape(-1, _N_SLOTS)


def _mean_sample(passes: Sequence[PassCosts]) -> PassSample:
    mean = _sum_costs(map(_cost_matrix, passes)) / len(passes)
    return PassSample(passes[0].number, len(passes), mean)


def _sum_costs(costs: Iterable[Costs]) -> Costs:
    """Add up costs; later ones may have more contexts."""
    every = [*costs]
    total = _zeros(max(map(len, every), default=1))
    for matrix in every:
        total[: len(matrix)] += matrix
    return total


class PassChoice(Enum):
    """Choose the passes of a table: all of them added up, the first one, or all later ones."""

    ALL = auto()
    FIRST = auto()
    LATER = auto()


@final
class PassesOfThreads:
    """Hold the passes of all threads.

    Attributes:
        n_passes: the number of passes that did not fail.
        n_failed: the number of passes whose forward raised.
        failed_seconds: the seconds of the passes that failed, if others did not.
    """

    def __init__(self, threads: Sequence[CostsByPass]) -> None:
        went_well = [passes.sum_passes(failed=False) for passes in threads]
        failed = [passes.sum_passes(failed=True) for passes in threads]
        self._samples = [passes.samples() for passes in threads]
        self.n_passes: int = sum(number for number, _ in went_well)
        self.n_failed: int = sum(number for number, _ in failed)
        self.failed_seconds: float = 0.0
        # If all passes failed, the costs until they raised are better than none.
        told = went_well if self.n_passes or not self.n_failed else failed
        self._sums = [costs for _, costs in told]
        if self.n_passes:
            seconds = [float(costs[:, :CALLS].sum()) for _, costs in failed]
            # The code around the model counts in the first thread alone.
            around = sum(float(costs[0, FORWARD]) for _, costs in failed[1:])
            self.failed_seconds = sum(seconds) - around

    def costs(self, choice: PassChoice) -> tuple[list[list[Costs]], int]:
        """Return the costs of each thread's contexts for a table, and the number of passes."""
        first = min(map(_NUMBER, itertools.chain(*self._samples)), default=None)
        if choice is PassChoice.ALL or first is None:
            n_passes = self.n_passes or self.n_failed
            divisor = 1 if choice is PassChoice.ALL else max(n_passes, 1)
            return [[costs / divisor] for costs in self._sums], n_passes if divisor == 1 else 1
        is_first = choice is PassChoice.FIRST
        chosen = [
            [sample for sample in thread if (sample.number == first) == is_first]
            for thread in self._samples
        ]
        if not any(chosen):
            return self.costs(PassChoice.FIRST)
        n_passes = sum(sample.n_passes for thread in chosen for sample in thread)
        return [[sample.costs for sample in thread] for thread in chosen], n_passes

    def failure_note(self) -> str:
        """Say how many passes failed; an empty text if none has."""
        if not self.n_failed:
            return ""
        if not self.n_passes:
            return "The forward raised in each pass: the times are those of what ran before."
        passes = plural(self.n_failed, "pass", "passes")
        return f"The forward raised in {passes}: no module's time, FLOPs or calls contain that."


def slot_medians(costs: Costs) -> list[float]:
    """Return the median of each slot over passes."""
    return [float(cost) for cost in numpy.median(costs, axis=0)]


@final
class ContextCosts:
    """Hold the costs of contexts in one table: sums over all passes, or those of several passes.

    Args:
        tops: the top of the contexts of each thread.
        costs: the costs of each thread's contexts, one after the other, for each of its passes.
        adds: True adds up the costs of the threads. Otherwise each thread has passes of its own.
    """

    def __init__(
        self, tops: Sequence[CallContext], costs: Sequence[Sequence[Costs]], *, adds: bool
    ) -> None:
        sizes = [sum(1 for _ in top.walk()) for top in tops]
        # One matrix for each thread: passes, contexts, slots.
        self._costs = [
            numpy.stack([_sum_costs([_zeros(size), matrix]) for matrix in passes])
            for size, passes in zip(sizes, costs, strict=True)
            if passes
        ]
        measured = [top for top, passes in zip(tops, costs, strict=True) if passes]
        self._thread_of = {context: k for k, top in enumerate(measured) for context in top.walk()}
        self.adds = adds

    def costs_of(self, contexts: Iterable[CallContext]) -> Costs:
        """Return the costs of some contexts together: a row a pass, a column a slot."""
        indices: list[list[int]] = [[] for _ in self._costs]
        for context in contexts:
            if context in self._thread_of:
                indices[self._thread_of[context]].append(context.index)
        parts = [
            matrix[:, chosen].sum(1) for matrix, chosen in zip(self._costs, indices, strict=True)
        ]
        if not parts:
            return _zeros(1)
        return sum(parts[1:], parts[0]) if self.adds else numpy.concatenate(parts)
