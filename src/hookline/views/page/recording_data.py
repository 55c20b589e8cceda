"""Write a recording as the data of its page: findings, rows and values, packed small.

    {findings: [{level, kind, text, site, number, why, advice, row, pass, also: [row],
                 passes: [number] (empty: all)}],
     types, shapes, dtypes: [text],
     rows:   {parent*, name, type, call (-1: the only one), alias: {row: text}},
     values: {row*, order*, port, pass, backward, leaf: {value: text}, shape, dtype, numel,
              mean, std, min, max, zeros, hist, bad: {value: count}, leaves: {value: text},
              stored: {value: bytes}, range: {value: [min, max, numel]} of the histogram,
              problem: {value: text}, waits: [value],
             parts: {value: [{leaf, shape, dtype, numel, mean, std, min, max, zeros, bad, hist}]}},
     trunk: [row], passes: [number], ports: [text],
     tokens: [the passes with one row a token in each block],
     flow: {pass: [[from row, to row, whether it is added to another]]},
     store: what is known of a store, from `store_data`}

Columns with `*` are differences of neighbours. `type`, `shape`, `dtype` and `port` are indices. A
histogram is 24 characters of 64 levels, with logarithmic heights.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from hookline.display.text import escape_invisible
from hookline.engine.pytree.describe import leaf_text
from hookline.errors import AmbiguousError, FolderError
from hookline.findings import Finding, Findings
from hookline.recordings import Recording
from hookline.statistics.value_statistics import Statistics
from hookline.views.page.module_rows import Row, repeated_block_rows
from hookline.views.page.token_norms import token_blocks
from hookline.views.page.value_entries import Part, ValueEntry
from hookline.views.page.values_by_site import ValuesBySite

BINS = 24
_LEVELS = 63
_FIRST = ord("0")
_BACKSLASH, _TILDE = "\\", "~"  # JSON writes a backslash as two
_DIGITS, _STD_DIGITS = 4, 5  # the norm is computed from the mean and the standard deviation
_DIGITS_OF = {
    "mean": _DIGITS, "std": _STD_DIGITS, "min": _DIGITS, "max": _DIGITS, "zeros": _DIGITS,
}  # fmt: skip
_MOST_FOLLOWING = 400


@final
class _TextIndex:
    """Number texts in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        """The texts, by number."""
        return [escape_invisible(text) for text in self.numbers]


def rows_and_values_data(rows: Sequence[Row], entries: Sequence[ValueEntry]) -> dict[str, Any]:
    """Return rows and values as plain data; findings are apart, because they take longer.

    Args:
        rows: the rows.
        entries: the values in firing order, of which some need not be measured yet.
    """
    types, shapes, dtypes, ports = _TextIndex(), _TextIndex(), _TextIndex(), _TextIndex()
    row_of = _row_by_order(rows)
    passes = sorted({entry.key.pass_number for entry in entries})
    values = {
        "row": _delta_encode(row_of[entry.order] for entry in entries),
        "order": _delta_encode(entry.order for entry in entries),
        "port": [ports(entry.site.port) for entry in entries],
        "pass": [entry.key.pass_number for entry in entries],
        "call": [entry.key.call for entry in entries],
        "backward": _present_by_order(entries, lambda entry: entry.key.backward),
        "leaf": _present_by_order(entries, lambda entry: _name_within_row(entry) or None),
        "shape": [shapes(entry.shape) for entry in entries],
        "dtype": [dtypes(entry.dtype) for entry in entries],
        "numel": [_numel(entry) for entry in entries],
        "stored": _present_by_order(entries, lambda entry: entry.stored),
        **statistics_columns(entries),
    }
    return {
        "rows": _row_columns(rows, types),
        "values": values,
        "types": types.texts,
        "shapes": shapes.texts,
        "dtypes": dtypes.texts,
        "ports": ports.texts,
        "trunk": repeated_block_rows(rows),
        "passes": passes,
        "tokens": [number for number in passes if token_blocks(rows, entries, number)],
    }


def _row_columns(rows: Sequence[Row], types: _TextIndex) -> dict[str, Any]:
    aliases = {str(k): ", ".join(row.aliases) for k, row in enumerate(rows) if row.aliases}
    return {
        "name": [escape_invisible(row.name) for row in rows],
        "parent": _delta_encode(-1 if row.parent is None else row.parent for row in rows),
        "type": [types(row.module_type) for row in rows],
        "call": [-1 if row.call is None else row.call for row in rows],
        "alias": {key: escape_invisible(text) for key, text in aliases.items()},
    }


