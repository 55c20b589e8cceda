"""Repeat a run of a model, operation by operation, to find who made a value that is not finite."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine import (
    ROOT,
    ArgumentBinder,
    AroundCall,
    ModuleNode,
    Order,
    Passes,
    Registrations,
    force_eager,
    is_scripted,
    module_tree,
    next_number,
    own_buffers,
    own_parameters,
    path_text,
    treat_runs_as_recomputation,
    unwrap,
    unwrap_all_transforms,
    unwrap_compiled,
    without_modes,
)
from hookline.engine.pytree import tree
from hookline.engine.pytree.describe import leaf_text
from hookline.statistics.finiteness import NonFinite, is_measurable, union_of_kinds
from hookline.verbs.check.finding import SINCE_START, CheckFinding, MeasuredTensor, user_frame
from hookline.verbs.check.loss_source_line import CalledAt
from hookline.verbs.check.nonfinite_origins import (
    FunctionNames,
    Origin,
    OriginTracker,
    OutsideTensors,
    measure,
)
from hookline.verbs.check.replay_file import SavedCall
from hookline.verbs.shared.gradients import compute_gradients
from hookline.verbs.shared.model_state import restore_modes_buffers_rng, tensor_version
from hookline.verbs.shared.rerun import ChangingBuffers, RunComparison, RunStart, Sums
from hookline.verbs.shared.root_call import root_call

# A parameter above this size is a likely cause: float16 ends at 65,504.
_LARGE = 1e4


# The key in `Pass.opened` of a pass's run.
RUN = object()


@final
@dataclass(slots=True, eq=False)
class CheckedRun:
    """One run of the root."""

    step: int  # the number of the run, from 0
    is_sharded: bool  # whether its weights are sharded over ranks
    is_transformed: bool  # whether it runs inside a transform of torch.func
    # A number for each output of a leaf module and of the root, in the order of the run, which is
    # not finite if any element of the output is not.
    sums: Sums = field(default_factory=list)
    # How often the modules were called whose outputs are compared with those of other runs.
    n_calls: Counter[object] = field(default_factory=Counter)
    start: RunStart | None = None  # what the run began with; None where that is not known
    # The number of its first node; None where the root was not called.
    first_node: int | None = None
    called_at: CalledAt | None = None  # the line that called the root
    output: Any = None  # the root's output, while its pass ends; None where it is not known
    is_output_finite: bool = False  # True if the root's output was finite, by its sums
    # The gradients of the root's outputs, by slot, once they have arrived.
    gradients: dict[int, Tensor] = field(default_factory=dict)
    has_grad: bool = field(default_factory=torch.is_grad_enabled)  # whether gradients were enabled

    def record_start(self, frame: FrameType, root: nn.Module, changing: ChangingBuffers) -> None:
        """Note what the call of the root in this frame begins with."""
        self.first_node = next_number()
        caller = user_frame(frame)
        if caller is not None:
            self.called_at = CalledAt(caller.f_code, caller.f_lineno)
        call = root_call(frame, root)
        if call is not None:
            self.start = RunStart(root, call.args, call.kwargs, changing)

    def why_not_repeatable(self) -> str | None:
        """Say why the run cannot be repeated; None if it can."""
        if self.is_sharded:
            return "weights are sharded, and a repeated run would wait for the other ranks"
        if self.is_transformed:
            return "a transform of torch.func runs the model; check the run without it"
        if self.start is None:
            return "the model was not called, only a part; check that, as in hl.check(m.net)"
        return self.start.why_not_repeatable()

    def release(self) -> None:
        """Release everything, because nothing of the run is repeated any more."""
        self.start, self.output, self.gradients, self.sums = None, None, {}, []


@final
@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module in the repeated run."""

    node: ModuleNode
    number: int | None  # the number of the call; None in a recomputation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: Tensor  # the random state when the call began
    first: int  # the number of the first node of the graph that the call made
    versions: list[int | None]  # the versions of its arguments' tensors when the call began
    last: int | None = None  # the number after the last one; None while the call runs
    kinds: NonFinite = NonFinite.NONE  # the kinds of numbers in its output that were not finite
    origin: Origin | None = None

    def is_overwritten(self) -> bool:
        """Tell whether an argument was overwritten since the call began."""
        return self.versions != _argument_versions(self.args, self.kwargs)


