"""Rules on gradients: where they become non-finite, stop, explode or vanish on their way back."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from hookline.display.text import listed, plural
from hookline.findings.change_point import find_change
from hookline.findings.finding import Finding, Level
from hookline.findings.forward_rules import later_sites, non_finite_finding
from hookline.findings.survey import (
    Survey,
    are_first_blocks,
    factor_text,
    further_text,
    kind_and_verb,
    log_or_nan,
    template_of,
)
from hookline.findings.tensor_reading import Reading

_NOT_NEEDED = ("needs no gradient", "frozen", "requires no gradient")
_NO_GRAD = "no_grad()"


def non_finite(survey: Survey) -> Iterator[Finding]:
    """Name the first gradient that is not finite."""
    bad = [r for r in survey.gradients if r.numbers.n_bad or r.numbers.n_masked]
    if not bad:
        return
    first, n_bad = bad[0], bad[0].numbers.n_bad + bad[0].numbers.n_masked
    why = f"{n_bad:,} of {first.numbers.numel:,} elements, first in the backward;"
    why += f" outputs are finite. {further_text(len(bad) - 1, 'gradient')}".rstrip()
    advice = f"Look at the operation that uses {first.path or 'the output'}; hl.check names it."
    if not any(r.numbers.n_nan for r in bad):
        advice += " If a GradScaler has scaled the loss, it skips this step, as usual at first."
    yield non_finite_finding(first, n_bad, "in the gradient at", why, advice, bad)


def stopped_gradient(survey: Survey) -> Iterator[Finding]:
    """Name the last layer, in firing order, that the gradient never reached."""
    reached = {r.path for r in survey.gradients if r.port == "grad_output"}
    silent = [(path, why) for path, port, why in survey.silent if port == "grad_output"]
    missing = {path: why for path, why in silent if not any(text in why for text in _NOT_NEEDED)}
    order = [r for r in survey.leaf_outputs if r.path in reached or r.path in missing]
    runs = [
        (is_lost, list(group)) for is_lost, group in groupby(order, lambda r: r.path in missing)
    ]
    weights = _missing_gradient_reasons(survey)
    lost = (k for k, (is_lost, _) in enumerate(runs[:-1]) if is_lost)
    place = next((k for k in lost if not _are_frozen(runs[k][1], weights)), None)
    if place is None:
        return
    stretch, after = runs[place][1], runs[place + 1][1][0]
    is_broken = place == 0 or _is_reached_in_other_blocks(stretch, runs)
    # Without the gradients of weights, it is not known whether such a part is frozen.
    may_be_frozen = not weights and _runs_under_no_grad(stretch, missing)
    level: Level = "warning" if is_broken and not may_be_frozen else "note"
    reading = stretch[-1]
    text = f"The gradient stops between {after.site} and {reading.site}."
    names = listed([r.site for r in stretch], 3)
    why = f"{plural(len(stretch), 'layer')} before it without one: {names}."
    advice = (
        "Look for detach(), no_grad(), .data, .item(), an integer operation or a checkpoint with"
        " use_reentrant=True there."
    )
    sites = later_sites(stretch, reading)
    yield Finding("cut", text, reading.site, level, "no gradient", why, advice, sites)


def _runs_under_no_grad(stretch: Sequence[Reading], reasons: Mapping[str, str]) -> bool:
    return all(_NO_GRAD in reasons[reading.path] for reading in stretch)


def _missing_gradient_reasons(survey: Survey) -> dict[str, str]:
    """Say why weights got no gradient; nothing of those that got one."""
    reasons = {path: why for path, port, why in survey.silent if port == "grad"}
    return reasons | {r.path: "" for r in survey.gradients if r.port == "grad"}


def _are_frozen(stretch: Sequence[Reading], reasons_by_weight: Mapping[str, str]) -> bool:
    """Tell whether all weights of some layers are frozen, and they have some."""
    paths = {r.path for r in stretch}
    inside = [why for path, why in reasons_by_weight.items() if path.rpartition(".")[0] in paths]
    return bool(inside) and all("frozen" in why for why in inside)


def _is_reached_in_other_blocks(
    stretch: Sequence[Reading], runs: Sequence[tuple[bool, list[Reading]]]
) -> bool:
    """Tell whether the gradient reached the same place of other blocks."""
    templates = {template_of(r.path) for is_lost, group in runs if not is_lost for r in group}
    return any("#" in (place := template_of(r.path)) and place in templates for r in stretch)


def frozen_parameters(survey: Survey, has_forward_fault: bool) -> Iterator[Finding]:
    """Name parameters without a gradient, whose siblings have one.

    Args:
        survey: the readings.
        has_forward_fault: whether a fault of the forward explains gradients that are all zero.
    """
    fired = [r for r in survey.gradients if r.port == "grad"]
    is_zero = [r for r in fired if r.numbers.is_zero and not has_forward_fault]
    silent = [(path, why) for path, port, why in survey.silent if port == "grad"]
    silent += [(r.path, "its gradient is all zero") for r in is_zero]
    n_alive = Counter(template_of(r.path) for r in fired)
    n_alive.subtract(template_of(r.path) for r in is_zero)
    odd = _unlike_siblings(silent, n_alive)
    if not odd:
        return
    path, why = odd[0]
    text, why = f"{path} gets no gradient, unlike its siblings.", f"{why.capitalize()}."
    level: Level = "warning"
    if "frozen" in why:
        advice = "Look at what froze it, unless that was on purpose."
        if _are_first_blocks_frozen(survey, dict(odd)):
            level = "note"
    elif path in {reading.path for reading in is_zero}:
        advice = f"Look at what uses {path.rpartition('.')[0]}, such as a slice, and at its input."
    else:
        advice = "Look at requires_grad, and for no_grad()."
    site, *others = (f"{other}:grad" for other, _ in odd)
    yield Finding("frozen", text, site, level, "no gradient", why, advice, tuple(others))


def _are_first_blocks_frozen(survey: Survey, reasons: Mapping[str, str]) -> bool:
    """Tell whether weights without a gradient are frozen in the first blocks, as in fine-tuning."""
    weights = [path for path, port, _ in survey.silent if port == "grad"]
    weights += [reading.path for reading in survey.gradients if reading.port == "grad"]
    return all("frozen" in why for why in reasons.values()) and are_first_blocks(reasons, weights)


def _unlike_siblings(
    silent: Sequence[tuple[str, str]], n_alive: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the weights without a gradient, most of whose siblings have one, and why."""
    n_silent = Counter(template_of(path) for path, _ in silent)
    return [
        (path, why)
        for path, why in silent
        if "#" in (template := template_of(path))
        and n_alive[template] > n_silent[template]
        and "expert" not in path
    ]


