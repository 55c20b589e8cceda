"""Judge a training by the numbers of its steps: what broke, when, and what moved first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hookline.curves.dead_units import dead_units
from hookline.curves.downsampled_table import RECENT, DownsampledTable
from hookline.curves.logged_numbers import logged_curves
from hookline.curves.ports import path_and_port
from hookline.curves.step_reports import StepReport
from hookline.curves.training_numbers import (
    BEGUN,
    GRADIENTS,
    OF_OUTPUTS,
    Array,
    Onset,
    TrainingNumbers,
    median_without_nan,
    path_of_site,
    sites_of,
)
from hookline.curves.weight_rules import frozen_weights, large_updates, no_updates
from hookline.display.text import listed, plural
from hookline.findings.finding import Finding, Findings, Level, sort_by_level
from hookline.findings.survey import TIMES, factor_text, further_text, template_of

_JUMP = 10.0  # times the greatest norm so far, apart from the last steps
_LAG = 5  # steps within which a norm grows by `_JUMP`
_WARM_UP = 10  # steps that are not judged
_DRIFT = 1e3  # times the median of the first half
_LOSS_RISE = 2.0
_FEW = 0.05  # of the sites: gradients of so few that jump alone break nothing
_LEAST_SHARE = 1e-6  # the greatest gradient, by the greatest of its kind
_MOST_NAMED = 3
_MOST_UNITS = 4  # whose numbers are printed
_OF_NOW = {"vanishing", "dead units"}  # kinds that tell of the last steps alone
_SINGLE = 3  # steps after which a jump is over
_ROUNDING = 1e-3  # of the norms of weights and updates


def judge_steps(
    reports: Sequence[StepReport],
    logged: Sequence[StepReport] = (),
    table: DownsampledTable | None = None,
) -> Findings:
    """Judge the steps of a training.

    Args:
        reports: the reports of measured steps.
        logged: the reports with the user's own numbers, such as the loss.
        table: the table of these reports; None makes it.
    """
    if not reports:
        return Findings([], "no step", ["No step was reported yet, so nothing was judged."])
    training = TrainingNumbers(reports, table)
    findings = sorted([*_non_finite(training), *_jumps(training)], key=lambda f: f.step or 0)
    moved = [finding.step for finding in findings if finding.level != "note"]
    for judge in (_all_zero_sites, frozen_weights, no_updates, _vanishing_gradients, _dead_units):
        findings += judge(training)
    if not any(finding.level == "error" for finding in findings):
        findings = [*large_updates(training, *moved[:1]), *findings]
    if all(finding.kind in _OF_NOW for finding in findings):
        findings += _drifting_norms(training)
    findings += _harmless_non_finite(training)
    findings = [_add_loss_change(finding, logged) for finding in findings]
    if all(finding.level == "note" for finding in findings):
        findings += _rising_loss(logged)
    facts = f"{plural(len(training.sites), 'site')}, {plural(len(reports), 'step')}"
    notes = []
    if "norm" not in training.table.names:
        notes = ["Jumps were not judged: measure norms, with stats=hl.stats.moments()."]
    elif empty := _sites_without_numbers(training):
        notes = [f"Not judged, because they hold no numbers: {listed(empty, _MOST_NAMED)}."]
    return Findings(sort_by_level(findings), facts, notes)


def _sites_without_numbers(training: TrainingNumbers) -> list[str]:
    """Return the sites whose values never held a number."""
    norms, bad = training.table.last_min_max("norm"), training.table.have_non_finite()
    is_empty = np.asarray(np.isnan(norms).all(axis=(0, 1)) & ~bad.any(axis=0))
    return [site for site, is_so in zip(training.sites, is_empty, strict=True) if is_so]


def _non_finite(training: TrainingNumbers) -> Iterator[Finding]:
    since = training.harmful_since
    onsets = [training.onset_at_step(int(k), int(since[k])) for k in np.flatnonzero(since >= 0)]
    if not onsets:
        return
    first, *others = sorted(onsets, key=lambda onset: onset.time)
    step = f"step {first.step:,}"
    text = f"NaN or infinity begins at {step}, at {first.site}."
    why = f"The first {first.noun} in this step. {further_text(len(others), 'site')}".rstrip()
    advice, follows = (
        "Run this step again in hl.check, which names the operation.",
        sites_of(others),
    )
    if first.port == "update" and training.site_indices("grad"):
        advice = "Its gradient is finite: look at the optimizer's eps, learning rate and state."
    if (
        first.port == "value"
        and training.site_indices("update")
        and training.has_step(first.step - 1)
    ):
        advice = f"No update made it: look at what else writes to {path_of_site(first.site)}."
    yield Finding("non-finite", text, first.site, "error", step, why, advice, follows, first.step)


def _harmless_non_finite(training: TrainingNumbers) -> Iterator[Finding]:
    """Tell of non-finite numbers that reached no weight, such as masks and skipped steps."""
    since = np.where(training.is_harmless, training.table.non_finite_since, -1)
    onsets = [training.onset_at_step(int(k), int(since[k])) for k in np.flatnonzero(since >= 0)]
    onsets.sort(key=lambda onset: onset.time)
    of_outputs = [onset for onset in onsets if onset.port in OF_OUTPUTS]
    others = [onset for onset in onsets if onset.port not in OF_OUTPUTS]
    for first, *later in filter(None, (others, of_outputs)):
        step, whose = f"step {first.step:,}", first.site
        advice = "A mask of -inf is so. For other values, hl.check raises an error."
        if first.port in OF_OUTPUTS:
            whose = f"The gradient at {first.site}"
            advice = "A GradScaler skips such a step, and lowers its scale: usual at first."
        end = "weight" if training.weight_sites else "output of the model"
        text = f"{whose} holds NaN or infinity since {step}, and no {end} gets it."
        why, follows = further_text(len(later), "site"), sites_of(later)
        where, since_step = first.site, first.step
        yield Finding("non-finite", text, where, "note", step, why, advice, follows, since_step)


def _jumps(training: TrainingNumbers) -> Iterator[Finding]:
    """Name the step at which norms jump, and the site that jumps first in it."""
    onsets = _jump_onsets(training)
    if not onsets:
        return
    first, what = onsets[0], onsets[0].noun
    level: Level = "error" if (training.harmful_since >= first.step).any() else "warning"
    if {onset.port for onset in onsets} <= GRADIENTS and len(onsets) < _FEW * len(training.sites):
        level = "note"
    simultaneous = [onset for onset in onsets if onset.step == first.step]
    if {onset.port for onset in simultaneous} == {"update"}:
        yield _update_jump_finding(training, simultaneous, onsets, level)
        return
    number = factor_text(math.log(first.factor))
    text = f"The {what} at {first.site} jumps {number} at step {first.step:,}."
    before = {
        "gradient": "Outputs of this step are as before. ",
        "output": "Weights are as before. ",
    }
    why = f"{before.get(what, '')}{_first_to_move_text(len(onsets))}"
    why += f" Its norm was at most {first.usual:.3g} before."
    if first.is_over:
        why += f" It is over after a few steps{': a single batch' * first.is_sudden}."
    is_weight, follows = what == "weight", sites_of(onsets[1:])
    advice = _advice_on_weight(training, first) if is_weight else _advice_on_jump(first, what)
    yield Finding("jump", text, first.site, level, number, why, advice, follows, first.step)


def _advice_on_jump(first: Onset, noun: str) -> str:
    if first.port == "grad" and first.is_alone:
        return (
            "No other gradient jumps in this step: look at hooks on"
            f" {path_of_site(first.site)} and at what uses it, and clip gradients."
        )
    if not first.is_sudden:
        return "It grows over several steps: lower the learning rate, or clip gradients."
    if noun == "gradient":
        return "Look at the loss and the labels of this step's batch, and clip gradients."
    if noun == "output" and not first.is_over:
        return f"Look at the input of {path_of_site(first.site)} and at what changed in this step."
    return "Look at this step's batch and its labels."


def _advice_on_weight(training: TrainingNumbers, first: Onset) -> str:
    """Tell whether the update before a jump made it: a norm grows by no more than its update's."""
    path, before = path_of_site(first.site), first.step - 1
    if not (training.site_indices("update") and training.has_step(before)):
        return "An update that was not measured may have made it: measure those of each step."
    norms = training.norms_of_step(before)
    growth = training.norms_of_step(first.step)[first.site] - norms.get(first.site, math.nan)
    if growth <= (1 + _ROUNDING) * norms.get(f"{path}:update", 0.0):
        return f"The update of step {before:,} made it: lower the learning rate, or clip gradients."
    return f"No update jumps before: look at what else writes to {path}."


