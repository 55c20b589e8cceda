"""Estimate the effect of putting back clean values, by gradients along a path between two runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.engine import Selector, module_tree
from hookline.errors import (
    InputError,
    check_int_from_zero,
    check_option_names,
    check_positive_int,
)
from hookline.statistics.flat_numbers import to_float64
from hookline.statistics.site_dict import SiteDict
from hookline.verbs.shared.run_model import Inputs, call_model, copy_inputs
from hookline.verbs.shared.run_settings import RandomStates, generators_of
from hookline.verbs.sweep.change_hooks import ChangeHooks, run_and_record
from hookline.verbs.sweep.estimate_verdicts import Array
from hookline.verbs.sweep.forwards import Forwards
from hookline.verbs.sweep.grid import (
    Each,
    Grid,
    SiteGroup,
    check_each,
    clean_patches,
    entry_sites,
)
from hookline.verbs.sweep.metric import (
    Metric,
    metric_number,
    refuse_constant_metric,
    require_metric_function,
)
from hookline.verbs.sweep.path_gradients import (
    PathGradients,
    PathIntegral,
    PathPoint,
    require_floating,
)
from hookline.verbs.sweep.repeatable_runs import (
    has_hooks,
    refuse_random,
    require_clean_inputs,
    without_side_effects,
)
from hookline.verbs.sweep.rows_per_change import copy_tensors
from hookline.verbs.sweep.site_change import require_same_form
from hookline.verbs.sweep.sweep_results import Attribution

_SEED = 0


class AttributeOptions(TypedDict, total=False):
    """Options of `hl.attribute`.

    Args:
        along: the sites whose values move from the run on `inputs` to the clean run; None moves
            each site itself.
        steps: the number of points on the way; None takes the gradient at `inputs` alone.
        check: how many of the changes are measured as well.
    """

    along: Selector | None
    steps: int | None
    check: int


def attribute(
    model: nn.Module,
    inputs: Inputs,
    selector: Selector,
    metric: Metric,
    *,
    clean: Inputs,
    each: Each | None = None,
    **options: Unpack[AttributeOptions],
) -> Attribution:
    """Estimate the effect of putting back values of a clean run, by gradients.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).eval()
        >>> x, clean = torch.zeros(1, 2), torch.ones(1, 2)
        >>> estimate = hl.attribute(model, x, "0", lambda out: out[0, 0], clean=clean)
        >>> estimate.scores["0"].shape
        torch.Size([1, 3])

    The score of an element is its gradient, times how far its value moves, summed along a path from
    the run on `inputs` to the clean run. The path is one of these:

    - By default, one step: (clean value - value) · gradient of the metric at `inputs`. This is
      attribution patching: two forwards and one backward for all sites.
    - `steps=8`: 8 points on the line from each site's value to its clean one. These are integrated
      gradients of the site (https://arxiv.org/abs/1703.01365).
    - `steps=8, along="(root):input"`: 8 points on the line from the inputs to the clean inputs.
      This is layer conductance (https://arxiv.org/abs/1805.12233), and `estimate.gradients` are the
      internal influence (https://arxiv.org/abs/1802.03788). For token ids, which have no line
      between them, name the embedding: `along="transformer.wte"`.

    The scores estimate what `hl.sweep` measures with a forward for each change. They are exact
    where the metric is linear in the value. Saturated functions and paths that cancel make them
    wrong: give `check` to compare them with real changes.

    Args:
        model: the model, in eval mode; its parameters may be frozen. It is left as it was, and each
            `.grad` too.
        inputs: what the model runs on, as in `hl.sweep`.
        selector: the sites. Each is differentiated as if only its value changed, also behind
            another one.
        metric: a function of the model's output that returns one number, and lets gradients pass.
        clean: the inputs of the clean run, whose values are put back.
        each: as in `hl.sweep`: the dimensions along which an estimate is made for each part.
        along: the sites that move along the path, by a line between their values in both runs.
            None moves each site itself, with a forward and a backward for each point of each site.
            Otherwise a forward and a backward for each point serve all sites.
        steps: the number of points, which are midpoints of equal steps. None takes the gradient at
            `inputs`.
        check: how many of the changes are measured as well, as many at each site; a random choice,
            the same each time. For a verdict on each site, about ten a site are needed.

    Returns:
        An array with named axes. `estimate.effects` has the estimates, in the place of
        `sweep.effects`; `estimate.scores[site]` has the scores in the value's shape, and
        `estimate.gradients[site]` the mean gradient on the path. With `check`,
        `estimate.rank_correlation` and `estimate.failing` tell how far to trust them.

    Raises:
        SelectionError: a selector matches nothing.
        NotRecordedError: the model does not reach one of the sites.
        AmbiguousError: a module runs several times; name the call, as in `"block#2"`.
        InputError: the model is in training mode, or its weights were made in inference mode; the
            metric gives no number or no gradient; a value is not one floating tensor; there is no
            line between values at `along`; or an argument is invalid.
        StructureError: the values of the clean run have other shapes.
        TypeError: there is no such option.
    """
    require_metric_function(metric)
    require_clean_inputs(clean)
    each = check_each(each)
    check_option_names(attribute, options, AttributeOptions.__annotations__)
    _check_options(options)
    along, steps, n_checked = options.get("along"), options.get("steps"), options.get("check", 0)
    with without_side_effects(model, "hl.attribute(model, ...)", inputs, clean):
        modules, run = module_tree(model), partial(call_model, model)
        may_draw, random_states = has_hooks(model), RandomStates(generators_of(model.modules()))
        output, recording = run_and_record(modules, lambda: run(copy_inputs(clean)), selector)
        if may_draw or not random_states.are_current():
            refuse_random(metric, lambda: copy_tensors(output), lambda: run(copy_inputs(clean)))
        values: dict[str, list[Tensor]] = {}  # of the clean run
        entries = clean_patches(modules, selector, values)
        goals = {site: require_floating(site, recording[site]) for site in entry_sites(entries)}
        values.update({site: [goal] for site, goal in goals.items()})
        slopes = PathGradients(model, inputs, metric)
        start = slopes.compute_at(list(goals))
        for site, goal in goals.items():
            require_same_form(site, start.values[site], goal)
        if steps is None:
            integrals = _integrate(start, goals, [start])
        elif along is None:
            integrals = {}
            for site, goal in goals.items():
                points = (slopes.compute_at([site], {site: goal}, at) for at in _midpoints(steps))
                integrals |= _integrate(start, {site: goal}, points)
        else:
            _, line = run_and_record(modules, lambda: run(copy_inputs(clean)), along)
            moved = {str(site): line[site] for site in line.sites}
            points = (slopes.compute_at(list(goals), moved, place) for place in _midpoints(steps))
            integrals = _integrate(start, slopes.values_at_end(list(goals), moved), points)
        grid = Grid(entries, each, start.values)
        measured = np.full(grid.shape, np.nan)
        if n_checked:
            forwards = Forwards(ChangeHooks(modules, list(goals), inputs), run, inputs, metric)
            refuse_constant_metric(metric, forwards.output, forwards.baseline)
            forwards.measure(_sample_changes(grid.groups, n_checked))
            for index, (number, _) in forwards.results.items():
                measured[index] = number - start.number
    scores = SiteDict({site: integral.score for site, integral in integrals.items()})
    gradients = SiteDict({site: integral.mean for site, integral in integrals.items()})
    numbers = start.number, metric_number(metric, output)
    effects = _sum_scores_of_parts(grid, scores)
    return Attribution(grid.axes, *numbers, *effects, scores, gradients, measured)


def _check_options(options: AttributeOptions) -> None:
    steps, n_checked = options.get("steps"), options.get("check", 0)
    if steps is not None:
        check_positive_int("steps", steps, "Give steps=8, or steps=None for one gradient.")
    elif options.get("along") is not None:
        raise InputError(
            "along must come with steps, got none.\nGive steps=32, the number of points on the way."
        )
    check_int_from_zero("check", n_checked, "Give check=20, the number of changes to measure.")


def _midpoints(steps: int) -> list[float]:
    return [(step + 0.5) / steps for step in range(steps)]


def _integrate(
    start: PathPoint, ends: Mapping[str, Tensor], points: Iterable[PathPoint]
) -> dict[str, PathIntegral]:
    """Integrate over the points of a path from its start to the values of the sites at its end."""
    integrals = {site: PathIntegral(start.values[site], end) for site, end in ends.items()}
    for point in points:
        for site, integral in integrals.items():
            integral.add(point.values[site], point.gradients[site])
    return integrals


def _sum_scores_of_parts(
    grid: Grid, scores: Mapping[str, Tensor]
) -> tuple[Array, NDArray[np.bool_]]:
    """Sum the scores of each part of each site, and tell which parts there are."""
    sums, is_part = np.full(grid.shape, np.nan), np.zeros(grid.shape, dtype=bool)
    for group in grid.groups:
        for point in group.points:
            (change,) = point.changes
            sums[point.index] = float(to_float64(scores[str(change.site)][change.where]).sum())
            is_part[point.index] = True
    return sums, is_part


def _sample_changes(groups: Sequence[SiteGroup], n: int) -> list[SiteGroup]:
    """Choose some of the changes at random, as many at each site as far as there are."""
    rng = random.Random(_SEED)
    shuffled = [rng.sample(group.points, len(group.points)) for group in groups]
    sizes = [range(len(points)) for points in shuffled]
    turns = sorted((turn, number) for number, size in enumerate(sizes) for turn in size)
    counts = Counter(number for _, number in turns[:n])
    return [
        replace(group, points=points[: counts[number]])
        for number, (group, points) in enumerate(zip(groups, shuffled, strict=True))
    ]
