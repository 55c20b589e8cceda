"""Estimate the effect of putting back clean values, by one backward for all sites."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from hookline.engine import Selector, Site
from hookline.engine.pytree import describe
from hookline.errors import AmbiguousError, InputError, StructureError, positive_integer
from hookline.verbs.edit.edit import edit
from hookline.verbs.shared.rerun import copied, gradients
from hookline.verbs.shared.run_model import Inputs, call
from hookline.verbs.sweep.effects import Attribution
from hookline.verbs.sweep.forwards import Forwards, recorded_run
from hookline.verbs.sweep.grid import (
    Each,
    Grid,
    Group,
    check_each,
    entries_of,
    patches_of,
    sites_of,
)
from hookline.verbs.sweep.metric import Metric, check_callable, number_of, refuse_constant
from hookline.verbs.sweep.still_model import undisturbed

_SEED = 0


def attribute(
    model: nn.Module,
    inputs: Inputs,
    selector: Selector,
    metric: Metric,
    *,
    clean: Inputs,
    each: Each | None = None,
    steps: int | None = None,
    check: int = 0,
) -> Attribution:
    """Estimate the effect of putting back values of a clean run: attribution patching.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).eval()
        >>> x, clean = torch.zeros(1, 2), torch.ones(1, 2)
        >>> estimate = hl.attribute(model, x, "0", lambda out: out[0, 0], clean=clean)
        >>> estimate.scores["0"].shape
        torch.Size([1, 3])

    The score of an element is (clean value - value) · gradient of the metric, with the gradient at
    `inputs`. So two forwards and one backward estimate what `hl.sweep` measures with a forward for
    each change. The estimate is exact where the metric is linear in the value. Saturated functions
    and paths that cancel make it wrong: give `check` to compare it with real changes.

    Args:
        model: the model, in eval mode; its parameters may be frozen. It is left as it was, and each
            `.grad` too.
        inputs: what the model runs on, as in `hl.sweep`.
        selector: the sites. Each is differentiated as if only its value changed, also behind
            another one.
        metric: a function of the model's output that returns one number, and lets gradients pass.
        clean: the inputs of the clean run, whose values are put back.
        each: as in `hl.sweep`: the dimensions along which an estimate is made for each part.
        steps: the number of points of integrated gradients: the mean gradient at this many
            midpoints on the line from each site's value to the clean one. Each point takes a
            forward and a backward for each site. None takes the gradient at `inputs`.
        check: how many of the changes are measured as well; a random choice, the same each time.

    Returns:
        An array with named axes. `estimate.effects` has the estimates, in the place of
        `sweep.effects`; `estimate.scores[site]` has the scores in the value's shape. With `check`,
        `estimate.rank_correlation` and `estimate.failing` tell how far to trust it.

    Raises:
        SelectionError: the selector matches nothing.
        NotRecordedError: the model does not reach one of the sites.
        AmbiguousError: a module runs several times; name the call, as in `"block#2"`.
        InputError: the model is in training mode; the metric gives no number or no gradient; a
            value is not one floating tensor; or an argument is invalid.
        StructureError: the values of the clean run have other shapes.
    """
    check_callable(metric)
    each = check_each(each)
    if steps is not None:
        positive_integer("steps", steps, "Give steps=8, or steps=None for one gradient.")
    if isinstance(check, bool) or not isinstance(check, int) or check < 0:
        raise InputError(f"check must be a number of changes, got {check!r}.\nGive check=20.")
    with undisturbed(model, "hl.attribute(model, ...)"):
        run = partial(call, model)
        output, recording = recorded_run(model, run, copied(clean), selector)
        entries = entries_of(model, patches_of(recording))
        sites = sites_of(entries)
        goal = {site: _floating(site, recording[site]) for site in sites}
        slopes = _Slopes(model, inputs, metric, sites)
        grads = slopes.at(goal, steps)
        scores = {site: (goal[site] - slopes.values[site]) * grads[site] for site in sites}
        grid = Grid(entries, each, slopes.values)
        measured = np.full(grid.shape, np.nan)
        if check:
            forwards = Forwards(model, run, inputs, metric, sites)
            refuse_constant(metric, forwards.output, forwards.baseline)
            for group in _sampled(grid.groups, check):
                forwards.measure(group, group.points)
            for index, (number, _) in forwards.results.items():
                measured[index] = number - slopes.number
    numbers = slopes.number, number_of(metric, output)
    return Attribution(grid.axes, *numbers, scores, _parts(grid, scores), measured)


def _parts(grid: Grid, scores: Mapping[str, Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sum the scores of each part of each site."""
    sums = np.full(grid.shape, np.nan)
    for group in grid.groups:
        for point in group.points:
            (change,) = point.changes
            sums[point.index] = float(scores[str(change.site)][change.where].double().sum())
    return sums


