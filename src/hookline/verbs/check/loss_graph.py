"""Find the operation of a loss, outside the model, that made a value that is not finite.

The code of the loss cannot be run again. But autograd has its graph. Before a backward frees it,
the graph still holds tensors that the operations were given or have returned. Few others follow
from these. An operation is named only if its output is known to be not finite, and all its inputs
are known to be finite.

Where the loss is finite, an operation in its backward is named by the gradients that it was given
and has passed on.
"""

from __future__ import annotations

import bisect
import math
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine import (
    hook_node,
    local_part,
    next_number,
    node_number,
    nodes_from_loss_to_model,
    tensors_saved_by,
)
from hookline.statistics.finiteness import NonFinite, is_measurable, non_finite_kinds
from hookline.verbs.check.finding import CheckFinding, SourceLine, user_frame
from hookline.verbs.check.loss_source_line import CalledAt, line_of_loss
from hookline.verbs.check.nonfinite_origins import line_from_traceback, measure

# A loss of more operations is not looked through.
_MOST_NODES = 64
# The most runs whose nodes are told from those of the loss.
_MOST_RUNS = 1024
# A loss is a number, or a few. To read more would take time.
_MOST_VALUES = 4096
# The gradients that are kept while the loss's backward runs, at most, in bytes.
_MOST_BYTES = 2**20
# Nodes of operations that move numbers and compute none.
_MOVING = re.compile(
    "(View|UnsafeView|ReshapeAlias|Unsqueeze|Squeeze|Expand|Permute|Transpose|T|Select|Slice|Split"
    "|Unbind|Index|IndexSelect|Gather|MaskedSelect|Clone|Alias|Cat|Stack|Repeat|Flip|Neg|Abs"
    "|AsStrided|Diagonal|Sort|Topk|Max|Min|Amax|Amin|Relu)Backward[0-9]+"
)  # fmt: skip
# Nodes of operations that write numbers out: infinities among them are meant.
_FILLING = re.compile("(MaskedFill|Where|ConstantPadNd|Fill|MaskedScatter)Backward[0-9]+")

# Nodes of operations that make no NaN of finite numbers, and an infinity only if they overflow.
_HARMLESS = re.compile(_MOVING.pattern + "|(Add|Sub|Rsub|Mul|Sum|Mean|Mv|Mm|Bmm|Dot)Backward[0-9]+")


@final
class Fault:
    """The operation of a loss that made a number that is not finite.

    `tensor` has the number: the loss, or a gradient in its backward. `node` is the node of the
    operation in the graph; None if not known.
    """

    __slots__ = ("_function", "_inputs", "_notes", "_operation", "line", "node", "tensor")

    def __init__(
        self,
        node: Any,
        tensor: Tensor,
        inputs: Sequence[Tensor] = (),
        notes: tuple[str, ...] = (),
        *,
        is_of_backward: bool = False,
    ) -> None:
        self.node: Any = node
        self.tensor: Tensor = tensor
        self._notes = notes
        self._inputs = [measure(f"[{k}]", part.detach()) for k, part in enumerate(inputs)]
        name = "" if node is None else _forward_name(node)
        self._function = (node.name() if is_of_backward else name) if name else None
        self._operation = f"aten.{name}" if hasattr(torch.ops.aten, name or "-") else None
        traceback = [] if node is None else node.metadata.get("traceback_", [])
        self.line: SourceLine | None = line_from_traceback(traceback)

    def added_to(self, finding: CheckFinding) -> CheckFinding:
        """Return a finding with the operation."""
        return finding.with_(
            operation=self._operation,
            function=self._function,
            line=self.line,
            inputs=(*finding.inputs, *self._inputs),
            notes=(*finding.notes, *self._notes),
        )


class _RunNodes(NamedTuple):
    """Name the nodes of one run by their numbers."""

    first: int  # the first number
    after: int  # the number after the last one
    is_finite: bool  # whether the run's output is known to be finite
    called_at: CalledAt | None  # the line that called the model


