"""Tables for the terminal: a summary, a report, an inventory. Imports units.

Paths and types are the user's own words: they go in as `Text`, never as rich's markup.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hookline.engine import Inventory, Report, Site
from hookline.engine.words import plural, visible
from hookline.views.units import count, size

_TEXT_WIDTH = 100
_STRUCTURE_WIDTH = 40
_N_ALIASES_SHOWN = 2
_SHAPE = re.compile(r"\[[\d, ]*\]")
ASCII_RULE = box.Box("    \n" * 2 + " -- \n" + "    \n" * 5, ascii=True)


class SummaryRow(Protocol):
    """One module, as `hl.summary` describes it."""

    path: str
    depth: int
    module_type: str
    aliases: tuple[str, ...]
    parameters: int
    calls: int
    input: str
    output: str
    dtype: str
    output_bytes: int
    flops: int


class SummaryLike(Protocol):
    """What `hl.summary` gives."""

    model_type: str
    ran: bool
    failure: str | None
    parameters: int
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    activation_bytes: int

    @property
    def rows(self) -> Sequence[SummaryRow]:
        """The modules in registration order, the root first."""

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole run."""


def summary_table(summary: SummaryLike, *, failure: bool = True) -> Group:
    """Lay a summary out for a terminal: the modules, the totals, and what went wrong.

        >>> import hookline as hl
        >>> shown = summary_table(hl.summary(nn.Linear(2, 3)))

    `ReLU x2` ran twice. One dtype throughout is left to the totals, several get a column.

    Args:
        summary: what `hl.summary` gave.
        failure: whether what the run raised is told below; False where that is said elsewhere.

    Returns:
        A renderable: print it with `rich.console.Console().print`.
    """
    return _with_totals(summary, _modules(summary, box.SIMPLE_HEAD), failure)


def summary_text(summary: SummaryLike) -> str:
    """A summary as plain text, for `print(summary)`; nothing in it is cut off.

        >>> import hookline as hl
        >>> print(hl.summary(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2)))
        module  type        input  output  parameters  FLOPs  memory
        ------------------------------------------------------------
        (root)  Sequential  [4,2]  [4,3]            9     48    48 B
          0     Linear      [4,2]  [4,3]            9     48    48 B
          1     ReLU        [4,3]  [4,3]                        48 B
        <BLANKLINE>
        Parameters         9, all trainable
        Parameter memory   36 B
        Buffers            0 B
        Input              32 B
        Activations        96 B
        FLOPs              48
        Output dtype       float32 throughout

    Args:
        summary: what `hl.summary` gave.

    Returns:
        The lines, as wide as they need to be, without colour and without a final line break.
    """
    # The rule is in ASCII: print must not fail where stdout is a file in an old code page.
    shown = _with_totals(summary, _modules(summary, ASCII_RULE))
    probe = Console(width=100_000, file=io.StringIO(), color_system=None, force_jupyter=False)
    return text_of(shown, max(probe.measure(shown).maximum, _TEXT_WIDTH))


