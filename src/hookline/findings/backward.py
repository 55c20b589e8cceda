"""Rules on gradients: where they become non-finite, stop, explode or vanish on their way back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import groupby

from hookline.display.text import listed, plural
from hookline.display.units import share
from hookline.findings.finding import Finding, Level
from hookline.findings.forward import bad_text, follow
from hookline.findings.reading import Reading
from hookline.findings.steps import change_in
from hookline.findings.survey import Survey, further_text, log_of, template_of, times_text

_NOT_NEEDED = ("needs no gradient", "frozen", "requires no gradient")


def non_finite(survey: Survey) -> list[Finding]:
    """Name the first gradient that is not finite."""
    bad = [r for r in survey.gradients if r.numbers.n_bad or r.numbers.n_masked]
    if not bad:
        return []
    first, n_bad = bad[0], bad[0].numbers.n_bad + bad[0].numbers.n_masked
    why = (
        f"{n_bad:,} of {first.numbers.numel:,} elements, first in the backward; outputs are finite."
    )
    why = f"{why} {further_text(len(bad) - 1, 'gradient')}".rstrip()
    return [
        Finding(
            "non-finite",
            f"{bad_text(first)} begins in the gradient at {first.site}.",
            first.site,
            "error",
            f"{share(n_bad / max(first.numbers.numel, 1))} {bad_text(first)}",
            why,
            f"Look at the operation that uses {first.path or 'the output'}; hl.check names it.",
            follow(bad, first),
        )
    ]


def cut(survey: Survey) -> list[Finding]:
    """Name the last layer, in firing order, that the gradient never reached."""
    reached = {r.path for r in survey.gradients if r.port == "grad_output"}
    missing = {
        path
        for path, port, why in survey.silent
        if port == "grad_output" and not any(text in why for text in _NOT_NEEDED)
    }
    order = [r for r in survey.leaf_outputs if r.path in reached or r.path in missing]
    runs = [
        (is_lost, list(group)) for is_lost, group in groupby(order, lambda r: r.path in missing)
    ]
    place = next((k for k, (is_lost, _) in enumerate(runs[:-1]) if is_lost), None)
    if place is None:
        return []
    stretch, after = runs[place][1], runs[place + 1][1][0]
    is_start = place == 0
    level: Level = "warning" if is_start or _has_siblings(stretch, runs) else "note"
    reading = stretch[-1]
    why = f"{plural(len(stretch), 'layer')} before it without one"
    return [
        Finding(
            "cut",
            f"The gradient stops between {after.site} and {reading.site}.",
            reading.site,
            level,
            "no gradient",
            f"{why}: {listed([r.site for r in stretch], 3)}.",
            "Look for detach(), no_grad(), .data, .item() or an integer operation there.",
            follow(stretch, reading),
        )
    ]


def _has_siblings(stretch: Sequence[Reading], runs: Sequence[tuple[bool, list[Reading]]]) -> bool:
    """Tell whether the gradient reached the same place of other blocks."""
    templates = {template_of(r.path) for is_lost, group in runs if not is_lost for r in group}
    return any("#" in (place := template_of(r.path)) and place in templates for r in stretch)


def frozen(survey: Survey, is_blamed: bool) -> list[Finding]:
    """Name parameters without a gradient, whose siblings have one.

    Args:
        survey: the readings.
        is_blamed: whether a fault of the forward explains gradients that are all zero.
    """
    fired = [r for r in survey.gradients if r.port == "grad"]
    templates = [template_of(r.path) for r in fired]
    silent = [(path, why) for path, port, why in survey.silent if port == "grad"]
    zero = [(r.path, "its gradient is all zero") for r in fired if r.numbers.is_zero]
    zero = [] if is_blamed else zero
    odd = []
    for path, why in [*silent, *zero]:
        template = template_of(path)
        n_silent = sum(template_of(other) == template for other, _ in [*silent, *zero])
        n_alive = templates.count(template) - sum(template_of(p) == template for p, _ in zero)
        if "#" in template and n_alive > n_silent and "expert" not in path:
            odd.append((path, why))
    if not odd:
        return []
    path, why = odd[0]
    others = tuple(f"{other}:grad" for other, _ in odd[1:])
    return [
        Finding(
            "frozen",
            f"{path} gets no gradient, unlike its siblings.",
            f"{path}:grad",
            "warning",
            "no gradient",
            f"{why.capitalize()}.",
            "Look at requires_grad, and for no_grad().",
            others,
        )
    ]


def through_depth(survey: Survey) -> list[Finding]:
    """Name the block at which gradients begin to explode or to vanish on their way back."""
    trunk_paths = [(r.path, r.call, r.leaf) for r in survey.trunk]
    gradients = {
        (r.path, r.call, r.leaf): r
        for r in survey.gradients
        if r.port == "grad_output" and r.numbers.rms > 0 and not r.numbers.n_bad
    }
    trunk = [gradients[key] for key in reversed(trunk_paths) if key in gradients]
    if len(trunk) < 3:
        return []
    levels = [log_of(r.numbers.rms) for r in trunk]
    steps = [
        after - before if ours.numbers.shape == theirs.numbers.shape else 0.0
        for (before, ours), (after, theirs) in itertools.pairwise(zip(levels, trunk, strict=True))
    ]
    change = change_in(steps)
    return [] if change is None else [_depth_finding(trunk, *change)]


def _depth_finding(trunk: Sequence[Reading], first: int, last: int, logarithm: float) -> Finding:
    block, end = trunk[first], trunk[last]
    verb = "grows" if logarithm > 0 else "shrinks"
    kind = "exploding gradient" if logarithm > 0 else "vanishing gradient"
    text = f"The gradient {verb} {times_text(logarithm)} on its way back through {block.path}"
    text += "." if last == first + 1 else f" to {end.path}."
    why = (
        f"Its root mean square is {block.numbers.rms:.3g} where it enters {block.path}, and"
        f" {end.numbers.rms:.3g} where it then reaches {end.path}."
    )
    return Finding(
        kind,
        text,
        block.site,
        "warning",
        times_text(logarithm),
        why,
        f"Look at the weights, and for saturated activations, in {block.path}.",
        tuple(r.site for r in trunk[first + 1 :]),
    )


def dead_gradients(survey: Survey) -> list[Finding]:
    """Name the first gradient in the backward that is all zero."""
    zero = [
        r
        for r in survey.gradients
        if r.port == "grad_output"
        and r.numbers.is_zero
        and r.numbers.numel > 8
        and survey.is_leaf(r)
    ]
    if not zero:
        return []
    first = zero[0]
    text = f"The gradient at {first.site} is all zero."
    return [
        Finding(
            "dead gradient",
            text,
            first.site,
            "note",
            "100 % zero",
            f"{plural(len(zero), 'gradient')} so.",
            follows=follow(zero, first),
        )
    ]
