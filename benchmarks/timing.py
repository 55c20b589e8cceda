"""Interleaved rounds: in each, every contender runs once, in an order that changes.

A machine's speed drifts, and other programs come and go. So nothing is compared across rounds: a
ratio is taken within one round, and the median of these ratios over all rounds is what is reported.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import torch

Step = Callable[[], Any]
Session = Callable[[], AbstractContextManager[Step]]
Clock = Callable[[], float]
Measure = Callable[[int, Clock], float]


def device_clock() -> float:
    """Wall time, once the device has done what it was given."""
    torch.cuda.synchronize()
    return perf_counter()


# Processor time leaves out the waiting while other programs have the cores: for a busy machine. It
# also leaves out the waiting of a program for its own threads, so wall time is what counts.
CLOCKS: dict[str, Clock] = {"wall": perf_counter, "cpu": process_time, "device": device_clock}


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a row.

    Args:
        name: its column: "bare", "hand-written", "hookline", or a library.
        how: what it does, in words.
        measure: called with a number of calls and a clock; the seconds of one call.
        check: called once before all timing; raises if the contender does not do its work.
        every: measured in every n-th round only: what is slow and needs no third digit, less often
    """

    name: str
    how: str
    measure: Measure
    check: Callable[[], None] = lambda: None
    every: int = 1


@dataclass(frozen=True)
class Plan:
    """How a row is measured: in so many rounds, by this clock."""

    rounds: int
    clock: Clock


@dataclass(frozen=True)
class Spread:
    """The middle of many numbers, how far they lie apart, and how sure the middle is.

    Args:
        median: the middle.
        quartiles: a quarter of the numbers lies below the first, a quarter above the second.
        interval: the median's 95 % confidence interval, by rank: it assumes no distribution.
        n: how many numbers there were.
    """

    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    n: int

    @classmethod
    def of(cls, numbers: list[float]) -> Spread:
        """The spread of at least one number."""
        ordered = sorted(numbers)
        n = len(ordered)
        reach = 0.98 * math.sqrt(n)  # 1.96 standard deviations of the rank of the median
        low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
        quarters = statistics.quantiles(ordered, n=4) if n > 1 else [ordered[0]] * 3
        return cls(
            statistics.median(ordered),
            (quarters[0], quarters[2]),
            (ordered[max(low, 0)], ordered[min(high, n - 1)]),
            n,
        )


@dataclass
class Result:
    """What was measured for one row.

    Args:
        name: the row's short name, as `--only` takes it.
        title: the row in words.
        base: the contender against which the target is set; None where the target is absolute.
        target: at most this, as a ratio to the base.
        unit: what one measurement is: "s" for seconds a call, "B" for bytes.
        calls: how many calls one measurement takes the mean of.
        seconds: for each contender one measurement a round; None in rounds that it sat out.
        hows: what each contender does, in words.
        skipped: the contenders that did not run, and why.
        notes: anything else to say.
    """

    name: str
    title: str
    base: str | None
    target: float
    unit: str = "s"
    calls: int = 1
    seconds: dict[str, list[float | None]] = field(default_factory=dict)
    hows: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def spread(self, name: str) -> Spread:
        """The spread of a contender's measurements."""
        return Spread.of([second for second in self.seconds[name] if second is not None])

    def ratio(self, name: str, base: str) -> Spread | None:
        """The spread of a contender's ratios to another's measurement of the same round."""
        if name not in self.seconds or base not in self.seconds:
            return None
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        ratios = [one / other for one, other in pairs if one is not None and other is not None]
        return Spread.of(ratios) if ratios else None

    def number_against_target(self, name: str = "hookline") -> Spread | None:
        """What is held against the target: a ratio to the base, or the measurement itself."""
        if self.base is not None:
            return self.ratio(name, self.base)
        return self.spread(name) if name in self.seconds else None


def measure_session(session: Session) -> Measure:
    """Time the steps of a session, and leaving it: not entering it.

    Leaving frees what was kept. A contender that keeps the last call's values frees the others' as
    it goes, one that keeps all of them frees them at the end: so the end is counted too.
    """

    def measure(calls: int, clock: Clock) -> float:
        manager = session()
        step: Step | None = manager.__enter__()
        assert step is not None
        start = clock()
        for _ in range(calls):
            step()
        step = None  # it holds what was kept
        manager.__exit__(None, None, None)
        return (clock() - start) / calls

    return measure


def run_rounds(result: Result, contenders: list[Contender], plan: Plan) -> Result:
    """Measure all contenders in interleaved rounds, and fill in the result.

    A library that fails its check is skipped, and the reason kept; bare, hand-written and hookline
    may not fail.
    """
    running = []
    for contender in contenders:
        result.hows[contender.name] = contender.how
        try:
            contender.check()
            contender.measure(1, plan.clock)  # warm-up: caches, lazy imports, the allocator
        except Exception as error:
            if contender.name in ("bare", "hand-written") or contender.name.startswith("hookline"):
                raise
            result.skipped[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        running.append(contender)
        result.seconds[contender.name] = []
    order = random.Random(0)
    with _without_garbage_collection():
        for number in range(plan.rounds):
            # The libraries run after ours, so that ours are as close in time as can be.
            order.shuffle(running)
            for contender in sorted(running, key=lambda one: one.every > 1):
                if number % contender.every:
                    result.seconds[contender.name].append(None)
                    continue
                gc.collect()
                result.seconds[contender.name].append(contender.measure(result.calls, plan.clock))
    return result


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """No garbage collection while timing: it would hit one contender or another by chance.

    What is alive now is frozen, so that the collections between measurements are quick.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