def _row_by_order(rows: Sequence[Row]) -> dict[int, int]:
    """Map the position of each value in firing order to its row."""
    return {entry.order: index for index, row in enumerate(rows) for entry in row.entries}


def _present_by_order(
    entries: Sequence[ValueEntry], of: Callable[[ValueEntry], Any]
) -> dict[str, Any]:
    """Return what few values have, by position in firing order."""
    parts = ((str(entry.order), of(entry)) for entry in entries)
    return {order: part for order, part in parts if part is not None}


def silent_sites_data(recording: Recording) -> list[list[str]]:
    """Return the sites that never fired, each with its type and the reason; and what is lost."""
    report = recording.report()
    lines = [(str(s), s.module_type, report.why.get(s, "")) for s in report.silent]
    lines += [(text, "", "not saved in the folder") for text in recording.lost]
    return [[escape_invisible(text) for text in line] for line in lines]


def statistics_columns(entries: Sequence[ValueEntry]) -> dict[str, Any]:
    """Return the statistics of values as columns; keys of dicts are positions in firing order."""
    numbers = [entry.whole or entry.statistics for entry in entries]
    columns: dict[str, Any] = {
        name: [_round_statistic(statistics, name) for statistics in numbers] for name in _DIGITS_OF
    }
    return columns | {
        "hist": "".join(_encode_histogram(entry.counts) for entry in entries),
        "bad": _present_by_order(entries, lambda entry: entry.non_finite or None),
        "leaves": _present_by_order(entries, lambda e: e.non_finite_text if e.non_finite else None),
        "problem": _present_by_order(
            entries, lambda entry: escape_invisible(entry.problem) or None
        ),
        "range": _present_by_order(entries, _range_of_shown_items),
        "waits": [entry.order for entry in entries if not entry.is_measured],
        "parts": {str(e.order): [*map(_part_data, e.parts)] for e in entries if e.parts},
    }


def _numel(entry: ValueEntry) -> int | None:
    """Return the number of elements; of a store, of all items."""
    return entry.numel if entry.whole is None or entry.numel is None else entry.whole.numel


def _range_of_shown_items(entry: ValueEntry) -> list[float | int | None] | None:
    """Return the range and the number of elements of a histogram that is not of all items."""
    shown = entry.statistics
    if entry.whole is None or shown is None:
        return None
    return [_round_if_finite(shown.min), _round_if_finite(shown.max), shown.numel]


def _part_data(part: Part) -> dict[str, Any]:
    statistics = part.statistics
    return {name: _round_statistic(statistics, name) for name in _DIGITS_OF} | {
        "leaf": escape_invisible(part.leaf),
        "shape": statistics.shape,
        "dtype": statistics.dtype,
        "numel": statistics.numel,
        "bad": statistics.non_finite,
        "hist": _encode_histogram(part.counts),
    }


def try_to_judge(judge: Callable[[], Findings]) -> tuple[Findings | None, str]:
    """Judge values, which are read once more; None and why if that cannot be."""
    try:
        return judge(), ""
    except (AmbiguousError, FolderError) as error:
        return None, str(error).splitlines()[0]


def findings_data(
    findings: Findings | None, problem: str, rows: Sequence[Row], entries: Sequence[ValueEntry]
) -> dict[str, Any]:
    """Return the findings of a recording, each with the row that it names.

    The note on sites that never fired is left out: `silent_sites_data` lists them.

    Args:
        findings: the findings; None for what cannot be judged.
        problem: why it cannot; empty otherwise.
        rows: the rows.
        entries: the values in firing order.
    """
    if findings is None:
        return {"findings": [], "notes": [problem] if problem else [], "judged": False}
    row_of = _row_by_order(rows)
    values = ValuesBySite(entries)
    by_label = {row.label: index for index, row in enumerate(rows)}

    def row(site: str) -> int | None:
        entry = values.find(site)
        return by_label.get(site) if entry is None else row_of[entry.order]

    return {
        "findings": [
            _finding_data_with_pass(finding, row, values)
            for finding in findings
            if (finding.kind, finding.level) != ("never called", "note")
        ],
        "notes": [escape_invisible(note) for note in findings.notes],
        "judged": any(entry.numel for entry in entries),
    }