@final
class NodeNumbers:
    """Keep the numbers of the nodes that runs of a model made, in each thread."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[int, list[_RunNodes]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs.get(threading.get_ident()))

    def add_run(self, first: int, *, is_finite: bool, called_at: CalledAt | None = None) -> None:
        """Add a run of this thread that ends now, by the number of its first node."""
        after = next_number()
        if after > first:
            runs = self._runs.setdefault(threading.get_ident(), [])
            while runs and runs[-1].after > first:
                runs.pop()  # of a thread that has ended, whose identifier this thread got
            runs.append(_RunNodes(first, after, is_finite, called_at))
            del runs[:-_MOST_RUNS]

    def is_run_finite(self, node_number: int, thread: int) -> bool | None:
        """Return whether the output of a node's run is known to be finite; None without a run."""
        run = self.last_run_before(node_number, thread)
        return run.is_finite if run is not None and node_number < run.after else None

    def last_run_before(self, node_number: int, thread: int) -> _RunNodes | None:
        """Return the last run of a thread that began before a node."""
        runs = self._runs.get(thread, [])
        index = bisect.bisect_right(runs, node_number, key=attrgetter("first"))
        return runs[index - 1] if index else None


@final
class LossGraph:
    """Hold the graph between the outputs of a model and the tensors that a backward begins at."""

    __slots__ = (
        "_context", "_frame", "_gradients", "_handles", "_is_output_finite", "_nodes", "_numbers",
        "_room", "fault", "is_accumulating", "is_nan", "thread", "value",
    )  # fmt: skip

    def __init__(self, roots: Sequence[Any], numbers: NodeNumbers) -> None:
        self.thread: int = threading.get_ident()
        self._context = copy_context()
        # True: gradients were as the last backward had left them
        self.is_accumulating: bool = False
        self._frame = user_frame(sys._getframe(1))
        self.fault: Fault | None = None  # None if the loss is finite, or not known
        self._numbers, self._is_output_finite = numbers, True
        self._handles: list[Any] = []
        # For each node whose backward has run: the gradients that it passed on, and that it got.
        self._gradients: list[tuple[Any, list[Tensor], list[Tensor]]] = []
        self._room = _MOST_BYTES
        tensors = [
            root for root in roots
            if isinstance(root, Tensor) and is_measurable(root) and root.grad_fn is not None
            and root.numel() <= _MOST_VALUES
        ]  # fmt: skip
        self.value: float | None = None  # the loss, if it is one number
        if len(tensors) == len(roots) == 1:
            plain = local_part(tensors[0].detach())
            is_number = plain.numel() == 1 and not plain.is_complex()
            self.value = float(plain) if is_number else None
        is_known = self.value is not None and math.isfinite(self.value)
        kinds = [
            NonFinite.NONE if is_known else non_finite_kinds(tensor.detach()) for tensor in tensors
        ]  # fmt: skip
        self.is_nan: bool = any(kind & NonFinite.NAN for kind in kinds)
        grad_fns = [tensor.grad_fn for tensor in tensors]
        self._nodes = nodes_from_loss_to_model(grad_fns, self._is_run_node, _MOST_NODES)
        loss = next((root for root, kind in zip(tensors, kinds, strict=True) if kind), None)
        if (
            loss is not None
            and not self._nodes
            and not self._is_run_node(node_number(loss.grad_fn))
        ):
            self.fault = Fault(None, loss, notes=(_TOO_MANY,))
        elif loss is not None:
            self.fault = self._add_line(
                _LossValues(self._nodes, loss, self._is_output_finite).find_fault()
            )
        else:
            for node in self._nodes:
                self._handles.append(hook_node(node, self._gradient_keeper(node)))

    def _is_run_node(self, number: int) -> bool:
        is_finite = self._numbers.is_run_finite(number, self.thread)
        self._is_output_finite &= is_finite is not False
        return is_finite is not None

    def _gradient_keeper(self, node: Any) -> Callable[..., None]:
        def keep(grad_inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> None:
            passed_on = [tensor for tensor in grad_inputs if tensor is not None]
            arrived = [tensor for tensor in grads if tensor is not None]
            tensors = [*passed_on, *arrived]
            if any(tensor.layout is not torch.strided for tensor in tensors):
                return  # sparse tensors do not know their size
            size = sum(tensor.nbytes for tensor in tensors)
            if size <= self._room:
                self._room -= size
                self._gradients.append((node, passed_on, arrived))

        return keep

    def release(self) -> None:
        """Remove all hooks from the graph, and release its gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self._frame = [], [], None
        self._gradients = []

    def bind_to_callers_context(self, act: Callable[..., None]) -> Callable[..., None]:
        """Return a function that acts among the lines of the backward's caller.

        A thread of autograd, on a GPU, has no context, and so no lines.
        """
        return act if self.thread == threading.get_ident() else partial(self._context.run, act)

    def fault_of_backward(self) -> Fault | None:
        """Return the first operation in the loss's backward that made a NaN or an infinity."""
        for node, passed_on, arrived in self._gradients:
            bad = [tensor for tensor in passed_on if non_finite_kinds(tensor.detach())]
            if bad and any(non_finite_kinds(tensor.detach()) for tensor in arrived):
                return None  # it was given that, by an operation whose gradients are not known
            if bad:
                return self._add_line(Fault(node, bad[0], arrived, is_of_backward=True))
        return None

    def _add_line(self, fault: Fault) -> Fault:
        """Add the line to a fault, if the graph does not know it."""
        node, frame = fault.node, self._frame
        if fault.line is None and node is not None and frame is not None:
            run = self._numbers.last_run_before(node_number(node), self.thread)
            called_at = None if run is None else run.called_at

            def reaches(later: Any) -> bool:
                return node in nodes_from_loss_to_model([later], self._is_run_node, _MOST_NODES)

            fault.line = line_of_loss(frame, node, called_at, reaches)
        return fault


@final
class _LossValues:
    """Hold the values in the graph of a loss, as far as they are known.

    Each node of `nodes` stands behind those that it gets values from.
    """

    def __init__(self, nodes: Sequence[Any], loss: Tensor, is_output_finite: bool) -> None:
        self._nodes, self._loss = dict.fromkeys(nodes), loss
        self._is_output_finite = is_output_finite
        self._known: dict[tuple[Any, int], Tensor] = {(loss.grad_fn, loss.output_nr): loss.detach()}
        self._constants: dict[Any, list[Tensor]] = {}
        for node in nodes:
            for name, tensor in tensors_saved_by(node):
                if tensor.grad_fn is not None:
                    self._known.setdefault((tensor.grad_fn, tensor.output_nr), tensor.detach())
                    continue
                is_constant = is_measurable(tensor) and not tensor.requires_grad
                if is_constant and not name.startswith("total"):
                    self._constants.setdefault(node, []).append(tensor.detach())
        with torch.no_grad():
            for node in nodes:
                self._compute_output(node)

    def _compute_output(self, node: Any) -> None:
        """Compute the output of an operation, if its inputs are known."""
        compute = _COMPUTED.get(node.name())
        if compute is None or (node, 0) in self._known:
            return
        inputs = [self._value_at(edge) for edge in node.next_functions]
        try:
            self._known[node, 0] = compute(node, inputs)
        except (TypeError, AttributeError, RuntimeError, IndexError):  # an input is not known
            return

    def _value_at(self, edge: tuple[Any, int]) -> Tensor | None:
        before, number = edge
        leaf = getattr(before, "variable", None)
        return leaf.detach() if isinstance(leaf, Tensor) else self._known.get((before, number))

    def _non_finite_kinds_at(self, edge: tuple[Any, int]) -> NonFinite | None:
        """Return the kinds of an operation's output that are not finite; None if not known."""
        tensor = self._value_at(edge)
        if tensor is not None:
            return non_finite_kinds(tensor)
        node = edge[0]
        if node is None:
            return None
        if node not in self._nodes:
            return NonFinite.NONE if self._is_output_finite else None
        inputs = list(map(self._non_finite_kinds_at, _input_edges(node)))
        is_moving = _MOVING.fullmatch(node.name()) is not None
        are_finite = bool(inputs) and all(kinds is NonFinite.NONE for kinds in inputs)
        return NonFinite.NONE if is_moving and are_finite else None

    def find_fault(self) -> Fault:
        """Find the operation that made the loss not finite."""
        edge: tuple[Any, int] = (self._loss.grad_fn, self._loss.output_nr)
        while True:
            node = edge[0]
            if node not in self._nodes:
                return Fault(None, self._loss, notes=(_FROM_OUTPUT,))
            edges = _input_edges(node)
            before = self._find_non_finite_behind(edges)
            if before is None:
                break
            edge = before
        is_kept = all(self._non_finite_kinds_at(below) is not None for below in edges)
        if not is_kept and _HARMLESS.fullmatch(node.name()):
            return Fault(None, self._loss, notes=(_TOO_LITTLE,))
        return self._describe_fault(node, edges, is_kept=is_kept)

    def _find_non_finite_behind(self, edges: Sequence[tuple[Any, int]]) -> tuple[Any, int] | None:
        """Return the next value that is not finite, behind those that are not known."""
        waiting, visited = list(edges), set()
        while waiting:
            edge = waiting.pop(0)
            kinds = self._non_finite_kinds_at(edge)
            if kinds and (kinds & NonFinite.NAN or not _writes_constants(edge[0])):
                return edge
            if kinds is None and edge not in visited and edge[0] in self._nodes:
                visited.add(edge)
                waiting += _input_edges(edge[0])
        return None

    def _describe_fault(self, node: Any, edges: list[tuple[Any, int]], *, is_kept: bool) -> Fault:
        inputs = [tensor for tensor in map(self._value_at, edges) if tensor is not None]
        constants = self._constants.get(node, [])
        notes: tuple[str, ...] = ()
        if any(non_finite_kinds(tensor) for tensor in constants):
            notes = ("an input of the operation that needs no gradient was not finite",)
        elif not is_kept:
            notes = ("the graph does not keep the operation's input; what it was computed from, as"
                     " far as it is kept, was finite",)  # fmt: skip
        elif len(edges) < len(node.next_functions) and not constants:
            notes = ("the graph does not keep the operation's other input; look at it, too",)
        saved = [tensor for name, tensor in tensors_saved_by(node) if name == "target"]
        targets = [tensor for tensor in saved if not is_measurable(tensor)]  # integers: classes
        return Fault(node, self._loss, [*inputs, *constants, *targets], notes)


_FROM_OUTPUT = "an output of the model or a weight was not finite, and the loss has passed it on"
_TOO_MANY = f"the operation is not known: the loss is of more than {_MOST_NODES} operations"
_TOO_LITTLE = (
    "the operation is not known: the loss's graph keeps too few of its values; the line of each"
    " operation is kept with torch.autograd.set_detect_anomaly(True, check_nan=False)"
)


def _writes_constants(node: Any) -> bool:
    return node is not None and _FILLING.fullmatch(node.name()) is not None


def _input_edges(node: Any) -> list[tuple[Any, int]]:
    """Return the edges to the nodes that a node gets values from."""
    return [edge for edge in node.next_functions if edge[0] is not None]


def _forward_name(node: Any) -> str:
    """Return the name of a node's operation: "log_softmax" of LogSoftmaxBackward0."""
    name = re.sub("Backward[0-9]*$", "", node.name().rpartition("::")[2])
    return re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _as_signed(number: int) -> int:
    """Return a number that a node keeps without its sign."""
    return number - 2**64 if number >= 2**63 else number


def _make_reduction(function: Callable[..., Tensor]) -> Callable[[Any, list[Any]], Tensor]:
    def compute(node: Any, inputs: list[Any]) -> Tensor:
        dims = node._saved_dim
        dims = [_as_signed(dim) for dim in (dims if isinstance(dims, tuple) else (dims,))]
        return function(inputs[0], dims, keepdim=node._saved_keepdim)

    return compute


def _operand(node: Any, inputs: list[Any], index: int) -> Any:
    is_saved = inputs[index] is None
    return (node._saved_self, node._saved_other)[index] if is_saved else inputs[index]


def _make_unary(name: str) -> Callable[[Any, list[Any]], Tensor]:
    function: Callable[[Tensor], Tensor] = getattr(torch, name)
    return lambda node, inputs: function(inputs[0])


def _make_binary(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, list[Any]], Tensor]:
    return lambda node, inputs: function(_operand(node, inputs, 0), _operand(node, inputs, 1))


