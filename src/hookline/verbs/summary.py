"""summary: one run of a model as a table of its modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.display.html import MOST_ROWS, escape, table
from hookline.display.terminal import Grid, Part, Table, Words, text_of
from hookline.display.units import count, size
from hookline.engine import Line, Order, Pass, Site
from hookline.engine.pytree import describe, tree
from hookline.engine.torch_private.fused_ops import CPU_ATTENTION
from hookline.errors import AttachError, HooklineError
from hookline.verbs.shared.failing_module import failure_text
from hookline.verbs.shared.run_model import Inputs, call, eval_without_side_effects

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


@final
@dataclass
class Row:
    """One module of a summary.

    Args:
        path: its path; the root's is the empty string.
        depth: how deep it lies below the root.
        module_type: the name of its class.
        aliases: its other paths, where it is shared.
        own_parameters: the number of elements of the parameters that it holds itself.
        parameters: the same with all that it holds below, each counted once.
        trainable: of `parameters`, those that require gradients.
        calls: how often it ran.
        input: the structure of what it got, first call.
        output: the structure of what it returned, first call.
        dtype: of its first output tensor.
        output_bytes: of its output tensors, all calls.
        flops: floating-point operations of all calls (a multiply-add is two), those below included.
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
        """The last part of its path."""
        return str(Site(self.path)).rpartition(".")[2]

    @property
    def type_and_calls(self) -> str:
        """Its class, and how often it ran where that was several times: `ReLU x2`."""
        return self.module_type + f" x{self.calls}" * (self.calls > 1)


@final
@dataclass
class Summary:
    """A model as a table. Print it, or read `rows` and the totals.

    Args:
        model_type: the class of the model.
        rows: every module in registration order, the root first.
        ran: whether the model was run.
        failure: if its forward raised: the module that did, what it got, and the error.
        parameters: elements of all parameters, shared ones counted once.
        trainable: of these, those that require gradients.
        parameter_bytes: their memory.
        buffer_bytes: the memory of buffers.
        input_bytes: the memory of the input's tensors.
        activation_bytes: of the outputs of all modules that hold no other: what a training step
            keeps, roughly.
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

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole run; a multiply-add is two."""
        return self.rows[0].flops if self.rows else 0

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the modules' outputs."""
        return {row.dtype for row in self.rows if row.dtype}

    def __str__(self) -> str:
        """Every module and the totals, as wide as they need to be.

        >>> print(summary(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2)))
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
        """
        return text_of(summary_parts(self), width=None)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the modules, indented, and the totals in a notebook."""
        head = (
            f"<b>{escape(self.model_type)}</b>: {self.parameters:,} parameters"
            f" ({size(self.parameter_bytes)}), {self.trainable:,} trainable"
        )
        names = ["module", "type", ">parameters"]
        if self.ran:
            head += f"; {count(self.flops)} FLOPs, activations {size(self.activation_bytes)}"
            names += ["~input", "~output", ">FLOPs", ">memory"]
        if self.failure:
            head += f"; <b>the run failed</b> in {escape(self.failure)}"
        rows = []
        for row in self.rows[:MOST_ROWS]:
            name = "\u2003\u2003" * row.depth + row.name
            cells = [name, row.type_and_calls, _number(row.parameters)]
            if self.ran:
                cells += [row.input, row.output, _number(row.flops, count)]
                cells += [_number(row.output_bytes, size)]
            rows.append(cells)
        return table(head, names, rows, len(self.rows))


def summary(model: nn.Module, inputs: Inputs | None = None) -> Summary:
    """Describe every module of a model: path, type, shapes, dtype, parameters, FLOPs, memory.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> table = summary(model, torch.zeros(4, 2))
        >>> table.rows[1].output, table.rows[1].parameters, table.flops
        ('[4, 3]', 9, 48)

    The model runs once, in eval mode and without gradients; its mode, buffers and torch's random
    state are as before afterwards. A model on the meta device is run there, on shapes alone, so
    that one larger than memory can be described. FLOPs are counted by torch's own counter.

    Args:
        model: the model.
        inputs: a tensor; a tuple of arguments; a dict of keyword arguments; a function that runs
            the model. A dict that is one argument is given as `({...},)`. None describes the
            parameters only.

    Returns:
        The table. If the forward raises, it holds what ran, and `failure` names the module that
        raised and what it got.

    Raises:
        AttachError: what was given is not a model.
        InputError: the model has lazy parameters, which a run would create for good.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"summary needs a model (an nn.Module), got {type(model).__name__}."
            "\nGive the model itself: hl.summary(model, x)."
        )
    line = Line(model, name="summary")
    line.options.quiet = line.options.lenient = True
    table, rows = _describe(line, model)
    if inputs is None:
        return table
    inputs = _to_meta_if(model, inputs)
    table.input_bytes = describe.n_bytes(inputs)
    counter = _counter()
    with eval_without_side_effects(model), line:
        line.tap(line.select(None, ("input", "output")), _Gauge(rows, counter).bind, Order.RECORD)
        try:
            with counter:
                call(model, inputs)
        except HooklineError:
            raise  # a fault of a hook or a selector, not of the model
        except Exception as error:
            table.rows[0].flops = counter.get_total_flops()
            table.failure = failure_text(model, error)
    table.ran = True
    holders = {path.rpartition(".")[0] for row in table.rows for path in (row.path, *row.aliases)}
    leaves = [row for row in table.rows[1:] if row.path not in holders] or table.rows
    table.activation_bytes = sum(row.output_bytes for row in leaves)
    return table


