"""Judge a training by the numbers of its steps: what broke, when, and what moved first."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves.dead_units import dead_units
from hookline.curves.downsampled_table import RECENT, DownsampledTable
from hookline.curves.logged_numbers import logged_curves
from hookline.curves.ports import STAGES, path_and_port
from hookline.curves.slot_layout import NO_TURN
from hookline.curves.step_reports import StepReport
from hookline.display.text import listed, plural
from hookline.findings.finding import Finding, Findings, Level, sort_by_level
from hookline.findings.survey import TIMES, factor_text, further_text, template_of

_JUMP = 10.0  # times the greatest norm so far, apart from the last steps
_BEGUN = 3.0  # the same, where a jump began
_LAG = 5  # steps within which a norm grows by `_JUMP`
_WARM_UP = 10  # steps that are not judged
_DRIFT = 1e3  # times the median of the first half
_LARGE_RATIO = 0.3  # of an update to its weight
_LOSS_RISE = 2.0
_FEW = 0.05  # of the sites: gradients of so few that jump alone break nothing
_LEAST_SHARE = 1e-6  # the greatest gradient, by the greatest of its kind
_LEAST_SIBLINGS = 3  # of a weight that is compared with the others at its place
_MOST_NAMED = 3
_MOST_UNITS = 4  # whose numbers are printed
_OF_NOW = {"vanishing", "dead units"}  # kinds that tell of the last steps alone
_SINGLE = 3  # steps after which a jump is over

_WEIGHT_PORTS = ("value", "update", "grad")
_OF_OUTPUTS = ("grad_output", "grad_input")
_GRADIENTS = {*_OF_OUTPUTS, "grad"}
# What a value is called; others are called by their port.
_NOUNS = {"value": "weight"} | dict.fromkeys(_GRADIENTS, "gradient")

Array = NDArray[Any]


@final
@dataclass(frozen=True)
class _Onset:
    """Hold when and where a site began to deviate. Onsets compare by their time in the training."""

    step: int
    stage: int
    turn: int
    site: str
    factor: float
    is_over: bool = False
    usual: float = math.nan  # the greatest norm before
    is_sudden: bool = True  # whether it jumped in its first step, and did not grow over several
    is_alone: bool = False  # whether no other parameter's gradient has grown in its first step

    @property
    def time(self) -> tuple[int, int, int]:
        return self.step, self.stage, self.turn

    @property
    def port(self) -> str:
        return path_and_port(self.site)[1]

    @property
    def noun(self) -> str:
        return _NOUNS.get(self.port, self.port)


@final
class _Training:
    """The numbers of a training, and the order in which its sites fired."""

    def __init__(self, reports: Sequence[StepReport], table: DownsampledTable | None) -> None:
        self.reports = reports
        self.table = _make_table(reports) if table is None else table
        self.sites = self.table.sites
        self.steps = [column.first for column in self.table.columns]
        self.is_harmless = self._find_harmless()

    @property
    def bad_since(self) -> Array:
        """The first step with a non-finite number by site; -1 without one, or if it is harmless."""
        return np.where(self.is_harmless, -1, self.table.bad_since)

    def numbers(self, name: str) -> Array | None:
        """Return the last, least and greatest of a number by column and site; None without it."""
        return self.table.values(name) if name in self.table.names else None

    def _find_harmless(self) -> NDArray[np.bool_]:
        """Tell of which sites the non-finite numbers have reached no weight.

        Masks of -inf in outputs and inputs are so, and gradients in a step that a `GradScaler`
        skips. An output whose gradients are not finite in this step either is broken.
        """
        since, of_outputs = self.table.bad_since, self.where(*_OF_OUTPUTS)
        bad_weights = [int(since[k]) for k in self.where(*_WEIGHT_PORTS) if since[k] >= 0]
        bad_gradients = {int(since[k]) for k in of_outputs} - {self.steps[0]}
        is_harmless = np.zeros(len(since), np.bool_)
        until = min(bad_weights, default=math.inf)
        for step in np.unique(since[(since >= 0) & (since < until)]).tolist():
            if not self._trains(step, until):
                continue
            is_harmless[of_outputs] |= since[of_outputs] == step
            if step not in bad_gradients:
                sites = [k for k in self.where("input", "output") if since[k] == step]
                is_harmless[sites] = self._have_numbers(step, sites)
        broken = since[(since >= 0) & ~is_harmless]
        is_harmless &= ~np.isin(since, broken) | (since == self.steps[0])
        return is_harmless

    def _trains(self, step: int, until: float) -> bool:
        """Tell whether finite numbers change weights from a step on, and before another."""
        columns = enumerate(self.table.columns)
        later = [c for c, span in columns if step <= span.first and span.last < until]
        norms = self.numbers("norm")
        if norms is None or not later:
            return False
        _, least, greatest = norms[:, later][:, :, self.where("value")]
        has_gradients = (norms[2][later][:, self.where("update", "grad")] >= 0).any()
        return bool(has_gradients or (least.min(axis=0) < greatest.max(axis=0)).any())

    def has_step(self, step: int) -> bool:
        """Tell whether a step was measured."""
        return any(report.step == step for report in self.reports)

    def _have_numbers(self, step: int, sites: Sequence[int]) -> list[bool]:
        """Tell of sites whether they have finite numbers in a step, too."""
        table = _make_table([next(report for report in self.reports if report.step == step)])
        norms = dict(zip(table.sites, table.values("norm")[0, 0], strict=True))
        return [not math.isnan(norms.get(self.sites[k], math.nan)) for k in sites]

    def where(self, *ports: str) -> list[int]:
        """Return the indices of the sites of some ports."""
        return [k for k, site in enumerate(self.sites) if path_and_port(site)[1] in ports]

    def find_onset(self, site_index: int, column: int, factor: float, usual: float = 0.0) -> _Onset:
        """Return the onset of a site in a column: its first step far above its usual norm."""
        span, site = self.table.columns[column], self.sites[site_index]
        reports = self.reports[span.index - span.n_reports + 1 : span.index + 1]
        first = 0 if len(reports) == 1 else int(np.argmax(_norms(reports, site) > _BEGUN * usual))
        stage = STAGES[path_and_port(site)[1]]
        turn = _firing_turn(reports[first], site, site_index)
        return _Onset(reports[first].step, stage, turn, site, factor, usual=usual)

    def onset_at_step(self, site_index: int, step: int) -> _Onset:
        """Return the onset of a site at a step."""
        columns = self.table.columns
        column = next((c for c, span in enumerate(columns) if step <= span.last), len(columns) - 1)
        return replace(self.find_onset(site_index, column, math.nan), step=step, usual=math.nan)


def _make_table(reports: Sequence[StepReport]) -> DownsampledTable:
    table = DownsampledTable()
    table.add(reports)
    return table


def _norms(reports: Sequence[StepReport], site: str) -> Array:
    """Return the norms of a site by report; NaN without them."""
    table = _make_table(reports)
    if site not in table.sites or "norm" not in table.names:
        return np.full(len(reports), np.nan)
    norms: Array = table.values("norm")[0][:, table.sites.index(site)]
    return norms


def _firing_turn(report: StepReport, site: str, default: int) -> int:
    """Return the turn of a site among those of its step; that of its registration if not known."""
    sites = list(report.layout.by_site)
    if report.order is None or site not in report.layout.by_site:
        return default
    turn = int(report.order[sites.index(site)])
    return default if turn == NO_TURN else turn


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
    training = _Training(reports, table)
    findings = sorted([*_non_finite(training), *_jumps(training)], key=lambda f: f.step or 0)
    moved = [finding.step for finding in findings if finding.level != "note"]
    for judge in (_all_zero_sites, _frozen_weights, _no_updates, _vanishing_gradients, _dead_units):
        findings += judge(training)
    if not any(finding.level == "error" for finding in findings):
        findings = [*_large_updates(training, *moved[:1]), *findings]
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


def _sites_without_numbers(training: _Training) -> list[str]:
    """Return the sites whose values never held a number."""
    norms, bad = training.table.values("norm"), training.table.is_non_finite()
    is_empty = np.asarray(np.isnan(norms).all(axis=(0, 1)) & ~bad.any(axis=0))
    return [site for site, is_so in zip(training.sites, is_empty, strict=True) if is_so]


def _non_finite(training: _Training) -> Iterator[Finding]:
    since = training.bad_since
    onsets = [training.onset_at_step(int(k), int(since[k])) for k in np.flatnonzero(since >= 0)]
    if not onsets:
        return
    first, *others = sorted(onsets, key=lambda onset: onset.time)
    step = f"step {first.step:,}"
    text = f"NaN or infinity begins at {step}, at {first.site}."
    why = f"The first {first.noun} in this step. {further_text(len(others), 'site')}".rstrip()
    advice, follows = "Run this step again in hl.check, which names the operation.", _sites(others)
    if first.port == "update" and training.where("grad"):
        advice = "Its gradient is finite: look at the optimizer's eps, learning rate and state."
    if first.port == "value" and training.where("update") and training.has_step(first.step - 1):
        advice = f"No update made it: look at what else writes to {_path(first.site)}."
    yield Finding("non-finite", text, first.site, "error", step, why, advice, follows, first.step)


def _harmless_non_finite(training: _Training) -> Iterator[Finding]:
    """Tell of non-finite numbers that reached no weight, such as masks and skipped steps."""
    since = np.where(training.is_harmless, training.table.bad_since, -1)
    onsets = [training.onset_at_step(int(k), int(since[k])) for k in np.flatnonzero(since >= 0)]
    onsets.sort(key=lambda onset: onset.time)
    of_outputs = [onset for onset in onsets if onset.port in _OF_OUTPUTS]
    others = [onset for onset in onsets if onset.port not in _OF_OUTPUTS]
    for first, *later in filter(None, (others, of_outputs)):
        step, whose = f"step {first.step:,}", first.site
        advice = "A mask of -inf is so. For other values, hl.check raises an error."
        if first.port in _OF_OUTPUTS:
            whose = f"The gradient at {first.site}"
            advice = "A GradScaler skips such a step, and lowers its scale: usual at first."
        text = f"{whose} holds NaN or infinity since {step}, and no weight gets it."
        why, follows = further_text(len(later), "site"), _sites(later)
        where, since_step = first.site, first.step
        yield Finding("non-finite", text, where, "note", step, why, advice, follows, since_step)


def _jumps(training: _Training) -> Iterator[Finding]:
    """Name the step at which norms jump, and the site that jumps first in it."""
    onsets = _jump_onsets(training)
    if not onsets:
        return
    first, what = onsets[0], onsets[0].noun
    level: Level = "error" if (training.bad_since >= first.step).any() else "warning"
    if {onset.port for onset in onsets} <= _GRADIENTS and len(onsets) < _FEW * len(training.sites):
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
    why += " It is over after a few steps: a single batch." if first.is_over else ""
    advice, follows = _advice_on_jump(first, what), _sites(onsets[1:])
    if what == "weight" and not (training.where("update") and training.has_step(first.step - 1)):
        advice = "An update that was not measured may have made it: measure those of each step."
    yield Finding("jump", text, first.site, level, number, why, advice, follows, first.step)


def _advice_on_jump(first: _Onset, noun: str) -> str:
    if first.port == "grad" and first.is_alone:
        return (
            f"No other gradient jumps in this step: look at hooks on {_path(first.site)} and at"
            " what uses it, and clip gradients."
        )
    if noun == "weight":
        return f"No update jumps before: look at what else writes to {_path(first.site)}."
    if not first.is_sudden:
        return "It grows over several steps: lower the learning rate, or clip gradients."
    if noun == "gradient":
        return "Look at the loss and the labels of this step's batch, and clip gradients."
    if noun == "output" and not first.is_over:
        return f"Look at the input of {_path(first.site)} and at what changed in this step."
    return "Look at this step's batch and its labels."


def _first_to_move_text(n_sites: int) -> str:
    if n_sites == 1:
        return "Nothing else moves."
    return f"It is the first to move; {further_text(n_sites - 1, 'site')}"


def _update_jump_finding(
    training: _Training, simultaneous: Sequence[_Onset], onsets: Sequence[_Onset], level: Level
) -> Finding:
    most = max(simultaneous, key=lambda onset: onset.factor)
    n_updates = len(training.where("update"))
    number = factor_text(math.log(most.factor))
    whose = f"The update at {most.site} jumps"
    if len(simultaneous) > n_updates / 2:
        whose = f"{len(simultaneous)} of {n_updates} updates jump"
    text = f"{whose} at step {most.step:,}, {most.site} most ({number})."
    why = "Outputs and gradients of this step are as before."
    why = f"{why} {further_text(len(onsets) - len(simultaneous), 'site')}".rstrip()
    advice = "Look at the learning rate and its schedule, and at the optimizer's state."
    others = _sites(onset for onset in onsets if onset is not most)
    return Finding("learning rate", text, most.site, level, number, why, advice, others, most.step)


def _jump_onsets(training: _Training) -> list[_Onset]:
    """Return where the norms of sites jump, in the order in which they do."""
    numbers = training.numbers("norm")
    if numbers is None or len(training.steps) <= _WARM_UP:
        return []
    last, greatest = numbers[0], np.nan_to_num(numbers[2], nan=0.0)
    highest = np.maximum.accumulate(greatest, axis=0)
    base = np.zeros_like(highest)
    base[_LAG:] = highest[:-_LAG]
    with np.errstate(all="ignore"):
        is_jump = (greatest > _JUMP * base) & (base > 0)
    is_jump[:_WARM_UP] = False
    is_jump &= ~_has_usual_rms(training, greatest.shape)
    onsets, gradients = [], training.where("grad")
    for k in np.flatnonzero(is_jump.any(axis=0)):
        column = int(np.argmax(is_jump[:, k]))
        usual = float(base[column, k])
        begun = [c for c in range(column - _LAG + 1, column + 1) if greatest[c, k] > _BEGUN * usual]
        later = last[column + _SINGLE : column + 2 * _SINGLE, k]
        is_over = bool(len(later)) and bool((later < _BEGUN * usual).all())
        factor = float(greatest[column, k]) / usual
        onset = training.find_onset(int(k), begun[0], factor, usual)
        others = [j for j in gradients if _path(training.sites[j]) != _path(onset.site)]
        has_company = (greatest[begun[0], others] > _BEGUN * base[begun[0], others]).any()
        is_sudden, is_alone = begun[0] == column, not has_company
        onsets.append(replace(onset, is_over=is_over, is_sudden=is_sudden, is_alone=is_alone))
    return sorted(onsets, key=lambda onset: onset.time)


def _has_usual_rms(training: _Training, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Tell of columns and sites whether values are as before, also where there are more of them.

    A larger batch has a larger norm. The root of the mean square is that of the greatest mean and
    deviation in a column, so that no jump within a column is lost.
    """
    are_more = np.zeros(shape, np.bool_)
    means, deviations = training.numbers("mean"), training.numbers("std")
    sites = training.where("input", "output")
    if means is None or deviations is None or not sites:
        return are_more
    with np.errstate(all="ignore"):
        mean = np.abs(means[:, :, sites]).max(axis=0)
        usual = np.hypot(mean, deviations[2][:, sites])
        highest = np.maximum.accumulate(np.nan_to_num(usual, nan=0.0, posinf=0.0), axis=0)
        are_more[_LAG:, sites] = usual[_LAG:] < _BEGUN * highest[:-_LAG]
    return are_more


