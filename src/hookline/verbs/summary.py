"""Run a model once and describe its modules in a table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Never, final

from torch import nn
from torch.nn.parameter import is_lazy

from hookline.display.results import Printout, Result
from hookline.display.text import name_without_torch
from hookline.display.text_table import Heading
from hookline.display.units import count, size
from hookline.display.wrapped_text import Cell
from hookline.engine import (
    ON_NESTED,
    Line,
    OperationCounter,
    Order,
    Pass,
    Site,
    is_reading_tap_running,
    paths_above,
    require_model,
    unwrap_all_transforms,
)
from hookline.engine.pytree import describe, tree
from hookline.errors import HooklineError, check_int_from_zero, check_option_names
from hookline.verbs.shared.failing_module import failure_text
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.refused_weights import execution_device
from hookline.verbs.shared.run_model import Inputs, call_model, map_inputs, unwrap_lone_tensor


@final
@dataclass
class Row:
    """A module in a summary.

    Args:
        path: the module's path; the root's is the empty string.
        depth: the number of modules above it.
        module_type: the name of its class.
        aliases: its other paths, if it is shared.
        own_parameters: the number of elements of its own parameters, without its submodules.
        parameters: the number of elements of its parameters and of those of its submodules. Each
            parameter counts once.
        trainable: the number of these elements that require gradients.
        calls: the number of its calls.
        input: the structure of its input at the first call.
        output: the structure of its output at the first call.
        dtype: the dtype of its first output tensor.
        output_bytes: the bytes of its output tensors, over all calls; under `vmap`, those of all
            examples.
        flops: the floating-point operations of all calls, with those of its submodules. A
            multiply-add counts as two.
    """

    path: str
    depth: int
    module_type: str
    aliases: tuple[str, ...] = ()
    own_parameters: int = 0
    parameters: int = 0
    trainable: int = 0
    calls: int = 0
    input: str = ""
    output: str = ""
    dtype: str = ""
    output_bytes: int = 0
    flops: int = 0

    @property
    def name(self) -> str:
        """The last part of the path."""
        return str(Site(self.path)).rpartition(".")[2]

    @property
    def type_and_calls(self) -> str:
        """The class, with the number of calls if there were several: `ReLU x2`."""
        return self.module_type + f" x{self.calls}" * (self.calls > 1)


@final
@dataclass(repr=False)
class Summary(Result):
    """The table that `hl.summary` makes. Print it, or read `rows` and the totals.

        >>> table = hl.summary(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2))
        >>> table.parameters, table.flops, table.dtypes
        (9, 48, {'float32'})
        >>> [(row.path, row.output) for row in table.rows]
        [('', '[4, 3]'), ('0', '[4, 3]'), ('1', '[4, 3]')]
        >>> print(table)
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

    `dtypes` is the set of the dtypes of the modules' outputs.

    Args:
        model_type: the class of the model.
        rows: every module in registration order, the root first. A row has `path`, `depth`,
            `module_type`, `aliases`, `own_parameters`, `parameters`, `trainable`, `calls`, `input`,
            `output`, `dtype`, `output_bytes` and `flops`.
        ran: whether the model was run.
        failure: if the forward raised, the module that raised, its inputs, and the error; else
            None.
        parameters: the number of elements of all parameters. A shared parameter counts once.
        trainable: the number of these elements that require gradients.
        parameter_bytes: the bytes of all parameters.
        buffer_bytes: the bytes of all buffers.
        input_bytes: the bytes of the input's tensors.
        activation_bytes: the bytes of the outputs of all modules in which no other module ran. A
            training step keeps roughly this much.
        flops: the floating-point operations of the whole run; a multiply-add counts as two.
        without_formula: the operations whose FLOPs are not counted, such as `aten::_fft_r2c`:
            neither torch nor hookline has a formula for them.
        folded: the rows that `fold` has left out.
    """

    model_type: str
    rows: list[Row] = field(default_factory=list)
    ran: bool = False
    failure: str | None = None
    parameters: int = 0
    trainable: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    input_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0
    without_formula: tuple[str, ...] = ()
    folded: tuple[Row, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the modules' outputs, those of folded rows among them."""
        return {row.dtype for row in (*self.rows, *self.folded) if row.dtype}

    def fold(self, depth: int) -> Summary:
        """Return the table without the modules below a depth; rows above hold their numbers.

        >>> table = hl.summary(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2))
        >>> [row.path for row in table.fold(0)], table.fold(0).flops
        ([''], 48)

        Args:
            depth: the greatest depth that is kept. The root has depth 0, its children depth 1.

        Raises:
            InputError: the depth is not an integer from 0 on.
        """
        check_int_from_zero("depth", depth, "Write table.fold(1).")
        rows = [row for row in self.rows if row.depth <= depth]
        folded = (row for row in self.rows if row.depth > depth)
        return replace(self, rows=rows, folded=(*self.folded, *folded))

    def to_dict(self) -> dict[str, Any]:
        """Return the totals and, as `rows`, the modules, as plain values named like the attributes.

        >>> hl.summary(nn.Linear(2, 3)).to_dict()["rows"][0]["parameters"]
        9
        """
        apart = ("model_type", "rows", "folded")
        names = [entry.name for entry in fields(self) if entry.name not in apart]
        facts = {"model": self.model_type} | {name: getattr(self, name) for name in names}
        return {**facts, "rows": self._table_rows()}

    def _printout(self) -> Printout:
        holders = _paths_with_inner_calls(self)
        has_dtypes = len(self.dtypes) > 1
        lacking = self.without_formula
        return Printout(
            headings=_HEADINGS,
            rows=[
                (
                    indented_name_cell(row),
                    row.type_and_calls,
                    _compact_shapes(row.input),
                    _output_cell(row, row.path in holders) if self.ran else "",
                    row.dtype if has_dtypes else "",
                    f"{row.parameters:,}" if row.parameters else "",
                    count(row.flops) if row.flops else "",
                    size(row.output_bytes) if row.output_bytes else "",
                )
                for row in self.rows
            ],
            totals=_totals(self),
            notes=[[(missing_formulas_text(lacking), "dim")]] if lacking else [],
            failure=("The run failed", self.failure) if self.failure else (),
            dim_rows={place for place, row in enumerate(self.rows) if self.ran and not row.calls},
            more="modules: .rows",
        )


