"""Follow the residual stream through a block: its sums, and the terms that are added to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from hookline.verbs.anatomy.identities import rescale_fit_error
from hookline.verbs.anatomy.trace import SCALES, SUMS, Event, ModuleCall, Trace, Value

MATMULS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "dot",
    "grouped_mm", "_grouped_mm", "scaled_dot_product_attention", "multi_head_attention_forward",
    "(module)", "tensordot", "mv", "addmv", "bilinear", "embedding", "chain_matmul",
}  # fmt: skip
# What a norm and a change of layout or dtype may call, besides sums and scales.
_LIGHT = SUMS | SCALES | {
    "layer_norm", "rms_norm", "pow", "mean", "rsqrt", "sqrt", "square", "var", "sub", "rsub",
    "reciprocal", "to", "float", "type_as", "type", "view", "reshape", "transpose", "permute",
    "contiguous", "clone", "dropout", "unsqueeze", "squeeze", "flatten", "unflatten", "size",
    "norm", "vector_norm", "normalize", "half", "bfloat16", "double", "expand", "sum", "std",
    "fused_rms_norm", "clamp_min", "maximum", "neg", "lerp", "addcmul", "detach", "view_as",
    "get",  # of an attribute: x.mT
}  # fmt: skip


@final
@dataclass(eq=False, slots=True, repr=False)
class Term:
    """Hold one addition of a block to the stream."""

    value: Value  # what is added
    events: list[Event]  # the calls that compute it
    reads: list[Value]  # the values of the stream from which the part computes it


@final
@dataclass(eq=False, slots=True, repr=False)
class Step:
    """One step of the stream: it gets terms, or is scaled or normalised."""

    before: Value  # the stream before the step
    after: Value  # the stream after it
    terms: list[Term]  # what a sum adds; none for a scale or a norm


@final
@dataclass(eq=False, slots=True, repr=False)
class Block:
    """One block, and the stream through it."""

    path: str  # the path of the block
    call: ModuleCall  # its call
    pre: Value  # the stream that it gets
    post: Value  # the stream that it returns
    steps: list[Step]  # the steps from one to the other

    @property
    def terms(self) -> list[Term]:
        """Return the terms of all sums, in order."""
        return [term for step in self.steps for term in step.terms]

    @property
    def stream_ids(self) -> set[int]:
        """Return the ids of the values of the stream."""
        return {id(value) for value in (self.pre, *(step.after for step in self.steps))}


class NoStream(Exception):
    """A block has no residual stream, for a reason."""


def trace_stream_through_block(trace: Trace, call: ModuleCall) -> Block:
    """Follow the stream through a block.

    Raises:
        NoStream: no sums, norms and scales alone lead from the block's input to its output.
    """
    ends = [value for value in call.outputs.values() if _may_be_stream(value)]
    begins = [value for value in call.inputs.values() if _may_be_stream(value)]
    streams = []
    for post in dict.fromkeys(ends):
        light = _walk_back_sums_and_norms(post, call.begin)
        own = [pre for pre in begins if pre is not post and any(v is pre for v in light)]
        streams += [(own[0], post, light)] if own else []
    if not streams:
        raise NoStream(_why_no_stream(call, begins, ends))
    pre, post, light = streams[0]
    alike = [each for each in streams[1:] if each[1].tensor.shape == post.tensor.shape]
    if any(other is not pre and end is not post for other, end, _ in alike):
        raise NoStream(f"{call.path} has {len(streams)} streams")
    return Block(call.path, call, pre, post, _stream_steps(_stream_values(pre, post, light), call))


def _why_no_stream(call: ModuleCall, begins: list[Value], ends: list[Value]) -> str:
    if not begins or not ends:
        return f"{call.path} gets or returns no stream of floating numbers"
    last = _last_event_not_sum_or_norm(ends[0], call.begin)
    by = (
        ""
        if last is None
        else f"; on the way is {last.path}@{last.name}{_rescale_error_text(last)}"
    )
    return f"no sums, norms and scales alone lead from the input of {call.path} to its output{by}"


def _rescale_error_text(event: Event) -> str:
    """Say how far a call is from a scale or a norm, if it returns as many numbers as it gets."""
    before, after = event.varying[0].tensor, event.outputs[0].tensor
    off = rescale_fit_error(after, before) if after.dim() > 1 else math.inf
    return f", off by {off:.1e} from a scale or a norm on input 1" if off < math.inf else ""


def _last_event_not_sum_or_norm(end: Value, begin: int) -> Event | None:
    light = _walk_back_sums_and_norms(end, begin)
    heavy = [
        value.maker
        for value in light
        if value.maker is not None and value.maker.index >= begin and not _is_sum_or_norm(value)
    ]
    return max(heavy, key=lambda event: event.index, default=None)


def _may_be_stream(value: Value) -> bool:
    return value.tensor.is_floating_point() and value.tensor.dim() > 1 and not value.is_constant


def _is_sum_or_norm(value: Value) -> bool:
    return value.maker is not None and (value.like is not None or value.maker.name in _LIGHT)


def _walk_back_sums_and_norms(end: Value, begin: int) -> list[Value]:
    """Return the values from which sums, norms and scales lead to a value; that value first."""
    before, waiting = {id(end): end}, [end]
    while waiting:
        value = waiting.pop()
        if not _is_sum_or_norm(value) or value.maker is None or value.maker.index < begin:
            continue
        for source in value.maker.varying:
            if id(source) not in before:
                before[id(source)] = source
                waiting.append(source)
    return list(before.values())


def event_index(value: Value) -> int:
    """Return the number of the event that made a value; -1 for inputs and weights."""
    return -1 if value.maker is None else value.maker.index


def _stream_values(pre: Value, post: Value, linked: Sequence[Value]) -> list[Value]:
    """Return the values that every path of `linked` from `pre` to `post` goes through, in order."""
    on_path = {id(pre)}
    values = [pre]
    for value in sorted(linked, key=event_index):
        if value is pre or value.maker is None or not _is_sum_or_norm(value):
            continue
        is_after = event_index(value) > event_index(pre)
        if is_after and any(id(source) in on_path for source in value.maker.varying):
            on_path.add(id(value))
            values.append(value)
    return values_on_every_path(values, post)


def values_on_every_path(values: Sequence[Value], last: Value) -> list[Value]:
    """Return the values, in the order in which they were made, that no path passes by."""
    place = {id(value): k for k, value in enumerate(values)}
    until = list(range(len(values)))  # the last place that uses a value
    for k, value in enumerate(values):
        for source in value.maker.varying if value.maker is not None else ():
            if id(source) in place and place[id(source)] < k:
                until[place[id(source)]] = k
    gates, reach = [], 0
    for k, value in enumerate(values[: place[id(last)] + 1]):
        if reach <= k:
            gates.append(value)
        reach = max(reach, until[k])
    return gates


def _stream_steps(spine: list[Value], call: ModuleCall) -> list[Step]:
    on_stream = {id(value) for value in spine}
    steps = []
    for start, end in itertools.pairwise(spine):
        if end.like is start:
            continue
        event = end.maker
        assert event is not None
        others = [value for value in event.varying if value is not start]
        is_sum = event.name in SUMS and start in event.varying and len(others) == 1
        addends = (
            _split_sum_of_parts(others[0], event.path, on_stream, call.begin) if is_sum else []
        )
        terms = [Term(value, *walk_back(value, on_stream, call.begin)) for value in addends]
        steps.append(Step(start, end, terms))
    return steps


def _split_sum_of_parts(value: Value, path: str, on_stream: set[int], begin: int) -> list[Value]:
    """Return the terms of a sum of two parts, where the same forward has added them."""
    event = value.maker
    is_sum = event is not None and event.path == path and event.name in SUMS
    if event is None or not is_sum or value.like is not None or len(event.varying) != 2:
        return [value]
    for part in event.varying:
        events, _ = walk_back(part, on_stream, begin)
        if not any(each.name in MATMULS for each in events):
            return [value]  # such as a bias
    return [
        each for part in event.varying for each in _split_sum_of_parts(part, path, on_stream, begin)
    ]


def walk_back(value: Value, stop_ids: Iterable[int], begin: int) -> tuple[list[Event], list[Value]]:
    """Return the calls that compute a value, in order, and the values where the search stops.

    Args:
        value: the value.
        stop_ids: the ids of values where the search stops.
        begin: the number of the event before which no event counts.
    """
    ends = set(stop_ids)
    events: dict[int, Event] = {}
    reads: dict[int, Value] = {}
    waiting = [value]
    while waiting:
        event = waiting.pop().maker
        if event is None or event.index < begin or event.index in events:
            continue
        events[event.index] = event
        for source in event.varying:
            if id(source) in ends:
                reads[id(source)] = source
            else:
                waiting.append(source)
    ordered = sorted(reads.values(), key=event_index)
    return [events[index] for index in sorted(events)], ordered