def _sampled(groups: Sequence[Group], n: int) -> list[Group]:
    """Choose some of the changes at random, by site."""
    points = [point for group in groups for point in group.points]
    chosen = {point.index for point in random.Random(_SEED).sample(points, min(n, len(points)))}
    return [
        Group(group.sites, group.modules, [p for p in group.points if p.index in chosen])
        for group in groups
    ]


def _floating(site: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    raise InputError(
        f"{site} must have one floating tensor, to be differentiated, got"
        f" {describe.in_words(value)}.\nSelect another site, or a leaf such as"
        f" {site + ':output[0]'!r}."
    )


@final
class _Slopes:
    """The gradients of the metric with respect to the values at sites.

    Args:
        model: the model.
        inputs: the inputs.
        metric: the metric.
        sites: the sites.

    Attributes:
        values: the value at each site in the run without a change.
        number: the metric of this run.
    """

    def __init__(self, model: nn.Module, inputs: Any, metric: Metric, sites: Sequence[str]) -> None:
        self._model, self._inputs, self._metric = model, inputs, metric
        self._sites = sites
        self.values: dict[str, Tensor] = {}
        self.number = 0.0

    def at(self, goal: Mapping[str, Tensor], steps: int | None) -> dict[str, Tensor]:
        """Return the gradient at each site: at the inputs, or the mean on the line to the goal."""
        zeros = _Zeros()
        number, grads = self._run(self._sites, zeros)
        self.number, self.values = number, zeros.values
        for site in self._sites:
            difference = describe.difference(self.values[site], goal[site])
            if difference:
                raise StructureError(
                    f"the clean run must have values of the same form at {site}: {difference}."
                    "\nGive inputs of one length in `clean` and `inputs`."
                )
        if not steps:
            return grads
        return {site: self._mean(site, goal[site] - self.values[site], steps) for site in grads}

    def _mean(self, site: str, gap: Tensor, steps: int) -> Tensor:
        total = torch.zeros_like(gap)
        for step in range(steps):
            zeros = _Zeros(gap * ((step + 0.5) / steps))
            total += self._run([site], zeros)[1][site]
        return total / steps

    def _run(self, sites: Sequence[str], zeros: _Zeros) -> tuple[float, dict[str, Tensor]]:
        with torch.enable_grad():
            with edit(self._model, list(sites), zeros):
                metric = self._metric(call(self._model, copied(self._inputs)))
            number = number_of(lambda _: metric, None)
            if not isinstance(metric, Tensor) or not metric.requires_grad:
                raise InputError(
                    "metric must return a tensor with a gradient, got"
                    f" {describe.in_words(metric)} without one.\nCompute it from the output by"
                    " differentiable functions of torch: no argmax, .item() or torch.no_grad()."
                    " hl.sweep takes any metric."
                )
            leaves = [zeros.leaves[site] for site in sites]
            grads = gradients([metric.sum()], leaves)
        if all(grad is None for grad in grads):
            raise InputError(
                f"metric must depend on a value at {', '.join(sites[:3])}, got one that depends on"
                " none.\nSelect sites that the metric's part of the output is computed from."
            )
        return number, {
            site: torch.zeros_like(leaf) if grad is None else grad
            for site, leaf, grad in zip(sites, leaves, grads, strict=True)
        }


@final
class _Zeros:
    """Add zeros to the value at each site, and differentiate with respect to them.

    The gradient with respect to one site's zeros is that of this site alone, also where another
    site lies behind it, and the model's parameters may be frozen.

    Args:
        shift: what is added to the values as well; None for nothing.

    Attributes:
        leaves: the zeros by site.
        values: the values by site, before the zeros were added.
    """

    def __init__(self, shift: Tensor | None = None) -> None:
        self._shift = shift
        self.leaves: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def at(self, site: Site) -> Callable[[Any], Any]:
        """Return the change at a site."""
        return partial(self._add, str(site))

    def __call__(self, value: Any) -> Any:
        """Leave a value: a change is made at each site by `at`."""
        return value

    def _add(self, site: str, value: Any) -> Tensor:
        tensor = _floating(site, value)
        if site in self.leaves:
            raise AmbiguousError(
                f"{site} must run once in a forward, got a second call.\nName the call:"
                f" {site + '#0'!r}."
            )
        zero = self.leaves[site] = torch.zeros_like(tensor).requires_grad_()
        self.values[site] = tensor.detach().clone()
        return tensor + zero if self._shift is None else tensor + self._shift + zero
