"""Read the values of a recording once, in firing order, and judge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hookline.display.text import first_line, listed, plural
from hookline.engine import Report, normalize_root
from hookline.engine.pytree import describe, tree
from hookline.errors import OverwrittenError
from hookline.findings.apply_rules import judge_survey
from hookline.findings.finding import Finding, Findings, sort_by_level
from hookline.findings.survey import Survey
from hookline.findings.tensor_reading import Reading, measure_numbers
from hookline.recordings.firing_order import RecordedValue, is_readable, values_of, with_leaf
from hookline.recordings.pass_record import PassRecord
from hookline.statistics.value_statistics import measured_tensors

_MOST_NAMED = 3


class _Reader:
    """Reads the values of passes, and keeps what could not be read."""

    def __init__(self) -> None:
        self.n_values = 0
        self.overwritten: dict[str, tuple[str, list[int]]] = {}
        self.unread: list[str] = []
        self.empty: list[str] = []

    def readings(self, record: PassRecord) -> Iterator[Reading]:
        """Yield a reading of each tensor; one value at a time is in memory."""
        for recorded in values_of(record):
            self.n_values += 1
            try:
                yield from self._read_value(recorded)
            except OverwrittenError as error:
                key, text = normalize_root(recorded.key), first_line(error)
                self.overwritten.setdefault(key, (text, []))[1].append(record.number)

    def _read_value(self, recorded: RecordedValue) -> Iterator[Reading]:
        value = recorded.read()
        site, key = recorded.site, normalize_root(recorded.key)
        tensors = measured_tensors(value)
        # A value without tensors, such as None for a gradient that was not needed, is not empty.
        if tree.distinct(value) and not any(tensor.numel() for _, tensor in tensors):
            self.empty.append(key)
        for leaf, tensor in tensors:
            label = with_leaf(key, leaf)
            if tensor.is_meta or not is_readable(tensor):
                self.unread.append(label)
                continue
            plain = tensor.dequantize() if tensor.is_quantized else tensor
            numbers = measure_numbers(plain, site.module_type)
            yield Reading(
                label,
                site.path,
                site.port,
                describe.leaf_text(leaf),
                site.module_type,
                recorded.call,
                numbers,
            )


def judge_passes(
    passes: Sequence[PassRecord], modules: Mapping[str, str], report: Report
) -> tuple[Findings, Survey]:
    """Judge the values of passes, one pass after the other.

    A finding of several passes is told once, with the first of them.

    Returns:
        The findings, and the survey of the last pass.
    """
    reader = _Reader()
    types = {"" if path == "(root)" else path: kind for path, kind in modules.items()}
    silent = [(site.path, site.port, report.why.get(site, "")) for site in report.silent]
    aliases = {site.path: site.aliases for site in report.sites if site.aliases}
    told: dict[tuple[str, str], tuple[Finding, list[int]]] = {}
    survey = Survey([])
    for record in passes:
        survey = Survey(list(reader.readings(record)), types, silent, aliases)
        for finding in judge_survey(survey):
            told.setdefault((finding.kind, finding.site), (finding, []))[1].append(record.number)
    rows = [_mention_passes(finding, numbers, len(passes)) for finding, numbers in told.values()]
    facts = f"{plural(reader.n_values, 'value')}, {plural(len(passes), 'pass', 'passes')}"
    judged = sort_by_level([*_overwritten_findings(reader.overwritten), *rows])
    return Findings(judged, facts, _unjudged_notes(reader)), survey


def _mention_passes(finding: Finding, numbers: Sequence[int], n_passes: int) -> Finding:
    if n_passes == 1:
        return replace(finding, passes=tuple(numbers))
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    why = f"{finding.why} In pass {numbers[0]}{more} of {n_passes}.".lstrip()
    return replace(finding, why=why, passes=tuple(numbers))


def _overwritten_findings(errors: Mapping[str, tuple[str, list[int]]]) -> list[Finding]:
    if not errors:
        return []
    first, *rest = errors
    text, numbers = errors[first]
    return [
        Finding(
            "overwritten",
            f"{text}.",
            first,
            "note",
            plural(len(errors), "value"),
            f"So were {listed(rest, _MOST_NAMED)}." if rest else "",
            "Record copies, with hl.record(..., copy=True).",
            tuple(rest),
            passes=tuple(dict.fromkeys(numbers)),
        )
    ]


def _unjudged_notes(reader: _Reader) -> list[str]:
    if not reader.n_values:
        return ["The model has not run, so nothing was judged. print(run.report()) says more."]
    reasons = {
        "they hold no numbers": dict.fromkeys(reader.empty),
        "torch cannot read the numbers": reader.unread,
    }
    return [
        f"Not judged, because {why}: {listed(keys, _MOST_NAMED)}."
        for why, keys in reasons.items()
        if keys
    ]
