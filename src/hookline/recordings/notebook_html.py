"""Show above the table of a recording, in a notebook, what is wrong and the depth strip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hookline.display.text import escape_html
from hookline.display.units import size
from hookline.engine import Report
from hookline.engine.pytree import tree
from hookline.errors import FolderError
from hookline.findings import Finding, Findings
from hookline.findings.depth_strip import INKS, depth_strip_svg
from hookline.recordings.firing_order import values_of
from hookline.recordings.judge_passes import judge_passes
from hookline.recordings.pass_record import PassRecord

_MOST_BYTES = 256 * 1024**2  # that are read to show a recording
_MOST_VALUES = 5_000
_MOST_FINDINGS = 5
_SIGNS = {"error": "●", "warning": "▲", "note": "○"}


def findings_html(passes: Sequence[PassRecord], modules: Mapping[str, str], report: Report) -> str:
    """Return the findings and the strip of the last pass as HTML without a script.

    A large recording is not read for this: the HTML says so.
    """
    try:
        if not _is_small(passes):
            return _paragraph(
                f"More than {size(_MOST_BYTES)} or {_MOST_VALUES:,} values: print(run.findings())"
                " says what is wrong."
            )
        findings, survey = judge_passes(passes, modules, report)
    except FolderError as error:
        return _paragraph(f"Not judged: {str(error).splitlines()[0]}")
    if not survey.readings:
        return ""
    lines = "".join(_lines(findings))
    number = passes[-1].number
    strip = depth_strip_svg(survey, [f for f in findings if not f.passes or number in f.passes])
    last = f"Over depth, in pass {number}, the last of {len(passes)}:"
    about = f"<p>{last}</p>" if strip and len(passes) > 1 else ""
    return f'<div class="hookline"><p>{lines}</p>{about}{strip}</div>'


def _is_small(passes: Sequence[PassRecord]) -> bool:
    n_bytes = n_values = 0
    for record in passes:
        for recorded in values_of(record):
            n_values += 1
            tensors = [tensor for _, tensor in tree.tensors(recorded.outline())]
            n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if n_bytes > _MOST_BYTES or n_values > _MOST_VALUES:
                return False
    return True


def _lines(findings: Findings) -> Iterator[str]:
    if findings.ok:
        yield "✓ <b>No error and no warning.</b><br>"
    for finding in findings[:_MOST_FINDINGS]:
        yield _line(finding)
    more = len(findings) - _MOST_FINDINGS
    if more > 0:
        yield f'<span class="quiet">and {more:,} more: print(run.findings())</span><br>'
    for note in findings.notes:
        yield f'<span class="quiet">{escape_html(note)}</span><br>'


def _line(finding: Finding) -> str:
    ink = INKS.get(finding.level, "inherit")
    sign = f'<span style="color:{ink}">{_SIGNS[finding.level]}</span>'
    number = f" {escape_html(finding.number)}" * bool(finding.number)
    why = escape_html(" ".join(filter(None, (finding.why, finding.advice))))
    level = f'<span class="quiet">{finding.level}</span>'
    text = f"<b>{escape_html(finding.text)}</b>{number}"
    return f'{sign} {level} {text} <span class="quiet">{why}</span><br>'


def _paragraph(text: str) -> str:
    return f'<div class="hookline"><p class="quiet">{escape_html(text)}</p></div>'
