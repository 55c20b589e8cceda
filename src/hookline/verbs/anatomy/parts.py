"""Name the parts of a block: where the trace sees each, and what they add to the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine import Site
from hookline.verbs.anatomy.identities import Names, equal_or_rescale_error, relative_error
from hookline.verbs.anatomy.residual_stream import (
    MATMULS,
    Block,
    NoStream,
    Term,
    event_index,
    values_on_every_path,
    walk_back,
)
from hookline.verbs.anatomy.trace import Event, Trace, Value, port_or_operation

_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward"}


class AttentionCore(NamedTuple):
    """A call that mixes values by a pattern, and these values; None where they are unknown.

    Such a call is `scaled_dot_product_attention`, or the product of a softmax and the values.
    """

    call: Event
    values: Value | None


@final
@dataclass(eq=False, slots=True, repr=False)
class Part:
    """One part of a block: a term of its sums, and what it is."""

    term: Term  # the term
    # The calls that mix the tokens by a pattern. None where no attention is.
    cores: list[AttentionCore]
    softmax: Event | None = None  # the call that computes the pattern, if it is a call of its own
    # "attention", "cross", "mixer", "mlp", "side" or "unknown", once the interventions are done.
    kind: str = ""
    why: str = ""  # why a part with a pattern is no attention, or why no kind can be told


@final
@dataclass(eq=False, slots=True, repr=False)
class Layer:
    """A block with its parts, and their names."""

    block: Block  # the block
    parts: list[Part]  # the parts in the order of the sums
    names: Names = field(default_factory=Names)  # the names, with their sites
    projection: str = ""  # the path of the output projection of the attention; "" without one
    # The number of heads of the values, before they are repeated; 0 if unknown.
    n_value_heads: int = 0

    def parts_of_kind(self, kind: str) -> list[Part]:
        """Return the parts of a kind."""
        return [part for part in self.parts if part.kind == kind]


def unclassified_layer(block: Block) -> Layer:
    """Return a block with its parts, of unknown kinds."""
    return Layer(block, list(map(_make_part, block.terms)))


def _make_part(term: Term) -> Part:
    fused = [event for event in term.events if event.name in _FUSED]
    # Beside the values, the mask may be no constant.
    cores = [AttentionCore(event, argument_of(event, 2, "value")) for event in fused]
    first = None
    for event in term.events:
        is_softmax = event.name == "softmax" and event.outputs[:1]
        if is_softmax and event.outputs[0].tensor.dim() > 2:
            product = _product_with_values(event, term)
            if product is not None:
                cores.append(product)
                first = first or event
    return Part(term, cores, first)


def argument_of(event: Event, position: int, name: str) -> Any:
    """Return an argument of a call by its number or name; None if the call has none."""
    positional, named = event.arguments
    return positional[position] if position < len(positional) else named.get(name)


def _product_with_values(softmax: Event, term: Term) -> AttentionCore | None:
    """Return the product of a softmax and values; a router's softmax has none."""
    pattern = {id(value) for value in softmax.outputs}
    for event in term.events:
        if event.index <= softmax.index or not any(id(v) in pattern for v in event.inputs):
            continue
        if event.name in _PRODUCTS:
            others = [value for value in event.varying if id(value) not in pattern]
            return AttentionCore(event, others[-1] if others else None)
        if event.name not in ("topk", "mul", "sum", "scatter", "gather", "max", "sort"):
            pattern.update(map(id, event.outputs))
    return None


def is_cross_attention(part: Part, block: Block, stack_begin: int) -> bool:
    """Tell whether an attention's values come from before the stack, such as from an encoder.

    Args:
        part: a part with cores.
        block: its block.
        stack_begin: the number of the first event in the stack.
    """
    values = part.cores[0].values
    if values is None:
        return False
    on_stream = block.stream_ids
    if any(id(value) in on_stream for value in values.equal_values()):
        return False
    events, reads = walk_back(values, on_stream, stack_begin)
    is_local = any(event.index < block.call.begin for event in events)
    return not reads and not is_local


def side_inputs(part: Part, block: Block) -> list[Value]:
    """Return what a part gets besides the stream: values of each token from outside the block."""
    shape, on_stream = block.pre.tensor.shape, block.stream_ids
    return [
        value
        for event in part.term.events
        for value in event.varying
        if id(value) not in on_stream
        and (value.maker is None or value.maker.index < block.call.begin)
        and value.tensor.is_floating_point()
        and value.tensor.shape[:-1] == shape[:-1]
    ]


# -- sites ----------------------------------------------------------------------------------------


