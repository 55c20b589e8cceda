"""Every private name of torch.compile that hookline touches. Imports only torch.

The other half of `torch_internals`. Nothing here loads dynamo: as long as nobody has, nothing is
compiled, and to load it takes a second.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def while_tracing(method: Callable[..., Any]) -> Any:
    """A method that is run when code that calls it is compiled, and never when that code runs."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def dynamo_config() -> Any:
    """The settings of dynamo; None as long as nothing has loaded it, and so nothing is compiled."""
    loaded = sys.modules.get("torch._dynamo")
    return getattr(loaded, "config", None)


def has_compiled() -> bool:
    """Whether there may be compiled code by now. A loaded dynamo alone says little: many packages
    load it."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


# Who has marked a module; one that is gone takes its marks along.
_marks: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
_marks_lock = threading.RLock()


def mark_module(module: nn.Module, owner: object) -> None:
    """Give a module its own forward as an attribute: code compiled without it no longer serves.

    Compiled code is guarded on whether an instance has a forward of its own. Nothing else changes.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return  # its class has no forward; and no hook on it is ever called
    with _marks_lock:
        if module not in _marks and "forward" in module.__dict__:
            return  # somebody else's, which the code is guarded on as it is
        _marks.setdefault(module, set()).add(id(owner))
        module.__dict__.setdefault("forward", types.MethodType(type(module).forward, module))


def unmark_module(module: nn.Module, owner: object) -> None:
    """Take an owner's mark back; with the last, the attribute goes. Twice is no mistake."""
    with _marks_lock:
        owners = _marks.get(module)
        if owners is None:
            return
        owners.discard(id(owner))
        if not owners:
            module.__dict__.pop("forward", None)
            del _marks[module]


class Border:
    """Calls two functions around each run of a compiled model, outside of the compiled code.

    The model is called through `torch.compile(model)`, of which it knows nothing, so torch's class
    for that is told, and only as long as a border needs it; or it holds its compiled call itself.
    """

    _all: ClassVar[list[Border]] = []
    _lock: ClassVar[threading.RLock] = threading.RLock()
    _original: ClassVar[Callable[..., Any] | None] = None

    def __init__(
        self, model: nn.Module, begin: Callable[[FrameType], None], end: Callable[[FrameType], None]
    ) -> None:
        self._model = model
        self._begin = begin
        self._end = end
        self._compiled: partial[Any] | None = None
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is not None:
            model.__dict__["_compiled_call_impl"] = self._compiled = partial(self._around, compiled)
        with Border._lock:
            Border._all.append(self)
            if Border._original is None:
                kind = sys.modules["torch._dynamo"].OptimizedModule
                Border._original = kind.__call__
                kind.__call__ = _call_optimized

    def remove(self) -> None:
        """Put all back."""
        ours, attributes = self._compiled, self._model.__dict__
        is_there = attributes.get("_compiled_call_impl") is ours
        if ours is not None and is_there:
            attributes["_compiled_call_impl"] = ours.args[0]
        with Border._lock:
            Border._all[:] = [one for one in Border._all if one is not self]
            if not Border._all and Border._original is not None:
                sys.modules["torch._dynamo"].OptimizedModule.__call__ = Border._original
                Border._original = None

    def _around(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe()
        self._begin(frame)
        try:
            return compiled(*args, **kwargs)
        finally:
            self._end(frame)


def _call_optimized(optimized: Any, *args: Any, **kwargs: Any) -> Any:
    """What `OptimizedModule.__call__` is while borders are there."""
    original = Border._original or type(optimized).__mro__[1].__call__
    borders = [one for one in Border._all if one._model is optimized._orig_mod]
    frame = sys._getframe()
    for border in borders:
        border._begin(frame)
    try:
        return original(optimized, *args, **kwargs)
    finally:
        for border in reversed(borders):
            border._end(frame)


def hook_in_graph(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Put a hook on a tensor of a graph that is being compiled: in its backward, it is compiled."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def keep_in_graphs(name: str) -> None:
    """Have graphs keep an operator that nobody uses the result of, and in its order."""
    from torch._higher_order_ops import effects  # dynamo is loaded by now

    effects._register_effectful_op(name, effects._EffectType.ORDERED)
