"""Print results: each describes itself once, as a printout, from which text and HTML are made.

Text is as wide as the terminal. Where stdout is not a terminal, it is 80 characters wide, so that
the same result always prints the same.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal, TextIO, final

from hookline.display.text import escape_html, escape_invisible
from hookline.util.optional_imports import require

_TEXT_WIDTH = 80
_LEAST_WIDTH = 40
_STRUCTURE_WIDTH = 40  # nested structures are wrapped at this width even where there is more room
_PROSE_WIDTH = 20  # columns are left out before prose gets narrower than this
_GAP = "  "
_MOST_HTML_ROWS = 60

# A text, or lines of it, each with its style in a terminal. Neither is parsed as markup.
Cell = str | Sequence[tuple[str, str]]
Line = list[tuple[str, str]]


@final
@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a column, and how its cells are laid out.

    Args:
        name: the text in the header.
        kind: a "number" stands on the right. A "path" is never cut. A
            "structure", such as a shape, is wrapped between its parts, and "prose" between words;
            where there is no room beside the others, prose stands below the row.
        gives_way: the order in which columns are left out where there is no room for all; 1 goes
            first, columns of one number go together, named by the first of them, and 0 stays.
    """

    name: str
    kind: Literal["text", "number", "path", "structure", "prose"] = "text"
    gives_way: int = 0


