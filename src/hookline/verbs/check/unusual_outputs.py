"""Warn of unusual finite outputs, such as dead units; `also=` says which are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.display.text import listed, plural
from hookline.engine import Site
from hookline.engine.pytree import tree
from hookline.errors import AttachError, warn
from hookline.statistics.channel_dim import channel_dim
from hookline.statistics.finiteness import detach_local_numbers, is_measurable
from hookline.statistics.flat_numbers import to_float64
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.verbs.check.finding import CheckFinding

CHOICES = ("magnitude", "dead", "constant", "shapes", "missing_grad")
# Values explode or vanish if their largest magnitude is so many times that of the first run, or so
# small a part of it.
_FACTOR = 1e4
# A unit is dead if it was 0 in all of at least so many runs.
_RUNS = 10
_MOST_SAID = 4

# Outputs may come from several threads.
_lock = fork_safe_lock()


def checked_names(also: str | Iterable[str]) -> frozenset[str]:
    """Return the names in `also=`, checked.

    Raises:
        AttachError: a name is unknown, or `also` is neither a name nor several.
    """
    names = tuple(also) if isinstance(also, Iterable) and not isinstance(also, str) else (also,)
    for name in names:
        if name not in CHOICES:
            raise AttachError(
                f"also= must name some of {', '.join(CHOICES)}, got {name!r}."
                "\nGive for instance also=('dead', 'shapes')."
            )
    return frozenset(names)


class Traits(NamedTuple):
    """The dtypes, shapes, units and extremes of one output, as far as they are checked."""

    # The dtype of each tensor, and its shape without the first dimension.
    kinds: tuple[tuple[torch.dtype, torch.Size], ...]
    alive: Tensor | None  # for each unit, whether any of its numbers was not 0; None if not checked
    # The least and the greatest number, to be read at the end of the run; None if not checked.
    extremes: Tensor | None


class _Units(NamedTuple):
    """Which units were ever not 0, in how many runs, and the number of the last of them."""

    alive: Tensor
    n_runs: int
    step: int


@final
class TraitReader:
    """Read the traits of outputs that `also=` asks for; compiled code does it in the graph."""

    __slots__ = ("_has_extremes", "_has_kinds", "_has_units")

    def __init__(self, also: frozenset[str]) -> None:
        self._has_kinds = "shapes" in also
        self._has_units = "dead" in also
        self._has_extremes = bool(also & {"magnitude", "constant"})

    @property
    def is_on(self) -> bool:
        """Tell whether any trait of outputs is read."""
        return self._has_kinds or self._has_units or self._has_extremes

    def read(self, value: Any, module_type: str) -> Traits:
        """Read the traits of an output of a module of this class."""
        tensors = [tensor for _, tensor in tree.tensors(value)]
        # The first dimension is the batch's: the last batch may be smaller.
        kinds = tuple((tensor.dtype, _row_shape(tensor)) for tensor in tensors if self._has_kinds)
        parts = [
            detach_local_numbers(tensor)
            for tensor in tensors
            if is_measurable(tensor) and tensor.numel()
        ]
        if not parts or parts[0].is_complex():
            return Traits(kinds, None, None)
        first = parts[0]
        alive = extremes = None
        unit = channel_dim(first.dim(), module_type) if self._has_units else None
        if unit is not None:
            rest = [dim for dim in range(first.dim()) if dim != unit]
            alive = (first != 0).sum(rest) > 0
        if self._has_extremes and first.numel() > 1:
            extremes = to_float64(torch.stack(torch.aminmax(first)))
        return Traits(kinds, alive, extremes)


def _row_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a row; none of a nested tensor, whose rows have shapes of their own."""
    return torch.Size() if tensor.is_nested else tensor.shape[1:]