def _finding_data_with_pass(
    finding: Finding, row: Callable[[str], int | None], values: ValuesBySite
) -> dict[str, Any]:
    entry = values.find(finding.site)
    place = (
        row if entry is None or _is_gradient(entry) else partial(_row_unless_gradient, row, values)
    )
    number = None if entry is None else entry.key.pass_number
    first = next(iter(finding.passes), number)
    return finding_data(finding, place) | {"pass": first, "passes": [*finding.passes]}


def _row_unless_gradient(
    row: Callable[[str], int | None], values: ValuesBySite, site: str
) -> int | None:
    """Return the row of a site; None of a gradient, which may lie before a fault of the forward."""
    entry = values.find(site)
    return None if entry is not None and _is_gradient(entry) else row(site)


def _is_gradient(entry: ValueEntry) -> bool:
    return entry.site.port.startswith("grad")


def finding_data(finding: Finding, row: Callable[[str], int | None]) -> dict[str, Any]:
    """Return a finding as plain data: its texts, and the rows that it names.

    Args:
        finding: the finding.
        row: returns the row of a site; None if the page has no such row.
    """
    following = (row(site) for site in finding.follows[:_MOST_FOLLOWING])
    texts = {name: escape_invisible(getattr(finding, name)) for name in _TEXTS}
    return texts | {
        "row": row(finding.site),
        "step": finding.step,
        "also": list(dict.fromkeys(index for index in following if index is not None)),
        "follows": len(finding.follows),
    }


_TEXTS = ("level", "kind", "text", "site", "number", "why", "advice")


def pack_json(data: Any) -> str:
    """Pack plain data as base64 of gzip of JSON, which the page's script unpacks.

    >>> json.loads(gzip.decompress(base64.b64decode(pack_json({"a": [1, 2]}))))
    {'a': [1, 2]}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    raw = text.encode("utf-8", "backslashreplace")
    return base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode("ascii")


def escape_texts(value: Any) -> Any:
    """Escape characters that do not print, in all texts of plain data."""
    if isinstance(value, dict):
        return {name: escape_texts(part) for name, part in value.items()}
    if isinstance(value, list):
        return [escape_texts(part) for part in value]
    return escape_invisible(value) if isinstance(value, str) else value


def _name_within_row(entry: ValueEntry) -> str:
    """Return what tells a value from others of its row: the parameter, or the recorded leaf."""
    if entry.site.port == "grad":
        return escape_invisible(entry.site.path.rpartition(".")[2])
    return escape_invisible(leaf_text(entry.site.leaf))


def _delta_encode(numbers: Iterable[int]) -> list[int]:
    """Return each number less the one before it: small where numbers run on.

    >>> _delta_encode([3, 4, 5, 5])
    [3, 1, 1, 0]
    """
    before, differences = 0, []
    for number in numbers:
        differences.append(number - before)
        before = number
    return differences


def _round_statistic(statistics: Statistics | None, name: str) -> float | None:
    """Round one of the numbers of a value. A share of zeros is 1 only where all elements are 0."""
    number = _round_if_finite(getattr(statistics, name, None), _DIGITS_OF[name])
    is_rounded_up = name == "zeros" and number == 1 and getattr(statistics, name) < 1
    return 1 - 10.0**-_DIGITS if is_rounded_up else number


def _round_if_finite(number: float | None, digits: int = _DIGITS) -> float | None:
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.{digits}g}")


def _encode_histogram(counts: Sequence[int]) -> str:
    """Write counts as characters: the heights of 24 bars, logarithmic, from 0 to 63.

    >>> _encode_histogram([0] * 47 + [5])[-2:]
    '0o'
    """
    if not counts or not any(counts):
        return "0" * BINS
    bars = np.asarray(counts, float).reshape(BINS, -1).sum(1)
    heights = np.log1p(bars)
    levels = np.where(bars > 0, 1 + np.round((_LEVELS - 1) * heights / heights.max()), 0)
    text = "".join(chr(_FIRST + int(level)) for level in levels)
    return text.replace(_BACKSLASH, _TILDE)