@final
@dataclass(frozen=True, slots=True)
class Printout:
    """The description of a result, from which its text and its HTML are made.

    Args:
        title: the first words of the line above the table, in bold.
        head: the rest of this line.
        headings: the columns. Those without any text are left out, except the first.
        rows: the cells, row by row.
        totals: pairs of a label and a text, below the table.
        failure: the lines about the exception that ended the run, below the totals.
        notes: texts below all others.
        quiet: the indices of rows that are dimmed in a terminal.
        n_rows: the number of rows that exist; None if `rows` has all of them.
        most_lines: the most rows of the text; None prints all.
        more: the name of the rows, and the attribute that has all of them.
        is_compact: whether the text has no blank lines and no rule, as for a short `repr`.
    """

    title: str = ""
    head: str = ""
    headings: Sequence[Heading] = ()
    rows: Sequence[Sequence[Cell]] = ()
    totals: Sequence[tuple[str, Cell]] = ()
    failure: Sequence[str] = ()
    notes: Sequence[Cell] = ()
    quiet: Collection[int] = ()
    n_rows: int | None = None
    most_lines: int | None = None
    more: str = "rows"
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
        width = max(width, _LEAST_WIDTH)
        rows = self.rows[: self.most_lines]
        table = _Table(self._filled_columns(), rows, width - 2 * self.is_compact)
        head = _wrap_titled(self.title, self.head, width) if self.title else []
        notes = width - 2 * self.is_compact
        parts = [
            head or _wrapped(self.head, width),
            table.lines(set(self.quiet), is_ruled=not self.is_compact) if rows else [],
            *[_wrapped(note, notes) for note in (*self._more_rows(len(rows)), *table.notes(width))],
            _total_lines(self.totals, notes),
            *[_wrapped(note, notes) for note in (self._failure_cell(), *self.notes)],
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
        more = [[(text, "dim")] for text in self._more_rows(len(rows))]
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

    def _more_rows(self, n_shown: int) -> list[str]:
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
        return [asdict(row) for row in rows]

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
        return self._printout().text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows; it says what the text says."""
        return self._printout().html()


def printout_of(result: Result) -> Printout:
    """Return the printout of a result, to lay it out elsewhere."""
    return result._printout()


def terminal_width() -> int:
    """Return the width of the terminal at stdout; 80 where stdout is not a terminal."""
    return max(_terminal_columns(sys.stdout) or _TEXT_WIDTH, _LEAST_WIDTH)


def fold_line(line: str, file: TextIO) -> str:
    """Fold a line that is wider than the terminal at a file; a line for another file stays."""
    width = _terminal_columns(file)
    if not width or _width(line) <= width:
        return line
    lines = [""]
    for part in re.findall(r" *\S.*?(?=  |$)", line):
        if not lines[-1] or _width(lines[-1] + part) <= width:
            lines[-1] += part
        else:
            lines += _wrap(f"    {part.strip()}", width)
    return "\n".join(lines)


def _terminal_columns(file: TextIO) -> int | None:
    """Return the width of the terminal at a file; None if there is no terminal."""
    try:
        return os.get_terminal_size(file.fileno()).columns if file.isatty() else None
    except (AttributeError, OSError, ValueError):
        return None


def json_text(data: Mapping[str, Any]) -> str:
    """Return data as JSON. NaN and infinities, which JSON lacks, become strings.

    >>> print(json_text({"norm": float("nan"), "sites": ("fc", 3)}))
    {
      "norm": "NaN",
      "sites": [
        "fc",
        3
      ]
    }
    """
    return json.dumps(to_json_value(data), indent=2, allow_nan=False)


def to_json_value(value: Any) -> Any:
    """Convert a value to one that JSON has. NaN and infinities become strings."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -- text ----------------------------------------------------------------------------------------


@final
class _Table:
    """The table of a printout, laid out in a width."""

    def __init__(
        self, columns: Sequence[Heading | None], rows: Sequence[Sequence[Cell]], width: int
    ) -> None:
        self._width = width
        self._columns = {place: column for place, column in enumerate(columns) if column}
        self._left_out: dict[str, None] = {}
        self._below: list[int] = []  # columns whose cells have lines of their own
        self._cells = [{place: _lines_of(row[place]) for place in self._columns} for row in rows]
        self._widths = self._fit_widths()

    def notes(self, width: int) -> list[str]:
        """Name the columns that were left out."""
        if not self._left_out:
            return []
        names = ", ".join(self._left_out)
        return [f"Left out at {width} columns: {names}. A wider terminal shows them."]

    def lines(self, quiet: Collection[int], *, is_ruled: bool) -> list[Line]:
        """Return the lines of the header and of all rows."""
        header: dict[int, list[tuple[str, str]]] = {
            place: [(column.name, "bold")] for place, column in self._columns.items()
        }
        lines = [*self._lay_out(header)]
        if is_ruled:
            length = sum(self._widths.values()) + len(_GAP) * (len(self._widths) - 1)
            lines.append([("-" * length, "dim")])
        for number, cells in enumerate(self._cells):
            style = "dim" if number in quiet else ""
            lines += [[(text, own or style) for text, own in line] for line in self._lay_out(cells)]
        return lines

    def _fit_widths(self) -> dict[int, int]:
        """Leave out columns without room, and return the widths of the others."""
        least = {place: self._least_width(place) for place in self._columns}
        places = [place for place in self._columns if self._columns[place].gives_way]
        places.sort(key=lambda place: self._columns[place].gives_way)
        # Where these do not suffice, columns go from the right.
        while sum(least.values()) + len(_GAP) * (len(least) - 1) > self._width and len(least) > 1:
            order = self._columns[places[0]].gives_way if places else 0
            going = [place for place in places if self._columns[place].gives_way == order]
            if not going and self._columns[max(least)].kind == "prose":  # it says what matters
                self._below.append(max(least))
                del least[max(least)]
                continue
            going = going or [max(least)]
            self._left_out[self._columns[going[0]].name] = None
            for place in going:
                del least[place], self._columns[place]
            places = [place for place in places if place in least]
        room = self._width - sum(least.values()) - len(_GAP) * (len(least) - 1)
        for place in sorted(least, key=lambda place: (place > 0, self._natural_width(place))):
            width = max(min(self._natural_width(place), least[place] + room), least[place])
            if self._columns[place].kind == "path":  # more than its longest path is of no use
                width = max(length for length in self._lengths(place) if length <= width)
            room -= width - least[place]
            least[place] = width
        return least

    def _lengths(self, place: int) -> list[int]:
        lines = [_width(text) for cells in self._cells for text, _ in cells[place]]
        return [_width(self._columns[place].name), *lines]

    def _natural_width(self, place: int) -> int:
        widest = max(self._lengths(place))
        is_structure = self._columns[place].kind == "structure"
        return min(widest, _STRUCTURE_WIDTH) if is_structure else widest

    def _least_width(self, place: int) -> int:
        """Return the width below which the column is left out, or its long cells are moved."""
        kind = self._columns[place].kind
        if kind == "path":  # a path longer than half of the width has a line of its own
            return max(length for length in self._lengths(place) if length <= self._width // 2)
        if kind in ("text", "number"):
            return self._natural_width(place)
        units = [
            _width(unit)
            for cells in self._cells
            for text, _ in cells[place]
            for unit in _UNIT.findall(text)
        ]
        longest = max((length for length in units if length <= self._width // 2), default=0)
        least = longest if kind == "structure" else max(longest, _PROSE_WIDTH)
        return max(min(self._natural_width(place), least), _width(self._columns[place].name))

    def _lay_out(self, cells: Mapping[int, list[tuple[str, str]]]) -> Iterable[Line]:
        """Lay out a row. A cell with a part that is wider than its column has its own lines."""
        first = next(iter(self._widths))
        beside: dict[int, Line] = {}
        above: list[Line] = []
        below: list[int] = []
        for place, width in self._widths.items():
            lines = [
                piece for text, style in cells[place] for piece in self._fold(place, text, style)
            ]
            if all(_width(text) <= width for text, _ in lines):
                beside[place] = lines
            elif place == first:
                above += [[line] for line in lines]
            else:
                below.append(place)
        yield from above
        for number in range(max((len(lines) for lines in beside.values()), default=0)):
            yield self._line_of_cells(beside, number)
        for place in [*below, *self._below]:
            yield from ([("    ", ""), *line] for line in _wrapped(cells[place], self._width - 4))

    def _fold(self, place: int, text: str, style: str) -> Line:
        if self._columns[place].kind in ("structure", "prose"):
            return [(line, style) for line in _wrap(text, self._widths[place])]
        return [(text, style)]

    def _line_of_cells(self, cells: Mapping[int, Line], number: int) -> Line:
        """Return a line of cells that stand side by side."""
        line: Line = []
        for place, width in self._widths.items():
            lines = cells.get(place, [])
            text, style = lines[number] if number < len(lines) else ("", "")
            space = " " * (width - _width(text))
            is_number = self._columns[place].kind == "number"
            line += [(_GAP, "")] * bool(line)
            line += [(space, ""), (text, style)] if is_number else [(text, style), (space, "")]
        return line


# A word, with a shape such as [1, 64, 112, 112] as one, in spite of its spaces.
_UNIT = re.compile(r"(?:\[[\w, ]*\]|\S)+")


def _wrap(text: str, width: int, hanging: str = "") -> list[str]:
    """Break a line of text between its words. Its indentation is kept; later lines hang more."""
    if _width(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    lines: list[str] = []
    for unit in _UNIT.findall(text):
        if lines and _width(lines[-1]) + 1 + _width(unit) <= width:
            lines[-1] += f" {unit}"
        else:
            lines.append(f"{indent}{hanging if lines else ''}{unit}")
    return lines


def _wrapped(cell: Cell, width: int) -> list[Line]:
    return [
        [(line, style)] for text, style in _lines_of(cell) for line in _wrap(text, width) if text
    ]


def _wrap_titled(title: str, text: str, width: int) -> list[Line]:
    """Wrap a bold title with the text after it."""
    first, *rest = _wrap(f"{title}{text}", width, "  ")
    cut = len(escape_invisible(title))
    return [[(first[:cut], "bold"), (first[cut:], "")], *[[(line, "")] for line in rest]]


def _total_lines(totals: Sequence[tuple[str, Cell]], width: int) -> list[Line]:
    label_width = max((_width(label) for label, _ in totals), default=0) + 3
    lines: list[Line] = []
    for label, cell in totals:
        room = max(width - label_width, _LEAST_WIDTH // 4)
        texts = _wrapped(cell, room)
        if any(_width(line) > room for [(line, _)] in texts):  # a shape that is not broken
            lines += [
                [(label, "bold")],
                *[[("  ", ""), *text] for text in _wrapped(cell, width - 2)],
            ]
            continue
        spaces = " " * (label_width - _width(label))
        lines += [
            [(label if not number else " " * len(label), "bold"), (spaces, ""), *line]
            for number, line in enumerate(texts)
        ]
    return lines


def _lines_of(cell: Cell) -> list[tuple[str, str]]:
    pieces = [(cell, "")] if isinstance(cell, str) else cell
    return [(line, style) for text, style in pieces for line in escape_invisible(text).split("\n")]


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "FW")
        for char in text
    )


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
    for text, style in _lines_of(cell):
        line = text.lstrip(" ")
        shown = "\u2003" * (len(text) - len(line)) + escape_html(line)
        lines.append(f'<span class="quiet">{shown}</span>' if style == "dim" else shown)
    return "<br>".join(lines)
