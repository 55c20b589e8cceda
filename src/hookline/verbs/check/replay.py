"""Repeat a run of a model, operation by operation, to find who made a value that is not finite."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine import Order, Passes, is_grouped, path_text
from hookline.engine.compile.compiled_modules import inside_compiled
from hookline.engine.line.registration import Registrations
from hookline.engine.passes.repetition import repeated
from hookline.engine.pytree import tree
from hookline.engine.pytree.call_arguments import Arguments
from hookline.engine.pytree.describe import leaf_text
from hookline.engine.selection.module_tree import ModuleNode, walk
from hookline.engine.torch_private.graph.dispatch import without_dispatch_modes
from hookline.engine.torch_private.graph.nodes import next_number
from hookline.engine.torch_private.hooks import tensor_hook_dict
from hookline.engine.torch_private.modules import buffers, is_scripted, parameters, unwrap
from hookline.verbs.check.finding import SINCE_START, Finding, Measured
from hookline.verbs.check.finiteness import Kind, all_kinds, is_measurable
from hookline.verbs.check.kept import Situation
from hookline.verbs.check.likeness import Likeness
from hookline.verbs.check.origins import FunctionNames, Origin, Origins, Outside, measured
from hookline.verbs.check.run import Run

# A parameter above this size is a likely cause: float16 ends at 65,504.
_LARGE = 1e4
_CHECKPOINT = "CheckpointFunctionBackward"


@final
@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module in the repeated run.

    Args:
        node: the module.
        number: the number of the call; None in a recomputation.
        args: its arguments.
        kwargs: its keyword arguments.
        rng: the random state when the call began.
        first: the number of the first node of the graph that the call made.
        last: the number after the last one; None while the call runs.
        kinds: the kinds of numbers in its output that were not finite.
        origin: who made it.
        versions: the versions of its arguments' tensors when the call began.
    """

    node: ModuleNode
    number: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: Tensor
    first: int
    last: int | None = None
    kinds: Kind = Kind.NONE
    origin: Origin | None = None
    versions: tuple[int, ...] = ()

    def is_overwritten(self) -> bool:
        """Tell whether an argument was overwritten since the call began."""
        return self.versions != _versions((self.args, self.kwargs))


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(-1 if one.is_inference() else one._version for _, one in tree.tensors(value))


class RepeatedBackward(NamedTuple):
    """Hold the gradients that the repeated backward of a run has made not finite.

    Attributes:
        origin: the origin of the first such gradient, of a parameter or an input.
        is_finite: True if all gradients of parameters and inputs are finite.
        not_finite: the parameters whose gradients are not.
    """

    origin: Origin | None
    is_finite: bool
    not_finite: list[Tensor]


