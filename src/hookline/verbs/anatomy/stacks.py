"""Find the stacks of blocks of a model in a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import nn

from hookline.engine import unwrap
from hookline.verbs.anatomy.trace import ModuleCall, Trace


def stacks_of(model: nn.Module, trace: Trace) -> list[tuple[str, list[ModuleCall]]]:
    """Return the stacks: the path and the calls of the blocks, outer stacks before inner ones.

    A stack is a module whose children ran one after the other, each from what the last returned.
    """
    stacks = []
    for path, module in _modules(model, ""):
        children = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
        calls = [call for child in children for call in trace.calls.get(child, ())]
        ran = [child for child in children if child in trace.calls]
        if len(calls) == len(ran) > 1 and len(ran) == len(children) and _is_chain(calls):
            stacks.append((path, calls))
    return stacks


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its path, in which torch's wrappers have no segment."""
    module = unwrap(module)
    yield path, module
    for name, child in module.named_children():
        yield from _modules(child, f"{path}.{name}" if path else name)


def _is_chain(calls: list[ModuleCall]) -> bool:
    return all(
        first.end <= second.begin and _hands_on(first, second)
        for first, second in itertools.pairwise(calls)
    )


def _hands_on(first: ModuleCall, second: ModuleCall) -> bool:
    origins = {id(value.origin) for _, value in first.outputs}
    return any(id(value.origin) in origins for _, value in second.inputs)
