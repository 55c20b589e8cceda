"""Rules on the forward values of one pass: each names the site where a fault begins."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch

from hookline.display.text import listed, name_without_torch, plural
from hookline.display.units import share
from hookline.findings.finding import Finding, Level
from hookline.findings.survey import (
    Survey,
    ancestors_of,
    is_activation,
    is_norm,
    is_pass_through,
    is_weighted,
    template_of,
)
from hookline.findings.tensor_reading import Reading

_LEAST_NUMEL = 8  # a value of fewer elements may well be all zero
_MOST_ZERO_SIBLINGS = 0.5  # from it on, zeros are how the model was initialised
_OUTLIER = 20.0  # standard deviations from the mean
_LEAST_OUTLIER_NUMEL = 512
_LEAST_DEAD_CHANNELS = 0.02
_LEAST_PER_CHANNEL = 32
_SATURATED_SHARE = 0.9
_FLOAT16_NEAR = 6e4
_LEAST_NORMS = 3  # for each block without one
_MOST_NAMED = 3


def later_sites(readings: Iterable[Reading], first: Reading) -> tuple[str, ...]:
    """Return the sites of the later readings."""
    return tuple(dict.fromkeys(r.site for r in readings if r is not first and r.site != first.site))


def _non_finite_text(reading: Reading) -> str:
    """Name the kinds of numbers that are not finite."""
    numbers = reading.numbers
    kinds = ["NaN"] * bool(numbers.n_nan) + ["inf"] * bool(numbers.n_inf)
    kinds += ["-inf"] * (not kinds)
    return " and ".join(kinds)


def non_finite_finding(
    first: Reading, n_bad: int, place: str, why: str, advice: str, later: Iterable[Reading]
) -> Finding:
    """Describe the first value with a NaN or an infinity."""
    kinds, part = _non_finite_text(first), share(n_bad / max(first.numbers.numel, 1))
    text, number = f"{kinds} begins {place} {first.site}.", f"{part} {kinds}"
    sites = later_sites(later, first)
    return Finding("non-finite", text, first.site, "error", number, why, advice, sites)


def non_finite(survey: Survey) -> Iterator[Finding]:
    """Name the first forward value with a NaN or an infinity."""
    bad = [reading for reading in survey.inputs_and_outputs if _is_non_finite(reading, survey)]
    if not bad:
        return
    first = bad[0]
    later = [r for r in survey.readings if r.numbers.n_bad and r is not first]
    n_bad = first.numbers.n_bad or first.numbers.n_masked
    source = survey.input_by_reading_id.get(id(first)) if first.port == "output" else None
    why = f"{n_bad:,} of {first.numbers.numel:,} elements, the first in firing order."
    if first.port == "input" and first.path:
        why += " Code outside the recorded modules made it, right before this module."
    elif source is not None and first.numbers.n_inf:
        why += _overflow_text(first, source)
    elif source is not None and not source.numbers.n_bad:
        why += f" The value before it, {source.site}, is finite."
    if later:
        why += f" {_count_with_have(later, 'later value')} some."
    advice = f"Look at the weights and the input of {first.path or 'the model'}."
    advice += " hl.check names the operation."
    yield non_finite_finding(first, n_bad, "at", why, advice, later)


def _is_non_finite(reading: Reading, survey: Survey) -> bool:
    """Tell whether a value is not finite; -inf alone is a mask, unless a layer made it."""
    numbers = reading.numbers
    if numbers.n_bad:
        return True
    is_made = is_weighted(reading) or is_norm(reading.module_type)
    if not numbers.n_masked or reading.port != "output" or not is_made:
        return False
    return survey.is_leaf(reading) and numbers.dtype is torch.float16


def _overflow_text(first: Reading, source: Reading) -> str:
    dtype = name_without_torch(first.numbers.dtype)
    greatest = max(abs(source.numbers.low), abs(source.numbers.high))
    if first.numbers.dtype is torch.float16 or greatest > _FLOAT16_NEAR:
        most = torch.finfo(first.numbers.dtype).max
        return (
            f" It overflows: {dtype} ends at {most:.3g}, and {source.site} reaches {greatest:.3g}."
        )
    return ""


def dead_outputs(survey: Survey) -> Iterator[Finding]:
    """Name each output that is all zero while what flows into it is not."""
    own = [r for r in survey.leaf_outputs if not is_pass_through(r.module_type)]
    alive = {survey.loop_key(r): r.call for r in own if not r.numbers.is_zero}
    zero = [r for r in own if r.numbers.is_zero and r.numbers.numel > _LEAST_NUMEL]
    meant = []
    for reading in zero:
        if alive.get(survey.loop_key(reading), -1) > reading.call:
            continue  # a step of a loop, such as one before the first spike
        source = survey.input_by_reading_id.get(id(reading))
        if source is not None and source.numbers.is_zero:
            continue
        if _is_zero_by_init(reading, survey):
            meant.append(reading)
        else:
            yield _dead_output_finding(reading, zero, survey)
    if meant:
        text = f"{listed([reading.site for reading in meant], _MOST_NAMED)}: all zero."
        why = "The last layer, or the same place of most blocks: probably initialised to zero."
        sites = later_sites(meant, meant[0])
        yield Finding("dead", text, meant[0].site, "note", "100 % zero", why, follows=sites)


def _is_zero_by_init(reading: Reading, survey: Survey) -> bool:
    """Tell whether zeros are probably how a model begins: a head, or the last norm of branches."""
    leaves = survey.leaf_outputs
    if reading is leaves[-1] and is_weighted(reading):
        return True
    group = next(
        (group for group in survey.sibling_groups if any(r is reading for r in group)), [reading]
    )
    n_zero = sum(sibling.numbers.is_zero for sibling in group)
    if len(group) < 2 or n_zero < _MOST_ZERO_SIBLINGS * len(group):
        return False
    place = next(k for k, leaf in enumerate(leaves) if leaf is reading)
    later = (leaf for leaf in leaves[place + 1 :] if not is_pass_through(leaf.module_type))
    following = next(later, None)
    return following is None or not following.numbers.is_zero


def _dead_output_finding(reading: Reading, zero: Sequence[Reading], survey: Survey) -> Finding:
    source = survey.input_by_reading_id.get(id(reading))
    why = "Every element of its output is exactly 0"
    if source is not None and is_activation(reading.module_type) and source.numbers.high <= 0:
        why += f": {source.site} is at most {source.numbers.high:.3g}"
    why += ", so no gradient flows through it."
    advice = f"Look at the weights and the bias of {(source or reading).path}."
    if not is_activation(reading.module_type):
        advice = f"Look at the weights of {reading.path}, and at what zeroes them."
    if reading.module_type == "Embedding":
        advice = f"Look at the ids: {reading.path} gives 0 for padding_idx. Then at its weights."
    text, sites = f"{reading.site} passes nothing.", later_sites(zero, reading)
    return Finding("dead", text, reading.site, "warning", "100 % zero", why, advice, sites)


def dead_channels(survey: Survey) -> Iterator[Finding]:
    """Name layers with channels, features or heads that are zero in the whole batch."""
    notes = []
    for reading in survey.leaf_outputs:
        numbers = reading.numbers
        if not numbers.dead or numbers.per_channel < _LEAST_PER_CHANNEL:
            continue
        if len(numbers.dead) < _LEAST_DEAD_CHANNELS * numbers.n_channels:
            continue
        source = survey.input_by_reading_id.get(id(reading))
        if source is not None and set(numbers.dead) <= set(source.numbers.dead):
            continue
        if is_weighted(reading) or is_norm(reading.module_type):
            yield _dead_channels_finding(reading, "warning", [])
        else:
            notes.append(reading)
    if notes:
        worst = max(notes, key=lambda r: len(r.numbers.dead) / r.numbers.n_channels)
        yield _dead_channels_finding(worst, "note", notes)


def _dead_channels_finding(reading: Reading, level: Level, others: list[Reading]) -> Finding:
    numbers = reading.numbers
    indices, n_dead = numbers.dead, len(numbers.dead)
    is_run = indices[-1] - indices[0] == n_dead - 1 and n_dead > 1
    where = f"{indices[0]} to {indices[-1]}" if is_run else listed(indices, 4)
    text = f"{n_dead} of {numbers.n_channels} channels of {reading.site} are zero: {where}."
    why = f"In all {numbers.per_channel:,} elements of each."
    why += " They stand in a row, as those of a head do." * (is_run and level == "warning")
    advice = f"Look at these rows of the weight of {reading.path}." if level == "warning" else ""
    part, sites = share(n_dead / max(numbers.n_channels, 1)), later_sites(others, reading)
    return Finding("channels", text, reading.site, level, part, why, advice, sites)


def outliers(survey: Survey) -> Iterator[Finding]:
    """Name the values with an element that is far from the mean."""
    far = [
        (distance, r) for r in survey.leaf_outputs if (distance := _farthest_in_stds(r)) > _OUTLIER
    ]
    if not far:
        return
    (distance, first), (farthest, worst) = far[0], max(far, key=lambda pair: pair[0])
    text = f"An element of {first.site} is {distance:.0f} standard deviations from the mean."
    why = f"{_count_with_have(far)} one beyond {_OUTLIER:g}"
    why += f"; {worst.site} has the farthest, at {farthest:.0f}." if worst is not first else "."
    advice = "Low precision and quantisation lose the other elements beside it."
    number, sites = f"{distance:.0f} sigma", later_sites([r for _, r in far], first)
    yield Finding("outlier", text, first.site, "note", number, why, advice, sites)


def _count_with_have(values: Sequence[Any], noun: str = "value") -> str:
    """Say that so many values have something, in words that agree."""
    return f"{plural(len(values), noun)} {'has' if len(values) == 1 else 'have'}"


def _farthest_in_stds(reading: Reading) -> float:
    """Return how many standard deviations the farthest element is from the mean."""
    numbers = reading.numbers
    if not numbers.std > 0 or numbers.numel < _LEAST_OUTLIER_NUMEL or numbers.saturated is not None:
        return 0.0
    return max(numbers.high - numbers.mean, numbers.mean - numbers.low) / numbers.std


def saturated_attention(survey: Survey) -> Iterator[Finding]:
    """Name the first attention whose weights go to single keys."""
    shares = [(r.numbers.saturated, r) for r in survey.outputs]
    maps = [(share_of_rows, r) for share_of_rows, r in shares if share_of_rows is not None]
    full = [pair for pair in maps if pair[0] > _SATURATED_SHARE]
    if not full:
        return
    share_of_rows, first = full[0]
    part = f"{100 * share_of_rows:.0f} %"
    why = f"In {part} of its rows one key has all the weight, in {len(full)} of {len(maps)} maps."
    why += " Almost no gradient flows through it."
    text = f"The softmax of {first.site} is saturated."
    advice = "Look at the scale of queries and keys, 1 / sqrt(width of a head), and at the mask."
    sites = later_sites([r for _, r in full], first)
    yield Finding("saturated", text, first.site, "warning", part, why, advice, sites)


def equal_outputs(survey: Survey) -> Iterator[Finding]:
    """Name outputs of distinct modules that are equal."""
    groups: dict[tuple[object, ...], list[Reading]] = {}
    for reading in survey.leaf_outputs:
        numbers, kind = reading.numbers, reading.module_type
        is_told = numbers.std > 0 and numbers.numel > _LEAST_NUMEL and not numbers.n_bad
        if is_told and not is_pass_through(kind) and not is_activation(kind):
            key = (numbers.digest, numbers.shape, numbers.dtype, numbers.mean, numbers.std)
            groups.setdefault(key, []).append(reading)
    equal = [group for group in groups.values() if len({reading.path for reading in group}) > 1]
    if not equal:
        return
    # Layers of one type that agree are odder than a norm that hands on what a layer gave.
    equal.sort(key=lambda group: len({reading.module_type for reading in group}) > 1)
    first, *rest = equal
    names = listed([reading.site for reading in first], _MOST_NAMED + 1)
    text, number = f"The outputs of {names} are equal.", f"{len(first)} equal"
    why = f"So are those of {plural(len(rest), 'other group')}." if rest else ""
    advice = "They share weights and inputs, or one hands on what another gave."
    sites = later_sites(itertools.chain(*equal), first[0])
    yield Finding("equal", text, first[0].site, "note", number, why, advice, sites)


def shared_modules(survey: Survey) -> Iterator[Finding]:
    """Name a module with weights that stands at the same place of several blocks.

    Weights that modules of their own share are a note: a model ties them on purpose.
    """
    tied: list[tuple[str, tuple[str, ...]]] = []
    for path, others in survey.aliases.items():
        kind, template = survey.modules.get(path, ""), template_of(path)
        if is_pass_through(kind) or is_activation(kind) or "Pool" in kind or "#" not in template:
            continue
        same = tuple(other for other in others if template_of(other) == template and other != path)
        if not same or _is_inside_alias(path, survey.aliases):
            continue
        if not kind and all(other.rpartition(".")[0] in survey.modules for other in same):
            tied.append((path, same))
            continue
        n, names = len(same) + 1, listed(same, _MOST_NAMED)
        text, number = f"{path} is also {names}: one module in place of {n}.", f"{n} paths"
        why = "Its calls share all weights."
        advice = "If it is a mistake, build each block anew, or copy.deepcopy it."
        yield Finding("shared", text, path, "warning", number, why, advice, same)
    if tied:
        path, same = tied[0]
        text = f"{path} is also {listed(same, _MOST_NAMED)}: one weight of {len(same) + 1} modules."
        why = f"Modules of their own share {plural(len(tied), 'weight')}."
        sites = (*same, *(other for other, _ in tied[1:]))
        yield Finding("shared", text, path, "note", f"{len(same) + 1} paths", why, follows=sites)


def _is_inside_alias(path: str, aliases: Container[str]) -> bool:
    return any(holder in aliases for holder in ancestors_of(path))


def odd_dtypes(survey: Survey) -> Iterator[Finding]:
    """Name the sites whose dtype differs from that at the same place of other blocks."""
    odd: list[tuple[Reading, torch.dtype]] = []
    for group in survey.group_siblings([r for r in survey.outputs if r.is_floating]):
        ((usual, n_usual),) = Counter(r.numbers.dtype for r in group).most_common(1)
        if n_usual > len(group) / 2:
            odd += [(reading, usual) for reading in group if reading.numbers.dtype is not usual]
    if not odd:
        return
    place = {id(reading): k for k, reading in enumerate(survey.readings)}
    first, usual = min(odd, key=lambda pair: place[id(pair[0])])
    got, wanted = (name_without_torch(d) for d in (first.numbers.dtype, usual))
    text = f"{first.site} is {got}, where other blocks have {wanted}."
    why = f"{plural(len(odd), 'value differs so', 'values differ so')}."
    advice = "Look for a cast, or for a module that was converted alone."
    sites = later_sites([r for r, _ in odd], first)
    yield Finding("dtype", text, first.site, "warning", got, why, advice, sites)


def missing_norms(survey: Survey) -> Iterator[Finding]:
    """Name a place of a norm at which a block has none."""
    for group in survey.sibling_groups:
        others = [r for r in group if not is_norm(r.module_type)]
        if len(group) - len(others) < _LEAST_NORMS * len(others):
            continue
        for r in others:
            text = f"{r.site} is a {r.module_type}, where other blocks have a norm."
            advice = f"Put the norm back at {r.path}, if it is missing."
            yield Finding("no norm", text, r.site, "warning", r.module_type, advice=advice)


def never_called(survey: Survey) -> Iterator[Finding]:
    """Name the selected sites without a value: those whose siblings have one, and the others."""
    silent = [(path, why) for path, port, why in survey.silent if port in ("output", "input")]
    tops = _topmost_paths(dict.fromkeys(path for path, _ in silent))
    fired = Counter(template_of(path) for path in {reading.path for reading in survey.outputs})
    missed = Counter(map(template_of, tops))
    odd = [
        path
        for path in tops
        if fired[template_of(path)] > missed[template_of(path)]
        and _should_run_like_siblings(path, survey)
    ]
    reasons, inside = dict(silent), _paths_inside(tops, [path for path, _ in silent])
    for path in odd:
        text = f"{path} was never called, unlike its siblings."
        why = f"{reasons[path].capitalize()}."
        advice = "Look at the forward that should call it."
        follows = tuple(inside[path])
        yield Finding("never called", text, path, "warning", "0 calls", why, advice, follows)
    named = set(odd)
    rest = [path for path in tops if path not in named]
    if rest:
        number, why = str(len(silent)), f"{reasons[rest[0]]}.".capitalize()
        text = f"{plural(len(silent), 'site')} without a value: {listed(rest, _MOST_NAMED)}."
        later = tuple(rest[1:])
        yield Finding("never called", text, rest[0], "note", number, why, follows=later)


def _topmost_paths(paths: Iterable[str]) -> list[str]:
    """Leave out the paths inside others."""
    known = dict.fromkeys(paths)
    return [path for path in known if known.keys().isdisjoint(ancestors_of(path))]


def _paths_inside(holders: Iterable[str], paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths inside each holder; no holder lies inside another."""
    known, inside = set(holders), defaultdict[str, list[str]](list)
    for path in paths:
        for holder in known.intersection(ancestors_of(path)):
            inside[holder].append(path)
    return inside


def _should_run_like_siblings(path: str, survey: Survey) -> bool:
    """Tell whether a module of a repeated block should run when its siblings do."""
    is_chosen = "expert" in path.lower() or is_pass_through(survey.modules.get(path, ""))
    return "#" in template_of(path) and not is_chosen
