"""Tables for notebooks. Every cell is escaped: paths and types are the user's own words."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from hookline.display.text import escape_invisible

MOST_ROWS = 60

# Notebooks have rules of their own for tables; a class named three times (&) outweighs them.
# Colours are the notebook's, light or dark: lines and quiet text are its text colour, made fainter.
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
    """Escape a text for HTML.

    >>> escape("<script>")
    '&lt;script&gt;'
    """
    return html.escape(escape_invisible(text))


def table(head: str, names: Sequence[str], rows: Iterable[Sequence[str]], n_all: int) -> str:
    """Lay out a table under a line of HTML.

        >>> "<td>fc</td>" in table("<b>Selection</b>", ["site"], [["fc"]], 1)
        True

    Args:
        head: the line above it, in HTML.
        names: the columns; `>` before a name sets its column right, `~` lets it wrap.
        rows: the cells as text, escaped here. Give at most `MOST_ROWS`.
        n_all: how many rows there are in all; the foot tells of those that are not shown.
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
    return (
        f'{_STYLE}<div class="hookline"><p>{head}</p><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table>{foot}</div>"
    )
