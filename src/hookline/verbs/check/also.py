"""Look for finite values that are probably not meant, by choice, and warn of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine import Site
from hookline.engine.pytree import tree
from hookline.errors import AttachError, warn
from hookline.util.locks import fork_safe_lock
from hookline.verbs.check.finding import Finding
from hookline.verbs.check.finiteness import flat, is_measurable

CHOICES = ("magnitude", "dead", "constant", "shapes", "missing_grad")
# Values explode or vanish if their largest magnitude is so many times that of the first run, or so
# small a part of it.
_FACTOR = 1e4
# A unit is dead if it was 0 in all of at least so many runs.
_RUNS = 10
_MOST_SAID = 4

# Held while what is known of an output changes: outputs may come from several threads.
_lock = fork_safe_lock()


def choices(also: str | Iterable[str]) -> frozenset[str]:
    """Return the names of what is looked for.

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


class Look(NamedTuple):
    """The dtypes, shapes, units and extremes of one output, as far as they are looked for.

    Attributes:
        kinds: the dtype of each tensor, and its shape without the first dimension.
        alive: for each unit, whether any of its numbers was not 0; None if not looked for.
        extremes: the least and the greatest number, to be read at the end of the run; None if not
            looked for.
    """

    kinds: tuple[tuple[torch.dtype, torch.Size], ...]
    alive: Tensor | None
    extremes: Tensor | None


@final
class Looking:
    """Look at outputs; compiled code does it in the graph.

    Args:
        wanted: what is looked for.
    """

    __slots__ = ("_at_alive", "_at_extremes", "_at_kinds")

    def __init__(self, wanted: frozenset[str]) -> None:
        self._at_kinds = "shapes" in wanted
        self._at_alive = "dead" in wanted
        self._at_extremes = bool(wanted & {"magnitude", "constant"})

    @property
    def is_on(self) -> bool:
        """Tell whether anything is looked for in outputs."""
        return self._at_kinds or self._at_alive or self._at_extremes

    def look(self, value: Any) -> Look:
        """Look at an output."""
        tensors = [one for _, one in tree.tensors(value)]
        # The first dimension is the batch's: the last batch may be smaller.
        kinds = tuple((one.dtype, one.shape[1:]) for one in tensors) if self._at_kinds else ()
        found = [flat(one) for one in tensors if is_measurable(one) and one.numel()]
        if not found or found[0].is_complex():
            return Look(kinds, None, None)
        first = found[0]
        alive = extremes = None
        if self._at_alive and first.dim() > 1:
            alive = _units_alive(first)
        if self._at_extremes and first.numel() > 1:
            extremes = torch.stack(torch.aminmax(first)).double()
        return Look(kinds, alive, extremes)


def _units_alive(value: Tensor) -> Tensor:
    """Tell which units are not 0: channels of pictures, else items of the last dimension."""
    unit = 1 if value.dim() in (4, 5) else value.dim() - 1
    rest = [k for k in range(value.dim()) if k != unit]
    return (value != 0).sum(rest) > 0


