"""The rows of a profile: the costs of each module, with and without the modules inside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, final

import numpy

from hookline.verbs.profile.call_tree import CALLS, PHASES, CallContext, outermost_contexts
from hookline.verbs.profile.costs_by_pass import ContextCosts, Costs, slot_medians
from hookline.verbs.summary import Row as Module

# What torch's loop over the hooks and the cold caches add to a call (`benchmarks/profiling.py`).
_SECONDS_A_CALL = 5e-6
_SHARE = 0.1
_N_PHASES = len(PHASES)


class Phases(NamedTuple):
    """A cost by phase.

    Attributes:
        forward: the cost of the first forward.
        backward: the cost of the backward, without recomputation.
        recompute: the cost of forwards that checkpointing runs again in backward.
    """

    forward: float = 0
    backward: float = 0
    recompute: float = 0

    @property
    def all(self) -> float:
        """The sum."""
        return self.forward + self.backward + self.recompute

    def divided_by(self, number: float) -> Phases:
        """Divide the cost."""
        return self if number == 1 else Phases(*(seconds / number for seconds in self))


NOTHING = Phases()


def sum_phases(costs: Iterable[Iterable[float]]) -> Phases:
    """Add up costs, phase by phase."""
    return Phases(*map(sum, zip(*costs, strict=True)))


@final
@dataclass(frozen=True)
class Row:
    """A module in a profile.

    Args:
        module: its path, type and parameters.
        calls: the number of its calls; recomputation is not counted.
        time: the seconds in it, with the modules inside.
        self_time: the seconds in its own code and its own part of the graph.
        spread: the interquartile range of the seconds in it over several passes: the middle half of
            the passes lies in a range of this width. 0 in a table of sums.
        flops: the floating-point operations, with those of the modules inside. A multiply-add
            counts as two.
        self_flops: the floating-point operations of its own code.
        activation_bytes: the bytes that it keeps for backward, with the modules inside. It is the
            largest amount of any pass. Memory that several modules save counts for the first one.
        self_activation_bytes: the bytes that its own operations keep.
        peak_bytes: the most bytes that were alive during its calls, of tensors that the pass made,
            and of inputs that it keeps for backward; 0 where it is not known.
        n_inner: the number of calls of modules in it, its own included.
    """

    module: Module
    calls: float = 0
    time: Phases = NOTHING
    self_time: Phases = NOTHING
    spread: float = 0
    flops: Phases = NOTHING
    self_flops: Phases = NOTHING
    activation_bytes: int = 0
    self_activation_bytes: int = 0
    peak_bytes: int = 0
    n_inner: float = 0

    @property
    def path(self) -> str:
        """The module's path; the root's is the empty string."""
        return self.module.path

    @property
    def depth(self) -> int:
        """The number of modules above it."""
        return self.module.depth

    @property
    def parameters(self) -> int:
        """The number of elements of its parameters and of those of its submodules."""
        return self.module.parameters

    @property
    def is_exact(self) -> bool:
        """Tell whether hooks add at most a tenth to its time."""
        return self.n_inner * _SECONDS_A_CALL <= _SHARE * self.time.all

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values; `time_forward` is `time.forward`."""
        return {
            "path": self.path,
            "type": self.module.module_type,
            "depth": self.depth,
            "aliases": list(self.module.aliases),
            "parameters": self.parameters,
            **plain_values(self, ("module",)),
            "is_exact": self.is_exact,
        }