def _all_zero_sites(training: _Training) -> Iterator[Finding]:
    """Name the outputs that are all zero since a step, and the weights that became so."""
    table, first_step = training.table, training.steps[0]
    since = [
        training.onset_at_step(k, int(table.zero_since[k]))
        for k in training.where("output", "value")
        if table.n_zero[k] >= RECENT
    ]
    since = [onset for onset in since if onset.port == "output" or onset.step > first_step]
    bad = training.bad_since[training.bad_since >= 0]
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
    yield Finding("dead", text, first.site, level, step, why, advice, _sites(since[1:]), first.step)


def _include_most_siblings(training: _Training, first: _Onset, others: Sequence[_Onset]) -> bool:
    """Tell whether most sites at the same place of other blocks are among these."""
    template = template_of(_path(first.site))
    n_alike = sum(template_of(_path(onset.site)) == template for onset in others)
    places = [template_of(_path(training.sites[k])) for k in training.where("output")]
    return places.count(template) > 1 and n_alike > places.count(template) / 2


def _frozen_weights(training: _Training) -> Iterator[Finding]:
    """Name the weights that never change while those at the same place of other blocks do."""
    updates = {_path(training.sites[k]): k for k in training.where("update")}
    paths = [_path(training.sites[k]) for k in training.where("value")]
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
    first, *others = odd or still
    step = first_step = training.steps[0]
    if first in updates:
        step = int(training.table.zero_since[updates[first]])
    since = f" since step {step:,}" * (step > first_step)
    text = f"{first} does not change{since}{', unlike its siblings' * bool(odd)}."
    level: Level = "warning" if odd else "note"
    why, advice = _cause_of_standstill(training, first)
    why = f"{plural(len(others) + 1, 'weight')} so. {why}".rstrip()
    follows = tuple(f"{path}:value" for path in others)
    number = f"step {step:,}"
    yield Finding("frozen", text, f"{first}:value", level, number, why, advice, follows, step)


