"""Run a model once with the selected sites hooked, as `record` does, and restore its state.

Only facts about the values are kept, and no memory of the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.display.text import name_without_torch
from hookline.engine import (
    Bound,
    GradientCallback,
    Line,
    ModuleNode,
    Order,
    ParameterNode,
    Pass,
    Selection,
    Site,
    SitedNode,
    SplitCallback,
    do_nothing,
    module_tree,
    path_text,
    snapshot_detached,
    version_counter,
)
from hookline.engine.pytree import describe, tree
from hookline.errors import HooklineError
from hookline.verbs.doctor.diagnosis import Note
from hookline.verbs.doctor.observe import foreign_hooks
from hookline.verbs.shared.failing_module import failure_text
from hookline.verbs.shared.gradients import ReentrantError, compute_gradients, leaves_and_reentrancy
from hookline.verbs.shared.model_state import restore_after_run
from hookline.verbs.shared.run_model import call_model, copy_inputs

_VIEW_OF_A_HOOK = re.compile(r"BackwardHookFunction\w* is a view and is being modified")


@final
@dataclass(slots=True)
class SiteValue:
    """The facts about the value at a site, from its first call."""

    form: str = ""  # its structure
    dtype: str = ""  # the dtype of its first tensor; empty if it holds no tensor
    is_lone: bool = False  # whether it is one tensor
    is_floating: bool = False  # whether it holds a tensor that can have a gradient
    needs_grad: bool = False  # whether it holds a tensor that requires a gradient
    is_quantised: bool = False  # whether its first tensor is quantised
    grads_off: bool = False  # whether gradients were switched off at the call
    is_compiled: bool = False  # whether compiled code returned it
    # For each tensor, a tensor that shares its version counter, and the version.
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def is_overwritten(self) -> bool:
        """Tell whether any of the tensors was written to after the call."""
        return any(counter._version != before for counter, before in self.versions)

    def record_facts(self, value: Any, *, is_compiled: bool) -> None:
        """Note the facts about a value."""
        tensors = [tensor for _, tensor in tree.tensors(value)]
        self.versions += [
            (version_counter(tensor), tensor._version)
            for tensor in tensors
            if not (is_compiled or tensor.is_inference() or type(tensor) is not Tensor)
        ]
        if self.form:
            return
        self.form = describe.in_words(value)
        self.is_lone = isinstance(value, Tensor)
        self.is_compiled = is_compiled
        self.grads_off = not torch.is_grad_enabled()
        self.is_floating = any(t.is_floating_point() or t.is_complex() for t in tensors)
        self.needs_grad = any(tensor.requires_grad for tensor in tensors)
        self.is_quantised = bool(tensors) and tensors[0].is_quantized
        self.dtype = name_without_torch(tensors[0].dtype) if tensors else ""


@final
class _NoOpCallback(GradientCallback):
    """A callback that does nothing with a gradient, because the tap counts the gradients."""

    warns = False


@final
@dataclass
class TrialRun:
    """The results of one hooked run."""

    fired: dict[Site, int] = field(default_factory=dict)  # how often each site fired
    # The line's own reason for each site that never fired.
    why: Mapping[Site, str] = field(default_factory=dict)
    # The values at inputs and outputs of the selected modules, by (path, port).
    values: dict[tuple[str, str], SiteValue] = field(default_factory=dict)
    # The sites at which the line itself raised, with the error.
    refused: dict[Site, HooklineError] = field(default_factory=dict)
    failure: Note | None = None  # the error that the model raised
    # The tensor from which backward was run, in words; empty if backward did not run.
    backward: str = ""
    no_backward: str = ""  # the reason why backward could not run
    # Whether a part of the graph is checkpointed with use_reentrant=True.
    is_reentrant: bool = False
    # The keys of `values` whose values were overwritten in place.
    overwritten: set[tuple[str, str]] = field(default_factory=set)


def run_with_hooks(model: nn.Module, selection: Selection, inputs: Any) -> TrialRun:
    """Run a model with the sites hooked: forward, and backward if a gradient site is selected.

    A site at which the line raises (because of a missing leaf, say) is left out of the next run.
    """
    refused: dict[Site, HooklineError] = {}
    while True:
        left = [place for place in selection.places if place[0] not in refused]
        run = TrialRun(refused=refused)
        if not left:
            return run
        error = _run_once_with_hooks(model, left, inputs, run)
        if error is None:
            return run
        site = next((site for site, _ in left if _raised_at(site, error)), None)
        if site is None:
            run.failure = Note("hookline", *fault_and_fix(error))
            return run
        refused[site] = error


def _raised_at(site: Site, error: HooklineError) -> bool:
    notes = getattr(error, "__notes__", ())
    return str(error).startswith(f"{site}: ") or any(f"the hook at {site} (" in n for n in notes)


def _reraise_hookline_error(error: BaseException | None) -> None:
    """Raise the line's own error, also if dynamo has wrapped it in another."""
    while error is not None:
        if isinstance(error, HooklineError):
            raise error from None
        error = error.__cause__ or error.__context__