def _counter() -> FlopCounterMode:
    """Torch's counter, and a formula that it lacks: the fused attention of the CPU."""
    from torch.utils import flop_counter  # late: it would slow `import hookline`

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        count: int = flop_counter.sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
        return count

    return flop_counter.FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: attention})


@final
class _Gauge:
    """Fills the rows as the modules run."""

    def __init__(self, rows: Mapping[str, Row], counter: FlopCounterMode) -> None:
        self._rows = rows
        self._counter = counter

    def bind(self, site: Site) -> Any:
        row = self._rows[site.path]
        return self._enter(row) if site.port == "input" else self._leave(row)

    def _enter(self, row: Row) -> Any:
        def callback(current: Pass, value: Any) -> None:
            row.input = row.input or describe.shape_or_structure(value)
            current.log.append((row, self._counter.get_total_flops()))

        return callback

    def _leave(self, row: Row) -> Any:
        def callback(current: Pass, value: Any) -> None:
            stack = current.log
            while stack and stack[-1][0] is not row:
                stack.pop()  # a module that raised, and whose caller went on
            before = stack.pop()[1] if stack else 0
            # A module that calls itself is counted at its outermost call only.
            if not any(other is row for other, _ in stack):
                row.flops += self._counter.get_total_flops() - before
            row.calls += 1
            row.output = row.output or describe.shape_or_structure(value)
            row.output_bytes += describe.n_bytes(value)
            first = next(tree.tensors(value), None)
            if first is not None and not row.dtype:
                row.dtype = str(first[1].dtype).removeprefix("torch.")

        return callback


def _describe(line: Line, model: nn.Module) -> tuple[Summary, dict[str, Row]]:
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
    known = [p for p in model.parameters() if not is_lazy(p)]
    table.parameter_bytes = sum(describe.n_bytes(p) for p in known)
    table.buffer_bytes = sum(b.nbytes for b in model.buffers() if not is_lazy(b))
    return table, rows


def _to_meta_if(model: nn.Module, inputs: Any) -> Any:
    if not any(p.is_meta for p in model.parameters()):
        return inputs
    if callable(inputs) and not isinstance(inputs, Tensor | Mapping):
        return inputs
    if isinstance(inputs, Mapping):
        return {key: tree.map_tensors(lambda t: t.to("meta"), part) for key, part in inputs.items()}
    return tree.map_tensors(lambda t: t.to("meta"), inputs)


