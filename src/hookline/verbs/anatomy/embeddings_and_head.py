"""Name what lies before the first block and after the last: embeddings, final norm, logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from hookline.engine import Site
from hookline.engine.pytree import describe
from hookline.errors import StructureError
from hookline.verbs.anatomy.identities import (
    Names,
    equal_or_rescale_error,
    relative_error,
    rescale_fit_error,
)
from hookline.verbs.anatomy.parts import Layer, output_site, stream_site
from hookline.verbs.anatomy.residual_stream import MATMULS, event_index, walk_back
from hookline.verbs.anatomy.trace import (
    SUMS,
    Event,
    Trace,
    Value,
    port_or_operation,
    replay_by_token,
)
from hookline.verbs.anatomy.trial_inputs import declared_embedding

# -- before the blocks ----------------------------------------------------------------------------


def name_embeddings_and_count_words(
    model: nn.Module, trace: Trace, first_layer: Layer, names: Names
) -> int:
    """Name the embeddings of tokens and of positions, which add up to the first stream.

    Returns:
        The number of words; 0 if it is unknown.
    """
    start = first_layer.block.pre
    addends = _stream_addends(start)
    words = _token_embeddings(model, trace, addends)
    if not words:
        why = _why_no_token_embedding(trace, start, first_layer.block.call.begin)
        names.refuse(["embed", "pos_embed"], why)
        return 0
    positions = _position_embeddings([value for value in addends if value not in words], start)
    sites = {id(value): output_site(trace, value, "") for value in addends}
    # Torch shows no site of a table, which is made of weights alone.
    tables = [each for each in addends if each.is_constant and sites[id(each)] is None]
    measure = partial(_embedding_sum_error, [table.tensor for table in tables])
    needed = [stream_site(trace, start, first_layer.block)]
    needed += [sites[id(each)] for each in addends if each not in tables]
    for name, values in (("embed", words), ("pos_embed", positions)):
        own = [sites[id(value)] for value in values]
        if len(own) == 1 and names.add_or_refuse(name, own[0]):
            names.add_claim("the sum of the embeddings", (name,), needed, measure)
        elif len(own) > 1:
            every = ", ".join(map(str, own)).replace("None", "a table")
            names.refused[name] = f"{len(own)} of this kind are added: {every}"
        elif not own:
            names.refused[name] = "nothing that counts up with the tokens is added"
    return max(map(len, _embedding_weights(words[0])), default=0)


def _stream_addends(stream: Value) -> list[Value]:
    """Return the values that add up to the first stream, each as the module returns it."""
    total = _value_before_rescales(stream)
    addends = _flatten_sum(total)
    return (
        [_embedding_module_output(stream)]
        if addends == [total] and _is_from_embedding(total)
        else addends
    )


def _why_no_token_embedding(trace: Trace, stream: Value, begin: int) -> str:
    embedding = [event for event in trace.events[:begin] if event.name == "embedding"]
    if not embedding:
        return "no embedding is looked up before the first block"
    returned = [event.outputs[0].tensor for event in embedding if event.outputs]
    sized = [value for value in returned if value.numel() == stream.tensor.numel()]
    off = min((equal_or_rescale_error(stream.tensor, value) for value in sized), default=0.0)
    by = f": the closest is off by {off:.1e} on input 1" if off else ""
    return (
        f"no sum, norm or scale of what an embedding of tokens returns gives the first stream{by}"
    )


def _token_embeddings(model: nn.Module, trace: Trace, addends: list[Value]) -> list[Value]:
    """Return what is looked up for the tokens; several values where it cannot be told.

    Tokens are the numbers that the model is given, but types of tokens and positions may be given,
    too. Positions count up, and types are zeros and ones.
    """
    embeds = [value for value in addends if _is_from_embedding(value)]
    given = [value.tensor for value in trace.calls[""][-1].inputs.values()]
    words = [value for value in embeds if _are_input_ids(_embedding_ids(value), given)]
    if not words:
        words = [
            v
            for v in embeds
            if not _embedding_ids(v).is_constant
            and not _look_like_position_or_type_ids(_embedding_ids(v).tensor)
        ]
    declared = declared_embedding(model)
    if declared is not None and len(words) > 1:
        own = [v for v in words if any(each is declared.weight for each in _embedding_weights(v))]
        words = own or words
    return [
        value
        for value in words
        if not _look_like_position_or_type_ids(_embedding_ids(value).tensor)
    ] or words


def _embedding_weights(value: Value) -> list[Tensor]:
    """Return the weights among which a value is looked up."""
    event = _embedding_call(value)
    return [getattr(*each.weight) for each in event.inputs if each.weight] if event else []


def _are_input_ids(ids: Value, given: list[Tensor]) -> bool:
    """Tell whether ids are the numbers of an input, in whatever order."""
    if ids.is_constant:
        return False
    numbers = ids.tensor.flatten().sort().values
    return any(
        each.numel() == numbers.numel() and torch.equal(each.flatten().sort().values, numbers)
        for each in given
        if not each.is_floating_point()
    )


def _look_like_position_or_type_ids(ids: Tensor) -> bool:
    """Tell whether ids count up along a dimension, as far as they go on; or are zeros and ones."""
    steps = [ids.diff(dim=dim) for dim, size in enumerate(ids.shape) if size > 1]
    is_up = any(bool(((step == 0) | (step == 1)).all()) and bool(step.any()) for step in steps)
    is_equal = not any(step.any() for step in steps)
    return is_up or is_equal or bool(((ids == 0) | (ids == 1)).all())


def _position_embeddings(values: list[Value], stream: Value) -> list[Value]:
    """Return the values that are looked up by ids that count up with the tokens, or are tables."""
    return [
        value
        for value in values
        if (
            _are_position_ids(_embedding_ids(value))
            if _is_from_embedding(value)
            else _is_position_table(value, stream)
        )
    ]


def _are_position_ids(ids: Value) -> bool:
    is_of_types = int(ids.tensor.max() - ids.tensor.min()) < 2
    return not is_of_types and (ids.is_constant or _look_like_position_or_type_ids(ids.tensor))


def _value_before_rescales(value: Value) -> Value:
    """Return the value of which another one is a scale or a norm."""
    return list(_walk_back_rescales(value))[-1]


def _walk_back_rescales(value: Value) -> Iterator[Value]:
    """Yield a value, and the values of which it is a scale or a norm, the first one last."""
    value = value.origin
    yield value
    event = value.maker
    while event is not None and event.name not in (*SUMS, "embedding"):
        # A norm that is written out multiplies the numbers by a second value, made of them.
        sources = [v for v in event.varying if rescale_fit_error(value.tensor, v.tensor) <= 1e-4]
        if not sources:
            break
        value = sources[0].origin
        yield value
        event = value.maker


def _embedding_module_output(stream: Value) -> Value:
    """Return what the module that embeds returns: it may scale what it looks up, as in Gemma."""
    values = list(_walk_back_rescales(stream))
    event = values[-1].maker
    path = event.path if event is not None else ""
    returned = (
        value
        for value in values
        if any(
            port_or_operation(place) == "output" and place.path == path for place in value.places
        )
    )
    return next(returned, values[-1])


def _flatten_sum(value: Value) -> list[Value]:
    """Return the terms of a sum."""
    event = value.origin.maker
    if event is not None and event.name in SUMS and len(event.inputs) == 2:
        return [addend for part in event.inputs for addend in _flatten_sum(part)]
    return [value]


def _embedding_call(value: Value) -> Event | None:
    event = _value_before_rescales(value).maker
    return event if event is not None and event.name == "embedding" else None


def _is_from_embedding(value: Value) -> bool:
    return _embedding_call(value) is not None


def _embedding_ids(value: Value) -> Value:
    """Return what a value is looked up by."""
    event = _embedding_call(value)
    assert event is not None
    return next(each for each in event.inputs if not each.tensor.is_floating_point())


def _is_position_table(value: Value, stream: Value) -> bool:
    """Tell whether a constant has a row for each token, and not the same for all."""
    table, width = value.tensor, stream.tensor.shape[-1]
    is_table = value.is_constant and table.dim() > 1 and table.shape[-1] == width
    return is_table and not torch.equal(table, table.flatten(0, -2)[0].expand_as(table))


def _embedding_sum_error(tables: list[Tensor], stream: Tensor, *terms: Tensor) -> float:
    total = torch.zeros_like(stream)
    for table in tables:
        # It is that of the first input, and the second one may have fewer tokens.
        part = table[..., : stream.shape[-2], :] if table.dim() > 1 else table
        pairs = zip(part.shape[::-1], stream.shape[::-1], strict=False)
        if any(size not in (1, of) for size, of in pairs):
            return float("inf")
        total = total + part
    for term in terms:
        total = total + term
    return equal_or_rescale_error(stream, total)


# -- after the blocks -----------------------------------------------------------------------------


@final
@dataclass(eq=False, slots=True)
class Head:
    """Hold the steps from the last stream to the logits: norm, product, scale and cap."""

    events: list[Event]  # the calls, in order; also those that make something of weights alone
    start: Value  # the last stream
    logits: Value  # what they make of it
    is_transposed: bool = False  # whether the logits have rows and tokens in the other order

    def release_trace(self) -> None:
        """Drop what leads from the values to the rest of the run, and the numbers of weights."""
        for event in self.events:
            for value in (*event.inputs, *event.outputs):
                value.maker = value.like = None
                value.places = []
                if value.weight is not None:
                    value.tensor = torch.empty(0, dtype=value.tensor.dtype)

    def __call__(self, stream: Tensor) -> Tensor:
        """Return the logits of a stream, by the weights that the model has now.

        Raises:
            StructureError: the stream has another width.
        """
        width = self.start.tensor.shape[-1]
        if stream.shape[-1] != width:
            raise StructureError(
                f"the stream must have {width} features, got {describe.shape(stream)}."
                "\nRecord resid_post without keep=."
            )
        logits = self.logits_in_layout_of(stream)
        return logits.transpose(0, 1) if self.is_transposed else logits

    def logits_in_layout_of(self, stream: Tensor) -> Tensor:
        """Return the logits in the layout of the stream."""
        used = {
            id(value): value
            for event in self.events
            for value in event.inputs
            if value.weight is not None
        }
        weights = {key: getattr(*value.weight) for key, value in used.items() if value.weight}
        # The model may have been cast since: the stream is as its weights are now.
        casts = {value.tensor.dtype: weights[key].dtype for key, value in used.items()}
        dtype = self.start.tensor.dtype
        given = [(self.start, stream.to(casts.get(dtype, dtype)))]
        with torch.no_grad():
            return replay_by_token(self.events, given, self.logits, weights)

    def logits_error(self, logits: Tensor, stream: Tensor) -> float:
        """Return how far the head is from logits, or else from computing each token alone."""
        own = self.logits_in_layout_of(stream)
        moved = self.logits_in_layout_of(_roll_tokens(stream))
        again = own.transpose(0, 1) if self.is_transposed else own
        if again.shape != logits.shape:
            return float("inf")
        return max(relative_error(again, logits), relative_error(moved, _roll_tokens(own)))


def _roll_tokens(values: Tensor) -> Tensor:
    """Move each token to the next place; the last one to the first."""
    return values.flatten(0, -2).roll(1, 0).reshape(values.shape)


def _with_events_of_constants(events: list[Event]) -> list[Event]:
    """Return the calls, and before them those that make their constants of weights."""
    every = {event.index: event for event in events}
    waiting = [value for event in events for value in event.inputs]
    while waiting:
        event = waiting.pop().maker
        is_known = event is None or event.index in every or event.function is None
        if event is not None and not is_known and not event.varying:
            every[event.index] = event
            waiting += event.inputs
    return [every[index] for index in sorted(every)]


def name_final_norm_and_logits(
    trace: Trace, last: Layer, names: Names, vocab_size: int
) -> Head | None:
    """Name the final norm and the logits; return the head, for the logit lens."""
    start = last.block.post
    heads: dict[str, Head] = {}
    for leaf, value in trace.calls[""][-1].outputs.items():
        head = _find_head(value, start)
        is_new = all(value.origin is not each.logits.origin for each in heads.values())
        if head is not None and is_new:
            heads[str(Site("", "output", leaf))] = head
    sites = list(heads)
    if len(heads) > 1:  # such as a value for each token beside the logits
        of_words = [site for site in heads if heads[site].logits.tensor.shape[-1] == vocab_size]
        sites = of_words or sites
    if len(sites) != 1:
        why = "no output of the model is made of the last stream by a product, token by token"
        if sites:
            why = "several outputs of the model are computed from the last stream: "
            why += ", ".join(sites)
        names.refuse(("ln_final", "unembed", "logits_raw", "logits"), why)
        return None
    head = heads[sites[0]]
    product = _matmuls(head)[-1]
    _name_logits(trace, head, product, names, sites[0])
    needed = [names.sites["logits"], stream_site(trace, start, last.block)]
    proven = ("logits", "logits_raw", "unembed")
    names.add_claim("head(last stream)", proven, needed, head.logits_error)
    _name_final_norm(trace, last, head, product, names)
    return head


def _find_head(logits: Value, stream: Value) -> Head | None:
    """Return what makes an output of the last stream; None if it is not made of each token."""
    if not logits.tensor.is_floating_point() or logits.origin is stream.origin:
        return None
    events, reads = walk_back(logits, [id(stream)], event_index(stream) + 1)
    places, own = stream.tensor.shape[:-1], logits.tensor.shape[:-1]
    head = Head(_with_events_of_constants(events), stream, logits, is_transposed=own != places)
    is_by_token = own in (places, places[::-1])
    is_of_stream = [id(read) for read in reads] == [id(stream)]
    return head if is_by_token and is_of_stream and _matmuls(head) else None


def _matmuls(head: Head) -> list[Event]:
    return [event for event in head.events if event.name in MATMULS and event.varying]


def _name_logits(trace: Trace, head: Head, product: Event, names: Names, site: str) -> None:
    names.sites["logits"] = site
    raw = product.outputs[0]
    _, reads = walk_back(head.logits, [id(head.start), id(raw)], event_index(head.start) + 1)
    if head.logits is not raw and [id(read) for read in reads] != [id(raw)]:
        names.refuse(("unembed", "logits_raw"), "the logits are made of several products")
        return
    for name in ("logits_raw", "unembed"):
        names.add_or_refuse(name, output_site(trace, raw, ""))


def _name_final_norm(trace: Trace, last: Layer, head: Head, product: Event, names: Names) -> None:
    """Name the last norm: what a module returns before the product, scaled or not."""
    value = product.varying[0]
    while value.origin is not head.start.origin:
        places = [place for each in value.equal_values() for place in each.places]
        is_of_module = any(port_or_operation(place) == "output" for place in places)
        event = value.origin.maker
        if is_of_module or event is None or len(event.varying) != 1:
            break
        value = event.varying[0]
    if value.origin is head.start.origin:
        names.refused["ln_final"] = "no norm is between the last stream and the logits"
        return
    site = output_site(trace, value, "", is_innermost=True)
    if names.add_or_refuse("ln_final", site):
        needed = [site, stream_site(trace, head.start, last.block)]
        names.add_claim("norm(last stream)", ("ln_final",), needed, rescale_fit_error)