def _compute_mean(node: Any, inputs: list[Any]) -> Tensor:
    is_of_nothing = node._saved_self_sym_numel == 0
    return torch.tensor(torch.nan) if is_of_nothing else torch.mean(inputs[0])


def _compute_nll_loss(node: Any, inputs: list[Any]) -> Tensor:
    loss: Tensor = torch.ops.aten.nll_loss(
        inputs[0], node._saved_target, node._saved_weight, _as_signed(node._saved_reduction),
        _as_signed(node._saved_ignore_index),
    )  # fmt: skip
    return loss


_UNARY = ("log", "log2", "log10", "log1p", "acos", "asin", "abs", "neg", "sum")
# Functions that compute the output of a node's operation from its inputs.
_COMPUTED: dict[str, Callable[[Any, list[Any]], Tensor]] = {
    **{f"{name.title()}Backward0": _make_unary(name) for name in _UNARY},
    "MulBackward0": _make_binary(torch.mul),
    "DivBackward0": _make_binary(torch.div),
    "AddBackward0": lambda node, inputs: torch.add(*inputs, alpha=node._saved_alpha),
    "SubBackward0": lambda node, inputs: torch.sub(*inputs, alpha=node._saved_alpha),
    "SumBackward1": _make_reduction(torch.sum),
    "MeanBackward0": _compute_mean,
    "MeanBackward1": _make_reduction(torch.mean),
    "PowBackward0": lambda node, inputs: torch.pow(inputs[0], node._saved_exponent),
    "NllLossBackward0": _compute_nll_loss,
}
