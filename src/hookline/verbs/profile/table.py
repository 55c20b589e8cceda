"""The result of a profile: rows and totals, as a table for the terminal and for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from hookline.display.data import Tabular
from hookline.display.html import MOST_ROWS, escape, table
from hookline.display.terminal import Grid, Part, Table, Words, text_of
from hookline.display.text import plural
from hookline.display.units import count, duration, share, size
from hookline.engine import path_text
from hookline.errors import InputError, SelectionError
from hookline.verbs.profile.rows import NOTHING, ORDERS, Phases, Row, flat
from hookline.verbs.summary import indented_name

_N_NEAR = 3
_GAP = 2  # characters between two columns
# The columns that a narrow terminal does without, the first to go first.
_DISPENSABLE = ("peak", "parameters", "type", "kept", "FLOPs", "calls", "self", "spread")


@final
@dataclass(frozen=True)
class Total:
    """The costs of a whole block.

    Args:
        time: the seconds in the model, by phase.
        optimizer: the seconds in the steps of optimizers that hold a parameter of the model.
        spread: the interquartile range of the seconds in the model over several passes.
        collectives: the seconds in which FSDP2 gathers and frees parameters and reduces gradients.
        outside: the seconds in all other code: the loss, the loading of data, the wait of DDP.
        failed: the seconds of passes whose forward raised, and of the code up to the next pass. No
            other number contains them, if any pass did not fail.
        overhead: the seconds of hookline's own work, which no other number contains.
        garbage: the seconds of Python's garbage collection, which no other number contains.
        flops: the floating-point operations of the model.
        activation_bytes: the bytes that a pass keeps for backward.
        peak_bytes: the most bytes of tensors, made in a pass, that were alive at once.
        parameters: the number of elements of all parameters.
        passes: the number of runs of the model that did not fail.
    """

    time: Phases = NOTHING
    spread: float = 0
    optimizer: float = 0
    collectives: float = 0
    outside: float = 0
    failed: float = 0
    overhead: float = 0
    garbage: float = 0
    flops: Phases = NOTHING
    activation_bytes: int = 0
    peak_bytes: int = 0
    parameters: int = 0
    passes: int = 0

    @property
    def seconds(self) -> float:
        """Return the duration of the block, without garbage collection and hookline's own work."""
        return self.time.all + self.optimizer + self.collectives + self.outside + self.failed


