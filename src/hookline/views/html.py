"""Tables for notebooks: what `_repr_html_` of recordings, selections, summaries and reports shows.

Imports escaping, tables, units. Every name is escaped: paths and types are the user's own words.
Colours are the notebook's, light or dark: lines and quiet text are its text colour, made fainter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hookline.engine import Report, Site, tree
from hookline.engine.errors import FolderError, OverwrittenError
from hookline.engine.words import plural
from hookline.recordings import PassRecord, Recording
from hookline.views.escaping import escape
from hookline.views.tables import SummaryLike
from hookline.views.units import count, size

MOST_ROWS = 60

# Notebooks have rules of their own for tables; a class named three times (&) outweighs
# them.
_STYLE = """<style>
& { font-size: 0.9em; color: inherit; max-width: 100%; overflow-x: auto; }
& p { margin: 0 0 0.4em; }
& table { border-collapse: collapse; border: 0; margin: 0; color: inherit; }
& table tr:nth-child(n) { background: transparent; }
& table tr > * { padding: 0.15em 1em 0.15em 0; text-align: left; border: 0;
  vertical-align: top; white-space: nowrap; color: inherit; max-width: none; }
& table thead tr > * { font-weight: bold;
  border-bottom: 1px solid color-mix(in srgb, currentColor 40%, transparent); }
& table tbody tr > * { font-variant-numeric: tabular-nums;
  border-bottom: 1px solid color-mix(in srgb, currentColor 12%, transparent); }