def text_of(shown: RenderableType, width: int = _TEXT_WIDTH) -> str:
    """What is to be printed as plain text, without colour and without a final line break."""
    out = io.StringIO()
    # In a notebook rich would display it, and write nothing here.
    console = Console(
        width=width, file=out, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def report_table(report: Report) -> Group:
    """Lay a report out for a terminal: each site, how often it fired, and why it did not.

        >>> import hookline as hl
        >>> model = nn.Linear(2, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.zeros(1, 2))
        >>> shown = report_table(run.report())

    Args:
        report: what `line.report()` or `run.report()` gave.

    Returns:
        A renderable: print it with `rich.console.Console().print`.
    """
    n_silent = len(report.silent)
    head = Text.assemble(
        (f"hl.{report.name}", "bold"),
        f" on {visible(report.model_type)}: {plural(len(report.fired), 'site')},"
        f" {plural(report.passes, 'pass', 'passes')}, {report.n_fired} fired, ",
        (f"{n_silent} never", "bold yellow" if n_silent else ""),
        f"; {'ended' if report.ended else 'attached'}",
    )
    if report.removed:
        head.append(f"; {len(report.removed)} removed")
    if report.elsewhere:
        runs = plural(report.elsewhere, "run")
        head.append(f"; {runs} in other threads or tasks not seen", style="yellow")
    table = table_of(box.SIMPLE_HEAD, "site", "type", ">fired", "why not")
    has_remarks = bool(report.silent or report.removed)
    if not has_remarks:
        table.columns.pop()
    for (site, n_fired), why in zip(report.fired, report.remarks(), strict=True):
        cells = [
            Text(visible(str(site))), Text(visible(site.module_type)),
            Text(f"{n_fired:,}"),
        ]  # fmt: skip
        # Unfired sites stand out by their reason; the rest of their row steps back.
        table.add_row(
            *(cells if n_fired else [Text(cell.plain, style="dim") for cell in cells]),
            *([Text(visible(why), style="yellow")] if has_remarks else []),
        )
    return Group(head, Text(), table)


def inventory_table(inventory: Inventory) -> Table | Text:
    """Lay an inventory out for a terminal: each hook now on a model, and whose it is.

        >>> import hookline as hl
        >>> str(inventory_table(hl.inventory(nn.Linear(2, 3))))
        'no hooks on 1 module'

    Args:
        inventory: what `hl.inventory` gave.

    Returns:
        A renderable: print it with `rich.console.Console().print`.
    """
    if not inventory.entries:
        return Text(f"no hooks on {plural(inventory.modules, 'module')}")
    table = table_of(box.SIMPLE_HEAD, "path", "kind", "owner", "function", "where")
    for entry in inventory:
        table.add_row(
            Text(visible(str(Site(entry.path)))),
            Text(entry.kind),
            Text(entry.owner, style="bold" if entry.owner == "yours" else ""),
            Text(visible(entry.function)),
            Text(entry.where, style="dim"),
        )
    return table


def _with_totals(summary: SummaryLike, modules: Table, failure: bool = True) -> Group:
    parts: list[RenderableType] = [modules, Text(), _totals(summary)]
    if summary.failure and failure:
        said = Text("The run failed", style="bold red")
        said.append(f"\n{visible(summary.failure)}", style="not bold red")
        parts += [Text(), said]
    return Group(*parts)


def _modules(summary: SummaryLike, rule: box.Box) -> Table:
    has_dtypes = len(_dtypes(summary)) > 1
    # Where a terminal is narrow, names are folded sooner than the numbers beside them are lost.
    names = ["^module", "^type"]
    if summary.ran:
        names += ["~input", "~output", *["dtype"] * has_dtypes]
    names += [">parameters"]
    if summary.ran:
        names += [">FLOPs", ">memory"]
    table = table_of(rule, *names)
    paths_run = [path for row in summary.rows if row.calls for path in (row.path, *row.aliases)]
    holders = {path[:at] for path in paths_run for at, char in enumerate(path) if char == "."}
    for row in summary.rows:
        parameters = f"{row.parameters:,}" if row.parameters else ""
        calls = f" x{row.calls}" * (row.calls > 1)
        cells = [_name(row), Text(visible(row.module_type) + calls)]
        if summary.ran:
            cells += [Text(_compact(row.input)), _output(row, row.path in holders)]
            cells += [Text(row.dtype)] * has_dtypes
        cells += [Text(parameters)]
        if summary.ran:
            cells += [Text(count(row.flops) if row.flops else "")]
            cells += [Text(size(row.output_bytes) if row.output_bytes else "")]
        table.add_row(*cells, style="dim" if summary.ran and not row.calls else None)
    return table


def _name(row: SummaryRow) -> Text:
    name = Text("  " * row.depth + visible(str(Site(row.path)).rpartition(".")[2]))
    if row.aliases:
        more = len(row.aliases) - _N_ALIASES_SHOWN
        shared = visible(", ".join(row.aliases[:_N_ALIASES_SHOWN]))
        shared += f" and {more} more" * (more > 0)
        name.append(f"\n{'  ' * row.depth}  shared with {shared}", style="dim")
    return name


def _output(row: SummaryRow, holds_one_that_ran: bool) -> Text:
    if row.calls:
        return Text(_compact(row.output))
    if row.input:  # it was entered, and never left
        return Text("raised", style="not dim bold red")
    # A ModuleList is never called itself: nothing is amiss.
    return Text("" if holds_one_that_ran else "not run")


def _compact(form: str) -> str:
    """Shapes without their spaces, `[1,64,112,112]`: four columns of them fit 100 characters."""
    return _SHAPE.sub(lambda shape: shape[0].replace(" ", ""), form)


def _dtypes(summary: SummaryLike) -> set[str]:
    return {row.dtype for row in summary.rows if row.dtype}


def _totals(summary: SummaryLike) -> Table:
    if summary.trainable == summary.parameters:
        trainable = "all trainable" if summary.parameters else ""
    else:
        trainable = f"{summary.trainable:,} trainable" if summary.trainable else "none trainable"
    parts = [f"{summary.parameters:,}", trainable]
    rows = [
        ("Parameters", ", ".join(filter(None, parts))),
        ("Parameter memory", size(summary.parameter_bytes)),
        ("Buffers", size(summary.buffer_bytes)),
    ]
    if summary.ran:
        rows += [
            ("Input", size(summary.input_bytes)),
            ("Activations", size(summary.activation_bytes)),
        ]
        # A run that raised never came to the end at which the root's are counted.
        rows += [("FLOPs", count(summary.flops))] * (not summary.failure)
        if len(_dtypes(summary)) == 1:
            rows += [("Output dtype", f"{_dtypes(summary).pop()} throughout")]
    table = Table.grid(padding=(0, 3, 0, 0), pad_edge=False)
    for label, text in rows:
        table.add_row(Text(label, style="bold"), Text(text))
    return table


def table_of(rule: box.Box, *names: str) -> Table:
    """An empty table; `>` before a name sets its column right, `~` and `^` let long cells wrap,
    `~` also where the terminal is wide enough."""
    table = Table(box=rule, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        kind, text = (name[0], name[1:]) if name[0] in "~^>" else ("", name)
        table.add_column(
            text,
            justify="right" if kind == ">" else "left",
            no_wrap=kind not in ("~", "^"),
            overflow="fold",
            max_width=_STRUCTURE_WIDTH if kind == "~" else None,
        )
    return table