@final
@dataclass(frozen=True)
class ProfileTable(Tabular):
    """Hold what `hl.profile` has measured. Print it, or read `rows` and `total`.

    Args:
        model_type: the class of the model.
        rows: the modules, in registration order, the root first.
        total: the costs of the whole block.
        is_median: whether the numbers are those of one pass: medians over several.
        failure: the module that was running when an exception ended the block, and the exception.
        notes: what is not known, and why.
    """

    model_type: str
    rows: list[Row]
    total: Total
    is_median: bool = False
    failure: str | None = None
    notes: tuple[str, ...] = ()
    is_sorted: bool = False

    def __getitem__(self, path: str) -> Row:
        """Return the row of a module.

        Raises:
            SelectionError: there is no module of this path.
        """
        for row in self.rows:
            if path in (row.path, *row.module.aliases) or (path == "(root)" and not row.path):
                return row
        near = [row.path for row in self.rows if row.path.endswith(path.rpartition(".")[2])]
        hint = f" There is {', '.join(near[:_N_NEAR])}." if near else ""
        raise SelectionError(
            f"the path must be one of the profile's {len(self.rows)} modules, got {path!r}.{hint}"
            "\nRead prof.rows for all of them."
        )

    def top(self, n: int = 10, by: str = "self") -> ProfileTable:
        """Return the modules that cost most, the largest first, as a table.

        Args:
            n: the number of modules.
            by: the cost that is compared. Without the modules inside: "self" (seconds of all
                phases), "forward", "backward" or "recompute" (seconds of one phase), "flops", or
                "activations" (bytes). With the modules inside: "time" (seconds) or "peak" (bytes).

        Raises:
            InputError: `by` is none of these, or `n` is not a positive integer.
        """
        if by not in ORDERS:
            raise InputError(
                f"by must be one of {', '.join(map(repr, ORDERS))}, got {by!r}."
                '\nWrite prof.top(10, by="self").'
            )
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InputError(f"n must be a positive integer, got {n!r}.\nWrite prof.top(10).")
        rows = sorted(self.rows, key=ORDERS[by], reverse=True)[:n]
        return replace(self, rows=rows, is_sorted=True)

    def fold(self, depth: int) -> ProfileTable:
        """Return the table without the modules below a depth; the rows above hold their costs.

        Args:
            depth: the greatest depth that is kept. The root has depth 0, its children depth 1.

        Raises:
            InputError: the depth is not an integer from 0 on.
        """
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
            raise InputError(
                f"depth must be an integer from 0 on, got {depth!r}.\nWrite prof.fold(1)."
            )
        return replace(self, rows=[row for row in self.rows if row.depth <= depth])

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values: `total` and `rows`, in seconds, FLOPs and bytes."""
        return {
            "model": self.model_type,
            "is_median": self.is_median,
            "failure": self.failure,
            "notes": list(self.notes),
            "total": {**flat(self.total), "seconds": self.total.seconds},
            "rows": self._table_rows(),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]

    def __str__(self) -> str:
        return text_of(profile_parts(self), width=None)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the modules and the totals in a notebook."""
        has = _Columns(self)
        names = [name.replace("^", "") for name in has.names]
        rows = []
        for row in self.rows[:MOST_ROWS]:
            name = (
                path_text(row.path)
                if self.is_sorted
                else ("\u2003\u2003" * row.depth + row.module.name)
            )
            rows.append([name, *has.cells(row)])
        facts = "; ".join(f"{label} {text}" for label, text in _totals(self))
        head = f"<b>{escape(self.model_type)}</b>: {escape(facts)}"
        for said in (self.failure, *self.notes):
            head += f"<br>{escape(said)}" if said else ""
        return table(head, names, rows, len(self.rows))


def profile_parts(found: ProfileTable, width: int | None = None) -> list[Part]:
    """Describe a profile for the terminal: the modules, the totals, what failed.

    Args:
        found: the profile.
        width: the width in characters. Columns for which there is no room are left out and named,
            because a number that is cut would be another number.
    """
    has = _Columns(found)
    rows: list[list[Words]] = []
    labels = []
    for row in found.rows:
        name = path_text(row.path) if found.is_sorted else indented_name(row.module)
        labels.append(name)
    left_out = [] if width is None else has.fit(found.rows, width, labels)
    rows = [[name, *has.cells(row)] for name, row in zip(labels, found.rows, strict=True)]
    quiet = {place for place, row in enumerate(found.rows) if not row.calls}
    parts: list[Part] = [Table(has.names, rows, quiet), Grid(_totals(found), gap=3)]
    if found.failure:
        parts.append([("The block raised", "bold red"), (f"\n{found.failure}", "red")])
    notes = [*found.notes]
    if left_out:
        notes.append(f"A wider terminal has more columns: {', '.join(left_out)}.")
    return parts + [[(note, "dim")] for note in notes]


Column = tuple[str, Callable[[Row], str], object]


