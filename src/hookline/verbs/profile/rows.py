"""The rows of a profile: the costs of each module, with and without the modules inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from hookline.verbs.profile.contexts import CALLS, Context, outermost
from hookline.verbs.summary import Row as Module

# What torch's loop over the hooks and the cold caches add to a call (`benchmarks/profiling.py`).
_SECONDS_A_CALL = 5e-6
_SHARE = 0.1


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

    def over(self, number: float) -> Phases:
        """Divide the cost."""
        return self if number == 1 else Phases(*(one / number for one in self))


NOTHING = Phases()


def sum_of(costs: Iterable[Phases]) -> Phases:
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
        flops: the floating-point operations, with those of the modules inside. A multiply-add
            counts as two.
        self_flops: the floating-point operations of its own code.
        activation_bytes: the bytes that it keeps for backward, with the modules inside. It is the
            largest amount of any pass. Memory that several modules save counts for the first one.
        self_activation_bytes: the bytes that its own operations keep.
        peak_bytes: the most bytes of tensors, made in the pass, that were alive during its calls.
        n_inner: the number of calls of modules in it, its own included.
    """

    module: Module
    calls: float = 0
    time: Phases = NOTHING
    self_time: Phases = NOTHING
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

    def over(self, number: float, n_passes: float) -> Row:
        """Divide what adds up over passes.

        Args:
            number: the number of passes whose times and calls these are.
            n_passes: the number of passes whose FLOPs these are.
        """
        if number == n_passes == 1:
            return self
        return replace(
            self,
            calls=self.calls / number,
            time=self.time.over(number),
            self_time=self.self_time.over(number),
            flops=self.flops.over(n_passes),
            self_flops=self.self_flops.over(n_passes),
            n_inner=self.n_inner / number,
        )


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


def rows_of(
    modules: Sequence[Module], times: Sequence[Context], counted: Context, cells: Sequence[int]
) -> list[Row]:
    """Add up the costs of all contexts of each module.

    Args:
        modules: the modules, in registration order.
        times: the tops of the contexts with times, one for each thread.
        counted: the top of the contexts with FLOPs and peaks.
        cells: which cells count: 0 is the first pass, 1 are all later ones.
    """
    timed = _Sums([one for top in times for one in top.all()], cells)
    of_flops = _Sums(list(counted.all()), cells)
    called = {path for sums in (timed, of_flops) for path in sums.by_path}
    return [_row(module, called, timed, of_flops) for module in modules]


@final
@dataclass
class _Sums:
    """Contexts by path, and sums over the contexts below each context."""

    contexts: list[Context]
    cells: Sequence[int]
    by_path: dict[str, list[Context]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_path = {}
        for one in self.contexts:
            if one.path is not None:
                self.by_path.setdefault(one.path, []).append(one)

    def meant(self, path: str, called: Iterable[str]) -> list[Context]:
        """Return the outermost contexts of a module.

        A container that is never called itself stands for the modules in it.
        """
        if path in called:
            return outermost(self.by_path.get(path, ()), lambda other: other == path)
        prefix = f"{path}." if path else ""
        inside = [c for p, found in self.by_path.items() if p.startswith(prefix) for c in found]
        return outermost(inside, lambda other: other.startswith(prefix))

    def seconds(self, contexts: Iterable[Context]) -> Phases:
        """Add up the seconds of contexts."""
        total = [0.0] * 3
        for one in contexts:
            for cell in self.cells:
                for phase in range(3):
                    total[phase] += one.cells[cell][phase]
        return Phases(*total)

    def calls(self, contexts: Iterable[Context]) -> int:
        """Add up the numbers of calls of contexts."""
        return int(sum(one.cells[cell][CALLS] for one in contexts for cell in self.cells))


def _row(module: Module, called: set[str], timed: _Sums, of_flops: _Sums) -> Row:
    own = timed.by_path.get(module.path, [])
    below = [one for top in timed.meant(module.path, called) for one in top.all()]
    own_flops = of_flops.by_path.get(module.path, [])
    tops = of_flops.meant(module.path, called)
    return Row(
        module,
        calls=timed.calls(own),
        time=timed.seconds(below),
        self_time=timed.seconds(own),
        flops=_flops(one for top in tops for one in top.all()),
        self_flops=_flops(own_flops),
        activation_bytes=sum(one.kept for one in below),
        self_activation_bytes=sum(one.kept for one in own),
        peak_bytes=max((one.peak for one in tops), default=0),
        n_inner=timed.calls(below),
    )


def _flops(contexts: Iterable[Context]) -> Phases:
    total = [0, 0, 0]
    for one in contexts:
        for phase in range(3):
            total[phase] += one.flops[phase]
    return Phases(*total)