def output_site(
    trace: Trace, value: Value, inside: str, *, is_innermost: bool = False
) -> str | None:
    """Return the best site of a value inside a module: of the outermost module that returns it."""
    sign = -1 if is_innermost else 1
    places = [place for each in value.equal_values()[::sign] for place in each.places]
    for kind in ("output", "operation"):
        fitting = [
            place
            for place in places
            if port_or_operation(place) == kind and _is_place_inside(place, inside)
        ]
        if fitting:
            return trace.site_text(min(fitting, key=lambda place: sign * place.path.count(".")))
    return None


def _is_place_inside(place: Site, inside: str) -> bool:
    path = place.path.partition("@")[0]
    if path == inside:
        return port_or_operation(place) == "operation"
    return path.startswith(f"{inside}." if inside else "")


def input_site(trace: Trace, value: Value, inside: str, events: Sequence[Event]) -> str | None:
    """Return the input of the outermost module that gets a value, of those that a part runs."""
    paths = {event.path for event in events}
    places = [
        place
        for each in value.equal_values()
        for place in each.places
        if place.port == "input" and place.path.startswith(f"{inside}.")
        and any(f"{path}.".startswith(f"{place.path}.") for path in paths)
    ]  # fmt: skip
    if not places:
        return output_site(trace, value, inside)
    return trace.site_text(min(places, key=lambda place: (place.path.count("."), place.call or 0)))


def stream_site(trace: Trace, value: Value, block: Block) -> str | None:
    """Return the site where the stream can be seen and changed."""
    if value is block.pre:
        return next(iter(trace.sites_of_kind(value, "input", block.path)), None)
    if value is block.post and value in block.call.outputs.values():
        return next(reversed(trace.sites_of_kind(value, "output", block.path)), None)
    shape = block.pre.tensor.shape
    shaped = next((each for each in value.equal_values() if each.tensor.shape == shape), value)
    return output_site(trace, shaped, block.path)


# -- names ----------------------------------------------------------------------------------------


def unavoidable_values(term: Term) -> list[Value]:
    """Return the values of a term that no path from the stream passes by, in order."""
    read = term.reads[-1]
    reached, values = {id(read)}, [read]
    for event in term.events:
        if any(id(value) in reached for value in event.varying):
            new = [value for value in event.outputs if id(value) not in reached]
            reached.update(map(id, new))
            values += new
    return values_on_every_path(values, term.value) if id(term.value) in reached else [term.value]


def input_and_output(term: Term) -> tuple[Value, Value]:
    """Return what a part gets before its first product, and what its last product returns."""
    gates = unavoidable_values(term)
    products = [event.index for event in term.events if event.name in MATMULS]
    if not products:
        return gates[0], term.value
    first = [value for value in gates if event_index(value) < products[0]] or gates[:1]
    last = [value for value in gates if event_index(value) >= products[-1]] or [term.value]
    return _closest_in_shape_to_stream(first[::-1], term), _closest_in_shape_to_stream(last, term)


def _closest_in_shape_to_stream(values: Sequence[Value], term: Term) -> Value:
    """Return the first value of the stream's shape, or else of its size, or else the first."""
    stream = term.reads[-1].tensor
    shaped = [value for value in values if value.tensor.shape == stream.shape]
    sized = [value for value in values if value.tensor.numel() == stream.numel()]
    return (shaped or sized or list(values))[0]


def refuse_several_streams(layer: Layer) -> None:
    """Refuse a block whose parts read a mixture of several streams.

    Raises:
        NoStream: there are several streams.
    """
    stream = layer.block.pre.tensor
    if stream.dim() > 3 and not any(part.cores for part in layer.parts):
        raise NoStream(f"no part of {layer.block.path} has an attention pattern")
    for part in layer.parts if stream.dim() > 3 else ():
        sources = [v.tensor for e in part.term.events if e.name in MATMULS for v in e.varying]
        is_read = any(
            source.numel() == stream.numel() and source.shape[-1] == stream.shape[-1]
            for source in sources
        )
        if sources and not is_read:
            n_streams = stream.shape[-2]
            raise NoStream(f"{layer.block.path} mixes {n_streams} streams (hyper-connections)")