def _first_to_move_text(n_sites: int) -> str:
    if n_sites == 1:
        return "Nothing else moves."
    return f"It is the first to move; {further_text(n_sites - 1, 'site')}"


def _update_jump_finding(
    training: TrainingNumbers, simultaneous: Sequence[Onset], onsets: Sequence[Onset], level: Level
) -> Finding:
    most = max(simultaneous, key=lambda onset: onset.factor)
    n_updates = len(training.site_indices("update"))
    number = factor_text(math.log(most.factor))
    whose = f"The update at {most.site} jumps"
    if len(simultaneous) > n_updates / 2:
        whose = f"{len(simultaneous)} of {n_updates} updates jump"
    text = f"{whose} at step {most.step:,}, {most.site} most ({number})."
    why = "Outputs and gradients of this step are as before."
    why = f"{why} {further_text(len(onsets) - len(simultaneous), 'site')}".rstrip()
    advice = "Look at the learning rate and its schedule, and at the optimizer's state."
    others = sites_of(onset for onset in onsets if onset is not most)
    return Finding("learning rate", text, most.site, level, number, why, advice, others, most.step)


def _jump_onsets(training: TrainingNumbers) -> list[Onset]:
    """Return where the norms of sites jump, in the order in which they do."""
    numbers = training.last_min_max("norm")
    if numbers is None or len(training.steps) <= _WARM_UP:
        return []
    last, greatest = numbers[0], np.nan_to_num(numbers[2], nan=0.0)
    highest = np.maximum.accumulate(greatest, axis=0)
    base = np.zeros_like(highest)
    base[_LAG:] = highest[:-_LAG]
    with np.errstate(all="ignore"):
        is_jump = (greatest > _JUMP * base) & (base > 0)
    is_jump[:_WARM_UP] = False
    is_jump &= ~_have_usual_rms(training, greatest.shape)
    gradients = training.site_indices("grad")
    n_grown = (greatest[:, gradients] > BEGUN * base[:, gradients]).sum(axis=1)
    onsets = []
    for k in np.flatnonzero(is_jump.any(axis=0)):
        column = int(np.argmax(is_jump[:, k]))
        usual = float(base[column, k])
        begun = [c for c in range(column - _LAG + 1, column + 1) if greatest[c, k] > BEGUN * usual]
        later = last[column + _SINGLE : column + 2 * _SINGLE, k]
        is_over = bool(len(later)) and bool((later < BEGUN * usual).all())
        factor = float(greatest[column, k]) / usual
        onset = training.find_onset(int(k), begun[0], factor, usual)
        is_sudden = begun[0] == column
        is_alone = onset.port == "grad" and int(n_grown[begun[0]]) == 1
        onsets.append(replace(onset, is_over=is_over, is_sudden=is_sudden, is_alone=is_alone))
    return sorted(onsets, key=lambda onset: onset.time)