@final
class OutputHistory:
    """Remember the output of one module in the runs so far, and add what is unusual.

    A call is compared with the same call in other runs: a pooling layer that several levels of a
    U-Net share returns another shape at each of them.
    """

    __slots__ = ("_add", "_checked", "_first", "_kinds", "_units", "_warned", "site")

    def __init__(
        self, site: Site, checked: frozenset[str], add: Callable[[CheckFinding], Any]
    ) -> None:
        self.site: Site = site
        self._checked = checked
        self._add = add
        self._first: dict[int, float] = {}
        self._units: dict[torch.Size, _Units] = {}
        self._kinds: dict[int, tuple[tuple[torch.dtype, torch.Size], ...]] = {}
        self._warned: set[str] = set()

    def compare_with_earlier_runs(self, traits: Traits, call: int, step: int) -> None:
        """Compare the output of a call, in the run of this number, with those before."""
        if "shapes" in self._checked:
            before = self._kinds.setdefault(call, traits.kinds)
            if before != traits.kinds:
                was, now = _dtypes_and_shapes_text(before), _dtypes_and_shapes_text(traits.kinds)
                text = f"has changed from {was} to {now} since the first run"
                self._warn_once("shapes", text, step)
        if traits.alive is not None:
            self._add_alive_units(traits.alive, step)

    def _add_alive_units(self, alive: Tensor, step: int) -> None:
        with _lock:
            before = self._units.get(alive.shape)
            if before is None:
                self._units[alive.shape] = _Units(alive, 1, step)
            else:
                n_runs = before.n_runs + (step != before.step)
                self._units[alive.shape] = _Units(before.alive | alive, n_runs, step)

    def judge_extremes(self, least: float, greatest: float, call: int, step: int) -> None:
        """Judge the extremes of the output of a call, in the run of this number."""
        largest = max(-least, greatest)
        if "constant" in self._checked and least == greatest:
            self._warn_once("constant", f"is {least + 0.0:.4g} everywhere", step)
        if "magnitude" not in self._checked:
            return
        first = self._first.get(call)
        if first is None and largest > 0:
            self._first[call] = largest
        elif first is not None:
            explodes, vanishes = largest > first * _FACTOR, largest < first / _FACTOR
            if not (explodes or vanishes):
                return
            verb = "explodes" if explodes else "vanishes"
            text = f"{verb}: from {first:.3g} at most to {largest + 0.0:.3g}"
            self._warn_once("magnitude", text, step, key=verb)

    def judge_dead_units(self) -> None:
        """Judge the units of all runs together."""
        for alive, n_runs, _ in self._units.values():
            dead = tuple((~alive).nonzero().flatten().tolist())
            if not dead or n_runs < _RUNS:
                continue
            indices = listed(dead, _MOST_SAID)
            names = f"{'index' if len(dead) == 1 else 'indices'} {indices}"
            units = plural(len(alive), "unit")
            text = f"has {len(dead)} dead of {units} ({names}): 0 in all of {n_runs} runs"
            self._warn_once("dead", text, None, key=units, units=dead)

    def _warn_once(
        self, also: str, text: str, step: int | None, *, key: str = "", units: tuple[int, ...] = ()
    ) -> None:
        """Warn of an observation and keep it as a finding, once for each key."""
        if (key or also) in self._warned:
            return
        self._warned.add(key or also)
        finding = CheckFinding(
            "forward", self.site.path, self.site.module_type, step=step,
            also=also, observation=text, units=units,
        )  # fmt: skip
        self._add(finding)
        warn(f"hl.check: {finding.message}")


def _dtypes_and_shapes_text(kinds: Iterable[tuple[torch.dtype, torch.Size]]) -> str:
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}[:{''.join(f', {n}' for n in rest)}]"
        for dtype, rest in kinds
    )


def judge_extremes_of_run(run_extremes: list[tuple[OutputHistory, int, Tensor]], step: int) -> None:
    """Judge the calls of the run of this number by their extremes; one transfer for each device."""
    by_device: dict[torch.device, list[tuple[OutputHistory, int, Tensor]]] = {}
    for entry in run_extremes:
        by_device.setdefault(entry[2].device, []).append(entry)
    for members in by_device.values():
        read = torch.stack([extremes for _, _, extremes in members]).tolist()
        for (history, call, _), (least, greatest) in zip(members, read, strict=True):
            history.judge_extremes(least, greatest, call, step)


def warn_of_missing_gradients(
    weights: Iterable[tuple[str, Tensor]], step: int | None, add: Callable[[CheckFinding], Any]
) -> bool:
    """Warn of the parameters of a step that have no gradient; return whether there are any."""
    missing = [path for path, weight in weights if weight.requires_grad and weight.grad is None]
    for path in missing:
        text = "had no gradient when the optimizer stepped"
        add(CheckFinding("gradient", path, step=step, also="missing_grad", observation=text))
    if missing:
        warn(
            f"hl.check: {plural(len(missing), 'parameter')} had no gradient when the optimizer"
            f" stepped: {listed(missing, _MOST_SAID)}."
            "\nFreeze them with requires_grad_(False), or use them in the loss."
        )
    return bool(missing)
