"""The calls of a profile as nested plain values, for a flame graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hookline.engine import path_text
from hookline.verbs.profile.call_tree import CALLS, PHASES, Context
from hookline.verbs.profile.costs_by_pass import ContextCosts

_NONE = Context()  # of no calls


def nested_calls(
    tops: Iterable[Context], measured: ContextCosts, counted: Context
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
        nodes += _nested(top, counted, measured)
        counted = _NONE
    return nodes


def _nested(timed: Context, counted: Context, measured: ContextCosts) -> Iterator[dict[str, Any]]:
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
            "children": list(_nested(inner, flops, measured)),
        }
