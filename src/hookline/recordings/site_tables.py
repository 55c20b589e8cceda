"""Describe recordings and passes as tables of their sites.

The number of rows and the cost are bounded, because a recording may have 100,000 passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from hookline.display.results import Printout
from hookline.display.text import listed, name_without_torch, plural
from hookline.display.text_table import Heading
from hookline.engine import Pass, Site, local_shards
from hookline.engine.pytree import describe, tree
from hookline.errors import FolderError
from hookline.recordings.log_entries import Entry
from hookline.recordings.pass_log import Log, RawSettings

MOST_PASSES = 100  # the shapes of later passes are not read
_MOST_ROWS = 60
_MOST_LINES = 24
_N_FORMS_SHOWN = 2
_MOST_SIGNS = 48

_HEADINGS = (
    Heading("site", "path"), Heading("type", gives_way=1), Heading("shape", "structure"),
    Heading("dtype"), Heading("calls", "number", 3), Heading("passes", "number", 2),
    Heading("remark", "prose"),
)  # fmt: skip


def recording_printout(
    log: Log, model_type: str, n_lost: int, remark: Callable[[Site], str]
) -> Printout:
    """Describe a recording: each site's shapes, dtypes, calls and passes."""
    passes = [tuple(current.log) for current in log.passes]
    facts = f"{plural(len(log.sites), 'site')}, {_recording_facts(log, n_lost)}"
    numbers = range(len(log.sites) if passes else 0)
    rows = [
        (*_cells(row), f"{row['passes']:,}", remark(site))
        for site, row in zip(log.sites, site_rows(log, numbers[:_MOST_ROWS], passes), strict=False)
    ]
    printout = _printout("Recording", f" of {model_type}: {facts}", rows, len(numbers))
    is_long = len(passes) > MOST_PASSES
    note = f"shapes, dtypes and remarks: of the first {MOST_PASSES} passes"
    return replace(printout, notes=[note] * is_long)


def pass_printout(log: Log, current: Pass, backward: int | None = None) -> Printout:
    """Describe the sites that fired in a pass, or in one backward pass over it."""
    noted = entries_of_pass(current, backward)
    name = f"Pass {current.number}"
    if backward is not None:
        name = f"Backward {log.autograd_runs(current).index(backward)} over pass {current.number}"
    numbers = sorted({entry[0] for entry in noted})
    state = "; the model raised in it" if current.failed and backward is None else ""
    head = f": {plural(len(noted), 'value')} at {plural(len(numbers), 'site')}{state}"
    rows = site_rows(log, numbers[:_MOST_ROWS], [noted])
    return _printout(name, head, [_cells(row) for row in rows], len(numbers))


def entries_of_pass(current: Pass, backward: int | None) -> tuple[RawSettings, ...]:
    """Return the entries of a pass, or of one backward pass over it."""
    if backward is None:
        return tuple(current.log)
    return tuple(entry for entry in current.log if Entry(*entry).backward == backward)


def site_rows(
    log: Log, indices: Sequence[int], passes: Sequence[tuple[RawSettings, ...]]
) -> list[dict[str, Any]]:
    """Describe the values at sites by a dict of plain values for each of the sites."""
    calls: dict[int, list[int]] = {number: [] for number in indices}  # in each pass that has any
    back = {number for number, site in enumerate(log.sites) if site.is_gradient}
    for noted in passes:
        n_calls = Counter([entry[0] for entry in noted if entry[0] not in back])
        # Each of several backward passes brings its own gradient of one call.
        n_calls.update(
            [number for number, _ in {entry[0:4:3] for entry in noted if entry[0] in back}]
        )
        for number in n_calls.keys() & calls.keys():
            calls[number].append(n_calls[number])
    forms = _shapes_and_dtypes(log, indices, passes[:MOST_PASSES])
    return [
        {
            "site": str(log.sites[number]),
            "type": log.sites[number].module_type,
            "shape": forms[number][0],
            "dtype": forms[number][1],
            "calls": _range_text(calls[number]),
            "passes": len(calls[number]),
        }
        for number in indices
    ]


def _printout(title: str, head: str, rows: Sequence[Sequence[str]], n_rows: int) -> Printout:
    return Printout(
        title=title,
        head=head,
        headings=_HEADINGS[: len(rows[0])] if rows else (),
        rows=rows,
        n_rows=n_rows,
        most_lines=_MOST_LINES,
        more="sites: run.sites",
        is_compact=True,
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("site", "type", "shape", "dtype", "calls"))


def _recording_facts(log: Log, n_lost: int) -> str:
    """Write the numbers of a recording, and the sites and values that it lacks."""
    n_values = sum(len(current.log) for current in log.passes)
    facts = [f"{plural(len(log.passes), 'pass', 'passes')}, {plural(n_values, 'value')}"]
    n_silent = len(log.sites) - len({noted[0] for current in log.passes for noted in current.log})
    if log.passes and n_silent:
        facts.append(f"{n_silent} without a value: print(run.report()) says why")
    if n_lost:
        facts.append(f"{plural(n_lost, 'part')} not saved: run.lost")
    return "; ".join(facts)


def _shapes_and_dtypes(
    log: Log, numbers: Sequence[int], passes: Sequence[tuple[RawSettings, ...]]
) -> dict[int, tuple[str, str]]:
    """Return, for each site, the text of its first shapes or structures and of its dtypes."""
    forms: dict[int, dict[str, None]] = {number: {} for number in numbers}
    dtypes: dict[int, dict[str, None]] = {number: {} for number in numbers}
    for noted in passes:
        for entry in noted:
            number = entry[0]
            if number not in forms:
                continue
            try:
                value = local_shards(log.outline(Entry(*entry)))
            except FolderError:
                forms[number]["cannot be read"] = None
                continue
            forms[number][describe.shape_or_structure(value)] = None
            for _, tensor in tree.tensors(value):
                dtypes[number][name_without_torch(tensor.dtype)] = None
    return {number: (_list_texts(forms[number]), _list_texts(dtypes[number])) for number in numbers}


def _list_texts(texts: Collection[str]) -> str:
    text = listed(texts, _N_FORMS_SHOWN)
    return text if len(text) <= _MOST_SIGNS else f"{text[: _MOST_SIGNS - 1]}…"


def _range_text(counts: Sequence[int]) -> str:
    if not counts:
        return "0"
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
