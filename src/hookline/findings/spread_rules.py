"""Rules on spreads: a layer unlike its siblings, and values that explode or vanish with depth."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from hookline.display.text import plural
from hookline.findings.change_point import Change, find_change
from hookline.findings.finding import Finding
from hookline.findings.forward_rules import later_sites
from hookline.findings.survey import (
    Survey,
    factor_text,
    is_weighted,
    kind_and_verb,
    log_or_nan,
    template_of,
)
from hookline.findings.tensor_reading import Reading

_LEAST = math.log(10.0)  # a smaller deviation from siblings is usual
_DEVIATIONS = 6.0  # of the siblings' own spread
_MANY = 8
_N_BEFORE = 3
_FLOOR = 0.25  # the least spread of siblings, as a logarithm
_USUAL_GAIN = math.log(0.5)  # of a layer as it is initialised
_LEAST_ALONE = math.log(30.0)  # of a layer without siblings
_LEAST_NOTED = math.log(1e6)  # from the first block to the last
_LEAST_MEMBERS = 3
_LEAST_CULPRIT = math.log(4.0)
_NORMAL = 1.4826
_LAYERS = re.compile(r"Linear|Conv")


class Deviation(NamedTuple):
    """A reading that is unlike others: the logarithm of the factor, and which others."""

    reading: Reading
    logarithm: float
    others: str

    @property
    def usual(self) -> float:
        """The standard deviation of the others."""
        return self.reading.numbers.std / math.exp(self.logarithm)


_ALL, _BEFORE = "that at its place in the other blocks", "that at its place in the blocks before"


def unusual_spreads(survey: Survey) -> Iterator[Finding]:
    """Name the layers that scale their input unlike their siblings, and the block that jumps.

    What follows from an earlier one is left out: a jump of the blocks after an unusual layer, and
    unusual layers after the jump.
    """
    place = {reading.site: k for k, reading in reversed(list(enumerate(survey.readings)))}
    deviations = [
        d for group in survey.sibling_groups for d in _deviations_from_siblings(group, survey)
    ]
    deviations = deviations or _deviations_from_earlier(survey)
    deviations.sort(key=lambda deviation: place[deviation.reading.site])
    jump = _find_spread_change(survey)
    if jump and (not deviations or place[jump.site] < place[deviations[0].reading.site]):
        yield jump
        return
    if not deviations:
        yield from _large_total_change(survey)
        return
    first = deviations[0]
    told = {_template_and_leaf(d.reading) for d in deviations if d.logarithm * first.logarithm > 0}
    for is_growth in (True, False):
        group = [d for d in deviations if (d.logarithm > 0) == is_growth]
        if group and (first in group or _template_and_leaf(group[0].reading) not in told):
            yield _deviation_finding(group, survey)


def _deviations_from_earlier(survey: Survey) -> list[Deviation]:
    """Return layers without siblings whose output is far above all before, and so is the gain."""
    with_siblings = {id(reading) for group in survey.sibling_groups for reading in group}
    highest, odd = math.nan, []
    for reading in filter(_has_comparable_spread, survey.leaf_outputs):
        level = log_or_nan(reading.numbers.std)
        is_alone = bool(_LAYERS.search(reading.module_type)) and id(reading) not in with_siblings
        if is_alone and min(level - highest, _log_gain(reading, survey)) > _LEAST_ALONE:
            odd.append(Deviation(reading, level - highest, "the largest before it"))
        highest = level if math.isnan(highest) else max(highest, level)
    return odd[:1]


def _template_and_leaf(reading: Reading) -> tuple[str, str]:
    return template_of(reading.path), reading.leaf


def _deviations_from_siblings(group: Sequence[Reading], survey: Survey) -> list[Deviation]:
    """Return the members whose output and whose gain both deviate, in the same direction."""
    members = [r for r in group if _has_comparable_spread(r)]
    if len(members) < _LEAST_MEMBERS:
        return []
    levels = [log_or_nan(r.numbers.std) for r in members]
    robust = [log_or_nan(r.numbers.spread) for r in members]
    gains = [_log_gain(r, survey) for r in members]
    by_levels, by_robusts, by_gains = map(_Siblings, (levels, robust, gains))
    odd: list[tuple[int, float, str]] = []
    for k in range(len(members)):
        by_gain = by_gains.deviation_from_all(k)
        if not by_gain or math.isnan(by_gain):
            continue
        by_level, by_robust = (
            by_levels.deviation_from_all_or_earlier(k),
            by_robusts.deviation_from_all_or_earlier(k),
        )
        parts = [by_level, by_gain, *[by_robust] * (not math.isnan(by_robust))]
        if all(part > 0 for part in parts) or all(part < 0 for part in parts):
            odd.append((k, by_level, _ALL if by_levels.deviation_from_all(k) else _BEFORE))
    odd = _deviations_of_rest_if_odder(odd, levels, gains)
    return [Deviation(members[k], logarithm, others) for k, logarithm, others in odd]


def _has_comparable_spread(reading: Reading) -> bool:
    """Tell whether a spread says something: attention weights follow the number of keys."""
    numbers = reading.numbers
    is_share = numbers.saturated is not None or "Softmax" in reading.module_type
    return numbers.std > 0 and not numbers.n_bad and not is_share


def _log_gain(reading: Reading, survey: Survey) -> float:
    """Return the logarithm of the output's standard deviation over the input's."""
    source = survey.input_by_reading_id.get(id(reading))
    if source is None:
        return math.nan
    return log_or_nan(reading.numbers.std) - log_or_nan(source.numbers.std)


@final
class _Siblings:
    """The logarithms of one number at the same place of all blocks."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = numbers
        # Without one of many, the median is the same: so it is taken once.
        self._of_all = _median_and_spread(numbers) if len(numbers) >= _MANY else None

    def deviation_from_all(self, k: int) -> float:
        """Return how far a number is from its siblings'; 0 if that is usual for them."""
        usual = self._of_all or _median_and_spread([*self._numbers[:k], *self._numbers[k + 1 :]])
        return _deviation_or_zero(self._numbers[k], usual)

    def deviation_from_all_or_earlier(self, k: int) -> float:
        """Do the same; if a number is not far from all, then beside those before it."""
        return self.deviation_from_all(k) or _deviation_or_zero(
            self._numbers[k], _median_and_spread(self._numbers[max(k - _N_BEFORE, 0) : k])
        )