def summary(model: nn.Module, inputs: Inputs | None = None, **others: Never) -> Summary:
    """Describe every module of a model: path, type, shapes, dtype, parameters, FLOPs, memory.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> table = hl.summary(model, torch.zeros(4, 2))
        >>> table.rows[1].output, table.rows[1].parameters, table.flops
        ('[4, 3]', 9, 48)

    The model runs once, in eval mode and without gradients. Afterwards its mode, its buffers, the
    attributes that its forward sets, and torch's random state are as before. A model on the meta
    device runs on shapes alone, so a model larger than memory can be described. torch's own counter
    counts the FLOPs; a multiply-add counts as two.

    Args:
        model: the model.
        inputs: a tensor; a tuple of arguments; a dict of keyword arguments; or a function without
            arguments that runs the model. Give a dict that is one argument as `({...},)`. A list of
            one tensor is this tensor, unless the model takes the list. None describes the
            parameters only, and does not run the model.
        **others: none are allowed. For a name of another package (`input_size`), the error says
            what to write here.

    Returns:
        The table. If the forward raises, the table holds the modules that ran. Its `failure` then
        names the module that raised and its inputs.

    Raises:
        AttachError: `model` is not a model.
        InputError: the model has lazy parameters, which a run would create for good.
        TypeError: another argument is given.
    """
    check_option_names(summary, others)
    require_model(model, "hl.summary(model, x)")
    line = Line(model, name="summary")
    line.options.quiet = line.options.lenient = True
    table, rows = describe_modules(line, model)
    if inputs is None:
        return table
    has_shapes_alone = any(parameter.is_meta for parameter in model.parameters())
    if has_shapes_alone and execution_device(model) is None:
        inputs = map_inputs(lambda tensor: tensor.to("meta"), inputs)
    inputs = unwrap_lone_tensor(model, inputs)
    table.input_bytes = describe.n_bytes(inputs)
    counted = _FlopCount()
    with eval_without_side_effects(model), line:
        line.attach_taps(
            line.select(None, ("input", "output")), _RowFiller(rows, counted).bind, Order.RECORD
        )
        try:
            with OperationCounter(counted.add, counted.add_missing_formula).counting():
                call_model(model, inputs)
        except HooklineError:
            raise  # a fault of a hook or a selector, not of the model
        except Exception as error:
            table.rows[0].flops = counted.flops
            table.failure = failure_text(model, error)
    table.ran = True
    table.flops = counted.flops
    table.without_formula = tuple(counted.without_formula)
    holders = _paths_with_inner_calls(table)
    table.activation_bytes = sum(row.output_bytes for row in table.rows if row.path not in holders)
    return table