def _changing_weights(training: _Training) -> set[str]:
    """Return the weights that change in the last steps, whoever writes to them."""
    if "norm" not in training.table.names:
        return set()
    recent = [row[training.table.names.index("norm")] for row in training.table.recent]
    values = training.where("value")
    with np.errstate(all="ignore"):
        is_moving = np.fmin.reduce(recent)[values] < np.fmax.reduce(recent)[values]
    return {_path(training.sites[k]) for k, moves in zip(values, is_moving, strict=True) if moves}


def _cause_of_standstill(training: _Training, path: str) -> tuple[str, str]:
    """Tell by its gradient why a weight does not change, and what to look at."""
    table = training.table
    if f"{path}:update" not in training.sites:
        advice = "Give it to the optimizer, unless it is frozen on purpose."
        return f"No optimizer that steps has {path}.", advice
    if not training.where("grad") or "norm" not in table.names:
        return "", "Look at requires_grad, and whether the optimizer was given it."
    at = [k for k in training.where("grad") if _path(training.sites[k]) == path]
    norms = np.array(table.recent)[:, table.names.index("norm"), at]
    if np.isnan(norms).all():
        advice = "Look whether it is used, at requires_grad, and for detach(), no_grad() and .data."
        return f"No gradient reaches {path}.", advice
    if not np.nan_to_num(norms).any():
        advice = "Look at what uses it: a factor of 0, a dead activation, inputs of 0."
        return f"The gradient of {path} is 0.", advice
    advice = "The learning rate of its group is 0, or its dtype rounds the updates away."
    return f"The gradient of {path} is not 0.", advice