def plain_values(costs: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes of a row or a total; a cost by phase becomes one number a phase."""
    data: dict[str, Any] = {}
    for name in (entry.name for entry in fields(costs) if entry.name not in without):
        value = getattr(costs, name)
        if isinstance(value, Phases):
            data |= {f"{name}_{phase}": part for phase, part in zip(PHASES, value, strict=True)}
        else:
            data[name] = value
    return data


# The orders in which rows can be sorted.
ORDERS: dict[str, Callable[[Row], float]] = {
    "self": lambda row: row.self_time.all,
    "time": lambda row: row.time.all,
    "forward": lambda row: row.self_time.forward,
    "backward": lambda row: row.self_time.backward,
    "recompute": lambda row: row.self_time.recompute,
    "flops": lambda row: row.self_flops.all,
    "activations": lambda row: row.self_activation_bytes,
    "peak": lambda row: row.peak_bytes,
}


def make_rows(
    modules: Sequence[Module],
    tops: Sequence[CallContext],
    measured: ContextCosts,
    counted: CallContext,
    n_counted: float,
) -> list[Row]:
    """Put together the costs of all contexts of each module.

    Args:
        modules: the modules, in registration order.
        tops: the tops of the contexts with times, one for each thread.
        measured: the times and numbers of calls, of which the rows have the medians.
        counted: the top of the contexts with FLOPs and peaks.
        n_counted: the number by which FLOPs are divided.
    """
    timed = _ContextsByPath([context for top in tops for context in top.walk()])
    of_flops = _ContextsByPath(list(counted.walk()))
    called = {*timed.by_path, *of_flops.by_path}
    return [_make_row(module, measured, timed, of_flops, called, n_counted) for module in modules]


@final
class _ContextsByPath:
    """Group contexts by the paths of their modules."""

    def __init__(self, contexts: Iterable[CallContext]) -> None:
        self.by_path: dict[str, list[CallContext]] = {}
        for context in contexts:
            if context.path is not None:
                self.by_path.setdefault(context.path, []).append(context)

    def outermost(self, path: str, called: Collection[str]) -> list[CallContext]:
        """Return the outermost contexts of a module.

        A container that is never called itself stands for the modules in it.
        """
        if path in called:
            return outermost_contexts(self.by_path.get(path, ()), lambda other: other == path)
        prefix = f"{path}." if path else ""
        inside = (contexts for other, contexts in self.by_path.items() if other.startswith(prefix))
        return outermost_contexts(itertools.chain(*inside), lambda other: other.startswith(prefix))


def median_phases(costs: Costs) -> Phases:
    """Return the median of the seconds of each phase over passes."""
    return Phases(*slot_medians(costs)[:_N_PHASES])


def interquartile_range(costs: Costs) -> float:
    """Return the interquartile range of the seconds of all phases over passes."""
    low, high = numpy.percentile(costs[:, :_N_PHASES].sum(1), (25, 75))
    return float(high - low)


def _make_row(
    module: Module,
    measured: ContextCosts,
    timed: _ContextsByPath,
    of_flops: _ContextsByPath,
    called: Collection[str],
    n_counted: float,
) -> Row:
    contexts = timed.by_path.get(module.path, [])
    below = [context for top in timed.outermost(module.path, called) for context in top.walk()]
    own_flops = of_flops.by_path.get(module.path, [])
    tops = of_flops.outermost(module.path, called)
    exclusive, inclusive = measured.costs_of(contexts), measured.costs_of(below)
    n_kept = sum(context.kept for context in below)
    peak = max((context.peak for context in tops), default=0)
    return Row(
        module,
        calls=_mean_calls(exclusive, measured),
        time=median_phases(inclusive),
        self_time=median_phases(exclusive),
        spread=interquartile_range(inclusive),
        flops=_flops_per_pass((context for top in tops for context in top.walk()), n_counted),
        self_flops=_flops_per_pass(own_flops, n_counted),
        activation_bytes=n_kept,
        self_activation_bytes=sum(context.kept for context in contexts),
        # Compiled code may keep more than the eager operations that are counted.
        peak_bytes=max(peak, n_kept) if peak else 0,
        n_inner=_mean_calls(inclusive, measured),
    )


def _mean_calls(costs: Costs, measured: ContextCosts) -> float:
    """Return the number of calls, or the mean over several passes."""
    calls = float(costs[:, CALLS].mean())
    return int(calls) if measured.adds else calls


def _flops_per_pass(contexts: Iterable[CallContext], n_passes: float) -> Phases:
    return sum_phases(context.flops for context in contexts).divided_by(n_passes)
