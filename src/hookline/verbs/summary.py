"""summary: one run of a model as a table of its modules. Imports engine and calling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine import Line, Pass, Rank, Site, blame, tree
from hookline.engine.errors import HooklineError
from hookline.engine.torch_internals import CPU_ATTENTION
from hookline.verbs.calling import Inputs, as_found, call

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

    def __str__(self) -> str:
        from hookline.views import summary_text

        return summary_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hookline.views import summary_html

        return summary_html(self)


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
            the model. None describes the parameters only.

    Returns:
        The table. If the forward raises, it holds what ran, and `failure` names the module that
        raised and what it got.

    Raises:
        InputError: the model has lazy parameters, which a run would create for good.
    """
    line = Line(model, name="summary")
    line.quiet = line.lenient = True
    table, rows = _describe(line, model)
    if inputs is None:
        return table
    inputs = _to_meta_if(model, inputs)
    table.input_bytes = tree.n_bytes(inputs)
    counter = _counter()
    with as_found(model), line:
        line.tap(line.select(None, ("input", "output")), _Gauge(rows, counter).bind, Rank.RECORD)
        try:
            with counter:
                call(model, inputs)
        except HooklineError:
            raise  # a fault of a hook or a selector, not of the model
        except Exception as error:
            found = blame(model, error)
            text = (str(error).strip().splitlines() or [""])[0]
            table.rows[0].flops = counter.get_total_flops()
            table.failure = f"{found or 'the call'}: {type(error).__name__}: {text}"
    table.ran = True
    holders = {path.rpartition(".")[0] for row in table.rows for path in (row.path, *row.aliases)}
    leaves = [row for row in table.rows[1:] if row.path not in holders] or table.rows[:1]
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
        def see(current: Pass, value: Any) -> None:
            row.input = row.input or tree.form(value)
            current.log.append((row, self._counter.get_total_flops()))

        return see

    def _leave(self, row: Row) -> Any:
        def see(current: Pass, value: Any) -> None:
            stack = current.log
            while stack and stack[-1][0] is not row:
                stack.pop()  # a module that raised, and whose caller went on
            before = stack.pop()[1] if stack else 0
            # A module that calls itself is counted at its outermost call only.
            if not any(other is row for other, _ in stack):
                row.flops += self._counter.get_total_flops() - before
            row.calls += 1
            row.output = row.output or tree.form(value)
            row.output_bytes += tree.n_bytes(value)
            first = next(tree.tensors(value), None)
            if first is not None and not row.dtype:
                row.dtype = str(first[1].dtype).removeprefix("torch.")

        return see


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
    table.parameter_bytes = sum(tree.n_bytes(p) for p in known)
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