def _no_updates(training: _Training) -> Iterator[Finding]:
    updates = training.where("update")
    if not updates:
        yield from _never_stepped(training)
    elif (training.table.n_zero[updates] >= RECENT).all():
        step = int(training.table.zero_since[updates].max())
        text, number = f"No weight changes since step {step:,}.", f"step {step:,}"
        site, are_zero = training.sites[updates[0]], _have_zero_gradients(training)
        why = f"All {len(updates)} updates are 0{', and so are the gradients' * are_zero}."
        advice = "Look at the learning rate and its schedule."
        if are_zero:
            advice = "Look at what uses these weights: a factor of 0, or a dead activation."
        yield Finding("frozen", text, site, "warning", number, why, advice, step=step)


def _have_zero_gradients(training: _Training) -> bool:
    """Tell whether weights get gradients, and all of them are 0 in the last steps."""
    grads = training.where("grad")
    return bool(grads) and bool((training.table.n_zero[grads] >= RECENT).all())


def _never_stepped(training: _Training) -> Iterator[Finding]:
    """Tell that gradients came and no weight changed, as with the optimizer of another model."""
    weights, norms = training.where("value"), training.numbers("norm")
    has_gradients = bool(training.where("grad_output", "grad_input"))
    if norms is None or not weights or not has_gradients or len(training.reports) < RECENT:
        return
    if (training.table.bad_since >= 0).any():  # a `GradScaler` skips these steps
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