def _median_and_spread(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the median of numbers and their spread; NaN is left out."""
    known = [number for number in numbers if not math.isnan(number)]
    if not known:
        return math.nan, math.nan
    centre = statistics.median(known)
    return centre, _NORMAL * statistics.median(abs(number - centre) for number in known)


def _deviation_or_zero(number: float, usual: tuple[float, float]) -> float:
    distance = number - usual[0]
    if math.isnan(distance):
        return math.nan
    return distance if abs(distance) > max(_LEAST, _DEVIATIONS * max(usual[1], _FLOOR)) else 0.0


def _deviations_of_rest_if_odder(
    odd: list[tuple[int, float, str]], levels: Sequence[float], gains: Sequence[float]
) -> list[tuple[int, float, str]]:
    """If the first members deviate, and the gain of the rest is the unusual one, name the rest."""
    places = [k for k, *_ in odd]
    if not odd or places != list(range(len(odd))) or len(odd) > len(levels) / 2:
        return odd
    first, rest = gains[len(odd) - 1], [g for g in gains[len(odd) :] if not math.isnan(g)]
    if math.isnan(first) or not rest:
        return odd
    if abs(statistics.median(rest) - _USUAL_GAIN) <= abs(first - _USUAL_GAIN):
        return odd
    centre = statistics.median(levels[: len(odd)])
    return [(k, levels[k] - centre, _BEFORE) for k in range(len(odd), len(levels))]


def _deviation_finding(group: Sequence[Deviation], survey: Survey) -> Finding:
    first = group[0]
    reading, logarithm = first.reading, first.logarithm
    kind, verb = kind_and_verb(logarithm)
    source = survey.input_by_reading_id.get(id(reading))
    text = f"The spread {verb} at {reading.site} ({reading.module_type})."
    std = reading.numbers.std
    why = f"Its standard deviation is {std:.3g}; {first.others} is {first.usual:.3g}."
    if source is not None:
        why += f" {source.site} before it has {source.numbers.std:.3g}."
    rest = [d.reading for d in group[1:]]
    why += f" {plural(len(rest), 'later value')} {_deviates_too_text(len(rest))}." if rest else ""
    advice = f"Look at the initialisation and the weights of {reading.path}."
    if not is_weighted(reading):
        advice = f"Look at {reading.path} and at what flows into it."
    number, sites = factor_text(logarithm), later_sites(rest, reading)
    return Finding(kind, text, reading.site, "warning", number, why, advice, sites)


def _deviates_too_text(n_values: int) -> str:
    return "deviates by itself, too" if n_values == 1 else "deviate by themselves, too"


# -- from block to block -------------------------------------------------------------------------


def _find_spread_change(survey: Survey) -> Finding | None:
    """Name the block at which the spread jumps, or from which it grows or shrinks steadily."""
    trunk = _comparable_block_outputs(survey)
    change = (
        find_change([_log_ratio(*pair) for pair in itertools.pairwise(trunk)]) if trunk else None
    )
    return None if change is None else _block_change_finding(trunk, change, survey)


def _comparable_block_outputs(survey: Survey) -> list[Reading]:
    trunk = [r for r in survey.block_outputs if _has_comparable_spread(r)]
    return trunk if len(trunk) >= _LEAST_MEMBERS else []


def _log_ratio(before: Reading, after: Reading) -> float:
    """Return the logarithm of the factor between the spreads of two blocks.

    It is 0 where the shapes differ, as between stages, and where single elements make it: the
    smaller one of two measures counts.
    """
    if before.numbers.shape != after.numbers.shape:
        return 0.0
    step = log_or_nan(after.numbers.std) - log_or_nan(before.numbers.std)
    robust = log_or_nan(after.numbers.spread) - log_or_nan(before.numbers.spread)
    if math.isnan(robust):
        return step
    return min(step, robust, key=abs) if step * robust > 0 else 0.0


def _large_total_change(survey: Survey) -> Iterator[Finding]:
    """Note that the spread changes much from the first block to the last."""
    trunk = _comparable_block_outputs(survey)
    total = log_or_nan(trunk[-1].numbers.std) - log_or_nan(trunk[0].numbers.std) if trunk else 0.0
    if abs(total) < _LEAST_NOTED:
        return
    kind, verb = kind_and_verb(total)
    text = f"The spread {verb} {factor_text(total)} from {trunk[0].site} to {trunk[-1].site}."
    advice = "So it does in a model with batch norms that was not trained, in eval mode."
    site, *sites = (reading.site for reading in trunk)
    number = factor_text(total)
    yield Finding(kind, text, site, "note", number, advice=advice, follows=tuple(sites))


def _block_change_finding(trunk: Sequence[Reading], change: Change, survey: Survey) -> Finding:
    first, logarithm = change.start + 1, change.logarithm
    block, before, end = trunk[first], trunk[change.start], trunk[change.end]
    culprit = _find_causing_layer(block, before, logarithm, survey)
    kind, verb = kind_and_verb(logarithm)
    where = f"in {block.site}" if block is end else f"from {block.site} to {end.site}"
    text = f"The spread {verb} {factor_text(logarithm)} {where}"
    text += f", at {culprit.site} ({culprit.module_type})." if culprit is not block else "."
    why = (
        f"Standard deviation {before.numbers.std:.3g} after {before.site}, {end.numbers.std:.3g}"
        f" after {end.site}."
    )
    advice = f"Look at the initialisation, and for a norm that is missing, in {block.path}."
    if culprit is block and _is_caused_by_own_forward(block, before, survey):
        why += " No value inside has such a spread."
        advice = f"Look at the forward of {block.path} itself, such as at its residual sum."
    number, sites = factor_text(logarithm), later_sites(trunk[first:], culprit)
    return Finding(kind, text, culprit.site, "warning", number, why, advice, sites)


def _is_caused_by_own_forward(block: Reading, before: Reading, survey: Survey) -> bool:
    """Tell whether a block's spread is far from that of its input and of all values inside."""
    inside = [
        r
        for r in survey.leaf_outputs_inside(block.path)
        if r.call == block.call and _has_comparable_spread(r)
    ]
    others = [log_or_nan(r.numbers.std) for r in (*inside, before)]
    level = log_or_nan(block.numbers.std)
    return bool(inside) and all(abs(level - other) > _LEAST for other in others)


def _find_causing_layer(
    block: Reading, before: Reading, logarithm: float, survey: Survey
) -> Reading:
    """Return the layer inside a block that does it, or the block if none does clearly."""
    sign = 1 if logarithm > 0 else -1
    inside = [
        r for r in survey.leaf_outputs_inside(block.path) if r.call == block.call and is_weighted(r)
    ]
    gains = [(sign * gain, r) for r in inside if not math.isnan(gain := _log_gain(r, survey))]
    best, culprit = max(gains, key=lambda pair: pair[0], default=(0.0, block))
    return culprit if best > _LEAST_CULPRIT else block
