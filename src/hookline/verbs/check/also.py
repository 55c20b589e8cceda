"""Look for finite values that are probably not meant, by choice, and warn of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine import Site
from hookline.engine.pytree import tree
from hookline.errors import AttachError, warn
from hookline.verbs.check.finiteness import flat, is_measurable

CHOICES = ("magnitude", "dead", "constant", "shapes", "missing_grad")
# Values explode or vanish if their largest magnitude is so many times that of the first run, or so
# small a part of it.
_FACTOR = 1e4
# A unit is dead if it was 0 in all of at least so many runs.
_RUNS = 10
_MOST_SAID = 4


def choices(also: str | Iterable[str]) -> frozenset[str]:
    """Return the names of what is looked for.

    Raises:
        AttachError: a name is unknown.
    """
    names = (also,) if isinstance(also, str) else tuple(also)
    for name in names:
        if name not in CHOICES:
            raise AttachError(
                f"also= must name some of {', '.join(CHOICES)}, got {name!r}."
                "\nGive for instance also=('dead', 'shapes')."
            )
    return frozenset(names)


@final
class Habits:
    """Remember the output of one module in the runs so far.

    Args:
        site: the module's output.
        wanted: what is looked for.
    """

    __slots__ = ("_alive", "_first", "_n_runs", "_shapes", "_told", "_wanted", "site")

    def __init__(self, site: Site, wanted: frozenset[str]) -> None:
        self.site = site
        self._wanted = wanted
        self._first: float | None = None
        self._alive: Tensor | None = None
        self._n_runs = 0
        self._shapes: str | None = None
        self._told: set[str] = set()

    def look(self, value: Any) -> Tensor | None:
        """Look at an output.

        Returns:
            The least and the greatest number, to be read at the end of the run; None without one.
        """
        if "shapes" in self._wanted:
            self._compare_shapes(value)
        found = [flat(one) for _, one in tree.tensors(value) if is_measurable(one) and one.numel()]
        if not found or found[0].is_complex():
            return None
        if "dead" in self._wanted and found[0].dim() > 1:
            self._note_alive(found[0])
        if not self._wanted & {"magnitude", "constant"} or found[0].numel() < 2:
            return None
        return torch.stack(torch.aminmax(found[0])).double()

    def _compare_shapes(self, value: Any) -> None:
        # The first dimension is the batch's: the last batch may be smaller.
        now = ", ".join(
            f"{str(one.dtype).removeprefix('torch.')}[:{''.join(f', {n}' for n in one.shape[1:])}]"
            for _, one in tree.tensors(value)
        )
        if self._shapes is not None and now != self._shapes:
            self._say("shapes", f"has changed from {self._shapes} to {now} since the first run")
        self._shapes = self._shapes or now

    def _note_alive(self, value: Tensor) -> None:
        """Note which units were not 0: channels of pictures, else items of the last dimension."""
        unit = 1 if value.dim() in (4, 5) else value.dim() - 1
        rest = [k for k in range(value.dim()) if k != unit]
        alive = (value != 0).sum(rest) > 0
        same = self._alive is not None and self._alive.shape == alive.shape
        self._alive = self._alive | alive if same and self._alive is not None else alive
        self._n_runs = self._n_runs + 1 if same else 1

    def judge(self, least: float, greatest: float) -> None:
        """Judge the extremes of a run's output."""
        largest = max(-least, greatest)
        if "constant" in self._wanted and least == greatest:
            self._say("constant", f"is {least + 0.0:.4g} everywhere")
        if "magnitude" not in self._wanted:
            return
        if self._first is None and largest > 0:
            self._first = largest
        elif self._first is not None and largest > self._first * _FACTOR:
            self._say("exploding", f"explodes: from {self._first:.3g} at most to {largest:.3g}")
        elif self._first is not None and largest < self._first / _FACTOR:
            self._say("vanishing", f"vanishes: from {self._first:.3g} at most to {largest:.3g}")

    def end(self) -> None:
        """Judge what only all runs together tell."""
        if self._alive is None or self._n_runs < _RUNS:
            return
        dead = int((~self._alive).sum())
        if dead:
            units = plural(len(self._alive), "unit")
            self._say("dead", f"has {dead} dead of {units}: 0 in all of {self._n_runs} runs")

    def _say(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(f"hl.check: the output of {self.site} ({self.site.module_type}) {text}.")


def judge_all(habits: Sequence[Habits], seen: list[tuple[int, Tensor]]) -> None:
    """Judge the outputs of a run; one transfer for each device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, extremes in seen:
        by_device.setdefault(extremes.device, []).append((number, extremes))
    for members in by_device.values():
        read = torch.stack([extremes for _, extremes in members]).tolist()
        for (number, _), (least, greatest) in zip(members, read, strict=True):
            habits[number].judge(least, greatest)


def say_missing(weights: Iterable[tuple[str, Tensor]]) -> bool:
    """Warn of parameters that an optimizer steps without a gradient; return whether any was."""
    missing = [path for path, one in weights if one.requires_grad and one.grad is None]
    if missing:
        names = ", ".join(missing[:_MOST_SAID]) + ", …" * (len(missing) > _MOST_SAID)
        warn(
            f"hl.check: {plural(len(missing), 'parameter')} had no gradient when the optimizer"
            f" stepped: {names}.\nFreeze them with requires_grad_(False), or use them in the loss."
        )
    return bool(missing)
