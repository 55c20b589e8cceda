"""Calling contexts: a module, called by a module, called by a module, and so on to the top.

The costs of all calls in one context add up, so that a long run needs no more memory than a short
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import final

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, COLLECTIVES, CALLS = SLOTS = range(6)
PHASES = ("forward", "backward", "recompute")


@final
class CallContext:
    """A calling context, with the costs of its own calls and without those inside.

    Args:
        path: the module's path; None at the top, which stands for the code around the model.
        parent: the context of the caller; None at the top.

    Attributes:
        index: its number among the contexts of the same top, whose number is 0.
        n_calls: the number of its calls, where FLOPs are counted: at first, and recomputed.
        flops: floating-point operations by phase.
        kept: the bytes that a pass keeps for backward; of the pass that keeps most.
        peak: the most bytes that were alive during a call, of those that the pass had made.
    """

    __slots__ = (
        "_indices", "chain", "children", "flops", "index", "kept", "n_calls", "parent", "path",
        "peak",
    )  # fmt: skip

    def __init__(self, path: str | None = None, parent: CallContext | None = None) -> None:
        self.path: str | None = path
        self.parent: CallContext | None = parent
        self.children: dict[str, CallContext] = {}
        self.chain: tuple[CallContext, ...] = (*(() if parent is None else parent.chain), self)
        self._indices: Iterator[int] = itertools.count() if parent is None else parent._indices
        self.index: int = next(self._indices)
        self.n_calls: list[int] = [0, 0]
        self.flops: list[int] = [0, 0, 0]
        self.kept: int = 0
        self.peak: int = 0

    def child(self, path: str) -> CallContext:
        """Return the context of a module that is called from here."""
        context = self.children.get(path)
        if context is None:
            context = self.children[path] = CallContext(path, self)
        return context

    def recomputed_child(self, path: str) -> CallContext:
        """Return the context that a module had, which is called again from a backward here.

        The backward of a checkpointed region runs in a context inside the region or around it.
        """
        for above in reversed(self.chain):
            if above.path == path:
                return above
            if path in above.children:
                return above.children[path]
        context = next((context for context in self.chain[0].walk() if context.path == path), None)
        return self.child(path) if context is None else context

    def walk(self) -> Iterator[CallContext]:
        """Yield this context and all contexts inside, callers first."""
        yield self
        for inner in self.children.values():
            yield from inner.walk()


def outermost_contexts(
    contexts: Iterable[CallContext], is_meant: Callable[[str], bool]
) -> list[CallContext]:
    """Return the contexts of some modules that are not inside another one of these.

    So a recursive module is counted at its outermost call.
    """
    return [
        context for context in contexts
        if context.path is not None and is_meant(context.path)
        and not any(above.path is not None and is_meant(above.path) for above in context.chain[:-1])
    ]  # fmt: skip
