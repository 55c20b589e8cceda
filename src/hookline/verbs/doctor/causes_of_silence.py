"""Find the cause why a selected site does not fire, and the remedy.

Each possible cause has a function, which returns None if it does not apply. The first function that
returns a cause decides. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch

from hookline.display.text import name_without_torch
from hookline.engine import (
    NO_BACKWARD,
    ModuleNode,
    OperationNode,
    ParameterNode,
    Site,
    has_forward,
    path_text,
)
from hookline.engine.report.why_silent import (
    RAISED,
    UNKNOWN,
    Why,
    custom_call_reason,
    never_called_reason,
    uncalled_operation_reason,
)
from hookline.verbs.doctor.diagnosis import SiteVerdict
from hookline.verbs.doctor.observe import DirectUse, Observations
from hookline.verbs.doctor.trial_run import SiteValue, TrialRun, fault_and_fix

NO_INPUTS = Why("no inputs given", "give some: hl.doctor(model, inputs)")
SWITCHED_OFF = Why(
    "gradients are switched off here (torch.no_grad or inference_mode)",
    "call the model and hl.doctor outside of that block",
)


@final
@dataclass
class Facts:
    """The facts from which the causes are found."""

    nodes: list[ModuleNode]  # the modules of the model
    # The observations of a run with nothing attached.
    observations: Observations = field(default_factory=Observations)
    # The results of a run with the sites hooked; None where no inputs were given.
    run: TrialRun | None = None
    # The ids of the modules that only run in the other mode, training or eval.
    other_mode: set[int] = field(default_factory=set)
    # A module that ran in one of the runs and not in another; None if none did.
    differing: ModuleNode | None = None
    is_training: bool = False  # whether the model is in training mode
    no_run: Why = NO_INPUTS  # the reason why nothing was run


def verdict_on(site: Site, node: ModuleNode | ParameterNode, facts: Facts) -> SiteVerdict:
    """Return the verdict on a site."""
    always = (
        _takes_no_gradient(node) if isinstance(node, ParameterNode) else never_called_reason(node)
    )
    if always is not None:
        return SiteVerdict(site, 0, *always)
    run = facts.run
    if run is None:
        return SiteVerdict(site, None, *facts.no_run)
    if site in run.refused:
        return SiteVerdict(site, 0, *fault_and_fix(run.refused[site]))
    calls = run.fired.get(site, 0)
    if calls:
        return SiteVerdict(site, calls, *(_overwritten_later(site, run) or ("", "")))
    causes = _OF_GRADIENTS if site.is_gradient else _OF_VALUES
    for cause in causes:
        why = cause(site, node, facts)
        if why is not None:
            return SiteVerdict(site, 0, *why)
    text = run.why.get(site, UNKNOWN.why)
    blind = "ask about the uncompiled model, and without a profiler, to learn more"
    return SiteVerdict(site, 0, text, "" if facts.observations.called else blind)


# -- causes that hold for any input --------------------------------------------------------------


def _takes_no_gradient(node: ParameterNode) -> Why | None:
    tensor = node.tensor
    if tensor.requires_grad:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return Why(f"it is {name_without_torch(tensor.dtype)}, which has no gradient", _FLOAT_MODEL)
    return Why("it is frozen: requires_grad is False", "call requires_grad_() on it")


_FLOAT_MODEL = "take the gradients of the float model, before it is quantised"
_SHARDED = Why(
    "it is sharded (a DTensor): torch calls no gradient hooks on it while it is gathered",
    "use hl.attach(model), line.accumulated(selector, fn), which is called when .grad is complete",
)


# -- values --------------------------------------------------------------------------------------


def _no_such_call(site: Site, node: Any, facts: Facts) -> Why | None:
    why = facts.run.why.get(site, "") if facts.run else ""
    if site.call is None or "never came" not in why:
        return None
    first = Site(site.path, site.port, site.leaf, 0)
    return Why(why, f"count calls from 0: '{first}' is the first")


def _raised_before(site: Site, node: Any, facts: Facts) -> Why | None:
    if facts.run is None or facts.run.failure is None:
        return None
    if id(node.module) in facts.observations.called:
        return Why(RAISED.why, "mend the failure below first")
    return Why("the forward raised before it came here", "mend the failure below first")


def _not_own_operation(site: Site, node: Any, facts: Facts) -> Why | None:
    if isinstance(node, OperationNode) and id(node.owner) in facts.observations.called:
        return uncalled_operation_reason(node)
    return None


def _forward_called_directly(site: Site, node: Any, facts: Facts) -> Why | None:
    use = facts.observations.direct.get(id(node.module))
    if use is None:
        return None
    if id(node.module) in facts.observations.overridden:
        return custom_call_reason(node, " that calls forward directly, past its hooks")
    return Why(
        f"its .forward was called directly{_where_used(use)}; a direct call skips hooks",
        "call the module itself there: module(x) instead of module.forward(x)",
    )


def _weights_used_directly(site: Site, node: Any, facts: Facts) -> Why | None:
    use = facts.observations.used.get(id(node.module))
    if use is None:
        return None
    return Why(
        f"not called: its weights were used directly, by {use.by}{_where_used(use)}",
        "call the module there: module(x); or select the module around it"
        + (f", {use.within!r}" if use.within else ""),
    )


def _inside_fused_attention(site: Site, node: Any, facts: Facts) -> Why | None:
    """Find a module inside a fused attention of transformers, which is not called."""
    parent = node.parent
    if parent is None or id(parent.module) not in facts.observations.called:
        return None
    kind = getattr(getattr(parent.module, "config", None), "_attn_implementation", None)
    if kind in (None, "eager") or "att" not in parent.path.rpartition(".")[2].lower():
        return None
    return Why(
        f"{kind} attention computes the pattern and its dropout inside one operation",
        'model.set_attn_implementation("eager")',
    )


def runs_differed(facts: Facts) -> Why | None:
    """Say that the runs differed: then the cause in one run need not be that in another."""
    node = facts.differing
    if node is None:
        return None
    return Why(
        f"the run did not repeat itself: {path_text(node.path)} ({node.type_name}) was called in"
        " one run and not in another",
        "let each run begin alike, such as with the same counter or seed, and call hl.doctor again",
    )


def _runs_differed(site: Site, node: Any, facts: Facts) -> Why | None:
    return runs_differed(facts)


def _only_in_other_mode(site: Site, node: Any, facts: Facts) -> Why | None:
    if id(node.module) not in facts.other_mode:
        return None
    now, other = ("training", "eval") if facts.is_training else ("eval", "training")
    call = "model.eval()" if facts.is_training else "model.train()"
    return Why(f"only called in {other} mode, and the model is in {now} mode", call)


def _not_reached(site: Site, node: Any, facts: Facts) -> Why | None:
    ran = facts.observations.ran
    if not ran:
        return None
    highest, caller, above = node, node, node.parent
    while above is not None:
        if has_forward(above.module):
            if id(above.module) in ran:
                caller = above
                break
            highest = above
        above = above.parent
    if not highest.path:
        return Why(
            "the model did not run: the given function never called it",
            "call this very model there, because a copy or another instance is not seen",
        )
    if highest is not node:
        return Why(
            f"not reached: nothing called {highest.path} ({highest.type_name}), which holds it",
            "give inputs that take the branch that calls it, if anything still uses it",
        )
    return Why(
        f"not reached: {path_text(caller.path)} ran and did not call it",
        "give inputs that take the branch that calls it, if anything still uses it",
    )


def _where_used(use: DirectUse) -> str:
    within = f" in {use.within}" if use.within else ""
    return within + (f" ({use.where})" if use.where else "")


# -- gradients -----------------------------------------------------------------------------------


def _gradients_switched_off(site: Site, node: Any, facts: Facts) -> Why | None:
    return None if torch.is_grad_enabled() or facts.run is None else SWITCHED_OFF


def _module_did_not_run(site: Site, node: Any, facts: Facts) -> Why | None:
    """Find why the module of the site, or of the parameter, did not run."""
    if isinstance(node, ParameterNode):
        return _unused_parameter(node, facts)
    if _value_at(site, facts) is not None:
        return None
    forward = Site(site.path, site.port.removeprefix("grad_"), (), site.call)
    for cause in _OF_VALUES:
        why = cause(forward, node, facts)
        if why is not None:
            return why
    return None


def _unused_parameter(node: ParameterNode, facts: Facts) -> Why | None:
    run = facts.run
    if type(node.tensor).__name__ == "DTensor":
        return _SHARDED
    owner = next((n for n in facts.nodes if n.path == node.path.rpartition(".")[0]), None)
    if owner is None or run is None or run.failure or not run.backward:
        return None
    other = runs_differed(facts) or _only_in_other_mode(Site(owner.path), owner, facts)
    if other is not None:
        return other
    busy = facts.observations.ran | facts.observations.used.keys()
    if id(owner.module) not in busy and facts.observations.called:
        return Why(
            f"its module, {path_text(owner.path)}, did not run",
            "give inputs that take the branch in which it runs; or freeze it, if that is meant",
        )
    return Why(
        f"unused: {run.backward} does not depend on it",
        "look for a .detach(), .data, .item() or argmax between it and the loss; or take a loss"
        " that depends on it: hl.doctor(model, lambda: loss(model(x)))",
    )


def _value_has_no_gradient(site: Site, node: Any, facts: Facts) -> Why | None:
    """Find why the value at a site can have no gradient."""
    value = _value_at(site, facts)
    if value is None or value.is_compiled:
        return None
    subject = "its input" if site.port == "grad_input" else "its output"
    if value.is_quantised:
        return Why(f"{subject} is quantised, and has no gradient", _FLOAT_MODEL)
    if not value.dtype:
        return Why(
            f"{subject} holds no tensor ({value.form})", "select a module that returns a tensor"
        )
    if not value.is_floating:
        instead = (
            f"'{path_text(site.path)}:grad_output'" if site.port == "grad_input" else "another site"
        )
        return Why(f"{subject} is {value.dtype}, and only floating tensors have gradients",
                   f"select {instead}, whose value is floating")  # fmt: skip
    if value.grads_off:
        return Why(
            "the model itself switches gradients off here: by torch.no_grad() in a forward, or by a"
            " checkpoint with use_reentrant=True",
            "remove the no_grad, or checkpoint with use_reentrant=False",
        )
    return None if value.needs_grad else _requires_no_grad(site, node, subject)


def _requires_no_grad(site: Site, node: Any, subject: str) -> Why:
    is_trainable = any(parameter.requires_grad for parameter in node.module.parameters())
    if site.port == "grad_output" and is_trainable:
        return Why(
            f"{subject} needs no gradient although its parameters do: it is detached inside",
            "remove the .detach(), .data or .item() in its forward",
        )
    return Why(
        f"{subject} needs no gradient: nothing that it is computed from requires one",
        "give an input with x.requires_grad_(), or unfreeze the layers before it:"
        " module.requires_grad_()",
    )


def _no_backward(site: Site, node: Any, facts: Facts) -> Why | None:
    run = facts.run
    if run is None or run.backward:
        return None
    if run.failure:
        return Why("the run raised before a gradient came here", "mend the failure below first")
    return Why(
        f"no backward could be run: {run.no_backward}",
        "give a function that returns the loss: hl.doctor(model, lambda: loss(model(x)))",
    )


def _no_gradient_arrived(site: Site, node: Any, facts: Facts) -> Why | None:
    run, value = facts.run, _value_at(site, facts)
    if run is None or not run.backward or value is None or not value.needs_grad:
        return None
    reason = run.why.get(site, NO_BACKWARD)
    if reason != NO_BACKWARD:  # the line's own reason and remedy: the gradient was lost on its way
        why, _, remedy = reason.partition("; ")
        return Why(why, remedy)
    return Why(
        f"no gradient reached it: {run.backward} does not depend on it",
        "look for a .detach(), .data, .item() or argmax behind it; or take a loss that depends on"
        " it: hl.doctor(model, lambda: loss(model(x)))",
    )


# -- remarks on sites that fire ------------------------------------------------------------------


def _overwritten_later(site: Site, run: TrialRun) -> Why | None:
    """Return a warning about a site that fires; None if there is none."""
    if site.is_gradient or (site.path, site.port) not in run.overwritten:
        return None
    return Why(
        "overwritten in place later in the forward: looking up its recorded value will raise",
        "record copies: hl.record(..., copy=True)",
    )


def _value_at(site: Site, facts: Facts) -> SiteValue | None:
    return facts.run.values.get((site.path, site.port.removeprefix("grad_"))) if facts.run else None


Cause = Callable[[Site, Any, Facts], Why | None]
_OF_VALUES: tuple[Cause, ...] = (
    _no_such_call, _runs_differed, _not_own_operation, _forward_called_directly,
    _weights_used_directly, _raised_before, _only_in_other_mode, _inside_fused_attention,
    _not_reached,
)  # fmt: skip
_OF_GRADIENTS: tuple[Cause, ...] = (
    _gradients_switched_off, _no_such_call, _module_did_not_run, _value_has_no_gradient,
    _no_backward, _no_gradient_arrived,
)  # fmt: skip
