"""List the functions of torch that a module itself calls, and how to select each call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

from torch import nn

from hookline.display.results import Printout, RowsResult
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.engine import (
    PARTS,
    AroundCall,
    CallList,
    FunctionCall,
    Line,
    ModuleNode,
    Order,
    path_text,
    require_model,
)
from hookline.engine.pytree import describe, tree
from hookline.errors import SelectionError
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.run_model import Inputs, call_model, unwrap_lone_tensor


@final
@dataclass(frozen=True)
class OperationRow:
    """One call of a function of torch.

    Args:
        site: the site of the call, as selectors write it. Empty for functions that selectors do not
            know, such as those of `torch.ops`.
        function: the name of the function.
        inputs: the shapes of the tensors that it gets, by name.
        output: the shape of its result, or the structure.
        file: the file of the code that makes the call; a file of torch, where torch alone makes it.
        line: the line of this code.
    """

    site: str
    function: str
    inputs: str
    output: str
    file: str
    line: int


@final
@dataclass(frozen=True, repr=False)
class Operations(RowsResult[OperationRow]):
    """The functions of torch that a module itself calls, in order. Print them, or iterate.

        >>> class Gate(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sigmoid(x) * x
        >>> calls = hl.operations(Gate(), torch.ones(2, 3))
        >>> [(row.site, row.output) for row in calls]
        [('@sigmoid', '[2, 3]'), ('@mul', '[2, 3]')]

    Args:
        path: the path of the module.
        module_type: the name of its class.
        rows: the calls, in order. Each has `site`, `function`, `inputs`, `output`, `file` and
            `line`.
        parts: the sites of the parts of its attention, if it computes one.
    """

    path: str
    module_type: str
    rows: tuple[OperationRow, ...]
    parts: tuple[str, ...] = ()
    _row_type: ClassVar[type] = OperationRow

    def to_dict(self) -> dict[str, Any]:
        """Return the path, the type, the calls as `operations`, and the parts of the attention."""
        return {
            "path": self.path,
            "type": self.module_type,
            "operations": self._table_rows(),
            "attention": list(self.parts),
        }

    def _printout(self) -> Printout:
        path = path_text(self.path)
        head = f"{path} ({self.module_type}) itself makes {plural(len(self.rows), 'call')}"
        rows = [
            (row.site.removeprefix(self.path) or f"{row.function} (no site)", row.inputs,
             row.output, f"{Path(row.file).name}:{row.line}")
            for row in self.rows
        ]  # fmt: skip
        sites = [row.site for row in self.rows if row.site]
        notes = [f"Write the path before each, as in {sites[0]!r}."] if sites and self.path else []
        parts = ", ".join(part.removeprefix(self.path) for part in self.parts)
        notes += [f"Of its attention, by name: {parts}."] if parts else []
        return Printout(
            head=f"{head} of torch's functions", headings=_HEADINGS, rows=rows, notes=notes
        )


_HEADINGS = (
    Heading("site", "path"), Heading("inputs", "structure", gives_way=2),
    Heading("output", "structure"), Heading("line", "path", gives_way=1),
)  # fmt: skip


def operations(model: nn.Module, inputs: Inputs, path: str = "") -> Operations:
    """List the functions of torch that one module itself calls, and how to select each call.

        >>> class Gate(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sigmoid(x) * x
        >>> model = nn.Sequential(nn.Linear(3, 3), Gate())
        >>> [row.site for row in hl.operations(model, torch.ones(2, 3), "1")]
        ['1@sigmoid', '1@mul']

    The model runs once, in eval mode and without gradients. Calls inside the module's children are
    theirs. Reads of attributes, such as `x.shape` and `x.mT`, are no calls.

    Args:
        model: the model.
        inputs: its inputs: a tensor; a tuple of arguments; a dict of keyword arguments; or a
            function without arguments that runs the model.
        path: the path of the module, or another selector of one module. "" is the model itself.

    Returns:
        The calls of the module's first run, in order. Print them, or iterate over them. Each has
        `site`, `function`, `inputs`, `output`, `file` and `line`.

    Raises:
        SelectionError: the selector matches no module, or several; or the module did not run.
        AttachError: `model` is not a model.
    """
    require_model(model, "hl.operations(model, x, path)")
    line = Line(model, name="operations")
    line.options.quiet = True
    inputs = unwrap_lone_tensor(model, inputs)
    calls = _FirstRunCalls()
    with eval_without_side_effects(model), line:
        node = _require_one_module(line, path)
        calls.attach(line, node)
        call_model(model, inputs)
    if not calls.has_run:
        raise SelectionError(
            f"{path_text(node.path)} did not run in this forward, so its calls are not known."
            "\nGive inputs with which it runs, or select a module that does: hl.doctor(model, x)."
        )
    return Operations(node.path, node.type_name, *_make_rows(node.path, calls.made))


def _require_one_module(line: Line, path: str) -> ModuleNode:
    places = line.select(path).places
    node = places[0][1]
    if len(places) > 1 or type(node) is not ModuleNode:
        raise SelectionError(
            f"path must be that of one module, got {path!r} ({plural(len(places), 'site')})."
            f"\nGive one of them: hl.operations(model, x, {str(places[0][0]).partition('@')[0]!r})."
        )
    return node


@final
class _FirstRunCalls:
    """The calls of functions in the first run of a module.

    Attributes:
        made: the calls, described.
        has_run: whether the module has run.
    """

    def __init__(self) -> None:
        self.made: list[_CallRow] = []
        self.has_run = False
        self._is_over = False

    def attach(self, line: Line, node: ModuleNode) -> None:
        """Watch a module."""
        watched = CallList(node.module, self._add_call)
        orders = Order.OPERATIONS_BEGIN, Order.OPERATIONS_END
        with line.undo_on_error() as registrations:
            line.fast_paths.keep_padded(node)
            registrations.register_taps([
                (AroundCall(watched.begin, watched.end, orders), node),
                (AroundCall(self._begin, self._end, orders), node),
            ])  # fmt: skip

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.has_run = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_over = True

    def _add_call(self, made: FunctionCall) -> None:
        if self._is_over:
            return
        row = OperationRow(
            "", made.name, _input_text(made), describe.shape_or_structure(made.output), made.file,
            made.line,
        )  # fmt: skip
        self.made.append(_CallRow(row, made.is_known, getattr(made.output, "ndim", 0)))


class _CallRow(NamedTuple):
    """A call, without its values.

    Args:
        row: the call, whose site is not known before all calls are.
        is_known: whether selectors know the function.
        n_dims: the number of dimensions of its result; 0 if it is no tensor.
    """

    row: OperationRow
    is_known: bool
    n_dims: int


def _input_text(made: FunctionCall) -> str:
    """Describe the tensors that a call gets, by name."""
    named = [*zip(made.names, made.args, strict=False), *made.kwargs.items()]
    with_tensors = [(name, value) for name, value in named if any(tree.tensors(value))]
    return ", ".join(f"{name} {describe.shape_or_structure(part)}" for name, part in with_tensors)


def _make_rows(
    path: str, calls: list[_CallRow]
) -> tuple[tuple[OperationRow, ...], tuple[str, ...]]:
    totals, numbers = Counter(made.row.function for made in calls), Counter[str]()
    rows = []
    for row, is_known, _ in calls:
        number = f"#{numbers[row.function]}" if totals[row.function] > 1 else ""
        numbers[row.function] += 1
        rows.append(replace(row, site=f"{path}@{row.function}{number}" * is_known))
    parts = tuple(f"{path}@{part}" for part in PARTS) if _is_attention(calls) else ()
    return tuple(rows), parts


def _is_attention(calls: list[_CallRow]) -> bool:
    """Tell whether calls make an attention: one function, or a softmax between two products."""
    if any(row.function in _WHOLE for row, *_ in calls):
        return True
    steps = [_STEPS.get(row.function, "") for row, _, n_dims in calls if n_dims >= 3]
    return "product softmax product" in " ".join(filter(None, steps))


_WHOLE = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_STEPS = dict.fromkeys(("matmul", "bmm", "baddbmm", "einsum"), "product") | {"softmax": "softmax"}
