"""Print results: each describes itself once, as a printout, from which text and HTML are made.

Text is as wide as the terminal. Where stdout is not a terminal, it is 80 characters wide, so that
the same result always prints the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, final

from hookline.display.text import escape_html
from hookline.display.text_table import Heading, TextTable, total_lines
from hookline.display.wrapped_text import (
    LEAST_WIDTH,
    Cell,
    Line,
    cell_lines,
    replace_missing_signs,
    terminal_width,
    wrap_cell,
    wrap_titled,
)
from hookline.util.optional_imports import require

_MOST_HTML_ROWS = 60

_Row = TypeVar("_Row")


@final
@dataclass(frozen=True, slots=True)
class Printout:
    """The description of a result, from which its text and its HTML are made."""

    title: str = ""  # the first words of the line above the table, in bold
    head: str = ""  # the rest of this line
    # The columns. Those without any text are left out, except the first.
    headings: Sequence[Heading] = ()
    rows: Sequence[Sequence[Cell]] = ()  # the cells, row by row
    totals: Sequence[tuple[str, Cell]] = ()  # pairs of a label and a text, below the table
    # The lines about the exception that ended the run, below the totals.
    failure: Sequence[str] = ()
    notes: Sequence[Cell] = ()  # texts below all others
    dim_rows: Collection[int] = ()  # the indices of rows that are dimmed in a terminal
    n_rows: int | None = None  # the number of rows that exist; None if `rows` has all of them
    most_lines: int | None = None  # the most rows of the text; None prints all
    more: str = "rows"  # the name of the rows, and the attribute that has all of them
    # Whether the text has no blank lines and no rule, as for a short `repr`.
    is_compact: bool = False

    def text(self, width: int | None = None) -> str:
        """Return the text, in lines of at most this width.

        Only a single path or shape makes a line longer, because neither is ever cut. Columns
        without room are left out, and named below the table.

            >>> headings = Heading("site", "path"), Heading("fired", "number")
            >>> print(Printout(head="two sites", headings=headings, rows=[["fc", "1"]]).text())
            two sites
            <BLANKLINE>
            site  fired
            -----------
            fc        1

        Args:
            width: the width in characters; None is that of the terminal, or 80.
        """
        lines = self.lines(terminal_width() if width is None else width)
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)

    def lines(self, width: int) -> list[Line]:
        """Return the lines of the text, each as pieces with their styles."""
        width = max(width, LEAST_WIDTH)
        rows = self.rows[: self.most_lines]
        table = TextTable(self._filled_columns(), rows, width - 2 * self.is_compact)
        head = wrap_titled(self.title, self.head, width) if self.title else []
        notes = width - 2 * self.is_compact
        parts = [
            head or wrap_cell(self.head, width),
            table.lines(set(self.dim_rows), is_ruled=not self.is_compact) if rows else [],
            *[
                wrap_cell(note, notes)
                for note in (*self._more_rows_note(len(rows)), *table.notes(width))
            ],
            total_lines(self.totals, notes),
            *[wrap_cell(note, notes) for note in (self._failure_cell(), *self.notes)],
        ]
        if not self.is_compact:
            return [line for part in parts if part for line in [[], *part]][1:]
        indent = [("  ", "")] if parts[0] else []
        return parts[0] + [indent + line for part in parts[1:] for line in part]

    def html(self) -> str:
        """Return the HTML for a notebook, with at most 60 rows. All texts are escaped."""
        columns = [(place, column) for place, column in enumerate(self._filled_columns()) if column]

        def row(tag: str, cells: Sequence[Cell]) -> str:
            texts = [
                f"<{tag}{_CLASSES.get(column.kind, '')}>{_cell_html(cells[place])}</{tag}>"
                for place, column in columns
            ]
            return f"<tr>{''.join(texts)}</tr>"

        rows = self.rows[:_MOST_HTML_ROWS]
        header = row("th", [heading.name for heading in self.headings])
        body = "".join(row("td", cells) for cells in rows)
        table = f"<table><thead>{header}</thead><tbody>{body}</tbody></table>" * bool(rows)
        head = f"<b>{escape_html(self.title)}</b>" * bool(self.title)
        head += escape_html(self.head).replace("\n", "<br>")
        totals = [f"<b>{escape_html(label)}</b> {_cell_html(text)}" for label, text in self.totals]
        more = [[(text, "dim")] for text in self._more_rows_note(len(rows))]
        notes = map(_cell_html, (self._failure_cell(), *self.notes))
        above = f"<p>{head}</p>" * bool(head)
        below = [text for text in (*map(_cell_html, more), "<br>".join(totals), *notes) if text]
        paragraphs = "".join(f"<p>{text}</p>" for text in below)
        return f'{_STYLE}<div class="hookline">{above}{table}{paragraphs}</div>'

    def _failure_cell(self) -> Cell:
        return list(zip(self.failure, ("bold red", "red", ""), strict=False))

    def _filled_columns(self) -> list[Heading | None]:
        """Return the columns, with None in place of those without any text."""
        return [
            column if not place or any(row[place] for row in self.rows) else None
            for place, column in enumerate(self.headings)
        ]

    def _more_rows_note(self, n_shown: int) -> list[str]:
        n_rows = len(self.rows) if self.n_rows is None else self.n_rows
        return [f"… and {n_rows - n_shown:,} more {self.more}"] * (n_rows > n_shown)


class Result(ABC):
    """A result that people print: one printout gives its text, its HTML and its table of pandas."""

    __slots__ = ()
    _row_type: ClassVar[Any] = None  # the dataclass of its rows, where there may be none

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict of plain values."""

    def _table_rows(self) -> list[dict[str, Any]]:
        """Return the rows, each as a dict of plain values with the same keys."""
        rows: Sequence[Any] = getattr(self, "rows", ())
        return [row.to_dict() if hasattr(row, "to_dict") else asdict(row) for row in rows]

    @abstractmethod
    def _printout(self) -> Printout:
        """Describe the result for people."""

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; the columns are the keys of `to_dict()`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        error = partial(ModuleNotFoundError, name="pandas")
        pandas = require("pandas", "to_pandas() needs pandas", "Run pip install pandas.", error)
        rows = self._table_rows()
        names = [] if self._row_type is None else [entry.name for entry in fields(self._row_type)]
        return pandas.DataFrame(rows, columns=None if rows else names)

    def __str__(self) -> str:
        """Return the text, as wide as the terminal; 80 characters where there is none."""
        return replace_missing_signs(self._printout().text())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows; it says what the text says."""
        return self._printout().html()

    def _ipython_key_completions_(self) -> list[str]:
        """Return what a notebook completes after `result["`."""
        keys: Iterable[Any] = self if isinstance(self, Iterable) else ()
        return [key for key in keys if isinstance(key, str)]


class RowsResult(Result, Generic[_Row]):
    """A result that is a list of its rows."""

    __slots__ = ()
    rows: Sequence[_Row]

    def __iter__(self) -> Iterator[_Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def printout_of(result: Result) -> Printout:
    """Return the printout of a result, to lay it out elsewhere."""
    return result._printout()


# -- HTML ----------------------------------------------------------------------------------------

# Notebooks style tables themselves; repeating the class three times (&) outweighs their rules.
# Lines and quiet text are the notebook's own text colour made fainter, so dark themes work.
_STYLE = """<style>
& { font-size: 0.9em; color: inherit; max-width: 100%; overflow-x: auto; }
& p { margin: 0 0 0.4em; }
& table { border-collapse: collapse; border: 0; margin: 0 0 0.4em; color: inherit; }
& table tr:nth-child(n) { background: transparent; }
& table tr > * { padding: 0.15em 1em 0.15em 0; text-align: left; border: 0; line-height: 1.4em;
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


_CLASSES = {"number": ' class="number"', "prose": ' class="wrap"'}


def _cell_html(cell: Cell) -> str:
    """Escape a cell. Its lines become lines, and its indentation em spaces."""
    lines = []
    for text, style in cell_lines(cell):
        line = text.lstrip(" ")
        shown = "\u2003" * (len(text) - len(line)) + escape_html(line)
        lines.append(f'<span class="quiet">{shown}</span>' if style == "dim" else shown)
    return "<br>".join(lines)
