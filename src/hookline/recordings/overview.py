"""Format the tables of `print(run)` and `print(run.passes[0])`.

Their length and cost are bounded, because a recording may have 100,000 passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hookline.display.text import escape_invisible, plural
from hookline.engine import Pass, local_shards
from hookline.engine.pytree import describe, tree
from hookline.errors import FolderError
from hookline.recordings.log import Log, Noted
from hookline.recordings.log_entries import Entry

_MOST_ROWS = 24
_MOST_PASSES = 100  # the shapes of later passes are not read
_N_FORMS_SHOWN = 2
_MOST_SIGNS = 48

_HEAD = ("site", "shape", "dtype", "calls", "passes")


def recording_text(log: Log, n_lost: int) -> str:
    """Format a recording: each site's shapes, dtypes, calls and passes."""
    noted = [tuple(current.log) for current in log.passes]
    head, facts = f"Recording of {plural(len(log.sites), 'site')}", recording_facts(log, n_lost)
    return _text(log, f"{head}: {facts}", range(len(log.sites)), noted, len(_HEAD))


def recording_facts(log: Log, n_lost: int) -> str:
    """Write the numbers of a recording, and the sites and values that it lacks."""
    n_values = sum(len(current.log) for current in log.passes)
    facts = [f"{plural(len(log.passes), 'pass', 'passes')}, {plural(n_values, 'value')}"]
    n_silent = len(log.sites) - len({noted[0] for current in log.passes for noted in current.log})
    if log.passes and n_silent:
        facts.append(f"{n_silent} without a value: print(run.report()) says why")
    if n_lost:
        facts.append(f"{plural(n_lost, 'part')} not saved: run.lost")
    return "; ".join(facts)


def recording_rows(log: Log, most: int) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """Return the table of a recording: the names of its columns, its rows, and notes on it."""
    noted = [tuple(current.log) for current in log.passes]
    rows = _rows(log, range(len(log.sites))[:most], noted)
    return ["site", "shape", "dtype", ">calls", ">passes"], rows, _notes(noted)


def pass_text(log: Log, current: Pass, backward: int | None = None) -> str:
    """Format the sites that fired in a pass, or in one backward pass over it."""
    noted = tuple(current.log)
    name = f"Pass {current.number}"
    if backward is not None:
        noted = tuple(one for one in noted if Entry(*one).backward == backward)
        name = f"Backward {log.backwards(current).index(backward)} over pass {current.number}"
    numbers = sorted({one[0] for one in noted})
    state = "; the model raised in it" if current.failed and backward is None else ""
    values, sites = plural(len(noted), "value"), plural(len(numbers), "site")
    return _text(log, f"{name}: {values} at {sites}{state}", numbers, [noted], len(_HEAD) - 1)


def _text(
    log: Log, head: str, numbers: Sequence[int], passes: Sequence[tuple[Noted, ...]], n_columns: int
) -> str:
    shown = numbers[:_MOST_ROWS]
    if not (shown and passes):
        return escape_invisible(head)
    cells = [row[:n_columns] for row in [_HEAD, *_rows(log, shown, passes)]]
    widths = [max(len(row[column]) for row in cells) for column in range(n_columns)]
    lines = [head]
    for row in cells:
        texts = [
            text.rjust(width) if column > 2 else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(texts)}".rstrip())
    if len(numbers) > len(shown):
        lines.append(f"  … and {plural(len(numbers) - len(shown), 'more site')}: run.sites")
    lines += [f"  {note}" for note in _notes(passes)]
    return escape_invisible("\n".join(lines))


def _notes(passes: Sequence[tuple[Noted, ...]]) -> list[str]:
    is_long = len(passes) > _MOST_PASSES
    return [f"shapes and dtypes: of the first {_MOST_PASSES} passes"] * is_long


def _rows(
    log: Log, shown: Sequence[int], passes: Sequence[tuple[Noted, ...]]
) -> list[tuple[str, ...]]:
    calls: dict[int, set[int]] = {number: set() for number in shown}
    n_passes: Counter[int] = Counter()
    back = {number for number, site in enumerate(log.sites) if site.is_gradient}
    for noted in passes:
        n_calls = Counter([one[0] for one in noted if one[0] not in back])
        # Each of several backward passes brings its own gradient of one call.
        n_calls.update([number for number, _ in {one[0:4:3] for one in noted if one[0] in back}])
        for number in n_calls.keys() & calls.keys():
            calls[number].add(n_calls[number])
            n_passes[number] += 1
    forms = _forms(log, shown, passes[:_MOST_PASSES])
    return [
        (str(log.sites[number]), *forms[number], _span(calls[number]), f"{n_passes[number]:,}")
        for number in shown
    ]


def _forms(
    log: Log, shown: Sequence[int], passes: Sequence[tuple[Noted, ...]]
) -> dict[int, tuple[str, str]]:
    """Return, for each site, the text of its first shapes or structures and of its dtypes."""
    forms: dict[int, dict[str, None]] = {number: {} for number in shown}
    dtypes: dict[int, dict[str, None]] = {number: {} for number in shown}
    for noted in passes:
        for one in noted:
            if one[0] not in forms:
                continue
            try:
                value = local_shards(log.outline(Entry(*one)))
            except FolderError:
                forms[one[0]]["cannot be read"] = None
                continue
            forms[one[0]][describe.shape_or_structure(value)] = None
            for _, tensor in tree.tensors(value):
                dtypes[one[0]][str(tensor.dtype).removeprefix("torch.")] = None
    return {number: (_listed([*forms[number]]), _listed([*dtypes[number]])) for number in shown}


def _listed(texts: list[str]) -> str:
    text = ", ".join(texts[:_N_FORMS_SHOWN]) + ", …" * (len(texts) > _N_FORMS_SHOWN)
    return text if len(text) <= _MOST_SIGNS else f"{text[: _MOST_SIGNS - 1]}…"


def _span(counts: set[int]) -> str:
    if not counts:
        return "0"
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
