"""Run a model once with the selected sites hooked, as `record` does, and restore its state.

Only facts about the values are kept, and no memory of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.engine import (
    Bound,
    GradientCallback,
    Line,
    Order,
    Pass,
    PendingGradient,
    Selection,
    Site,
    SplitCallback,
    snapshot,
)
from hookline.engine.pytree import describe, tree
from hookline.engine.selection.module_tree import ModuleNode, ParameterNode
from hookline.engine.selection.selectors import Place
from hookline.engine.torch_private.autograd import version_counter
from hookline.engine.torch_private.hooks import tensor_hooks
from hookline.errors import HooklineError
from hookline.verbs.doctor.diagnosis import Note
from hookline.verbs.doctor.failure import raised
from hookline.verbs.shared.run_model import call, untouched

REENTRANT = "CheckpointFunctionBackward"


@final
@dataclass
class Seen:
    """The facts about the value at a site, from its first call.

    Args:
        form: its structure.
        dtype: the dtype of its first tensor; empty if it holds no tensor.
        is_lone: whether it is one tensor.
        is_floating: whether it holds a tensor that can have a gradient.
        needs_grad: whether it holds a tensor that requires a gradient.
        is_quantised: whether its first tensor is quantised.
        grads_off: whether gradients were switched off when the value was seen.
        is_compiled: whether compiled code returned it.
        watched: for each tensor, a tensor that shares its version counter, and the version.
    """

    form: str = ""
    dtype: str = ""
    is_lone: bool = False
    is_floating: bool = False
    needs_grad: bool = False
    is_quantised: bool = False
    grads_off: bool = False
    is_compiled: bool = False
    watched: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def is_overwritten(self) -> bool:
        """Tell whether any of the tensors has been written to since it was seen."""
        return any(counter._version != before for counter, before in self.watched)

    def note(self, value: Any, *, is_compiled: bool) -> None:
        """Note the facts about a value."""
        found = [tensor for _, tensor in tree.tensors(value)]
        self.watched += [
            (version_counter(tensor), tensor._version)
            for tensor in found
            if not (is_compiled or tensor.is_inference() or type(tensor) is not Tensor)
        ]
        if self.form:
            return
        self.form = describe.in_words(value)
        self.is_lone = isinstance(value, Tensor)
        self.is_compiled = is_compiled
        self.grads_off = not torch.is_grad_enabled()
        self.is_floating = any(t.is_floating_point() or t.is_complex() for t in found)
        self.needs_grad = any(tensor.requires_grad for tensor in found)
        self.is_quantised = bool(found) and found[0].is_quantized
        self.dtype = str(found[0].dtype).removeprefix("torch.") if found else ""


@final
class _Nothing(GradientCallback):
    """A callback that does nothing with a gradient, because the tap counts the gradients."""

    warns = False

    def arrived(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Do nothing."""


@final
@dataclass
class Run:
    """The results of one hooked run.

    Args:
        fired: how often each site fired.
        why: the line's own reason for each site that never fired.
        seen: the values at inputs and outputs of the selected modules, by (path, port).
        refused: the sites at which the line itself raised, with the error.
        failure: the error that the model raised.
        backward: the tensor from which backward was run, in words; empty if backward did not run.
        no_backward: the reason why backward could not run.
        is_reentrant: whether a part of the graph is checkpointed with use_reentrant=True.
        overwritten: the keys of `seen` whose values were overwritten in place.
    """

    fired: dict[Site, int] = field(default_factory=dict)
    why: Mapping[Site, str] = field(default_factory=dict)
    seen: dict[tuple[str, str], Seen] = field(default_factory=dict)
    refused: dict[Site, HooklineError] = field(default_factory=dict)
    failure: Note | None = None
    backward: str = ""
    no_backward: str = ""
    is_reentrant: bool = False
    overwritten: set[tuple[str, str]] = field(default_factory=set)


def copied(inputs: Any) -> Any:
    """Return the inputs with copied tensors, because a model may write to its inputs.

    The copies also get the gradients of the run.
    """

    def copy(tensor: Tensor) -> Tensor:
        new = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.grad_fn is None:
            return new
        with torch.enable_grad():
            return new.clone()  # a non-leaf as well, which may be written to in place

    if isinstance(inputs, Mapping):
        return {key: tree.map_tensors(copy, part) for key, part in inputs.items()}
    if callable(inputs) and not isinstance(inputs, Tensor):
        return inputs
    return tree.map_tensors(copy, inputs)


def hooked_run(model: nn.Module, selection: Selection, inputs: Any) -> Run:
    """Run a model with the sites hooked: forward, and backward if a gradient site is selected.

    A site at which the line raises (because of a missing leaf, say) is left out of the next run.
    """
    refused: dict[Site, HooklineError] = {}
    while True:
        left = [place for place in selection.places if place[0] not in refused]
        run = Run(refused=refused)
        if not left:
            return run
        error = _run(model, left, inputs, run)
        if error is None:
            return run
        at = next((site for site, _ in left if _is_at(site, error)), None)
        if at is None:
            run.failure = Note("hookline", *halves(error))
            return run
        refused[at] = error