class _Columns:
    """The columns of a table: those in which any module has a number."""

    def __init__(self, found: ProfileTable) -> None:
        time, flops = found.total.time, found.total.flops
        every: list[Column] = [
            ("^type", lambda row: row.module.module_type, True),
            (">calls", lambda row: f"{row.calls:.4g}" if row.calls else "", True),
            (">forward", lambda row: _time(row, row.time.forward), True),
            (">self", lambda row: _time(row, row.self_time.forward), True),
            (">backward", lambda row: _time(row, row.time.backward), time.backward),
            (">self", lambda row: _time(row, row.self_time.backward), time.backward),
            (">recompute", lambda row: _time(row, row.time.recompute), time.recompute),
            (">spread", _spread, found.total.spread),
            (">FLOPs", lambda row: _count(row.flops.forward), flops.forward),
            (">backward", lambda row: _count(row.flops.backward), flops.backward),
            (">recompute", lambda row: _count(row.flops.recompute), flops.recompute),
            (">kept", lambda row: _size(row.activation_bytes), found.total.activation_bytes),
            (">peak", lambda row: _size(row.peak_bytes), found.total.peak_bytes),
            (">parameters", lambda row: f"{row.parameters:,}" if row.parameters else "", True),
        ]
        first = next(place for place, one in enumerate(every) if one[0] == ">FLOPs")
        self._flops = every[first : first + 3]
        self._shown = [one for one in every if one[2]]

    def fit(self, rows: Sequence[Row], width: int, labels: Sequence[Words]) -> list[str]:
        """Leave out columns until the others have room; return the names of those left out.

        Args:
            rows: the rows.
            width: the width in characters.
            labels: the names of the rows, in the first column.
        """
        texts = [one if isinstance(one, str) else "".join(t for t, _ in one) for one in labels]
        lines = [line for text in texts for line in text.splitlines()]
        room = width - max(map(len, lines), default=0)
        widths = {
            one: max(len(one[0]) - 1, *(len(one[1](row)) for row in rows), 0) + _GAP
            for one in self._shown
        }
        left_out = []
        for name in _DISPENSABLE:
            if sum(widths.values()) <= room:
                break
            gone = [one for one in self._shown if self._group(one) == name]
            for one in gone:
                del widths[one]
                self._shown.remove(one)
            left_out += [name] * bool(gone)
        return left_out

    def _group(self, column: Column) -> str:
        return "FLOPs" if column in self._flops else column[0][1:]

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        return ["^module", *(name for name, _, _ in self._shown)]

    def cells(self, row: Row) -> list[str]:
        """The texts of a row, without its name."""
        return [text(row) for _, text, _ in self._shown]


def _time(row: Row, seconds: float) -> str:
    return "" if not seconds else f"{'' if row.is_exact else '~'}{duration(seconds)}"


def _spread(row: Row) -> str:
    return share(row.spread / row.time.all) if row.time.all else ""


def _count(number: float) -> str:
    return count(number) if number else ""


def _size(n_bytes: float) -> str:
    return size(n_bytes) if n_bytes else ""


def _totals(found: ProfileTable) -> Sequence[tuple[str, str]]:
    total = found.total
    title = "Block"
    if found.is_median:
        title = "Median of a pass" if total.passes > 1 else "One pass"
    time = total.time
    parts = [
        ("forward", time.forward), ("backward", time.backward), ("recompute", time.recompute),
        ("collectives", total.collectives), ("optimizer", total.optimizer),
        ("outside the model", total.outside), ("failed passes", total.failed),
    ]  # fmt: skip
    rows = [(title, f"{duration(total.seconds)}, {plural(total.passes, 'pass', 'passes')}")]
    rows += [
        (name.capitalize(), f"{duration(seconds)} ({share(seconds / total.seconds)})")
        for name, seconds in parts
        if seconds
    ]
    rows.append(("hookline", f"{duration(total.overhead) or '0 ms'}, left out of all times"))
    rows += [("Garbage collection", f"{duration(total.garbage)}, left out of all times")] * bool(
        total.garbage
    )
    rows += [("FLOPs", _flops_text(total.flops))] * bool(total.flops.all)
    rows += [("Kept for backward", f"{size(total.activation_bytes)} a pass")] * bool(
        total.activation_bytes
    )
    rows += [("Peak of a pass", size(total.peak_bytes))] * bool(total.peak_bytes)
    return rows


def _flops_text(flops: Phases) -> str:
    names = zip(("forward", "backward", "recompute"), flops, strict=True)
    return ", ".join(f"{count(number)} {name}" for name, number in names if number)