def exploding_or_vanishing(survey: Survey) -> Iterator[Finding]:
    """Name the block at which gradients begin to explode or to vanish on their way back."""
    trunk_paths = [(r.path, r.call, r.leaf) for r in survey.block_outputs]
    gradients = {
        (r.path, r.call, r.leaf): r
        for r in survey.gradients
        if r.port == "grad_output" and r.numbers.rms > 0 and not r.numbers.n_bad
    }
    trunk = [gradients[key] for key in reversed(trunk_paths) if key in gradients]
    if len(trunk) < 3:
        return
    levels = [log_or_nan(r.numbers.rms) for r in trunk]
    steps = [
        after - before if ours.numbers.shape == theirs.numbers.shape else 0.0
        for (before, ours), (after, theirs) in itertools.pairwise(zip(levels, trunk, strict=True))
    ]
    change = find_change(steps)
    if change is not None:
        yield _gradient_change_finding(trunk, *change)


def _gradient_change_finding(
    trunk: Sequence[Reading], first: int, last: int, logarithm: float
) -> Finding:
    block, end = trunk[first], trunk[last]
    kind, verb = kind_and_verb(logarithm)
    text = f"The gradient {verb} {factor_text(logarithm)} on its way back through {block.path}"
    text += "." if last == first + 1 else f" to {end.path}."
    why = (
        f"Its root mean square is {block.numbers.rms:.3g} where it enters {block.path}, and"
        f" {end.numbers.rms:.3g} where it then reaches {end.path}."
    )
    advice = f"Look at the weights, and for saturated activations, in {block.path}."
    number, sites = factor_text(logarithm), tuple(r.site for r in trunk[first + 1 :])
    return Finding(f"{kind} gradient", text, block.site, "warning", number, why, advice, sites)


def dead_gradients(survey: Survey) -> Iterator[Finding]:
    """Name the first gradient in the backward that is all zero."""
    of_outputs = (r for r in survey.gradients if r.port == "grad_output" and survey.is_leaf(r))
    zero = [r for r in of_outputs if r.numbers.is_zero and r.numbers.numel > 8]
    if not zero:
        return
    first = zero[0]
    text, why = f"The gradient at {first.site} is all zero.", f"{plural(len(zero), 'gradient')} so."
    sites = later_sites(zero, first)
    yield Finding("dead gradient", text, first.site, "note", "100 % zero", why, follows=sites)
