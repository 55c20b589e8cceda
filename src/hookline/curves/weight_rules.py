"""Rules on weights: those that stand still, and those that change too much."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

import numpy as np

from hookline.curves.downsampled_table import RECENT
from hookline.curves.training_numbers import TrainingNumbers, median_without_nan, path_of_site
from hookline.display.text import plural
from hookline.findings.finding import Finding, Level
from hookline.findings.survey import are_first_blocks, template_of

_LEAST_SIBLINGS = 3  # of a weight that is compared with the others at its place
_LARGE_RATIO = 0.3  # of an update to its weight


def frozen_weights(training: TrainingNumbers) -> Iterator[Finding]:
    """Name the weights that never change while those at the same place of other blocks do."""
    updates = {path_of_site(training.sites[k]): k for k in training.site_indices("update")}
    paths = [path_of_site(training.sites[k]) for k in training.site_indices("value")]
    zero, least = training.table.n_zero, min(RECENT, len(training.reports))
    moving = _changing_weights(training)
    still = [
        path
        for path in paths
        if path not in moving and (path not in updates or zero[updates[path]] >= least)
    ]
    if not updates or not still or len(still) == len(paths):
        return
    n_alike, n_still = Counter(map(template_of, paths)), Counter(map(template_of, still))
    odd = [
        path
        for path in still
        if "expert" not in path  # no token may be routed to it for some steps
        and n_alike[template_of(path)] >= _LEAST_SIBLINGS
        and 2 * n_still[template_of(path)] <= n_alike[template_of(path)]
    ]
    # A weight that no optimizer has is frozen on purpose more often than one that was given to it.
    held = [path for path in still if path in updates]
    first, *others = odd or held or still
    step = first_step = training.steps[0]
    if first in updates:
        step = int(training.table.zero_since[updates[first]])
    since = f" since step {step:,}" * (step > first_step)
    text = f"{first} does not change{since}{', unlike its siblings' * bool(odd)}."
    # Without an optimizer, the first blocks are frozen on purpose, as in fine-tuning.
    is_meant = updates.keys().isdisjoint(odd) and are_first_blocks(odd, paths)
    level: Level = "note" if is_meant else "warning"
    why, advice = _why_unchanged_and_advice(training, first)
    why = f"{plural(len(others) + 1, 'weight')} so. {why}".rstrip()
    follows = tuple(f"{path}:value" for path in others)
    number = f"step {step:,}"
    yield Finding("frozen", text, f"{first}:value", level, number, why, advice, follows, step)


def _changing_weights(training: TrainingNumbers) -> set[str]:
    """Return the weights that change in the last steps, whoever writes to them."""
    if "norm" not in training.table.names:
        return set()
    recent = [row[training.table.names.index("norm")] for row in training.table.recent]
    values = training.site_indices("value")
    with np.errstate(all="ignore"):
        is_moving = np.fmin.reduce(recent)[values] < np.fmax.reduce(recent)[values]
    return {
        path_of_site(training.sites[k]) for k, moves in zip(values, is_moving, strict=True) if moves
    }


def _why_unchanged_and_advice(training: TrainingNumbers, path: str) -> tuple[str, str]:
    """Tell by its gradient why a weight does not change, and what to look at."""
    table = training.table
    if f"{path}:update" not in training.sites:
        advice = "Give it to the optimizer, unless it is frozen on purpose."
        return f"No optimizer that steps has {path}.", advice
    if not training.site_indices("grad") or "norm" not in table.names:
        return "", "Look at requires_grad, and whether the optimizer was given it."
    at = [k for k in training.site_indices("grad") if path_of_site(training.sites[k]) == path]
    norms = np.array(table.recent)[:, table.names.index("norm"), at]
    if np.isnan(norms).all():
        advice = (
            "Look whether it is used, at requires_grad, and for detach(), no_grad(), .data and"
            " checkpoints with use_reentrant=True."
        )
        return f"No gradient reaches {path}.", advice
    if not np.nan_to_num(norms).any():
        advice = "Look at what uses it: a factor of 0, a dead activation, inputs of 0."
        return f"The gradient of {path} is 0.", advice
    advice = "The learning rate of its group is 0, or its dtype rounds the updates away."
    return f"The gradient of {path} is not 0.", advice


def no_updates(training: TrainingNumbers) -> Iterator[Finding]:
    """Tell that no weight changes at all."""
    updates = training.site_indices("update")
    if not updates:
        yield from _optimizer_never_stepped(training)
    elif (training.table.n_zero[updates] >= RECENT).all():
        step = int(training.table.zero_since[updates].max())
        text, number = f"No weight changes since step {step:,}.", f"step {step:,}"
        site, are_zero = training.sites[updates[0]], _have_zero_gradients(training)
        why = f"All {len(updates)} updates are 0{', and so are the gradients' * are_zero}."
        advice = "Look at the learning rate and its schedule."
        if are_zero:
            advice = "Look at what uses these weights: a factor of 0, or a dead activation."
        yield Finding("frozen", text, site, "warning", number, why, advice, step=step)


def _have_zero_gradients(training: TrainingNumbers) -> bool:
    """Tell whether weights get gradients, and all of them are 0 in the last steps."""
    grads = training.site_indices("grad")
    return bool(grads) and bool((training.table.n_zero[grads] >= RECENT).all())


def _optimizer_never_stepped(training: TrainingNumbers) -> Iterator[Finding]:
    """Tell that gradients came and no weight changed, as with the optimizer of another model."""
    weights, norms = training.site_indices("value"), training.last_min_max("norm")
    has_gradients = bool(training.site_indices("grad_output", "grad_input"))
    if norms is None or not weights or not has_gradients or len(training.reports) < RECENT:
        return
    if (training.table.non_finite_since >= 0).any():  # a `GradScaler` skips these steps
        return
    _, least, greatest = (numbers[:, weights] for numbers in norms)
    if (least.min(axis=0) != greatest.max(axis=0)).any():
        return
    step, (first, *others) = training.steps[0], [training.sites[k] for k in weights]
    text, number = "No weight changes, though gradients come.", f"step {step:,}"
    why = f"{plural(len(weights), 'weight')} so. No optimizer of the model has stepped."
    advice = (
        "Unless the model is frozen on purpose, make the optimizer of its parameters, once it"
        " is wrapped and moved."
    )
    yield Finding("frozen", text, first, "warning", number, why, advice, tuple(others), step)


def large_updates(training: TrainingNumbers, until: int | None = None) -> Iterator[Finding]:
    """Tell that updates are large beside their weights, before a step: a jump makes large ones."""
    numbers = training.last_min_max("ratio")
    if numbers is None or len(training.steps) < RECENT:
        return
    weights = [
        k for k in training.site_indices("update") if not training.sites[k].endswith("bias:update")
    ]
    n_columns = len(training.steps) if until is None else bisect_left(training.steps, until)
    by_column = numbers[0][:n_columns, weights]
    # Of a weight that begins at 0, as that of a new head, the first updates are large.
    early = np.where(np.isnan(by_column[0]), math.nan, median_without_nan(by_column[: RECENT // 2]))
    ratio = np.fmax(early, median_without_nan(by_column[-RECENT:]))
    large = [training.sites[weights[k]] for k in np.flatnonzero(ratio > _LARGE_RATIO)]
    if len(large) <= len(weights) / 2:
        return
    share = f"{len(large)} of {len(weights)} weights"
    text = f"{share} change by more than {_LARGE_RATIO:.0%} in a step."
    number, advice = f"{np.nanmax(ratio):.2g}", "Lower the learning rate."
    why = "The norm of the update over that of the weight; 0.001 is usual. At first, or at last."
    follows = tuple(large[1:])
    yield Finding("learning rate", text, large[0], "warning", number, why, advice, follows)
