"""A table as text: columns without room are left out, and named."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from hookline.display.wrapped_text import (
    LEAST_WIDTH,
    UNIT,
    Cell,
    Line,
    lines_of,
    text_width,
    wrap,
    wrapped,
)

_STRUCTURE_WIDTH = 40  # nested structures are wrapped at this width even where there is more room
_PROSE_WIDTH = 20  # columns are left out before prose gets narrower than this
_GAP = "  "


@final
@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a column, and how its cells are laid out."""

    name: str  # the text in the header
    # A "number" stands on the right. A "path" is never cut. A "structure", such as a shape, is
    # wrapped between its parts, and "prose" between words; where there is no room beside the
    # others, prose stands below the row.
    kind: Literal["text", "number", "path", "structure", "prose"] = "text"
    # The order in which columns are left out where there is no room for all; 1 goes first, columns
    # of one number go together, named by the first of them, and 0 stays.
    gives_way: int = 0


@final
class TextTable:
    """The table of a printout, laid out in a width."""

    def __init__(
        self, columns: Sequence[Heading | None], rows: Sequence[Sequence[Cell]], width: int
    ) -> None:
        self._width = width
        self._columns = {place: column for place, column in enumerate(columns) if column}
        self._left_out: dict[str, None] = {}
        self._below: list[int] = []  # columns whose cells have lines of their own
        self._cells = [{place: lines_of(row[place]) for place in self._columns} for row in rows]
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
        lines = [text_width(text) for cells in self._cells for text, _ in cells[place]]
        return [text_width(self._columns[place].name), *lines]

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
            text_width(unit)
            for cells in self._cells
            for text, _ in cells[place]
            for unit in UNIT.findall(text)
        ]
        longest = max((length for length in units if length <= self._width // 2), default=0)
        least = longest if kind == "structure" else max(longest, _PROSE_WIDTH)
        return max(min(self._natural_width(place), least), text_width(self._columns[place].name))

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
            if all(text_width(text) <= width for text, _ in lines):
                beside[place] = lines
            elif place == first:
                above += [[line] for line in lines]
            else:
                below.append(place)
        yield from above
        for number in range(max((len(lines) for lines in beside.values()), default=0)):
            yield self._line_of_cells(beside, number)
        for place in [*below, *self._below]:
            yield from ([("    ", ""), *line] for line in wrapped(cells[place], self._width - 4))

    def _fold(self, place: int, text: str, style: str) -> Line:
        if self._columns[place].kind in ("structure", "prose"):
            return [(line, style) for line in wrap(text, self._widths[place])]
        return [(text, style)]

    def _line_of_cells(self, cells: Mapping[int, Line], number: int) -> Line:
        """Return a line of cells that stand side by side."""
        line: Line = []
        for place, width in self._widths.items():
            lines = cells.get(place, [])
            text, style = lines[number] if number < len(lines) else ("", "")
            space = " " * (width - text_width(text))
            is_number = self._columns[place].kind == "number"
            line += [(_GAP, "")] * bool(line)
            line += [(space, ""), (text, style)] if is_number else [(text, style), (space, "")]
        return line


def total_lines(totals: Sequence[tuple[str, Cell]], width: int) -> list[Line]:
    """Lay out pairs of a label and a text, with the texts below each other."""
    label_width = max((text_width(label) for label, _ in totals), default=0) + 3
    lines: list[Line] = []
    for label, cell in totals:
        room = max(width - label_width, LEAST_WIDTH // 4)
        texts = wrapped(cell, room)
        if any(text_width(line) > room for [(line, _)] in texts):  # a shape that is not broken
            lines += [
                [(label, "bold")],
                *[[("  ", ""), *text] for text in wrapped(cell, width - 2)],
            ]
            continue
        spaces = " " * (label_width - text_width(label))
        lines += [
            [(label if not number else " " * len(label), "bold"), (spaces, ""), *line]
            for number, line in enumerate(texts)
        ]
    return lines
