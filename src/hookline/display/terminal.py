"""Text, tables and grids, laid out for a terminal or as plain text.

A result describes itself with these as plain data, and rich draws them. rich is imported on first
use, because most programs print nothing.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from hookline.display.text import escape_invisible

if TYPE_CHECKING:
    from rich import box, table
    from rich.console import Group
    from rich.text import Text

_TEXT_WIDTH = 100
_STRUCTURE_WIDTH = 40

# A text, or pairs of a text and its style. It is never parsed as rich's markup.
Words = str | Sequence[tuple[str, str]]


@final
@dataclass(frozen=True)
class Table:
    """A table with a header row.

    Args:
        names: the column names. The prefix `>` aligns a column right. `~` and `^` let long cells
            wrap; `~` limits the width even where the terminal has room.
        rows: the cells.
        quiet: the indices of rows that are dimmed.
    """

    names: Sequence[str]
    rows: Sequence[Sequence[Words]]
    quiet: Collection[int] = ()


@final
@dataclass(frozen=True)
class Grid:
    """Pairs of a label and a text, one pair a line.

    Args:
        rows: the pairs.
        gap: the number of spaces between label and text.
    """

    rows: Sequence[tuple[str, Words]]
    gap: int = 2


Part = Words | Table | Grid


def renderable(parts: Sequence[Part]) -> Group:
    """Convert parts to a rich renderable, with a blank line between them."""
    from rich import box

    return _laid_out(parts, box.SIMPLE_HEAD)


def text_of(parts: Sequence[Part], width: int | None = _TEXT_WIDTH) -> str:
    """Lay parts out as plain text, for `print`.

        >>> print(text_of(["two sites", Table(["site", ">fired"], [["fc", "1"], ["relu", "2"]])]))
        two sites
        <BLANKLINE>
        site  fired
        -----------
        fc        1
        relu      2

    Args:
        parts: the parts.
        width: the width in characters; None makes it wide enough for every line.

    Returns:
        The lines, without colour and without a trailing newline.
    """
    from rich import box
    from rich.console import Console

    # An ASCII rule, because print must not fail where stdout has a legacy encoding.
    shown = _laid_out(parts, box.Box("    \n" * 2 + " -- \n" + "    \n" * 5, ascii=True))
    out = io.StringIO()

    def console(width: int) -> Console:
        # Without force_jupyter=False, rich in a notebook would display it and write nothing here.
        return Console(
            width=width, file=out, color_system=None, legacy_windows=False, force_jupyter=False
        )

    if width is None:
        width = max(console(100_000).measure(shown).maximum, _TEXT_WIDTH)
    console(width).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _laid_out(parts: Sequence[Part], rule: box.Box) -> Group:
    from rich.console import Group, RenderableType
    from rich.text import Text

    shown: list[RenderableType] = []
    for part in parts:
        shown += [Text()] * bool(shown)
        if isinstance(part, Table):
            shown.append(_table(part, rule))
        else:
            shown.append(_grid(part) if isinstance(part, Grid) else _words(part))
    return Group(*shown)


def _words(words: Words) -> Text:
    from rich.text import Text

    pieces = [(words, "")] if isinstance(words, str) else words
    return Text.assemble(*((escape_invisible(text), style) for text, style in pieces))


def _table(part: Table, rule: box.Box) -> table.Table:
    from rich.table import Table as RichTable

    drawn = RichTable(box=rule, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in part.names:
        kind, text = (name[0], name[1:]) if name[0] in "~^>" else ("", name)
        drawn.add_column(
            text,
            justify="right" if kind == ">" else "left",
            no_wrap=kind not in ("~", "^"),
            overflow="fold",
            max_width=_STRUCTURE_WIDTH if kind == "~" else None,
        )
    for place, row in enumerate(part.rows):
        drawn.add_row(*map(_words, row), style="dim" if place in part.quiet else None)
    return drawn


def _grid(part: Grid) -> table.Table:
    from rich.table import Table as RichTable

    drawn = RichTable.grid(padding=(0, part.gap, 0, 0), pad_edge=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column()
    for label, words in part.rows:
        drawn.add_row(_words([(label, "bold")]), _words(words))
    return drawn