@final
class Habits:
    """Remember the output of one module in the runs so far.

    Args:
        site: the module's output.
        wanted: what is looked for.
        add: called with each finding.
    """

    __slots__ = ("_add", "_alive", "_first", "_kinds", "_n_runs", "_told", "_wanted", "site")

    def __init__(self, site: Site, wanted: frozenset[str], add: Callable[[Finding], Any]) -> None:
        self.site = site
        self._wanted = wanted
        self._add = add
        self._first: float | None = None
        self._alive: Tensor | None = None
        self._n_runs = 0
        self._kinds: tuple[tuple[torch.dtype, torch.Size], ...] | None = None
        self._told: set[str] = set()

    def note(self, look: Look, step: int) -> None:
        """Compare a look at an output with those before, in the run of this number."""
        if "shapes" in self._wanted:
            before, self._kinds = self._kinds, self._kinds or look.kinds
            if before is not None and before != look.kinds:
                was, now = _in_words(before), _in_words(look.kinds)
                text = f"has changed from {was} to {now} since the first run"
                self._say("shapes", text, step)
        if look.alive is not None:
            self._note_alive(look.alive)

    def _note_alive(self, alive: Tensor) -> None:
        with _lock:
            if self._alive is None or self._alive.shape != alive.shape:
                self._alive, self._n_runs = alive, 1
            else:
                self._alive, self._n_runs = self._alive | alive, self._n_runs + 1

    def judge(self, least: float, greatest: float, step: int) -> None:
        """Judge the extremes of the output of the run of this number."""
        largest = max(-least, greatest)
        if "constant" in self._wanted and least == greatest:
            self._say("constant", f"is {least + 0.0:.4g} everywhere", step)
        if "magnitude" not in self._wanted:
            return
        if self._first is None and largest > 0:
            self._first = largest
        elif self._first is not None and largest > self._first * _FACTOR:
            self._say_change("explodes", self._first, largest, step)
        elif self._first is not None and largest < self._first / _FACTOR:
            self._say_change("vanishes", self._first, largest, step)

    def end(self) -> None:
        """Judge what only all runs together tell."""
        if self._alive is None or self._n_runs < _RUNS:
            return
        dead = tuple((~self._alive).nonzero().flatten().tolist())
        if dead:
            names = f"{'index' if len(dead) == 1 else 'indices'} {_first_of(dead)}"
            units = plural(len(self._alive), "unit")
            text = f"has {len(dead)} dead of {units} ({names}): 0 in all of {self._n_runs} runs"
            self._say("dead", text, None, units=dead)

    def _say_change(self, verb: str, first: float, largest: float, step: int) -> None:
        text = f"{verb}: from {first:.3g} at most to {largest:.3g}"
        self._say("magnitude", text, step, key=verb)

    def _say(
        self, also: str, text: str, step: int | None, *, key: str = "", units: tuple[int, ...] = ()
    ) -> None:
        """Warn of an observation and keep it as a finding, once for each key."""
        if (key or also) in self._told:
            return
        self._told.add(key or also)
        finding = Finding(
            "forward", self.site.path, self.site.module_type, step=step,
            also=also, observation=text, units=units,
        )  # fmt: skip
        self._add(finding)
        warn(f"hl.check: {finding.message}")


def _in_words(kinds: Iterable[tuple[torch.dtype, torch.Size]]) -> str:
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}[:{''.join(f', {n}' for n in rest)}]"
        for dtype, rest in kinds
    )


def judge_all(habits: Sequence[Habits], run_extremes: list[tuple[int, Tensor]], step: int) -> None:
    """Judge the outputs of the run of this number; one transfer for each device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, extremes in run_extremes:
        by_device.setdefault(extremes.device, []).append((number, extremes))
    for members in by_device.values():
        read = torch.stack([extremes for _, extremes in members]).tolist()
        for (number, _), (least, greatest) in zip(members, read, strict=True):
            habits[number].judge(least, greatest, step)


def say_missing(
    weights: Iterable[tuple[str, Tensor]], step: int | None, add: Callable[[Finding], Any]
) -> bool:
    """Warn of parameters that an optimizer steps without a gradient; return whether any was.

    Args:
        weights: the parameters that the optimizer steps, by path.
        step: the number of the last run; None before the first.
        add: called with a finding for each.
    """
    missing = [path for path, weight in weights if weight.requires_grad and weight.grad is None]
    for path in missing:
        text = "had no gradient when the optimizer stepped"
        add(Finding("gradient", path, step=step, also="missing_grad", observation=text))
    if missing:
        warn(
            f"hl.check: {plural(len(missing), 'parameter')} had no gradient when the optimizer"
            f" stepped: {_first_of(missing)}."
            "\nFreeze them with requires_grad_(False), or use them in the loss."
        )
    return bool(missing)


def _first_of(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:_MOST_SAID])) + ", …" * (len(items) > _MOST_SAID)