def _is_at(site: Site, error: HooklineError) -> bool:
    notes = getattr(error, "__notes__", ())
    return str(error).startswith(f"{site}: ") or any(f"the hook at {site} (" in n for n in notes)


def _ours_behind(error: BaseException | None) -> HooklineError | None:
    """Return the line's own error, if dynamo has wrapped it in another."""
    while error is not None and not isinstance(error, HooklineError):
        error = error.__cause__ or error.__context__
    return error


def halves(error: HooklineError) -> tuple[str, str]:
    """Split an error into the fault and the fix, its first two lines. Dynamo adds more lines."""
    what, remedy, *_ = [*str(error).split("\n"), ""]
    return what, remedy


def _run(model: nn.Module, places: list[Place], inputs: Any, run: Run) -> HooklineError | None:
    line = Line(model, name="doctor")
    line.options.quiet = line.options.lenient = True
    selection = Selection(line.module_tree, places)
    wants_gradients = any(site.is_gradient for site in selection)
    try:
        with untouched(model), line:
            line.tap(selection, _count, Order.RECORD)
            watched = Selection(line.module_tree, _forward_places(places))
            if len(watched):
                line.tap(watched, lambda site: _watch(site, run), Order.RECORD)
            try:
                output = call(model, copied(inputs))
                run.fired = dict(line.report().fired)
                if wants_gradients:
                    _backward(model, output, run)
                del output
            except HooklineError:
                raise
            except Exception as error:
                ours = _ours_behind(error)
                if ours is not None:
                    raise ours from None
                run.failure = raised(model, error)
            run.overwritten = {place for place, seen in run.seen.items() if seen.is_overwritten}
            _count_fired(line, run)
    except HooklineError as error:
        return error
    run.why = line.report().why
    return None


def _count_fired(line: Line, run: Run) -> None:
    """Count the fired sites; forward sites as before backward, which runs checkpoints again."""
    for site, count in line.report().fired:
        if site.is_gradient or site not in run.fired:
            run.fired[site] = count


def _count(site: Site) -> Bound:
    return _Nothing() if site.is_gradient else _let_by


def _let_by(current: Pass, value: Any) -> None:
    """Do nothing, because the tap counts the values."""


def _watch(site: Site, run: Run) -> Bound:
    place = site.path, site.port

    def callback(current: Pass, value: Any) -> None:
        run.seen.setdefault(place, Seen()).note(value, is_compiled=False)

    def after(current: Pass, value: Any) -> None:
        run.seen.setdefault(place, Seen()).note(value, is_compiled=True)

    return SplitCallback(callback, snapshot, after)


def _forward_places(places: list[Place]) -> list[Place]:
    """List the whole inputs and outputs of the modules that hold a selected site."""
    found: dict[Site, ModuleNode | ParameterNode] = {
        Site(site.path, site.port.removeprefix("grad_")): node
        for site, node in places
        if isinstance(node, ModuleNode)
    }
    return list(found.items())


def _backward(model: nn.Module, output: Any, run: Run) -> None:
    """Run autograd once from the output, without changing any `.grad`."""
    if any(count for site, count in run.fired.items() if site.is_gradient):
        run.backward = "the backward of the given function"
        return
    if not torch.is_grad_enabled():
        run.no_backward = "gradients are switched off here (torch.no_grad or inference_mode)"
        return
    loss, name = _loss_of(output)
    if loss is None:
        run.no_backward = f"no output requires a gradient ({describe.in_words(output)})"
        return
    leaves, run.is_reentrant = _leaves_of(loss)
    if run.is_reentrant:
        stepping = [1 for p in model.parameters() for kind, _ in tensor_hooks(p) if kind != "grad"]
        if stepping:
            run.no_backward = (
                "a checkpoint with use_reentrant=True only allows backward(), which would also run"
                " the hooks after gradient accumulation"
            )
            return
        kept = [(leaf, leaf.grad) for leaf in leaves]
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for leaf, grad in kept:
                leaf.grad = grad
    else:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    run.backward = name


def _loss_of(output: Any) -> tuple[Tensor | None, str]:
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for value, name in ((given, "its output's loss"), (output, "the model's output")):
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            return value.sum(), name
    parts = [
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).sum()
        for _, tensor in tree.tensors(output)
        if tensor.requires_grad
    ]
    if not parts:
        return None, ""
    home = parts[0].device
    total: Tensor = torch.stack([part.to(home, torch.float32) for part in parts]).sum()
    return total, "the sum of its outputs"


def _leaves_of(loss: Tensor) -> tuple[list[Tensor], bool]:
    """List the leaf tensors of a graph, and tell whether it holds reentrant checkpoints."""
    stack: list[Any] = [loss.grad_fn]
    done: set[Any] = set()
    leaves: list[Tensor] = [loss] if loss.grad_fn is None else []
    is_reentrant = False
    while stack:
        node = stack.pop()
        if node is None or node in done:
            continue
        done.add(node)
        is_reentrant |= node.name() == REENTRANT
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        stack += [other for other, _ in node.next_functions]
    return leaves, is_reentrant
