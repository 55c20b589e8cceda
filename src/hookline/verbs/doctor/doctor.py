"""Tell whether the selected sites fire in the present regime, and why not.

The model runs in its present mode and gradient mode, and not in eval mode under no_grad, because
the diagnosis must hold for the user's own run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.engine import (
    Line,
    ModuleNode,
    Selection,
    Selector,
    Site,
    SitedNode,
    check_ports,
    has_forward,
    is_compiled,
    is_scripted,
    path_text,
    require_model,
)
from hookline.engine.report.why_silent import Why
from hookline.verbs.doctor.causes_of_silence import Facts, verdict_on
from hookline.verbs.doctor.diagnosis import Diagnosis, SiteVerdict
from hookline.verbs.doctor.notes import environment, notes
from hookline.verbs.doctor.observe import Observations, WeightUses, observe_calls
from hookline.verbs.doctor.trial_run import run_with_hooks
from hookline.verbs.shared.model_state import restore_after_run
from hookline.verbs.shared.refused_ports import refuse_ignored_ports
from hookline.verbs.shared.refused_weights import first_lazy_name
from hookline.verbs.shared.run_model import Inputs, call_model, copy_inputs, unwrap_lone_tensor


def doctor(
    model: nn.Module,
    inputs: Inputs | None = None,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
) -> Diagnosis:
    """Tell before a long run whether the selected sites fire, how often, and if not, why.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> model[0].requires_grad_(False)
        Linear(in_features=2, out_features=3, bias=True)
        >>> diagnosis = hl.doctor(model, torch.zeros(4, 2), "*", ports=("output", "grad_output"))
        >>> diagnosis["0"].verdict, diagnosis["0:grad_output"].verdict
        ('fires', 'never')
        >>> diagnosis["0:grad_output"].remedy[:39]
        'give an input with x.requires_grad_(), '

    A site fires if its hook is called. The model runs in its present mode, gradient mode and
    autocast, and with its compiled code. It runs forward twice, once without hooks and once with a
    hook at each site. It runs more often if a hook is not called. With gradient ports, backward
    runs, too.

    Afterwards, modes, buffers, every `.grad`, random states, and attributes that the forward sets
    on its modules are as before. Changes elsewhere (a list that grows, a file) stay.

    Args:
        model: the model. For a DistributedDataParallel, the module inside it runs, on this rank
            alone.
        inputs: a tensor; a tuple of arguments; a dict of keyword arguments; or a function without
            arguments that runs the model and returns the loss, for gradients of that loss. Give a
            dict that is one argument as `({...},)`. A list of one tensor is this tensor, unless the
            model takes the list. None finds only causes that need no run.
        selector: which sites, as in `hl.select`. None is every module.
        ports: one or several of "output", "input", "grad_output", "grad_input" and "grad", for
            selectors that name no port.

    Returns:
        A diagnosis. Print it, or read `.sites`, `.notes`, `.failure` and `.ok`. `diagnosis[site]`
        is the verdict on one site, with `verdict`, `why` and `remedy`.

    Raises:
        SelectionError: the selector matches nothing, or a port is unknown.
        AttachError: `model` is not a module.
    """
    require_model(model, "hl.doctor(model, x)")
    while isinstance(model, DistributedDataParallel):
        model = model.module  # a call of the wrapper would wait for the other processes
    refuse_ignored_ports(ports, selector)
    line = Line(model, name="doctor")
    places, holders = _sites_and_containers(line, selector, check_ports(ports))
    facts = Facts(line.nodes, is_training=model.training)
    selection = Selection(line.module_tree, places)
    _gather_facts(model, inputs, selection, facts)
    verdicts = [verdict_on(site, node, facts) for site, node in selection.places]
    ran = "nothing"
    if facts.run is not None:
        ran = "forward and backward" if facts.run.backward else "forward"
    return Diagnosis(
        model_type=line.module_tree.name,
        ran=ran,
        sites=(*verdicts, *holders),
        notes=tuple(notes(model, verdicts, facts)),
        failure=None if facts.run is None else facts.run.failure,
        environment=environment(model),
    )


def _sites_and_containers(
    line: Line, selector: Selector, ports: tuple[str, ...]
) -> tuple[list[SitedNode], list[SiteVerdict]]:
    """List the selected sites, and verdicts on named containers, which no verb would select."""
    parts = selector if isinstance(selector, list | tuple) and selector else [selector]
    places: list[SitedNode] = []
    holders: list[SiteVerdict] = []
    for part in parts:
        holder = _named_container(line.nodes, part)
        if holder is None:
            places += line.select(part, ports).places
            continue
        kind = holder.type_name
        holds_modules = any(True for _ in holder.module.children())
        inside = f"{holder.path}.*" if holder.path else "*"
        inside = repr(inside if holds_modules else f"{path_text(holder.path)}:grad")
        site = Site(holder.path, "output", (), None, holder.aliases, kind)
        why = f"{kind} is a container only: it has no forward, and is never called"
        holders.append(
            SiteVerdict(site, 0, why, f"select the modules or parameters in it: {inside}")
        )
    return places, holders


def _named_container(nodes: list[ModuleNode], part: Any) -> ModuleNode | None:
    for node in nodes:
        is_named = node.module is part or (isinstance(part, str) and part in node.paths)
        if is_named and not has_forward(node.module):
            return node
    return None


def _gather_facts(model: nn.Module, inputs: Any, selection: Selection, facts: Facts) -> None:
    """Run the model as often as the causes need."""
    lazy = first_lazy_name(model)
    if inputs is None or is_scripted(model) or not len(selection):
        return
    if lazy is not None:
        facts.no_run = Why(
            f"{lazy} is lazy: the first run of the model creates it for good",
            "run the model once yourself, then call hl.doctor again",
        )
        return
    inputs = unwrap_lone_tensor(model, inputs)
    is_eager = not any(is_compiled(module) for module in model.modules())
    can_observe = is_eager and sys.getprofile() is None  # a thread has one profiling function
    if can_observe:
        facts.observations = _observe_run(model, inputs, facts.nodes)
    facts.run = run_with_hooks(model, selection, inputs)
    if can_observe and not facts.run.failure:
        _investigate_silent_modules(model, inputs, selection, facts)


def _investigate_silent_modules(
    model: nn.Module, inputs: Any, selection: Selection, facts: Facts
) -> None:
    """Find out whether modules that were not called are used by weight, or in the other mode."""
    ran = facts.observations.ran
    modules = {path: id(node.module) for node in facts.nodes for path in node.paths}
    fired = facts.run.fired if facts.run else {}
    silent = {
        id(node.owner) if isinstance(node, ModuleNode) else modules[node.path.rpartition(".")[0]]
        for site, node in selection.places
        if not fired.get(site)
    }
    idle = silent - ran
    facts.differing = _find_module_differing_with_hooks(selection, facts, ran)
    if silent and facts.differing is None:
        facts.differing = _module_called_in_one_run_only(
            facts.nodes, ran, _observe_run(model, inputs, facts.nodes)
        )
    if not idle or facts.differing is not None:
        return
    with restore_after_run(model), WeightUses(facts.nodes, facts.observations):
        _call_ignoring_errors(model, inputs)
    if not facts.observations.fast:  # torch's function mode switches them off
        facts.differing = next((node for node in facts.nodes if _newly_called(node, facts)), None)
    if facts.differing is None and idle - facts.observations.used.keys():
        flipped = _observe_run(model, inputs, facts.nodes, flip=True)
        facts.other_mode = flipped.ran - ran
        if facts.other_mode & idle:
            again = _observe_run(model, inputs, facts.nodes, flip=True)
            facts.differing = _module_called_in_one_run_only(facts.nodes, flipped.ran, again)


def _module_called_in_one_run_only(
    nodes: list[ModuleNode], ran: set[int], again: Observations
) -> ModuleNode | None:
    """Find a module that was called in one of two runs alone."""
    ran_again = again.ran
    keys = ((node, id(node.module)) for node in nodes)
    return next((node for node, key in keys if (key in ran) != (key in ran_again)), None)


def _newly_called(node: ModuleNode, facts: Facts) -> bool:
    """Tell whether a module that was not called before was called where uses were observed."""
    key, observations = id(node.module), facts.observations
    use = observations.used.get(key)
    return use is not None and use.within == node.path and key not in observations.ran


def _find_module_differing_with_hooks(
    selection: Selection, facts: Facts, ran: set[int]
) -> ModuleNode | None:
    """Find a selected module that was called in the hooked run or in that without hooks alone."""
    run = facts.run
    if run is None or facts.observations.fast:  # hooks switch torch's fast paths off
        return None
    for site, node in selection.places:
        if type(node) is not ModuleNode or site.is_gradient or site in run.refused:
            continue
        fired = run.fired.get(site, 0) > 0
        is_called = id(node.module) in facts.observations.called
        if (fired and id(node.module) not in ran) or (is_called and not fired and not site.call):
            return node
    return None


def _observe_run(
    model: nn.Module, inputs: Any, nodes: list[ModuleNode], *, flip: bool = False
) -> Observations:
    with restore_after_run(model):
        if flip:
            is_training = model.training
            for module in model.modules():
                module.training = not is_training
        with observe_calls(nodes) as observations:
            _call_ignoring_errors(model, inputs)
    return observations


def _call_ignoring_errors(model: nn.Module, inputs: Any) -> None:
    # The hooked run raises the same error and reports it.
    with contextlib.suppress(Exception):
        call_model(model, copy_inputs(inputs))
