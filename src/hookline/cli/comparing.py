"""The command `compare`: its arguments, and its lines for annotations in CI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hookline.errors import InputError
from hookline.verbs.compare.compare import compare
from hookline.verbs.compare.comparison import ComparedSite, Comparison

_LEVELS = {"differs": "error", "not comparable": "warning"}


def compare_by_name(a: str, b: str, names: Sequence[str], floor: str | None) -> Comparison:
    """Compare two folders or files.

    Args:
        a: the folder or file.
        b: the reference.
        names: the renamed paths, each as `THEIRS=OURS`.
        floor: the folder of a run that only rounding tells from `a`, or None.

    Raises:
        InputError: a name has no `=`, or as in `hl.compare`.
    """
    bad = next((name for name in names if "=" not in name), None)
    if bad is not None:
        raise InputError(
            f"--names must be THEIRS=OURS, got {bad}.\nGive --names encoder.layers=h, for instance."
        )
    renamed = dict(name.split("=", 1) for name in names)
    noise = None if floor is None else compare(a, floor)
    return compare(a, b, names=renamed or None, floor=noise)


def annotation_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a workflow command of GitHub for each finding, and each site that is not equal."""
    for finding in comparison.findings:
        if finding.kind not in ("site", "values"):
            yield _line("notice", finding.text)
    for row in comparison.rows:
        if row.verdict in _LEVELS:
            yield _line(_LEVELS[row.verdict], _text(row))


def _text(row: ComparedSite) -> str:
    floor = f", noise floor {row.floor.relative:.3g}" * (row.relative is not None)
    return f"{row.site} {row.verdict}: {row.why}{floor}"


def _line(level: str, text: str) -> str:
    """Write a workflow command; it must be one line."""
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    return f"::{level} title=hookline compare::{text}"
