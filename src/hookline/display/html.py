"""HTML tables for notebooks. Every cell is escaped, because paths and types come from users."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from hookline.display.text import escape_invisible

MOST_ROWS = 60

# Notebooks style tables themselves; repeating the class three times (&) outweighs their rules.
# Lines and quiet text are the notebook's own text colour made fainter, so dark themes work.
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


def escape(text: str) -> str:
    """Escape a text for HTML, including characters that do not print.

    >>> escape("<script>")
    '&lt;script&gt;'
    """
    return html.escape(escape_invisible(text))


def table(
    head: str,
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    n_all: int,
    notes: Iterable[str] = (),
) -> str:
    """Return the HTML of a table with a line above it and notes below it.

        >>> "<td>fc</td>" in table("<b>Selection</b>", ["site"], [["fc"]], 1)
        True

    Args:
        head: the line above it, in HTML.
        names: the column names; the prefix `>` aligns a column right, `~` lets it wrap.
        rows: the cells as text, at most `MOST_ROWS` rows; this function escapes them.
        n_all: the number of rows in all; a footer counts the rows that are not shown.
        notes: the notes as text; this function escapes them.
    """
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
    foot += "".join(f"<p>{escape(line)}</p>" for note in notes for line in note.splitlines())
    return (
        f'{_STYLE}<div class="hookline"><p>{head}</p><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table>{foot}</div>"
    )
