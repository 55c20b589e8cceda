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
    cell_lines,
    text_width,
    wrap,
    wrap_cell,
)

_STRUCTURE_WIDTH = 40  # nested structures are wrap_cell at this width even where there is more room
_PROSE_WIDTH = 20  # columns are left out before prose gets narrower than this
_GAP = "  "


@final
@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a column, and how its cells are laid out."""

    name: str  # the text in the header
    # A "number" stands on the right. A "path" is never cut. A "structure", such as a shape, is
    # wrap_cell between its parts, and "prose" between words; where there is no room beside the
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
        self._columns = {index: column for index, column in enumerate(columns) if column}
        self._left_out: dict[str, None] = {}
        self._below: list[int] = []  # columns whose cells have lines of their own
        self._cells = [
            {
                index: cell_lines(row[index], may_break=column.kind != "path")
                for index, column in self._columns.items()
            }
            for row in rows
        ]
        self._widths = self._fit_widths()

    def notes(self, width: int) -> list[str]:
        """Name the columns that were left out."""
        if not self._left_out:
            return []
        names = ", ".join(self._left_out)
        return [f"Left out at {width} columns: {names}. A wider terminal shows them."]

    def lines(self, dim_rows: Collection[int], *, is_ruled: bool) -> list[Line]:
        """Return the lines of the header and of all rows."""
        header: dict[int, list[tuple[str, str]]] = {
            index: [(column.name, "bold")] for index, column in self._columns.items()
        }
        lines = [*self._row_lines(header)]
        if is_ruled:
            length = sum(self._widths.values()) + len(_GAP) * (len(self._widths) - 1)
            lines.append([("-" * length, "dim")])
        for number, cells in enumerate(self._cells):
            style = "dim" if number in dim_rows else ""
            lines += [
                [(text, own or style) for text, own in line] for line in self._row_lines(cells)
            ]
        return lines

    def _fit_widths(self) -> dict[int, int]:
        """Leave out columns without room, and return the widths of the others."""
        least = {index: self._least_width(index) for index in self._columns}
        while self._total_width(least) > self._width and len(least) > 1:
            going = self._columns_to_go(least)
            if going:
                self._left_out[self._columns[going[0]].name] = None
                for index in going:
                    del least[index], self._columns[index]
            else:
                self._below.append(max(least))
                del least[max(least)]
        room = self._width - self._total_width(least)
        for index in sorted(least, key=lambda index: (index > 0, self._natural_width(index))):
            width = max(min(self._natural_width(index), least[index] + room), least[index])
            if self._columns[index].kind == "path":  # more than its longest path is of no use
                width = max(length for length in self._line_widths(index) if length <= width)
            room -= width - least[index]
            least[index] = width
        return least

    def _total_width(self, widths: Mapping[int, int]) -> int:
        return sum(widths.values()) + len(_GAP) * (len(widths) - 1)

    def _columns_to_go(self, least: Mapping[int, int]) -> list[int]:
        """Return the columns that are left out next; none if prose is to go below its rows."""
        columns = {index: self._columns[index] for index in least}
        stay = {
            index: least[index]
            for index, column in columns.items()
            if not column.gives_way and column.kind != "prose"
        }
        # Where those that stay are too wide by themselves, the room of others would not suffice.
        if self._total_width(stay) > self._width and len(stay) > 1:
            return [max(stay)]
        fits = {
            index: self._total_width({**stay, index: least[index]}) <= self._width
            for index, column in columns.items()
            if column.gives_way
        }
        if fits:
            first = min(fits, key=lambda index: (fits[index], columns[index].gives_way))
            return [index for index in fits if columns[index].gives_way == columns[first].gives_way]
        return [] if columns[max(least)].kind == "prose" else [max(least)]  # it says what matters

    def _line_widths(self, index: int) -> list[int]:
        lines = [text_width(text) for cells in self._cells for text, _ in cells[index]]
        return [text_width(self._columns[index].name), *lines]

    def _natural_width(self, index: int) -> int:
        widest = max(self._line_widths(index))
        is_structure = self._columns[index].kind == "structure"
        return min(widest, _STRUCTURE_WIDTH) if is_structure else widest

    def _least_width(self, index: int) -> int:
        """Return the width below which the column is left out, or its long cells are moved."""
        kind = self._columns[index].kind
        if kind == "path":  # a path longer than half of the width has a line of its own
            return max(length for length in self._line_widths(index) if length <= self._width // 2)
        if kind in ("text", "number"):
            return self._natural_width(index)
        units = [
            text_width(unit)
            for cells in self._cells
            for text, _ in cells[index]
            for unit in UNIT.findall(text)
        ]
        longest = max((length for length in units if length <= self._width // 2), default=0)
        least = longest if kind == "structure" else max(longest, _PROSE_WIDTH)
        return max(min(self._natural_width(index), least), text_width(self._columns[index].name))

    def _row_lines(self, cells: Mapping[int, list[tuple[str, str]]]) -> Iterable[Line]:
        """Lay out a row. A cell with a part that is wider than its column has its own lines."""
        first = next(iter(self._widths))
        beside: dict[int, Line] = {}
        above: list[Line] = []
        below: list[int] = []
        for index, width in self._widths.items():
            lines = [
                piece
                for text, style in cells[index]
                for piece in self._wrap_text(index, text, style)
            ]
            if all(text_width(text) <= width for text, _ in lines):
                beside[index] = lines
            elif index == first:
                above += [[line] for line in lines]
            else:
                below.append(index)
        yield from above
        for number in range(max((len(lines) for lines in beside.values()), default=0)):
            yield self._line_of_cells(beside, number)
        for index in [*below, *self._below]:
            yield from ([("    ", ""), *line] for line in wrap_cell(cells[index], self._width - 4))

    def _wrap_text(self, index: int, text: str, style: str) -> Line:
        if self._columns[index].kind in ("structure", "prose"):
            return [(line, style) for line in wrap(text, self._widths[index])]
        return [(text, style)]

    def _line_of_cells(self, cells: Mapping[int, Line], number: int) -> Line:
        """Return a line of cells that stand side by side."""
        line: Line = []
        for index, width in self._widths.items():
            lines = cells.get(index, [])
            text, style = lines[number] if number < len(lines) else ("", "")
            space = " " * (width - text_width(text))
            is_number = self._columns[index].kind == "number"
            line += [(_GAP, "")] * bool(line)
            line += [(space, ""), (text, style)] if is_number else [(text, style), (space, "")]
        return line


def total_lines(totals: Sequence[tuple[str, Cell]], width: int) -> list[Line]:
    """Lay out pairs of a label and a text, with the texts below each other."""
    label_width = max((text_width(label) for label, _ in totals), default=0) + 3
    lines: list[Line] = []
    for label, cell in totals:
        room = max(width - label_width, LEAST_WIDTH // 4)
        texts = wrap_cell(cell, room)
        if any(text_width(line) > room for [(line, _)] in texts):  # a shape that is not broken
            lines += [
                [(label, "bold")],
                *[[("  ", ""), *text] for text in wrap_cell(cell, width - 2)],
            ]
            continue
        spaces = " " * (label_width - text_width(label))
        lines += [
            [(label if not number else " " * len(label), "bold"), (spaces, ""), *line]
            for number, line in enumerate(texts)
        ]
    return lines