def _have_usual_rms(training: TrainingNumbers, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Tell of columns and sites whether values are as before, also where there are more of them.

    A larger batch has a larger norm. The root of the mean square is that of the greatest mean and
    deviation in a column, so that no jump within a column is lost.
    """
    are_more = np.zeros(shape, np.bool_)
    means, deviations = training.last_min_max("mean"), training.last_min_max("std")
    sites = training.site_indices("input", "output")
    if means is None or deviations is None or not sites:
        return are_more
    with np.errstate(all="ignore"):
        mean = np.abs(means[:, :, sites]).max(axis=0)
        usual = np.hypot(mean, deviations[2][:, sites])
        highest = np.maximum.accumulate(np.nan_to_num(usual, nan=0.0, posinf=0.0), axis=0)
        are_more[_LAG:, sites] = usual[_LAG:] < BEGUN * highest[:-_LAG]
    return are_more


def _all_zero_sites(training: TrainingNumbers) -> Iterator[Finding]:
    """Name the outputs that are all zero since a step, and the weights that became so."""
    table, first_step = training.table, training.steps[0]
    since = [
        training.onset_at_step(k, int(table.zero_since[k]))
        for k in training.site_indices("output", "value")
        if table.n_zero[k] >= RECENT
    ]
    since = [onset for onset in since if onset.port == "output" or onset.step > first_step]
    bad = training.harmful_since[training.harmful_since >= 0]
    since = [onset for onset in since if onset.step <= bad.min(initial=onset.step)]
    if not since:
        return
    since.sort(key=lambda onset: (onset.step == first_step, onset.time))
    first, step = since[0], f"step {since[0].step:,}"
    is_meant = first.step <= first_step and _include_most_siblings(training, first, since)
    what = "is all zero" if first.port == "value" else "passes nothing"
    text = f"{first.site} {what} since {step}."
    level: Level = "note" if is_meant else "warning"
    why = f"Every element is 0. {plural(len(since), 'site is so', 'sites are so')}."
    advice = "Look at the learning rate and the biases: an activation with negative inputs is dead."
    if first.step <= first_step and first.port == "output":
        advice = (
            "Look at its weights and its input: an activation gives 0 for negative inputs, and an"
            " embedding for padding_idx."
        )
    yield Finding(
        "dead", text, first.site, level, step, why, advice, sites_of(since[1:]), first.step
    )


def _include_most_siblings(
    training: TrainingNumbers, first: Onset, others: Sequence[Onset]
) -> bool:
    """Tell whether most sites at the same place of other blocks are among these."""
    template = template_of(path_of_site(first.site))
    n_alike = sum(template_of(path_of_site(onset.site)) == template for onset in others)
    places = [template_of(path_of_site(training.sites[k])) for k in training.site_indices("output")]
    return places.count(template) > 1 and n_alike > places.count(template) / 2


def _drifting_norms(training: TrainingNumbers) -> Iterator[Finding]:
    """Name the sites whose norms have grown or shrunk by a large factor, without a jump."""
    numbers = training.last_min_max("norm")
    if numbers is None or len(training.steps) <= 2 * _WARM_UP:
        return
    last = numbers[0]
    half = len(last) // 2
    with np.errstate(all="ignore"):
        factor = median_without_nan(last[-RECENT:]) / median_without_nan(last[:half])
    onsets = [
        training.find_onset(int(k), half, float(factor[k]))
        for k in np.flatnonzero((factor > _DRIFT) & (factor < math.inf))  # it may begin at 0
    ]
    onsets = [onset for onset in onsets if onset.port != "update"]
    if not onsets:
        return
    first, *others = sorted(onsets, key=lambda onset: onset.time)
    number = factor_text(math.log(first.factor))
    text = f"The {first.noun} at {first.site} grows {number}."
    why = "The median of the last steps beside that of the first half."
    advice = "Lower the learning rate, or clip gradients."
    yield Finding("drift", text, first.site, "warning", number, why, advice, sites_of(others))


def _logged_losses(logged: Sequence[StepReport]) -> dict[str, tuple[Array, Array]]:
    return {
        name: (numbers.steps, numbers.values)
        for name, numbers in logged_curves(logged).items()
        if "loss" in name.lower() and len(numbers.values) >= 2 * RECENT
    }


def _add_loss_change(finding: Finding, logged: Sequence[StepReport]) -> Finding:
    """Say what the loss did from the step of a finding on."""
    if finding.step is None or finding.level == "note":
        return finding
    for name, (steps, values) in _logged_losses(logged).items():
        before = values[steps < finding.step][-RECENT:]
        after = values[steps > finding.step][:RECENT]
        if not len(before) or not len(after):
            continue
        old, new = float(np.median(before)), float(np.median(after))
        is_told = not math.isfinite(new) or abs(new - old) > 0.2 * abs(old)
        text = (
            f" The median of {name} is {old:.3g} over the {plural(len(before), 'value')} before,"
            f" and {new:.3g} over the {len(after)} after."
        ) * is_told
        return replace(finding, why=finding.why + text)
    return finding


def _rising_loss(logged: Sequence[StepReport]) -> Iterator[Finding]:
    """Tell that the loss has risen, where nothing else tells why."""
    for name, (_, values) in _logged_losses(logged).items():
        first, last = float(np.median(values[:RECENT])), float(np.median(values[-RECENT:]))
        if first > 0 and (last > _LOSS_RISE * first or not math.isfinite(last)):
            text = f"{name} rises from {first:.3g} to {last:.3g}."
            yield Finding("loss", text, "", "warning", f"{TIMES}{last / first:.3g}")


def _vanishing_gradients(training: TrainingNumbers) -> Iterator[Finding]:
    """Name the gradients that are tiny beside the largest of their kind, in the last step."""
    table = training.table
    if not {"min", "max"} <= set(table.names):
        return
    ends = np.abs([table.now[table.names.index(name)] for name in ("min", "max")])
    greatest = np.fmax(*ends)
    shares: list[tuple[float, str]] = []
    for port in sorted(GRADIENTS):
        sites = [
            k for k in training.site_indices(port) if not training.sites[k].endswith("bias:grad")
        ]
        of_port = np.array(sites, np.intp)
        top = float(np.nanmax(greatest[of_port], initial=0.0))
        small = of_port[(greatest[of_port] > 0) & (greatest[of_port] < _LEAST_SHARE * top)]
        shares += [(float(greatest[k]) / top, training.sites[k]) for k in small]
    if not shares:
        return
    (least, first), *others = sorted(shares)
    number = f"{least:.1e}"
    text = f"The gradient at {first} is {number} of the largest of its kind."
    why = (
        f"Its largest element in the last step. {plural(len(shares), 'gradient')} are below"
        f" {_LEAST_SHARE:g}."
    )
    advice = "Look at the activations and the initialisation behind it."
    follows = tuple(site for _, site in others)
    yield Finding("vanishing", text, first, "note", number, why, advice, follows)


def _dead_units(training: TrainingNumbers) -> Iterator[Finding]:
    """Name the units that are dead in the last steps, where covariances are measured."""
    sites = dict(dead_units(training.reports))
    if not sites:
        return
    # The gradients of a dead unit, and those of its weights, are 0 as well.
    sites = {site: sites[site] for site in sites if path_and_port(site)[1] == "output"} or sites
    first, *others = sites
    units = sites[first]
    text = f"{plural(len(units), 'unit')} of {first} pass nothing: {listed(units, _MOST_UNITS)}."
    number = plural(sum(map(len, sites.values())), "unit")
    why = f"Mean and variance were 0 in each of the last {RECENT} measured steps."
    advice = "Look at the learning rate and the biases."
    yield Finding("dead units", text, first, "note", number, why, advice, tuple(others))