@final
class _FlopCount:
    """Count the FLOPs of a run, and note the operations that have no formula."""

    def __init__(self) -> None:
        self.flops = 0
        self.without_formula: dict[str, None] = {}

    def add(self, flops: int, n_bytes: int) -> None:
        """Count an operation, unless a hook computes it that only reads, as that of `hl.watch`."""
        if flops and not is_reading_tap_running(sys._getframe(1)):
            self.flops += flops

    def add_missing_formula(self, operation: str) -> None:
        """Note an operation without a formula."""
        if not is_reading_tap_running(sys._getframe(1)):
            self.without_formula[operation] = None


@final
class _RowFiller:
    """Fill the rows as the modules run."""

    def __init__(self, rows: Mapping[str, Row], counted: _FlopCount) -> None:
        self._rows = rows
        self._counted = counted

    def bind(self, site: Site) -> Any:
        return partial(self._enter if site.port == "input" else self._leave, self._rows[site.path])

    def _enter(self, row: Row, current: Pass, value: Any) -> None:
        row.input = row.input or describe.shape_or_structure(value)
        current.log.append((row, self._counted.flops))

    def _leave(self, row: Row, current: Pass, value: Any) -> None:
        stack = current.log
        while stack and stack[-1][0] is not row:
            stack.pop()  # a module that raised, and whose caller caught the exception
        before = stack.pop()[1] if stack else 0
        # A recursive module is counted at its outermost call only.
        if not any(other is row for other, _ in stack):
            row.flops += self._counted.flops - before
        row.calls += 1
        row.output = row.output or describe.shape_or_structure(value)
        # Like the FLOPs, under vmap those of all examples.
        tensors = [unwrap_all_transforms(tensor) for _, tensor in tree.tensors(value)]
        row.output_bytes += describe.n_bytes(tensors)
        if tensors and not row.dtype:
            row.dtype = name_without_torch(tensors[0].dtype)


def describe_modules(line: Line, model: nn.Module) -> tuple[Summary, dict[str, Row]]:
    """Describe the modules of a line's model before any run.

    Returns:
        The summary, and its rows by path.
    """
    table = Summary(type(line.nodes[0].module).__name__)
    rows: dict[str, Row] = {}
    for node in line.nodes:
        own = [p for p in node.module.parameters(recurse=False) if not is_lazy(p)]
        depth = node.path.count(".") + 1 if node.path else 0
        row = Row(node.path, depth, type(node.module).__name__, node.aliases)
        row.own_parameters = sum(p.numel() for p in own)
        rows[node.path] = row
        table.rows.append(row)
        below = [p for p in node.module.parameters() if not is_lazy(p)]
        row.parameters = sum(p.numel() for p in below)
        row.trainable = sum(p.numel() for p in below if p.requires_grad)
    table.parameters, table.trainable = table.rows[0].parameters, table.rows[0].trainable
    table.parameter_bytes = sum(describe.n_bytes(p) for p in model.parameters() if not is_lazy(p))
    table.buffer_bytes = sum(describe.n_bytes(b) for b in model.buffers() if not is_lazy(b))
    return table, rows