@final
class Replay:
    """One repeated run, and what was found in it.

    Args:
        root: the model, as it is called.
        run: the run to repeat.
        passes: the passes of the line that repeats it.
        paths: the path of each site that the run measured, by number.

    Attributes:
        calls: the calls of modules, in the order in which they began.
        output: the output of the repeated run.
        origin: the origin of a number in the output that is not finite; None if all are finite, or
            are meant.
        masks: the origins of each -inf in the output that is taken for a mask.
        likeness: the comparison of the repeated run with the first.
    """

    def __init__(self, root: nn.Module, run: Run, passes: Passes, paths: Sequence[str]) -> None:
        self._passes = passes
        self._root = unwrap(inside_compiled(root))
        self._run = run
        self._running: list[ModuleCall] = []
        self._counts: dict[int, int] = {}
        self._is_backward = False
        self._names = FunctionNames()
        self._outside = Outside()
        self.origins = Origins(self._outside, lambda: tuple(self._running), self._names)
        self.calls: list[ModuleCall] = []
        self.likeness = Likeness(run.sums, paths)
        self._leaves: dict[int, Tensor] = {}
        self.output: Any = None
        self.has_numbers = False
        self.origin: Origin | None = None
        self.masks: list[Origin] = []

    def forward(self) -> None:
        """Repeat the forward."""
        run = self._run
        assert run.args is not None
        if run.has_grad:
            args, kwargs = tree.map_tensors(self._cut, (run.args, run.kwargs))
        else:
            args, kwargs = run.args, run.kwargs
        with repeated(self._passes), run.repeated_state(self._root), self._hooked():
            self._name_tensors(args, kwargs)
            anomaly = torch.autograd.set_detect_anomaly(run.has_grad, check_nan=False)
            with anomaly, self._names, self.origins:
                self.output = self._root(*args, **kwargs)
            self._judge_output()
        self.likeness.end({call.node.path for call in self.calls})

    def _cut(self, tensor: Tensor) -> Tensor:
        """Return an input without the graph that made it: that may be freed, or another run's."""
        if not tensor.requires_grad:
            return tensor
        leaf = self._leaves.get(id(tensor))
        if leaf is None:
            leaf = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
            self._leaves[id(tensor)] = leaf
        # A copy, so that the model may write to it, as it could before.
        return leaf if tensor.is_leaf else leaf.clone()

    def _judge_output(self) -> None:
        for _, tensor in tree.tensors(self.output):
            self.has_numbers = self.has_numbers or is_measurable(tensor)
            mark = self.origins.mark_of(tensor)
            origin = None if mark is None else mark.origin
            if mark is None or origin is None:
                continue
            if mark.kinds is Kind.MINUS_INF and origin.is_logarithm:
                self.masks.append(origin)  # of a mask of zeros and ones
            else:
                self.origin = self.origin or origin

    def backward(self) -> RepeatedBackward:
        """Repeat the backward of the repeated forward, from the gradients of its outputs."""
        grads = self._run.gradients
        outputs = [tensor for tensor in tree.distinct(self.output) if tensor.requires_grad]
        pairs = [(outputs[slot], grad) for slot, grad in grads.items() if slot < len(outputs)]
        weights = [weight for weight in self._root.parameters() if weight.requires_grad]
        wanted = [*weights, *self._leaves.values()]
        if not pairs or not wanted:
            return RepeatedBackward(None, is_finite=True, not_finite=[])
        # A checkpoint runs its modules again, in the backward.
        self._is_backward = True
        with ExitStack() as stack:
            stack.enter_context(repeated(self._passes))
            stack.enter_context(self._run.left_as_found(self._root))
            stack.enter_context(self._hooked())
            stack.enter_context(torch.autograd.set_detect_anomaly(True, False))
            stack.enter_context(self.origins)
            found = _gradients([one for one, _ in pairs], wanted, [one for _, one in pairs])
        marks = [None if grad is None else self.origins.mark_of(grad) for grad in found]
        made = [mark.origin for mark in marks if mark is not None and mark.origin is not None]
        pairs_of_weights = zip(weights, marks, strict=False)
        return RepeatedBackward(
            min(made, key=lambda origin: origin.number, default=None),
            is_finite=all(mark is None for mark in marks),
            not_finite=[weight for weight, mark in pairs_of_weights if mark is not None],
        )

    def proven_origins(self) -> list[Origin]:
        """Return the origins in this run's outputs, as far as the first run was the same."""
        origins = [*(call.origin for call in self.calls), self.origin]
        return [
            origin for origin in origins
            if origin is not None and origin not in self.masks
            and self.likeness.proves(origin.number)
        ]  # fmt: skip

    @property
    def root_kinds(self) -> Kind | None:
        """Return the kinds of numbers in the root's output that are not finite, if it was seen."""
        root = next((call for call in self.calls if not call.node.path), None)
        return None if root is None else root.kinds

    # -- watching the modules --------------------------------------------------------------------

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Note the calls of modules in the block."""
        registrations = Registrations()
        with ExitStack() as stack:
            stack.callback(registrations.end)
            # A model that raises is judged while torch goes through its forward hooks: then no hook
            # may come or go there.
            is_raising = sys.exception() is not None
            for node in walk(self._root):
                if not is_scripted(node.module) and not (is_raising and node.module is self._root):
                    self._watch(registrations, node)
            yield

    def _watch(self, registrations: Registrations, node: ModuleNode) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            number = None if self._is_backward else self._counts.get(id(module), 0)
            self._counts[id(module)] = self._counts.get(id(module), 0) + 1
            call = ModuleCall(node, number, args, kwargs, torch.get_rng_state(), next_number())
            call.versions = _versions((args, kwargs))
            self._running.append(call)
            self.calls.append(call)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            call = self._running.pop()
            call.last = next_number()
            marks = [self.origins.mark_of(one) for _, one in tree.tensors(output)]
            found = [mark for mark in marks if mark is not None]
            call.kinds = all_kinds(mark.kinds for mark in found)
            if not self._is_backward:
                with without_dispatch_modes():
                    self.likeness.compare(node.path, output, self.origins.count)
            call.origin = next((mark.origin for mark in found if mark.origin is not None), None)

        registrations.register(node.module, "forward_pre", begin, Order.HOOK, with_kwargs=True)
        registrations.register(node.module, "forward", end, Order.RECORD, always_call=True)

    def _name_tensors(self, args: Any, kwargs: Any) -> None:
        for node in walk(self._root):
            prefix = f"{node.path}." if node.path else ""
            for name, held in parameters(node.module).items():
                if held is not None:
                    self._outside.add("parameter", prefix + name, held)
            for name, buffer in buffers(node.module).items():
                if buffer is not None:
                    self._outside.add("buffer", prefix + name, buffer)
        arguments = Arguments().bind(self._root, args, kwargs)
        for leaf, tensor in tree.tensors(arguments):
            self._outside.add("input", f":input{leaf_text(leaf)}", tensor)

    # -- the finding -----------------------------------------------------------------------------

    def call_of(self, origin: Origin) -> ModuleCall | None:
        """Return the innermost call of a module that an operation belongs to."""
        if origin.node is None:
            return origin.frames[-1] if origin.frames else None
        number = origin.node
        inside = [one for one in self.calls if one.first <= number < (one.last or number + 1)]
        return inside[-1] if inside else None

    def finding(self, origin: Origin, kind: str) -> Finding:
        """Describe who made a value that is not finite."""
        call = self.call_of(origin)
        is_outside = origin.kind != "operation"
        node = None if call is None else call.node
        held = () if node is None else _held(node)
        path = origin.name if is_outside else "" if node is None else node.path
        inputs = origin.inputs
        if is_outside and call is not None and not inputs:
            inputs = _inputs(call)
        kept = [one for one in held if not one.name.startswith("num_batches")]
        suspect = f"{origin.kind} {path}" if path else None
        if not is_outside:
            suspect = _suspect(kept, node)
        return Finding(
            kind=origin.kind if is_outside else kind,
            path=path,
            module_type="" if is_outside or node is None else node.type_name,
            call=None if is_outside or call is None else call.number,
            step=self._run.step,
            n_nan=origin.n_nan,
            n_inf=origin.n_inf,
            n_total=origin.n_total,
            operation=origin.operation,
            function=origin.function,
            line=origin.line,
            inputs=inputs,
            parameters=tuple(kept),
            suspect=suspect,
            passed_on=self._passed_on(origin, call),
            notes=(SINCE_START,) if origin.kind == "parameter" else (),
        )

    def situation(self, origin: Origin, finding: Finding) -> Situation:
        """Return what is needed to run the module again that made a value; in a backward the root.

        Tensors are as they are now. A note tells if an input was overwritten since the call began.
        """
        call = self.call_of(origin)
        is_backward = finding.kind == "backward"
        if call is None or is_backward:
            call = self.calls[0]
        if call.is_overwritten():
            note = "an input of the module was overwritten; it is kept as it was afterwards"
            finding = finding.with_(notes=(*finding.notes, note))
        module = call.node.module
        return Situation(
            finding=finding,
            path=call.node.path,
            inputs=(call.args, call.kwargs),
            state=self._state(module),
            rng=call.rng,
            gradients=[grad for _, grad in sorted(self._run.gradients.items())] * is_backward,
            training=module.training,
            autocast=self._run.autocast_on(),
        )

    def _state(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and buffers of a module as they were before the run."""
        state = {name: one for name, one in module.state_dict().items() if isinstance(one, Tensor)}
        for prefix, part in module.named_modules():
            for name in buffers(part):
                before = self._run.buffer_before(part, name)
                path = f"{prefix}.{name}" if prefix else name
                if before is not None and path in state:
                    state[path] = before
        return state

    def _passed_on(self, origin: Origin, maker: ModuleCall | None) -> tuple[str, ...]:
        return tuple(
            path_text(one.node.path) + (f"#{one.number}" if one.number else "")
            for one in self.calls
            if one.kinds and one is not maker and one.origin is origin
            and (maker is None or self.calls.index(one) > self.calls.index(maker))
        )  # fmt: skip