def _drifting_norms(training: _Training) -> Iterator[Finding]:
    """Name the sites whose norms have grown or shrunk by a large factor, without a jump."""
    numbers = training.numbers("norm")
    if numbers is None or len(training.steps) <= 2 * _WARM_UP:
        return
    last = numbers[0]
    half = len(last) // 2
    with np.errstate(all="ignore"):
        factor = _nanmedian(last[-RECENT:]) / _nanmedian(last[:half])
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
    yield Finding("drift", text, first.site, "warning", number, why, advice, _sites(others))


def _large_updates(training: _Training, until: int | None = None) -> Iterator[Finding]:
    """Tell that updates are large beside their weights, before a step: a jump makes large ones."""
    numbers = training.numbers("ratio")
    if numbers is None or len(training.steps) < RECENT:
        return
    weights = [k for k in training.where("update") if not training.sites[k].endswith("bias:update")]
    n_columns = len(training.steps) if until is None else bisect_left(training.steps, until)
    by_column = numbers[0][:n_columns, weights]
    # Of a weight that begins at 0, as that of a new head, the first updates are large.
    early = np.where(np.isnan(by_column[0]), math.nan, _nanmedian(by_column[: RECENT // 2]))
    ratio = np.fmax(early, _nanmedian(by_column[-RECENT:]))
    large = [training.sites[weights[k]] for k in np.flatnonzero(ratio > _LARGE_RATIO)]
    if len(large) <= len(weights) / 2:
        return
    share = f"{len(large)} of {len(weights)} weights"
    text = f"{share} change by more than {_LARGE_RATIO:.0%} in a step."
    number, advice = f"{np.nanmax(ratio):.2g}", "Lower the learning rate."
    why = "The norm of the update over that of the weight; 0.001 is usual. At first, or at last."
    follows = tuple(large[1:])
    yield Finding("learning rate", text, large[0], "warning", number, why, advice, follows)


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


def _vanishing_gradients(training: _Training) -> Iterator[Finding]:
    """Name the gradients that are tiny beside the largest of their kind, in the last step."""
    table = training.table
    if not {"min", "max"} <= set(table.names):
        return
    ends = np.abs([table.now[table.names.index(name)] for name in ("min", "max")])
    greatest = np.fmax(*ends)
    shares: list[tuple[float, str]] = []
    for port in sorted(_GRADIENTS):
        sites = [k for k in training.where(port) if not training.sites[k].endswith("bias:grad")]
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


def _dead_units(training: _Training) -> Iterator[Finding]:
    """Name the units that are dead in the last steps, where covariances are measured."""
    sites = dict(dead_units(training.reports))
    if not sites:
        return
    first, *others = sites
    units = sites[first]
    text = f"{plural(len(units), 'unit')} of {first} pass nothing: {listed(units, _MOST_UNITS)}."
    number = plural(sum(map(len, sites.values())), "unit")
    why = f"Mean and variance were 0 in each of the last {RECENT} measured steps."
    advice = "Look at the learning rate and the biases."
    yield Finding("dead units", text, first, "note", number, why, advice, tuple(others))


def _path(site: str) -> str:
    return path_and_port(site)[0]


def _sites(onsets: Iterable[_Onset]) -> tuple[str, ...]:
    return tuple(onset.site for onset in onsets)


def _nanmedian(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the median over the first axis without NaN; NaN where nothing else is."""
    ordered = np.sort(numbers, axis=0)  # NaN comes last
    counts = np.count_nonzero(~np.isnan(numbers), axis=0)
    at = np.maximum(counts - 1, 0) // 2
    return np.where(counts > 0, np.take_along_axis(ordered, at[None], axis=0)[0], np.nan)