def name_stream_and_parts(trace: Trace, layer: Layer) -> None:
    """Find the sites of the names of a layer, whose parts have kinds."""
    block, names = layer.block, layer.names
    names.add_or_refuse(
        "resid_pre", stream_site(trace, block.pre, block), "the block has no input of it"
    )
    names.add_or_refuse(
        "resid_post", stream_site(trace, block.post, block), "the block does not return it"
    )
    for kind, prefix in KINDS.items():
        parts = layer.parts_of_kind(kind)
        if len(parts) != 1:
            singular, several = WORDS[kind]
            why = f"the block has no {singular}{why_no_part(layer, kind)}"
            if parts:
                every = [output_site(trace, part.term.value, block.path) for part in parts]
                why = f"the block has {len(parts)} {several}: {', '.join(map(str, every))}"
            names.refuse([f"{prefix}_{end}" for end in ("in", "out", "out_raw")], why)
            continue
        term = parts[0].term
        got, returned = input_and_output(term)
        names.add_or_refuse(f"{prefix}_in", input_site(trace, got, block.path, term.events))
        is_added = any(value is returned.origin for value in term.value.equal_values())
        raw = term.value if is_added else returned
        names.add_or_refuse(f"{prefix}_out_raw", output_site(trace, raw, block.path))
        names.add_or_refuse(f"{prefix}_out", output_site(trace, term.value, block.path))
    mid, why = find_mid_stream(layer)
    if mid is None:
        names.refuse(["resid_mid"], why)
    else:
        names.add_or_refuse("resid_mid", stream_site(trace, mid, block))


def why_no_part(layer: Layer, kind: str) -> str:
    """Say what else the part is that could be of a kind, if the block has one."""
    reasons = [part.why for part in layer.parts_of_kind("unknown")]
    if kind == "attention":
        reasons = [part.why for part in layer.parts if part.cores and part.why] or reasons
    return f": {reasons[0]}" if reasons else ""


KINDS = {"attention": "attn", "cross": "cross_attn", "mixer": "mixer", "mlp": "mlp"}
WORDS = {
    "attention": ("attention", "attentions"), "cross": ("cross attention", "cross attentions"),
    "mixer": ("other part that mixes tokens", "other parts that mix tokens"),
    "mlp": ("MLP", "MLPs"),
}  # fmt: skip


def find_mid_stream(layer: Layer) -> tuple[Value | None, str]:
    """Return the stream between the two parts of a block; None and the reason without it."""
    mixing = [part for part in layer.parts if part.kind in ("attention", "mixer", "cross")]
    mlp = layer.parts_of_kind("mlp")
    if not mixing or not mlp:
        kind = "part that mixes tokens" if not mixing else "MLP"
        return (
            None,
            f"the block has no {kind}{why_no_part(layer, 'attention' if not mixing else '')}",
        )
    reads = mlp[0].term.reads
    if len(mlp) > 1:
        return None, f"the block has {len(mlp)} MLPs"
    if len(reads) != 1:
        return None, "the MLP reads the stream at several places"
    earlier = [read for part in mixing for read in part.term.reads]
    if any(read is reads[0] for read in earlier):
        return None, "attention and MLP are parallel: both read the same stream"
    if max(event_index(read) for read in earlier) > event_index(reads[0]):
        return None, "the MLP comes before a part that mixes tokens"
    return reads[0], ""


# -- identities of the stream ---------------------------------------------------------------------


def _sum_error(after: Tensor, before: Tensor, *terms: Tensor) -> float:
    total = before
    for term in terms:
        total = total + reshape_or_expand(term, before.shape)
    return relative_error(total, after)


def reshape_or_expand(term: Tensor, shape: torch.Size) -> Tensor:
    """Return a term in the shape of the stream that it is added to, and has fewer tokens than."""
    return term.reshape(shape) if term.numel() == shape.numel() else term.expand(shape)


def claim_stream_identities(trace: Trace, layer: Layer) -> None:
    """Claim the identities of a layer's stream; a stream without a site is a claim that fails."""
    block, names = layer.block, layer.names
    streams = ("resid_pre", "resid_mid", "resid_post")
    sums = [prefix + "_out" for prefix in KINDS.values()]
    for step in block.steps:
        before, after = (stream_site(trace, value, block) for value in (step.before, step.after))
        terms = [output_site(trace, term.value, block.path) for term in step.terms]
        sites = (after, before, *terms)
        proven = (*streams, *(name for name in sums if names.sites.get(name) in terms))
        if terms:
            names.add_claim(" + ".join(map(str, sites[1:])), proven, sites, _sum_error)
        else:
            names.add_claim(f"a scale or norm of {before}", proven, sites, equal_or_rescale_error)
    for kind, prefix in KINDS.items():
        for part in layer.parts_of_kind(kind)[:1]:
            got = names.sites.get(f"{prefix}_in")
            if got is not None and part.term.reads:
                read = stream_site(trace, part.term.reads[-1], block)
                names.add_claim("norm", (f"{prefix}_in",), (got, read), equal_or_rescale_error)
            raw, added = (
                names.sites.get(f"{prefix}_out_raw"),
                names.sites.get(f"{prefix}_out"),
            )
            if raw is not None and added is not None and raw != added:
                names.add_claim(
                    "rescale", (f"{prefix}_out_raw",), (added, raw), equal_or_rescale_error
                )