def _gradients(
    outputs: list[Tensor], wanted: Sequence[Tensor], grads: list[Tensor]
) -> list[Tensor | None]:
    """Compute gradients and leave every `.grad` as it is."""
    # torch.autograd.grad, which leaves them alone, is refused by reentrant checkpoints.
    is_refused = _CHECKPOINT in [type(node).__name__ for node in _nodes(outputs)]
    if not is_refused:
        return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    if is_grouped() or any(tensor_hook_dict(one, "accumulated") for one in wanted):
        raise RuntimeError("a reentrant checkpoint would call the hooks on accumulated gradients")
    before = [one.grad for one in wanted]
    try:
        for one in wanted:
            one.grad = None
        torch.autograd.backward(outputs, grads)
        return [one.grad for one in wanted]
    finally:
        for one, grad in zip(wanted, before, strict=True):
            one.grad = grad


def _nodes(outputs: list[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph of some tensors."""
    waiting: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def _inputs(call: ModuleCall) -> tuple[Measured, ...]:
    given = Arguments().bind(call.node.module, call.args, call.kwargs)
    return tuple(measured(f"input{leaf_text(leaf)}", one) for leaf, one in tree.tensors(given))


def _held(node: ModuleNode) -> tuple[Measured, ...]:
    both = {**parameters(node.module), **buffers(node.module)}
    return tuple(measured(name, one) for name, one in both.items() if one is not None)


def _suspect(held: list[Measured], node: ModuleNode | None) -> str | None:
    """Name the parameter or buffer that is not finite, or else the largest if it is very large."""
    known = [(one, one.moments) for one in held if one.moments is not None]
    bad = [one.name for one, moments in known if moments.non_finite]
    large = sorted(known, key=lambda one: one[1].max_abs)
    name = bad[0] if bad else None
    if name is None and large and large[-1][1].max_abs > _LARGE:
        name = large[-1][0].name
    if name is None or node is None:
        return name
    return f"{node.path}.{name}" if node.path else name


__all__ = ["ModuleCall", "Replay"]