& table tr > .number { text-align: right; }
& table tr > .wrap { white-space: normal; }
& tbody td:first-child, & code { font-family: ui-monospace, monospace; }
& .quiet { opacity: 0.65; }
</style>""".replace("&", ".hookline" * 3)


def recording_html(recording: Recording) -> str:
    """A recording as a table: each site that fired, its type, how often, its structure.

    >>> import hookline as hl
    >>> model = nn.Linear(2, 3)
    >>> with hl.record(model) as run:
    ...     _ = model(torch.zeros(4, 2))
    >>> "[4, 3] float32" in recording_html(run)
    True
    """
    passes = list(recording.passes[:1000])
    fired: Counter[Site] = Counter(site for one in passes for site, _ in one.fired())
    first: dict[Site, tuple[PassRecord, int]] = {}
    for one in passes:
        for site, call in one.fired():
            first.setdefault(site, (one, call))
    sites = [site for site in recording.sites if site in fired]
    n_silent = len(recording.sites) - len(sites)
    head = (
        f"<b>Recording</b> of {escape(recording.report().model_type)}:"
        f" {plural(len(recording.sites), 'site')},"
        f" {plural(len(recording.passes), 'pass', 'passes')},"
        f" {plural(sum(fired.values()), 'value')}"
    )
    if len(recording.passes) > len(passes):
        head += f" in the first {len(passes)} passes"
    if n_silent:
        head += f"; {n_silent} without a value: <code>print(run.report())</code> says why"
    if recording.lost:
        head += f"; {plural(len(recording.lost), 'part')} not saved: <code>run.lost</code>"
    rows = [
        [str(site), site.module_type, f"{fired[site]:,}", _form(*first[site], site)]
        for site in sites[:MOST_ROWS]
    ]
    return _page(head, ["site", "type", ">values", "first value"], rows, len(sites))


def selection_html(sites: Sequence[Site]) -> str:
    """A selection as a table: each site and its type.

    >>> import hookline as hl
    >>> "Linear" in selection_html(hl.select(nn.Linear(2, 3)).sites)
    True
    """
    rows = [[str(site), site.module_type, ", ".join(site.aliases)] for site in sites[:MOST_ROWS]]
    names = ["site", "type", "also"]
    if not any(row[2] for row in rows):
        rows, names = [row[:2] for row in rows], names[:2]
    return _page(f"<b>Selection</b> of {plural(len(sites), 'site')}", names, rows, len(sites))


def summary_html(summary: SummaryLike) -> str:
    """A summary as a table: the modules, indented, and the totals.

    >>> import hookline as hl
    >>> "Linear" in summary_html(hl.summary(nn.Linear(2, 3)))
    True
    """
    parts = [
        f"<b>{escape(summary.model_type)}</b>: {summary.parameters:,} parameters"
        f" ({size(summary.parameter_bytes)}), {summary.trainable:,} trainable"
    ]
    names = ["module", "type", ">parameters"]
    if summary.ran:
        parts += [f"{count(summary.flops)} FLOPs, activations {size(summary.activation_bytes)}"]
        names += ["~input", "~output", ">FLOPs", ">memory"]
    if summary.failure:
        parts += [f"<b>the run failed</b> in {escape(summary.failure)}"]
    rows = []
    for row in summary.rows[:MOST_ROWS]:
        name = "\u2003\u2003" * row.depth + str(Site(row.path)).rpartition(".")[2]
        calls = f" x{row.calls}" if row.calls > 1 else ""
        cells = [name, row.module_type + calls, f"{row.parameters:,}" if row.parameters else ""]
        if summary.ran:
            flops = count(row.flops) if row.flops else ""
            memory = size(row.output_bytes) if row.output_bytes else ""
            cells += [row.input, row.output, flops, memory]
        rows.append(cells)
    return _page("; ".join(parts), names, rows, len(summary.rows))


def report_html(report: Report) -> str:
    """A report as a table: each site, how often it fired, and why it did not.

    >>> import hookline as hl
    >>> model = nn.Linear(2, 3)
    >>> with hl.record(model) as run:
    ...     _ = model(torch.zeros(1, 2))
    >>> "1 fired, 0 never" in report_html(run.report())
    True
    """
    n_silent, n_removed = len(report.silent), len(report.removed)
    head = (
        f"<b>hl.{escape(report.name)}</b> on {escape(report.model_type)}:"
        f" {plural(len(report.fired), 'site')}, {plural(report.passes, 'pass', 'passes')},"
        f" {report.n_fired} fired, {n_silent} never;"
        f" {'ended' if report.ended else 'attached'}"
    )
    if n_removed:
        head += f"; {n_removed} removed"
    if report.elsewhere:
        head += f"; {plural(report.elsewhere, 'run')} in other threads or tasks not seen"
    # Silent sites first: they are what one looks for.
    remarked = zip(report.fired, report.remarks(), strict=True)
    ordered = sorted(remarked, key=lambda row: row[0][1] > 0)
    rows = [
        [str(site), site.module_type, f"{n:,}", remark] for (site, n), remark in ordered[:MOST_ROWS]
    ]
    names = ["site", "type", ">fired", "~why not"]
    if not n_silent and not n_removed:
        rows, names = [row[:3] for row in rows], names[:3]
    return _page(head, names, rows, len(ordered))


def _page(head: str, names: list[str], rows: Iterable[list[str]], n_all: int) -> str:
    """A table under a line of HTML; `>` before a name sets its column right, `~` lets it wrap."""
    classes = [{">": "number", "~": "wrap"}.get(name[0], "") for name in names]
    kinds = [f' class="{kind}"' if kind else "" for kind in classes]
    titles = [name.lstrip(">~") for name in names]
    heads = "".join(f"<th{k}>{escape(t)}</th>" for k, t in zip(kinds, titles, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{escape(cell)}</td>" for k, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    more = n_all - MOST_ROWS
    foot = f'<p class="quiet">… and {more:,} more; iterate for all</p>' if more > 0 else ""
    return (
        f'{_STYLE}<div class="hookline"><p>{head}</p><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table>{foot}</div>"
    )


def _form(one: PassRecord, call: int, site: Site) -> str:
    """What a value is, read without its numbers."""
    key = site if site.call is not None else Site(site.path, site.port, site.leaf, call)
    try:
        runs = one.backwards if site.is_gradient else []
        value: Any = next((run for run in runs if (site, call) in run.fired()), one)[key]
    except OverwrittenError:
        return "overwritten in place after it was recorded; copy=True keeps it"
    except FolderError as error:
        return str(error).splitlines()[0]
    first = next(tree.tensors(value), None)
    dtype = "" if first is None else f" {str(first[1].dtype).removeprefix('torch.')}"
    return tree.form(value) + dtype