def _paths_with_inner_calls(table: Summary) -> set[str]:
    """Return the paths of the modules in which another module ran."""
    rows = (*table.rows, *table.folded)
    paths = [path for row in rows if row.calls for path in (row.path, *row.aliases)]
    # A parametrization runs beside its module, not in it: it returns a weight.
    return {
        above
        for path in paths
        for above in paths_above(path)
        if "parametrizations" not in path.removeprefix(above).split(".")
    }


_HEADINGS = (
    Heading("module", "path"), Heading("type"), Heading("input", "structure", 3),
    Heading("output", "structure"), Heading("dtype", gives_way=4),
    Heading("parameters", "number", 5), Heading("FLOPs", "number", 2),
    Heading("memory", "number", 1),
)  # fmt: skip
_SHAPE = re.compile(r"\[[\d, ]*\]")
_N_ALIASES_SHOWN = 2
_N_OPERATIONS_SHOWN = 3


def missing_formulas_text(operations: Sequence[str]) -> str:
    """Say which operations have no FLOPs in the numbers."""
    shown = ", ".join(operations[:_N_OPERATIONS_SHOWN])
    more = len(operations) - _N_OPERATIONS_SHOWN
    text = f"FLOPs leave out {shown}{f' and {more} more' * (more > 0)}: no formula is known."
    if all(operation.endswith(ON_NESTED) for operation in operations):
        return text  # torch would not ask a formula
    return f"{text} Register one with torch.utils.flop_counter.register_flop_formula."


def indented_name_cell(row: Row) -> Cell:
    """Return the last part of a module's path, indented by its depth, with its other paths."""
    indent = "  " * row.depth
    if not row.aliases:
        return indent + row.name
    more = len(row.aliases) - _N_ALIASES_SHOWN
    shared = ", ".join(row.aliases[:_N_ALIASES_SHOWN]) + f" and {more} more" * (more > 0)
    return [(indent + row.name, ""), (f"{indent}  shared with {shared}", "dim")]


def _output_cell(row: Row, holds_one_that_ran: bool) -> Cell:
    if row.calls:
        return _compact_shapes(row.output)
    if row.input:  # it was called and has not returned
        return [("raised", "not dim bold red")]
    # A container such as ModuleList is never called itself, so its row stays empty.
    return "" if holds_one_that_ran else "not run"


def _compact_shapes(form: str) -> str:
    """Remove the spaces from shapes, `[1,64,112,112]`, so that four columns fit 100 characters."""
    return _SHAPE.sub(lambda shape: shape[0].replace(" ", ""), form)


def _totals(table: Summary) -> list[tuple[str, Cell]]:
    if table.trainable == table.parameters:
        trainable = "all trainable" if table.parameters else ""
    else:
        trainable = f"{table.trainable:,} trainable" if table.trainable else "none trainable"
    rows: list[tuple[str, Cell]] = [
        ("Parameters", ", ".join(filter(None, [f"{table.parameters:,}", trainable]))),
        ("Parameter memory", size(table.parameter_bytes)),
        ("Buffers", size(table.buffer_bytes)),
    ]
    if table.ran:
        rows += [
            ("Input", size(table.input_bytes)),
            ("Activations", size(table.activation_bytes)),
        ]
        # The root's FLOPs are counted when it returns, so a run that raised has none.
        rows += [("FLOPs", count(table.flops))] * (not table.failure)
        if len(table.dtypes) == 1:
            rows += [("Output dtype", f"{table.dtypes.pop()} throughout")]
    return rows
