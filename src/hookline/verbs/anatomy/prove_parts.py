"""Find the parts of a model in a trace, and prove them on two inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookline.display.text import first_line
from hookline.engine import PARTS, is_scripted
from hookline.engine.pytree import tree
from hookline.errors import (
    AmbiguousError,
    AttachError,
    HooklineWarning,
    InputError,
    NotRecordedError,
    SelectionError,
    StructureError,
)
from hookline.verbs.anatomy.embeddings_and_head import (
    name_embeddings_and_count_words,
    name_final_norm_and_logits,
)
from hookline.verbs.anatomy.identities import Claim, tolerance
from hookline.verbs.anatomy.interventions import Interventions
from hookline.verbs.anatomy.name_inside_parts import name_attention, name_experts, name_mlp
from hookline.verbs.anatomy.parts import claim_stream_identities, name_stream_and_parts
from hookline.verbs.anatomy.stacks import Stack, find_stacks
from hookline.verbs.anatomy.trace import Trace
from hookline.verbs.record.record import record
from hookline.verbs.shared.run_model import call_model, copy_inputs


def find_and_prove_parts(model: nn.Module, trace: Trace, inputs: Sequence[Any]) -> list[Stack]:
    """Find and prove the parts of every stack of a model.

    Args:
        model: the model, in eval mode.
        trace: its run on the first input.
        inputs: the inputs on which the names are proven.

    Raises:
        SelectionError: no stack of the model has a residual stream.
        InputError: the inputs have fewer than three tokens.
    """
    stacks = _require_stacks(model, trace)
    for stack in stacks:
        _check_enough_tokens(stack, inputs[0])
        Interventions(model, trace, inputs[0], stack.layers).determine_kinds()
        _name_parts(model, trace, stack, is_last=stack is stacks[-1])
        _prove_names(model, stack, inputs)
        if stack.head is not None:
            stack.head.release_trace()
    return stacks


def _check_enough_tokens(stack: Stack, inputs: Any) -> None:
    """Refuse a text that is too short to tell the parts apart.

    Most streams are (rows, tokens, features). XLNet's is (tokens, rows, features), which its ids
    tell, of shape (rows, tokens). Where nothing tells, as of (7, 2, 16), the larger one counts.
    """
    sizes = stack.layers[0].block.pre.tensor.shape[:-1]
    shapes = [tensor.shape for _, tensor in tree.tensors(inputs)]
    n_tokens = max(sizes)
    if len(sizes) == 2 and sizes != sizes[::-1]:
        n_tokens = sizes[1] if sizes in shapes else sizes[0] if sizes[::-1] in shapes else n_tokens
    n_tokens = n_tokens if all(sizes) else 0  # such as of no rows
    if n_tokens < _FEWEST_TOKENS:
        raise InputError(
            f"inputs must have at least {_FEWEST_TOKENS} tokens, got {n_tokens} at"
            f" {stack.layers[0].block.path}.\nGive a longer text."
        )


_FEWEST_TOKENS = 3


def _require_stacks(model: nn.Module, trace: Trace) -> list[Stack]:
    stacks, reasons = find_stacks(model, trace)
    if not stacks:
        none = (
            "no stack of blocks ran, two or more, each on what the last one returned (a sum such as"
            " x + block(x) must lie within the block)"
        )
        why = reasons[0] if reasons else none + _scripted_module_text(model)
        raise SelectionError(
            f"{type(model).__name__} must have a residual stream, and none can be proven: {why}."
            "\nSelect modules by their paths: hl.summary(model) lists them."
        )
    return sorted(stacks, key=lambda stack: stack.layers[-1].block.call.end)


def _scripted_module_text(model: nn.Module) -> str:
    """Name a module whose calls nobody sees, if the model has one."""
    paths = [path for path, module in model.named_modules() if is_scripted(module)]
    return f"; {paths[0]} is a ScriptModule, whose calls are not seen" if paths else ""


def _name_parts(model: nn.Module, trace: Trace, stack: Stack, *, is_last: bool) -> None:
    """Find the sites of all names, and claim the identities that prove them."""
    for layer in stack.layers:
        name_stream_and_parts(trace, layer)
        claim_stream_identities(trace, layer)
        name_mlp(trace, layer)
        name_experts(trace, layer, model)
        name_attention(trace, layer)
    n_words = name_embeddings_and_count_words(model, trace, stack.layers[0], stack.names)
    if is_last:
        stack.head = name_final_norm_and_logits(trace, stack.layers[-1], stack.names, n_words)


def _prove_names(model: nn.Module, stack: Stack, inputs: Sequence[Any]) -> None:
    """Measure every identity on every input, and refuse the names whose identities fail."""
    owners = stack.names_by_layer()
    claims = [(number, claim) for number, names in owners.items() for claim in names.claims]
    sites = sorted({site for _, each in claims for site in each.sites})
    bound = tolerance(stack.layers[0].block.pre.tensor.dtype)
    failing: dict[tuple[str, int], str] = {}
    for n_input, each_input in enumerate(inputs, 1):
        values = _record_values(model, sites, each_input)
        shapes = {site: tuple(v.shape) for site, v in values.items() if isinstance(v, Tensor)}
        stack.shapes = shapes | stack.shapes
        for number, claim in claims:
            worst, why = _measure_claim(claim, values)
            why += f" on input {n_input}" + f", above {bound:.0e}" * (worst < math.inf)
            keys = [(name, number) for name in claim.names]
            worse = [key for key in keys if worst >= stack.errors.get(key, 0.0)]
            stack.errors |= dict.fromkeys(worse, worst)
            failing |= dict.fromkeys(worse, why)
    for (name, number), worst in stack.errors.items():
        owner = owners[number]
        if worst > bound and name in owner.sites:
            owner.refused[name] = f"{failing[name, number]}, at {owner.sites.pop(name)}"


def _record_values(model: nn.Module, sites: Sequence[str], inputs: Any) -> dict[str, Tensor | str]:
    """Record the values of sites, or why they have none; attention by name may be unknown."""
    try:
        with record(model, sites, copy=True) as run:
            call_model(model, copy_inputs(inputs))
    except AttachError as error:
        others = [site for site in sites if site.rpartition("@")[2] not in PARTS]
        if len(others) == len(sites):
            raise
        why = first_line(error).removesuffix(".")
        return dict.fromkeys(sites, why) | _record_values(model, others, inputs)
    values: dict[str, Tensor | str] = {}
    for site in sites:
        try:
            values[site] = run.tensor(site)
        except NotRecordedError:
            values[site] = f"{site} has no value"
        except (AmbiguousError, StructureError):
            values[site] = f"{site} has several values"
    return values


def _measure_claim(claim: Claim, values: dict[str, Tensor | str]) -> tuple[float, str]:
    """Return the error of an identity, and a text for people."""
    own = [values[site] for site in claim.sites]
    lacking = [value for value in own if isinstance(value, str)]
    if lacking:
        return math.inf, lacking[0]
    tensors = [value for value in own if isinstance(value, Tensor)]
    worst = claim.measure(*tensors)
    if worst < math.inf:
        return worst, f"{claim.text} is off by {worst:.1e}"
    pairs = zip(claim.sites, tensors, strict=True)
    not_numbers = [site for site, value in pairs if not value.isfinite().all()]
    if not_numbers:
        return worst, f"{not_numbers[0]} has NaN or infinity"
    return worst, f"{claim.text} has values without sites, or of shapes that do not fit,"


@contextmanager
def without_warnings_and_fastpath() -> Iterator[None]:
    """Leave out hookline's warnings: sites that never fire are refused, and no run is kept.

    Torch's fast path for padded texts is left out, too: its values are nested, without a shape.
    """
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HooklineWarning)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