_SHAPE = re.compile(r"\[[\d, ]*\]")
_N_ALIASES_SHOWN = 2


def summary_parts(found: Summary, *, failure: bool = True) -> list[Part]:
    """Describe a summary for the terminal: the modules, the totals, and what went wrong.

        >>> len(summary_parts(summary(nn.Linear(2, 3))))
        2

    `ReLU x2` ran twice. One dtype throughout is left to the totals, several get a column.

    Args:
        found: what `hl.summary` gave.
        failure: whether what the run raised is told below; False where that is said elsewhere.
    """
    parts: list[Part] = [_modules(found), _totals(found)]
    if found.failure and failure:
        parts.append([("The run failed", "bold red"), (f"\n{found.failure}", "red")])
    return parts


def _modules(found: Summary) -> Table:
    has_dtypes = len(found.dtypes) > 1
    # Where a terminal is narrow, names are folded sooner than the numbers beside them are lost.
    names = ["^module", "^type"]
    if found.ran:
        names += ["~input", "~output", *["dtype"] * has_dtypes]
    names += [">parameters"]
    if found.ran:
        names += [">FLOPs", ">memory"]
    paths_run = [path for row in found.rows if row.calls for path in (row.path, *row.aliases)]
    holders = {path[:at] for path in paths_run for at, char in enumerate(path) if char == "."}
    rows = []
    for row in found.rows:
        cells: list[Words] = [_name(row), row.type_and_calls]
        if found.ran:
            cells += [_compact(row.input), _output(row, row.path in holders)]
            cells += [row.dtype] * has_dtypes
        cells += [_number(row.parameters)]
        if found.ran:
            cells += [_number(row.flops, count), _number(row.output_bytes, size)]
        rows.append(cells)
    quiet = {place for place, row in enumerate(found.rows) if found.ran and not row.calls}
    return Table(names, rows, quiet)


def _name(row: Row) -> Words:
    indent = "  " * row.depth
    if not row.aliases:
        return indent + row.name
    more = len(row.aliases) - _N_ALIASES_SHOWN
    shared = ", ".join(row.aliases[:_N_ALIASES_SHOWN]) + f" and {more} more" * (more > 0)
    return [(indent + row.name, ""), (f"\n{indent}  shared with {shared}", "dim")]


def _output(row: Row, holds_one_that_ran: bool) -> Words:
    if row.calls:
        return _compact(row.output)
    if row.input:  # it was entered, and never left
        return [("raised", "not dim bold red")]
    # A ModuleList is never called itself: nothing is amiss.
    return "" if holds_one_that_ran else "not run"


def _compact(form: str) -> str:
    """Take the blanks out of shapes, `[1,64,112,112]`: four columns fit 100 characters."""
    return _SHAPE.sub(lambda shape: shape[0].replace(" ", ""), form)


def _number(number: int, text: Callable[[int], str] = "{:,}".format) -> str:
    return text(number) if number else ""


def _totals(found: Summary) -> Grid:
    if found.trainable == found.parameters:
        trainable = "all trainable" if found.parameters else ""
    else:
        trainable = f"{found.trainable:,} trainable" if found.trainable else "none trainable"
    rows = [
        ("Parameters", ", ".join(filter(None, [f"{found.parameters:,}", trainable]))),
        ("Parameter memory", size(found.parameter_bytes)),
        ("Buffers", size(found.buffer_bytes)),
    ]
    if found.ran:
        rows += [
            ("Input", size(found.input_bytes)),
            ("Activations", size(found.activation_bytes)),
        ]
        # A run that raised never came to the end at which the root's are counted.
        rows += [("FLOPs", count(found.flops))] * (not found.failure)
        if len(found.dtypes) == 1:
            rows += [("Output dtype", f"{found.dtypes.pop()} throughout")]
    return Grid(rows, gap=3)