def fault_and_fix(error: HooklineError) -> tuple[str, str]:
    """Split an error into the fault and the fix, its first two lines. Dynamo adds more lines."""
    fault, remedy, *_ = [*str(error).split("\n"), ""]
    return fault, remedy


def _run_once_with_hooks(
    model: nn.Module, places: list[SitedNode], inputs: Any, run: TrialRun
) -> HooklineError | None:
    """Run a model with sites hooked. Return the error that the line itself raised."""
    line = Line(model, name="doctor")
    line.options.quiet = line.options.lenient = True
    selection = Selection(line.module_tree, places)
    forward_selection = Selection(line.module_tree, _forward_sites(places))
    try:
        with restore_after_run(model), line:
            line.attach_taps(selection, _bind_no_op, Order.RECORD)
            if len(forward_selection):
                line.attach_taps(
                    forward_selection,
                    lambda site: _value_recording_callback(site, run),
                    Order.RECORD,
                )
            _run_forward_backward(model, inputs, line, run)
            run.overwritten = {key for key, value in run.values.items() if value.is_overwritten}
            _count_fired(line, run)
    except HooklineError as error:
        return error
    run.why = line.report().why
    return None


def _run_forward_backward(model: nn.Module, inputs: Any, line: Line, run: TrialRun) -> None:
    """Run forward, and backward if a gradient site is selected; note an error of the model."""
    try:
        output = call_model(model, copy_inputs(inputs))
        run.fired = dict(line.report().fired)
        if any(site.is_gradient for site in run.fired):
            _run_backward(model, output, run)
    except Exception as error:
        _reraise_hookline_error(error)
        run.failure = _describe_failure(model, error)


def _describe_failure(model: nn.Module, error: Exception) -> Note:
    """Describe the module that raised, its inputs, the error, and the remedy."""
    text = failure_text(model, error)
    if _VIEW_OF_A_HOOK.search(str(error)):
        return Note(
            "failure",
            f"{text}: a full backward hook is registered before an in-place operation",
            "remove that hook and use hl.attach(model), line.backward(...), or a grad_output"
            " site; or use an operation that is not in place",
        )
    hooks = {code: (path, kind) for path, kind, code in foreign_hooks(module_tree(model).nodes)}
    for frame, lineno in walk_tb(error.__traceback__):
        code = frame.f_code
        if code in hooks:
            path, kind = hooks[code]
            place = f"{code.co_qualname} ({code.co_filename}:{lineno})"
            return Note(
                "failure",
                f"{text}: raised by the {kind} hook {place} on {path_text(path)}",
                "mend that hook, or remove it; hl.inventory(model) lists all hooks",
            )
    return Note("failure", text, "give the inputs that it expects; later sites were not reached")


def _count_fired(line: Line, run: TrialRun) -> None:
    """Count the fired sites; forward sites as before backward, which runs checkpoints again."""
    for site, count in line.report().fired:
        if site.is_gradient or site not in run.fired:
            run.fired[site] = count


def _bind_no_op(site: Site) -> Bound:
    return _NoOpCallback() if site.is_gradient else do_nothing  # the tap counts


def _value_recording_callback(site: Site, run: TrialRun) -> Bound:
    key = site.path, site.port

    def callback(current: Pass, value: Any) -> None:
        run.values.setdefault(key, SiteValue()).record_facts(value, is_compiled=False)

    def after(current: Pass, value: Any) -> None:
        run.values.setdefault(key, SiteValue()).record_facts(value, is_compiled=True)

    return SplitCallback(callback, snapshot_detached, after)


def _forward_sites(places: list[SitedNode]) -> list[SitedNode]:
    """List the whole inputs and outputs of the modules that hold a selected site."""
    nodes: dict[Site, ModuleNode | ParameterNode] = {
        Site(site.path, site.port.removeprefix("grad_")): node
        for site, node in places
        if isinstance(node, ModuleNode)
    }
    return list(nodes.items())


def _run_backward(model: nn.Module, output: Any, run: TrialRun) -> None:
    """Run autograd once from the output, without changing any `.grad`."""
    if any(count for site, count in run.fired.items() if site.is_gradient):
        run.backward = "the backward of the given function"
        return
    if not torch.is_grad_enabled():
        run.no_backward = "gradients are switched off here (torch.no_grad or inference_mode)"
        return
    loss, name = _loss_and_name(output)
    if loss is None:
        run.no_backward = f"no output requires a gradient ({describe.in_words(output)})"
        return
    _, run.is_reentrant = leaves_and_reentrancy([loss])
    try:
        compute_gradients([loss])
    except ReentrantError as error:
        run.no_backward = str(error)
    else:
        run.backward = name


def _loss_and_name(output: Any) -> tuple[Tensor | None, str]:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for value, name in ((loss, "its output's loss"), (output, "the model's output")):
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
