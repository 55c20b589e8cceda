"""Lay out the calls of a profile: as a trace that Perfetto opens, and nested for a flame graph."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hookline.engine import path_text
from hookline.files.atomic_text import write_text_file
from hookline.verbs.profile.call_tree import BACKWARD, CALLS, PHASES, CallContext
from hookline.verbs.profile.costs_by_pass import ContextCosts
from hookline.verbs.profile.thread_lane import Lane

_MICROSECONDS = 1e6
_NONE = CallContext()  # of no calls


def write_trace(path: Path, lanes: list[Lane], model_type: str) -> Path:
    """Write a trace; the clock of the trace stands still while hookline works.

    The format is Chrome's trace event format:
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        _metadata_event("process_name", pid, 0, f"hl.profile: {model_type}")
    ]
    for number, lane in enumerate(lanes):
        events.append(_metadata_event("thread_name", pid, number, lane.name))
        events += [{**event, "pid": pid, "tid": number} for event in _lane_events(lane)]
    n_lost = sum(lane.n_lost for lane in lanes)
    data = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": model_type, "events that were not kept": n_lost},
    }
    return write_text_file(path, json.dumps(data))


def _metadata_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _lane_events(lane: Lane) -> Iterator[dict[str, Any]]:
    seconds = lane.clock.seconds_at
    stretches: list[tuple[CallContext, float, float]] = []
    for context, phase, first, last in zip(*[iter(lane.events)] * 4, strict=True):
        start, end = seconds(first), seconds(last)
        if phase == BACKWARD:
            stretches.append((context, start, end))
        else:
            yield _complete_event(context, PHASES[phase], start, end)
    yield from _join_backward_stretches(stretches)


def _join_backward_stretches(
    stretches: list[tuple[CallContext, float, float]],
) -> Iterator[dict[str, Any]]:
    """Join the stretches of backward that follow each other: a caller spans those in it."""
    running: list[tuple[CallContext, float]] = []
    last = -1.0

    def ended(n_left: int) -> Iterator[dict[str, Any]]:
        while len(running) > n_left:
            context, began = running.pop()
            yield _complete_event(context, PHASES[BACKWARD], began, last)

    for context, start, end in stretches:
        chain = [caller for caller in context.chain if caller.path is not None]
        n_common = 0
        # Between two stretches, a recomputation or other code may have run; it is inside a caller.
        while n_common < min(len(chain), len(running)) and running[n_common][0] is chain[n_common]:
            n_common += 1
        if start != last and n_common == len(running):
            n_common = max(n_common - 1, 0)
        yield from ended(n_common)
        running += [(caller, start) for caller in chain[n_common:]]
        last = end
    yield from ended(0)


def _complete_event(context: CallContext, phase: str, start: float, end: float) -> dict[str, Any]:
    return {
        "name": path_text(context.path or ""),
        "cat": phase,
        "ph": "X",
        "ts": start * _MICROSECONDS,
        "dur": max(end - start, 0.0) * _MICROSECONDS,
        "args": {"phase": phase},
    }


def nested_calls(
    tops: Iterable[CallContext], measured: ContextCosts, counted: CallContext
) -> list[dict[str, Any]]:
    """Return the calling contexts, each with the costs of its own calls and the contexts inside.

    Args:
        tops: the tops of the contexts with times, one for each thread.
        measured: the sums of their costs.
        counted: the top of the contexts with FLOPs, whose costs count for the first thread that
            has the context.
    """
    nodes: list[dict[str, Any]] = []
    for top in tops:
        nodes += _nested_children(top, counted, measured)
        counted = _NONE
    return nodes


def _nested_children(
    timed: CallContext, counted: CallContext, measured: ContextCosts
) -> Iterator[dict[str, Any]]:
    for path in dict.fromkeys((*timed.children, *counted.children)):
        inner = timed.children.get(path, _NONE)
        flops = counted.children.get(path, _NONE)
        costs = [float(cost) for cost in measured.costs_of([inner])[0]]
        yield {
            "path": path_text(path),
            "calls": int(costs[CALLS]),
            "seconds": costs[: len(PHASES)],
            "flops": list(flops.flops),
            "kept": inner.kept,
            "children": list(_nested_children(inner, flops, measured)),
        }
