"""The result of a profile: rows and totals, as a table for the terminal and for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.display.units import count, duration, share, size
from hookline.engine import path_text
from hookline.errors import (
    SelectionError,
    check_int_from_zero,
    check_one_of,
    check_positive_int,
)
from hookline.verbs.profile.call_tree import PHASES
from hookline.verbs.profile.rows import NOTHING, ORDERS, Phases, Row, plain_values
from hookline.verbs.summary import indented_name_cell

_N_NEAR = 3


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
@dataclass(frozen=True, repr=False)
class ProfileTable(Result):
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

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

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
        check_one_of("by", by, ORDERS, 'Write prof.top(10, by="self").')
        check_positive_int("n", n, "Write prof.top(10).")
        rows = sorted(self.rows, key=ORDERS[by], reverse=True)[:n]
        return replace(self, rows=rows, is_sorted=True)

    def fold(self, depth: int) -> ProfileTable:
        """Return the table without the modules below a depth; the rows above hold their costs.

        Args:
            depth: the greatest depth that is kept. The root has depth 0, its children depth 1.

        Raises:
            InputError: the depth is not an integer from 0 on.
        """
        check_int_from_zero("depth", depth, "Write prof.fold(1).")
        return replace(self, rows=[row for row in self.rows if row.depth <= depth])

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values: `total` and `rows`, in seconds, FLOPs and bytes."""
        return {
            "model": self.model_type,
            "is_median": self.is_median,
            "failure": self.failure,
            "notes": list(self.notes),
            "total": {**plain_values(self.total), "seconds": self.total.seconds},
            "rows": self._table_rows(),
        }

    def _printout(self) -> Printout:
        return Printout(
            headings=_HEADINGS,
            rows=[
                (
                    path_text(row.path) if self.is_sorted else indented_name_cell(row.module),
                    *_cell_texts(row, has_spread=bool(self.total.spread)),
                )
                for row in self.rows
            ],
            totals=_totals(self),
            failure=("The block raised", self.failure) if self.failure else (),
            notes=[[(note, "dim")] for note in self.notes],
            dim_rows={place for place, row in enumerate(self.rows) if not row.calls},
            more="modules: .rows",
        )


_HEADINGS = (
    Heading("module", "path"), Heading("type", gives_way=3), Heading("calls", "number", 6),
    Heading("forward", "number"), Heading("self", "number", 7), Heading("backward", "number"),
    Heading("self", "number", 7), Heading("recompute", "number"), Heading("spread", "number", 8),
    Heading("FLOPs", "number", 5), Heading("backward", "number", 5),
    Heading("recompute", "number", 5), Heading("kept", "number", 4), Heading("peak", "number", 1),
    Heading("parameters", "number", 2),
)  # fmt: skip


def _cell_texts(row: Row, *, has_spread: bool) -> tuple[str, ...]:
    """Return the texts of a row after its name, in the order of the columns."""
    return (
        row.module.module_type, f"{row.calls:.4g}" if row.calls else "",
        _time_text(row, row.time.forward), _time_text(row, row.self_time.forward),
        _time_text(row, row.time.backward), _time_text(row, row.self_time.backward),
        _time_text(row, row.time.recompute),
        share(row.spread / row.time.all) if has_spread and row.time.all else "",
        *(count(number) if number else "" for number in row.flops),
        size(row.activation_bytes) if row.activation_bytes else "",
        size(row.peak_bytes) if row.peak_bytes else "",
        f"{row.parameters:,}" if row.parameters else "",
    )  # fmt: skip


def _time_text(row: Row, seconds: float) -> str:
    return "" if not seconds else f"{'' if row.is_exact else '~'}{duration(seconds)}"


def _totals(table: ProfileTable) -> Sequence[tuple[str, str]]:
    total = table.total
    title = "Block"
    if table.is_median:
        title = "Median of a pass" if total.passes > 1 else "One pass"
    time = total.time
    parts = [
        ("forward", time.forward), ("backward", time.backward), ("recompute", time.recompute),
        ("collectives", total.collectives), ("optimizer", total.optimizer),
        ("outside the model", total.outside), ("failed passes", total.failed),
    ]  # fmt: skip
    rows = [
        (title, f"{duration(total.seconds) or '0 ms'}, {plural(total.passes, 'pass', 'passes')}")
    ]
    rows += [
        (name.capitalize(), f"{duration(seconds)} ({share(seconds / total.seconds)})")
        for name, seconds in parts
        if seconds
    ]
    rows.append(("hookline", f"{duration(total.overhead) or '0 ms'}, left out of all times"))
    flops = [f"{count(n)} {name}" for name, n in zip(PHASES, total.flops, strict=True) if n]
    facts = [
        ("Garbage collection", f"{duration(total.garbage)}, left out of all times", total.garbage),
        ("FLOPs", ", ".join(flops), total.flops.all),
        ("Kept for backward", f"{size(total.activation_bytes)} a pass", total.activation_bytes),
        ("Peak of a pass", size(total.peak_bytes), total.peak_bytes),
    ]
    return [*rows, *((name, text) for name, text, number in facts if number)]
