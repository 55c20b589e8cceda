"""Find the parts of a model in a trace, and prove them on two inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

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
from hookline.verbs.anatomy.claims import Claim, claims_of
from hookline.verbs.anatomy.head import Head, Names, name_embeddings, name_head
from hookline.verbs.anatomy.identity_errors import limit
from hookline.verbs.anatomy.inner import name_attention, name_experts, name_mlp
from hookline.verbs.anatomy.interventions import Interventions
from hookline.verbs.anatomy.part_names import PartNames
from hookline.verbs.anatomy.parts import Layer, name_layer
from hookline.verbs.anatomy.stacks import stacks_of
from hookline.verbs.anatomy.trace import Trace
from hookline.verbs.record.record import record
from hookline.verbs.shared.rerun import copied
from hookline.verbs.shared.run_model import call


@final
@dataclass(eq=False, slots=True)
class Stack:
    """A stack of blocks with its proven names.

    Attributes:
        path: the path of the stack.
        layers: its blocks.
        names: the names that belong to no layer.
        head: what the model computes from the last stream; None where it cannot be told.
        errors: the largest error of each name's identities, by layer; -1 is no layer.
        shapes: the shapes of the values by site, for the first input.
    """

    path: str
    layers: list[Layer]
    names: Names
    head: Head | None = None
    errors: dict[tuple[str, int], float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def part_names(self, model: nn.Module) -> PartNames:
        """Return the names without the trace, which they would keep alive."""
        owners: list[tuple[int, Any]] = [(-1, self.names), *enumerate(self.layers)]
        stream = self.layers[0].block.pre.tensor
        return PartNames(
            model=type(model).__name__,
            stack=self.path,
            blocks=tuple(layer.block.path for layer in self.layers),
            sites={(name, k): site for k, each in owners for name, site in each.sites.items()},
            refused={(name, k): why for k, each in owners for name, why in each.refused.items()},
            errors=self.errors,
            shapes=self.shapes,
            width=stream.shape[-1],
            n_tokens=stream[..., 0].numel(),
            n_value_heads=tuple(layer.n_value_heads for layer in self.layers),
        )


def structure_of(model: nn.Module, trace: Trace, inputs: Sequence[Any]) -> list[Stack]:
    """Find and prove the parts of every stack of a model.

    Args:
        model: the model, in eval mode.
        trace: its run on the first input.
        inputs: the inputs on which the names are proven.

    Raises:
        SelectionError: no stack of the model has a residual stream.
        InputError: the inputs have fewer than three tokens.
    """
    stacks = _stacks(model, trace)
    for stack in stacks:
        _check_tokens(stack, inputs[0])
        Interventions(model, trace, inputs[0], stack.layers).tell_apart()
        claims = list(_name(model, trace, stack, is_last=stack is stacks[-1]))
        _prove(model, stack, claims, inputs)
        if stack.head is not None:
            stack.head.forget_the_trace()
    return stacks


def _check_tokens(stack: Stack, inputs: Any) -> None:
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


def _stacks(model: nn.Module, trace: Trace) -> list[Stack]:
    chains, reasons = stacks_of(model, trace)
    if not chains:
        none = "no stack of blocks ran, two or more, each on what the last one returned"
        why = reasons[0] if reasons else none + _scripted_text(model)
        raise SelectionError(
            f"{type(model).__name__} must have a residual stream, and none can be proven: {why}."
            "\nSelect modules by their paths: hl.summary(model) lists them."
        )
    stacks = [Stack(chain.path, chain.layers, Names()) for chain in chains]
    return sorted(stacks, key=lambda stack: stack.layers[-1].block.call.end)


def _scripted_text(model: nn.Module) -> str:
    """Name a module whose calls nobody sees, if the model has one."""
    paths = [path for path, module in model.named_modules() if is_scripted(module)]
    return f"; {paths[0]} is a ScriptModule, whose calls are not seen" if paths else ""


def _name(
    model: nn.Module, trace: Trace, stack: Stack, *, is_last: bool
) -> Iterable[tuple[int, Claim]]:
    for number, layer in enumerate(stack.layers):
        name_layer(trace, layer)
        claims = claims_of(trace, layer)
        claims += name_mlp(trace, layer)
        claims += name_experts(trace, layer, model)
        claims += name_attention(trace, layer)
        yield from ((number, each) for each in claims)
    name_embeddings(model, trace, stack.layers[0], stack.names)
    if is_last:
        stack.head = name_head(trace, stack.layers[-1], stack.names)
    yield from ((-1, each) for each in stack.names.claims)


def _prove(
    model: nn.Module, stack: Stack, claims: Sequence[tuple[int, Claim]], inputs: Sequence[Any]
) -> None:
    """Measure every identity on every input, and refuse the names whose identities fail."""
    sites = sorted({site for _, each in claims for site in each.sites})
    bound = limit(stack.layers[0].block.pre.tensor.dtype)
    failing: dict[tuple[str, int], str] = {}
    for n_input, each_input in enumerate(inputs, 1):
        values = _values(model, sites, each_input)
        shapes = {site: tuple(v.shape) for site, v in values.items() if isinstance(v, Tensor)}
        stack.shapes = shapes | stack.shapes
        for key, worst, why in _measured(claims, values, n_input):
            if worst >= stack.errors.get(key, 0.0):
                stack.errors[key] = worst
                failing[key] = f"{why}, above {bound:.0e}" if worst < math.inf else why
    for (name, number), worst in stack.errors.items():
        owner: Any = stack.names if number < 0 else stack.layers[number]
        if worst > bound and name in owner.sites:
            owner.refused[name] = f"{failing[name, number]}, at {owner.sites.pop(name)}"


def _values(model: nn.Module, sites: Sequence[str], inputs: Any) -> dict[str, Tensor | str]:
    """Record the values of sites, or why they have none; attention by name may be unknown."""
    try:
        with record(model, sites, copy=True) as run:
            call(model, copied(inputs))
    except AttachError as error:
        others = [site for site in sites if site.rpartition("@")[2] not in PARTS]
        if len(others) == len(sites):
            raise
        why = first_line(error).removesuffix(".")
        return dict.fromkeys(sites, why) | _values(model, others, inputs)
    values: dict[str, Tensor | str] = {}
    for site in sites:
        try:
            values[site] = run.tensor(site)
        except NotRecordedError:
            values[site] = f"{site} has no value"
        except (AmbiguousError, StructureError):
            values[site] = f"{site} has several values"
    return values


def _measured(
    claims: Sequence[tuple[int, Claim]], values: dict[str, Tensor | str], n_input: int
) -> Iterator[tuple[tuple[str, int], float, str]]:
    """Yield each name and layer, the error of an identity that it needs, and a text of it."""
    for number, each in claims:
        worst, why = _error(each, values)
        yield from (((name, number), worst, f"{why} on input {n_input}") for name in each.names)


def _error(each: Claim, values: dict[str, Tensor | str]) -> tuple[float, str]:
    """Return the error of an identity, and a text for people."""
    own = [values[site] for site in each.sites]
    lacking = [value for value in own if isinstance(value, str)]
    if lacking:
        return math.inf, lacking[0]
    tensors = [value for value in own if isinstance(value, Tensor)]
    worst = each.measure(*tensors)
    if worst < math.inf:
        return worst, f"{each.text} is off by {worst:.1e}"
    pairs = zip(each.sites, tensors, strict=True)
    not_numbers = [site for site, value in pairs if not value.isfinite().all()]
    if not_numbers:
        return worst, f"{not_numbers[0]} has NaN or infinity"
    return worst, f"{each.text} has values without sites, or of shapes that do not fit,"


@contextmanager
def quiet() -> Iterator[None]:
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
