"""Read the values of a recording once, in firing order, judge them, and show it in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hookline.display.text import escape_html, first_line, listed, plural
from hookline.display.units import size
from hookline.engine import Report, normalize_root
from hookline.engine.pytree import describe, tree
from hookline.errors import FolderError, OverwrittenError
from hookline.findings.apply_rules import judge_survey
from hookline.findings.depth_strip import INKS, depth_strip_svg
from hookline.findings.finding import Finding, Findings, sort_by_level
from hookline.findings.survey import Survey
from hookline.findings.tensor_reading import Reading, measure_numbers
from hookline.recordings.pass_record import PassRecord
from hookline.recordings.recorded_values import (
    RecordedValue,
    add_leaf_to_key,
    is_convertible,
    iterate_recorded_values,
)
from hookline.statistics.value_statistics import measured_tensors

_MOST_NAMED = 3
_MOST_BYTES = 256 * 1024**2  # that are read to show a recording in a notebook
_MOST_VALUES = 5_000
_MOST_FINDINGS = 5
_SIGNS = {"error": "●", "warning": "▲", "note": "○"}


class _Reader:
    """Reads the values of passes, and keeps what could not be read."""

    def __init__(self) -> None:
        self.n_values = 0
        self.overwritten: dict[str, tuple[str, list[int]]] = {}
        self.unread: list[str] = []
        self.empty: list[str] = []

    def readings(self, record: PassRecord) -> Iterator[Reading]:
        """Yield a reading of each tensor; one value at a time is in memory."""
        for recorded in iterate_recorded_values(record):
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
        if tree.distinct_tensors(value) and not any(tensor.numel() for _, tensor in tensors):
            self.empty.append(key)
        for leaf, tensor in tensors:
            label = add_leaf_to_key(key, leaf)
            if tensor.is_meta or not is_convertible(tensor):
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
    rows = [_add_pass_numbers(finding, numbers, len(passes)) for finding, numbers in told.values()]
    facts = f"{plural(reader.n_values, 'value')}, {plural(len(passes), 'pass', 'passes')}"
    judged = sort_by_level([*_overwritten_findings(reader.overwritten), *rows])
    return Findings(judged, facts, _unjudged_notes(reader)), survey


def _add_pass_numbers(finding: Finding, numbers: Sequence[int], n_passes: int) -> Finding:
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


def findings_html(passes: Sequence[PassRecord], modules: Mapping[str, str], report: Report) -> str:
    """Return the findings and the strip of the last pass as HTML without a script.

    A large recording is not read for this: the HTML says so.
    """
    try:
        if not _is_quick_to_judge(passes):
            return _html_paragraph(
                f"More than {size(_MOST_BYTES)} or {_MOST_VALUES:,} values: print(run.findings())"
                " says what is wrong."
            )
        findings, survey = judge_passes(passes, modules, report)
    except FolderError as error:
        return _html_paragraph(f"Not judged: {str(error).splitlines()[0]}")
    if not survey.readings:
        return ""
    lines = "".join(_html_lines(findings))
    number = passes[-1].number
    strip = depth_strip_svg(survey, [f for f in findings if not f.passes or number in f.passes])
    last = f"Over depth, in pass {number}, the last of {len(passes)}:"
    about = f"<p>{last}</p>" if strip and len(passes) > 1 else ""
    return f'<div class="hookline"><p>{lines}</p>{about}{strip}</div>'


def _is_quick_to_judge(passes: Sequence[PassRecord]) -> bool:
    n_bytes = n_values = 0
    for record in passes:
        for recorded in iterate_recorded_values(record):
            n_values += 1
            tensors = [tensor for _, tensor in tree.tensors(recorded.outline())]
            n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if n_bytes > _MOST_BYTES or n_values > _MOST_VALUES:
                return False
    return True


def _html_lines(findings: Findings) -> Iterator[str]:
    if findings.ok:
        yield "✓ <b>No error and no warning.</b><br>"
    for finding in findings[:_MOST_FINDINGS]:
        yield _html_line(finding)
    more = len(findings) - _MOST_FINDINGS
    if more > 0:
        yield f'<span class="quiet">and {more:,} more: print(run.findings())</span><br>'
    for note in findings.notes:
        yield f'<span class="quiet">{escape_html(note)}</span><br>'


def _html_line(finding: Finding) -> str:
    ink = INKS.get(finding.level, "inherit")
    sign = f'<span style="color:{ink}">{_SIGNS[finding.level]}</span>'
    number = f" {escape_html(finding.number)}" * bool(finding.number)
    why = escape_html(" ".join(filter(None, (finding.why, finding.advice))))
    level = f'<span class="quiet">{finding.level}</span>'
    text = f"<b>{escape_html(finding.text)}</b>{number}"
    return f'{sign} {level} {text} <span class="quiet">{why}</span><br>'


def _html_paragraph(text: str) -> str:
    return f'<div class="hookline"><p class="quiet">{escape_html(text)}</p></div>'
