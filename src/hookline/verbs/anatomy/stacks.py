"""Find the stacks of blocks of a model in a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from torch import nn

from hookline.engine import unwrap
from hookline.verbs.anatomy.embeddings_and_head import Head
from hookline.verbs.anatomy.identities import Names
from hookline.verbs.anatomy.parts import (
    Layer,
    is_cross_attention,
    refuse_several_streams,
    unclassified_layer,
)
from hookline.verbs.anatomy.proven_names import ProvenNames
from hookline.verbs.anatomy.residual_stream import NoStream, trace_stream_through_block
from hookline.verbs.anatomy.trace import ModuleCall, Trace


@final
@dataclass(eq=False, slots=True)
class Stack:
    """Blocks that the stream goes through, one after the other, with their proven names."""

    path: str  # the path of the module whose children they are
    layers: list[Layer]  # the blocks, of which none is a norm before the first or after the last
    names: Names = field(default_factory=Names)  # the names that belong to no layer
    # What the model computes from the last stream; None where it cannot be told.
    head: Head | None = None
    # The largest error of each name's identities, by layer; -1 is no layer.
    errors: dict[tuple[str, int], float] = field(default_factory=dict)
    # The shapes of the values by site, for the first input.
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def contains_module(self, path: str) -> bool:
        """Tell whether a module is one of the blocks, or in one."""
        return any(f"{path}.".startswith(f"{layer.block.path}.") for layer in self.layers)

    def names_by_layer(self) -> dict[int, Names]:
        """Return the names by layer; -1 is no layer."""
        return {-1: self.names, **{k: layer.names for k, layer in enumerate(self.layers)}}

    def proven_names(self, model: nn.Module) -> ProvenNames:
        """Return the names without the trace, which they would keep alive."""
        owners = self.names_by_layer().items()
        stream = self.layers[0].block.pre.tensor
        return ProvenNames(
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


def find_stacks(model: nn.Module, trace: Trace) -> tuple[list[Stack], list[str]]:
    """Return the stacks of a model, none inside another; and why chains of blocks are none."""
    chains: list[Stack] = []
    reasons: list[tuple[int, str]] = []
    for path, calls in _chained_children(model, trace):
        layers = [_layer_or_no_stream(trace, call) for call in calls]
        chains += [Stack(path, run) for run in _runs_of_connected_layers(layers)]
        reasons += _reasons_for_no_stream(
            [model.get_submodule(call.path) for call in calls], layers
        )
    stacks: list[Stack] = []
    for chain in chains:
        inner = [each for each in chains if each is not chain and chain.contains_module(each.path)]
        if any(stack.contains_module(chain.path) for stack in stacks) or _are_blocks_stages(
            chain, inner
        ):
            continue
        stacks.append(chain)
    return stacks, [why for _, why in sorted(reasons, reverse=True)]


def _reasons_for_no_stream(
    modules: Sequence[nn.Module], layers: Sequence[Layer | NoStream]
) -> Iterator[tuple[int, str]]:
    """Yield why modules of one type, one after the other, have no stream; and their number."""
    for _, group in itertools.groupby(
        zip(modules, layers, strict=True), key=lambda pair: type(pair[0])
    ):
        pairs = list(group)
        why = [str(layer) for _, layer in pairs if isinstance(layer, NoStream)]
        why += [
            f"{layer.block.path} adds to its input nothing that it computes of it"
            for _, layer in pairs
            if isinstance(layer, Layer) and not layer.parts
        ]
        if why and len(pairs) > 1 and any(pairs[0][0].children()):
            yield len(pairs), why[0]


def _chained_children(model: nn.Module, trace: Trace) -> Iterator[tuple[str, list[ModuleCall]]]:
    """Yield the children of each module that ran once, each on what the last one returned.

    Outer modules come before inner ones. What returns what it gets, as dropout does, is left out.
    """
    for path, module in _unwrapped_modules(model, ""):
        paths = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
        runs = [call for child in paths for call in trace.calls.get(child, ())]
        calls = [call for call in runs if not _returns_its_inputs(call)]
        if len({call.path for call in calls}) < len(calls):
            continue  # a child that runs again has no site of its own
        chain: list[ModuleCall] = []
        for call in sorted(calls, key=lambda each: each.begin):
            if chain and not (chain[-1].end <= call.begin and _feeds_into(chain[-1], call)):
                yield path, chain
                chain = []
            chain.append(call)
        if chain:
            yield path, chain


def _unwrapped_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its path, in which torch's wrappers have no segment."""
    module = unwrap(module)
    yield path, module
    for name, child in module.named_children():
        yield from _unwrapped_modules(child, f"{path}.{name}" if path else name)


def _returns_its_inputs(call: ModuleCall) -> bool:
    given = {id(value.origin) for value in call.inputs.values()}
    return bool(call.outputs) and all(id(value.origin) in given for value in call.outputs.values())


def _feeds_into(first: ModuleCall, second: ModuleCall) -> bool:
    origins = {id(value.origin) for value in first.outputs.values()}
    return any(id(value.origin) in origins for value in second.inputs.values())


def _layer_or_no_stream(trace: Trace, call: ModuleCall) -> Layer | NoStream:
    try:
        layer = unclassified_layer(trace_stream_through_block(trace, call))
        refuse_several_streams(layer)
    except NoStream as reason:
        return reason
    return layer


def _runs_of_connected_layers(layers: Sequence[Layer | NoStream]) -> Iterator[list[Layer]]:
    """Yield the longest runs of two or more blocks whose stream goes from each to the next."""
    runs: list[list[Layer]] = [[]]
    for layer in layers:
        if isinstance(layer, NoStream) or not layer.block.steps:
            runs.append([])
            continue
        last = runs[-1][-1] if runs[-1] else None
        if last is not None and layer.block.pre.origin is not last.block.post.origin:
            runs.append([])
        runs[-1].append(layer)
    for run in runs:
        adding = [number for number, layer in enumerate(run) if layer.parts]
        if len(adding) > 1:
            yield _without_last_norm(run[adding[0] : adding[-1] + 1])


def _without_last_norm(run: list[Layer]) -> list[Layer]:
    """Let the stream of the last block end before a norm that no other block ends with."""
    *others, last = run
    steps = last.block.steps
    if not steps[-1].terms and all(layer.block.steps[-1].terms for layer in others):
        block = replace(last.block, post=steps[-1].before, steps=steps[:-1])
        return [*others, unclassified_layer(block)]
    return run


def _are_blocks_stages(chain: Stack, inner: Sequence[Stack]) -> bool:
    """Tell whether the blocks are stages, each with blocks that have attention of their own."""
    return any(_n_self_attentions(chain, layer) > 1 for layer in chain.layers) and any(
        sum(_n_self_attentions(each, layer) > 0 for layer in each.layers) > 1 for each in inner
    )


def _n_self_attentions(chain: Stack, layer: Layer) -> int:
    """Return how many parts of a block attend to the stream."""
    begin = chain.layers[0].block.call.begin
    parts = [part for part in layer.parts if part.cores]
    return sum(not is_cross_attention(part, layer.block, begin) for part in parts)
