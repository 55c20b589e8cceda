"""The modules that torch.compile has wrapped, and the border between them and eager code."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling, set_stance

from hookline.engine.torch_private.dynamo import may_have_compiled
from hookline.engine.torch_private.graph.compiler_state import filters_guards
from hookline.engine.torch_private.modules import children, holds_compiled_call
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.util.optional_imports import module_if_imported
from hookline.util.weak_map import WeakIdentityMap


class Watcher(Protocol):
    """The interface of an object that is told when compiled modules run."""

    def covers(self, module: nn.Module) -> bool:
        """Tell whether this module concerns the watcher."""

    def enter(self, module: nn.Module, frame: FrameType) -> None:
        """Prepare for the run of a compiled module, whose call has this frame."""

    def leave(self, module: nn.Module, frame: FrameType, output: Any) -> None:
        """Clean up after a compiled module has returned or raised; `output` is then None."""

    def add_error_note(self, error: BaseException) -> None:
        """Add a note to the error of a compiled module."""


class RunSubscription:
    """A watcher's subscription to the runs of compiled modules, outside the compiled code.

    A module does not know the `torch.compile(module)` through which it is called. So torch's class
    of such wrappers is patched, only as long as somebody watches. A module compiled by
    `module.compile()` holds its compiled call, which is replaced instead.
    """

    _all: ClassVar[list[RunSubscription]] = []
    _lock: ClassVar[threading.RLock] = fork_safe_lock()
    _original: ClassVar[Callable[..., Any] | None] = None
    # The modules that hold their compiled call: the ids of watchers, the compiled call, its
    # replacement.
    _replaced_calls: ClassVar[WeakIdentityMap[tuple[set[int], Any, Any]]] = WeakIdentityMap()

    def __init__(self, watcher: Watcher) -> None:
        # The watcher holds its subscription. A strong reference would form a cycle, and a whole
        # line would live until gc runs.
        self.watcher: Callable[[], Watcher | None] = weakref.ref(watcher)

    def open(self) -> None:
        """Begin to report runs. `remove` undoes this also after an interrupt."""
        with RunSubscription._lock:
            kind = sys.modules["torch._dynamo"].OptimizedModule
            if kind.__call__ is not _call_optimized:
                RunSubscription._original = kind.__call__
                kind.__call__ = _call_optimized
            RunSubscription._all.append(self)

    def watch_module(self, module: nn.Module) -> None:
        """Report the runs of a module that was compiled by `module.compile()`. Idempotent."""
        with RunSubscription._lock:
            entry = RunSubscription._replaced_calls.get(module)
            if entry is None:
                compiled = module.__dict__["_compiled_call_impl"]
                replacement = partial(_call_compiled_in_place, weakref.ref(module), compiled)
                entry = RunSubscription._replaced_calls[module] = set(), compiled, replacement
                module.__dict__["_compiled_call_impl"] = replacement
            entry[0].add(id(self))

    def remove(self) -> None:
        """Stop reporting and restore torch's class and the modules."""
        with RunSubscription._lock:
            if (
                self in RunSubscription._all
            ):  # Ctrl-C in a comprehension keeps the lock in Python 3.13
                RunSubscription._all.remove(self)
            for module, (
                watchers,
                compiled,
                replacement,
            ) in RunSubscription._replaced_calls.items():
                watchers.discard(id(self))
                if watchers:
                    continue
                if module.__dict__.get("_compiled_call_impl") is replacement:
                    module.__dict__["_compiled_call_impl"] = compiled
                RunSubscription._replaced_calls.pop(module)
            kind = sys.modules["torch._dynamo"].OptimizedModule
            if not RunSubscription._all and kind.__call__ is _call_optimized:
                kind.__call__ = RunSubscription._original


# The modules that were called by a `torch.compile(module)` with a `guard_filter_fn`.
_with_fewer_guards: WeakIdentityMap[bool] = WeakIdentityMap()


def may_lack_guards(module: nn.Module) -> bool:
    """Tell whether compiled code of a module may lack the guards that notice a line."""
    return module in _with_fewer_guards


def is_compiled(module: nn.Module) -> bool:
    """Tell whether calls of this module go through `torch.compile`."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    # Without dynamo loaded there is none.
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return kind in type(module).__mro__


def find_compiled_in_place(model: nn.Module) -> tuple[set[int], list[nn.Module]]:
    """Find the modules of a model that were compiled by `module.compile()`.

    Returns:
        The ids of all modules of the model, wrappers included, and the modules that hold their
        compiled call.
    """
    visited: set[int] = set()
    compiled: list[nn.Module] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in visited:
            continue
        visited.add(id(module))
        if holds_compiled_call(module):
            compiled.append(module)
        if inner := children(module):
            waiting += inner.values()
    return visited, compiled


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(module)`; return any other module unchanged."""
    loaded = module_if_imported("torch._dynamo")
    while loaded is not None and isinstance(module, loaded.OptimizedModule):
        module = module._orig_mod
    return module


def force_eager() -> AbstractContextManager[Any]:
    """Run modules as they are written inside, also compiled ones."""
    return set_stance("force_eager") if may_have_compiled() else nullcontext()


def _call_compiled_in_place(
    module_ref: weakref.ref[nn.Module], compiled: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    module = module_ref()
    if module is None or is_dynamo_compiling():
        return compiled(*args, **kwargs)
    return _call_watched(module, sys._getframe(), compiled, args, kwargs)


def _call_optimized(optimized: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an `OptimizedModule` and tell its watchers; it replaces `OptimizedModule.__call__`."""
    original = RunSubscription._original or type(optimized).__mro__[1].__call__
    if is_dynamo_compiling():
        return original(optimized, *args, **kwargs)
    if filters_guards(optimized):
        _with_fewer_guards[optimized._orig_mod] = True
    frame, call = sys._getframe(), partial(original, optimized)
    return _call_watched(optimized._orig_mod, frame, call, args, kwargs)


def _call_watched(
    module: nn.Module, frame: FrameType, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    held = filter(None, [border.watcher() for border in RunSubscription._all])
    watchers = [watcher for watcher in held if watcher.covers(module)]
    entered: list[Watcher] = []
    output = None
    try:
        for watcher in watchers:
            entered.append(watcher)
            watcher.enter(module, frame)
        output = call(*args, **kwargs)
        return output
    except Exception as error:
        for watcher in entered:
            watcher.add_error_note(error)
        raise
    finally:
        for watcher in reversed(entered):
            watcher.leave(module, frame, output)