def _argument_versions(args: Any, kwargs: Any) -> list[int | None]:
    values = (*args, *kwargs.values())
    return [tensor_version(tensor) for value in values for tensor in _tensors_in(value)]


def _tensors_in(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [part for _, part in tree.tensors(value)]


class RepeatedBackward(NamedTuple):
    """Hold the gradients that the repeated backward of a run has made not finite."""

    origin: Origin | None  # the origin of the first such gradient, of a parameter or an input
    is_finite: bool  # True if all gradients of parameters and inputs are finite
    not_finite: list[Tensor]  # the parameters whose gradients are not


@final
class Replay:
    """One repeated run, and who made what is not finite in it.

    `paths` has the path of each site that the run measured, by number.
    """

    def __init__(
        self, root: nn.Module, run: CheckedRun, passes: Passes, paths: Sequence[str]
    ) -> None:
        self._passes = passes
        self._root = unwrap(unwrap_compiled(root))
        self._nodes = module_tree(self._root).nodes
        self._run = run
        self._running: list[int] = []  # in `calls`; origins that held calls would be a cycle
        self._counts: dict[int, int] = {}
        self._is_backward = False
        self._names = FunctionNames()
        self._outside = OutsideTensors()
        self._origins = OriginTracker(self._outside, self._running, self._names)
        self.calls: list[ModuleCall] = []  # in the order in which they began
        self.comparison: RunComparison = RunComparison(run.sums, paths)
        self._leaves: dict[int, Tensor] = {}
        self.output: Any = None
        self.has_numbers: bool = False
        # Of a number in the output that is not finite; None if all are finite, or are meant.
        self.origin: Origin | None = None
        self.masks: list[Origin] = []  # of each -inf in the output that is taken for a mask

    def forward(self) -> None:
        """Repeat the forward."""
        run, start = self._run, self._run.start
        assert start is not None
        args, kwargs = start.args, start.kwargs
        if run.has_grad:
            args, kwargs = tree.map_tensors(self._without_graph, (args, kwargs))
        with (
            treat_runs_as_recomputation(self._passes),
            start.restore_state(self._root),
            self._recording_calls(),
        ):
            self._name_weights_and_inputs(args, kwargs)
            anomaly = torch.autograd.set_detect_anomaly(run.has_grad, check_nan=False)
            # What is compiled in place would be compiled anew, with the hooks of the repetition.
            with force_eager(), anomaly, self._names, self._origins:
                self.output = self._root(*args, **kwargs)
            self._find_output_origin()
        self.comparison.check_missing_calls({call.node.path for call in self.calls})

    def _without_graph(self, tensor: Tensor) -> Tensor:
        """Return an input without the graph that made it: that may be freed, or another run's."""
        if not tensor.requires_grad:
            return tensor
        leaf = self._leaves.get(id(tensor))
        if leaf is None:
            leaf = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
            self._leaves[id(tensor)] = leaf
        # A copy, so that the model may write to it, as it could before.
        return leaf if tensor.is_leaf else leaf.clone()

    def _find_output_origin(self) -> None:
        for tensor in _tensors_in(self.output):
            self.has_numbers = self.has_numbers or is_measurable(tensor)
            mark = self._origins.mark_of(tensor)
            if mark is None or mark.origin is None:
                continue
            if mark.kinds is NonFinite.MINUS_INF and mark.origin.is_logarithm:
                self.masks.append(mark.origin)  # of a mask of zeros and ones
            else:
                self.origin = self.origin or mark.origin

    def backward(self) -> RepeatedBackward:
        """Repeat the backward of the repeated forward, from the gradients of its outputs."""
        with_grad = [
            tensor for tensor in tree.distinct_tensors(self.output) if tensor.requires_grad
        ]
        pairs = [
            (with_grad[slot], grad) for slot, grad in self._run.gradients.items()
            if slot < len(with_grad)
        ]  # fmt: skip
        weights = [weight for weight in self._root.parameters() if weight.requires_grad]
        leaves = [*weights, *self._leaves.values()]
        if not pairs or not leaves:
            return RepeatedBackward(None, is_finite=True, not_finite=[])
        # A checkpoint runs its modules again, in the backward.
        self._is_backward = True
        with (
            treat_runs_as_recomputation(self._passes),
            restore_modes_buffers_rng(list(self._root.modules())),
            self._recording_calls(),
            torch.autograd.set_detect_anomaly(True, check_nan=False),
            self._origins,
        ):
            outputs, output_grads = zip(*pairs, strict=True)
            grads = compute_gradients(outputs, leaves, output_grads)
        marks = [None if grad is None else self._origins.mark_of(grad) for grad in grads]
        origins = [mark.origin for mark in marks if mark is not None and mark.origin is not None]
        marks_of_weights = zip(weights, marks, strict=False)
        return RepeatedBackward(
            min(origins, key=lambda origin: origin.number, default=None),
            is_finite=all(mark is None for mark in marks),
            not_finite=[weight for weight, mark in marks_of_weights if mark is not None],
        )

    def proven_origins(self) -> list[Origin]:
        """Return the origins in this run's outputs, as far as the first run was the same."""
        origins = [*(call.origin for call in self.calls), self.origin]
        return [
            origin for origin in origins
            if origin is not None and origin not in self.masks
            and self.comparison.are_equal_until(origin.number)
        ]  # fmt: skip

    @property
    def root_kinds(self) -> NonFinite | None:
        """Return the kinds of numbers in the root's output that are not finite, if it was seen."""
        return next((call.kinds for call in self.calls if not call.node.path), None)

    # -- watching the modules --------------------------------------------------------------------

    @contextmanager
    def _recording_calls(self) -> Iterator[None]:
        """Note the calls of modules in the block."""
        registrations = Registrations()
        # A model that raises is judged while torch goes through its forward hooks: then no hook
        # may come or go there.
        is_raising = sys.exception() is not None
        try:
            for node in [node for node in self._nodes if not is_scripted(node.module)]:
                if not (is_raising and node.module is self._root):
                    self._hook_calls(registrations, node)
            yield
        finally:
            registrations.end()

    def _hook_calls(self, registrations: Registrations, node: ModuleNode) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            count = self._counts.get(id(module), 0)
            self._counts[id(module)] = count + 1
            call = ModuleCall(
                node, None if self._is_backward else count, args, kwargs,
                torch.get_rng_state(), next_number(), _argument_versions(args, kwargs),
            )  # fmt: skip
            self._running.append(len(self.calls))
            self.calls.append(call)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            call = self.calls[self._running.pop()]
            call.last = next_number()
            marks = [mark for mark in map(self._origins.mark_of, _tensors_in(output)) if mark]
            if marks:
                call.kinds = union_of_kinds([mark.kinds for mark in marks])
                call.origin = next((mark.origin for mark in marks if mark.origin), None)
            if not self._is_backward:
                self._compare_output(node.path, output, is_new=any(mark.is_empty for mark in marks))

        registrations.register_taps([(AroundCall(begin, end, (Order.HOOK, Order.RECORD)), node)])

    def _compare_output(self, path: str, output: Any, *, is_new: bool) -> None:
        if is_new:
            self.comparison.skip_output(path)
            return
        output = tree.map_tensors(unwrap_all_transforms, output)
        with without_modes():
            self.comparison.compare_output(path, output, self._origins.count)

    def _name_weights_and_inputs(self, args: Any, kwargs: Any) -> None:
        for kind, path, tensor in named_parameters_and_buffers(self._nodes):
            self._outside.add(kind, path, tensor)
        for leaf, tensor in tree.tensors(ArgumentBinder().bind(self._root, args, kwargs)):
            self._outside.add("input", f"{ROOT}:input{leaf_text(leaf)}", tensor)

    # -- the finding -----------------------------------------------------------------------------

    def call_of(self, origin: Origin) -> ModuleCall | None:
        """Return the innermost call of a module that an operation belongs to."""
        if origin.node is None:
            return None if origin.call is None else self.calls[origin.call]
        number = origin.node
        around = [call for call in self.calls if call.first <= number < (call.last or number + 1)]
        return around[-1] if around else None

    def finding(self, origin: Origin, kind: str) -> CheckFinding:
        """Describe who made a value that is not finite."""
        call = self.call_of(origin)
        node = None if call is None else call.node
        parts = () if node is None else _measured_parameters(node)
        finding = CheckFinding(
            kind, "" if node is None else node.path,
            step=self._run.step,
            n_nan=origin.n_nan,
            n_inf=origin.n_inf,
            n_total=origin.n_total,
            operation=origin.operation,
            function=origin.function,
            line=origin.line,
            inputs=origin.inputs,
            parameters=parts,
            passed_on=self._sites_passing_on(origin, call),
        )  # fmt: skip
        if origin.kind == "operation":
            if call is None:
                return finding
            return finding.with_(
                module_type=call.node.type_name,
                call=call.number,
                suspect=_likely_cause(parts, call.node),
            )
        inputs = finding.inputs if finding.inputs or call is None else _measured_inputs(call)
        name = origin.name
        return finding.with_(
            kind=origin.kind,
            path=name,
            inputs=inputs,
            suspect=f"{origin.kind} {name}" if name else None,
            notes=(SINCE_START,) if origin.kind == "parameter" else (),
        )

    def saved_call(self, origin: Origin, finding: CheckFinding) -> SavedCall:
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
        module, start = call.node.module, self._run.start
        assert start is not None
        return SavedCall(
            finding=finding,
            path=call.node.path,
            inputs=(call.args, call.kwargs),
            state=_state_before(module, start),
            rng=call.rng,
            gradients=[grad for _, grad in sorted(self._run.gradients.items())] * is_backward,
            training=module.training,
            autocast=start.autocast,
        )

    def _sites_passing_on(self, origin: Origin, maker: ModuleCall | None) -> tuple[str, ...]:
        first = 0 if maker is None else self.calls.index(maker) + 1
        return tuple(
            path_text(call.node.path) + (f"#{call.number}" if call.number else "")
            for call in self.calls[first:]
            if call.kinds and call.origin is origin
        )


def named_parameters_and_buffers(nodes: Iterable[ModuleNode]) -> list[tuple[str, str, Tensor]]:
    """Return all parameters of modules, then all buffers: "parameter" or "buffer", path, tensor."""
    tables: list[tuple[str, Callable[[nn.Module], Mapping[str, Tensor | None]]]]
    tables = [("parameter", own_parameters), ("buffer", own_buffers)]
    return [
        (kind, f"{node.path}.{name}".removeprefix("."), tensor)
        for (kind, table), node in itertools.product(tables, nodes)
        for name, tensor in table(node.module).items()
        if tensor is not None
    ]


def _state_before(module: nn.Module, start: RunStart) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module as they were before the run."""
    entries = module.state_dict().items()
    state = {name: entry for name, entry in entries if isinstance(entry, Tensor)}
    for prefix, part in module.named_modules():
        for name in own_buffers(part):
            before = start.buffer_before(part, name)
            path = f"{prefix}.{name}" if prefix else name
            if before is not None and path in state:
                state[path] = before
    return state


def _measured_inputs(call: ModuleCall) -> tuple[MeasuredTensor, ...]:
    arguments = ArgumentBinder().bind(call.node.module, call.args, call.kwargs)
    return tuple(
        measure(f"input{leaf_text(leaf)}", tensor) for leaf, tensor in tree.tensors(arguments)
    )


def _measured_parameters(node: ModuleNode) -> tuple[MeasuredTensor, ...]:
    tensors = {**own_parameters(node.module), **own_buffers(node.module)}
    return tuple(
        measure(name, tensor)
        for name, tensor in tensors.items()
        if tensor is not None and not name.startswith("num_batches")
    )


def _likely_cause(parts: Sequence[MeasuredTensor], node: ModuleNode) -> str | None:
    """Name the parameter or buffer that is not finite, or else the largest if it is very large."""
    floating = [part for part in parts if "float" in part.dtype or "complex" in part.dtype]
    entries = [(part.name, part.moments) for part in floating if part.moments is not None]
    bad = [name for name, moments in entries if moments.non_finite]
    sizes = [(moments.max_abs, name) for name, moments in entries if moments.finite]
    size, largest = max(sizes, default=(0.0, ""), key=itemgetter(0))
    name = bad[0] if bad else largest if size > _LARGE else None
    return f"{node.path}.{name}".lstrip(".") if name else None
