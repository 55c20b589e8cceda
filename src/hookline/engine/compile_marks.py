"""Marks: how compiled code learns that a module has other hooks. Imports locks, compile_internals.

Compiled code is guarded on each module that it calls: that it has no forward of its own, or on the
code of the one that it has. By default nothing else in it shows that a hook was put where none was.
So as long as a line has hooks on a module, the module has a forward of its own, which does what the
usual one does and has a copy of its code: one copy for each set of kinds of hooks that are there.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, final

import torch
from torch import nn

from hookline.engine.compile_internals import own_kinds
from hookline.engine.locks import lock

# Under which a mark keeps its note.
_NOTE = "_hookline_mark"


@final
class _Note:
    """What a mark stands for. In a copy of the module it is nobody's.

    Args:
        given: the forward that the module had of its own; None if it had none.
        kinds: the kinds of hooks that there are.
        owners: who has marked the module, by id.
        module: the module.
    """

    __slots__ = ("_module", "given", "kinds", "owners")

    def __init__(
        self,
        given: Callable[..., Any] | None,
        kinds: int,
        owners: set[int] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.given = given
        self.kinds = kinds
        self.owners = set() if owners is None else owners
        self._module = None if module is None else weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Note, (self.given, self.kinds)

    def is_of(self, module: nn.Module) -> bool:
        """Whether this module was marked, and not one that it is a copy of."""
        return self._module is not None and self._module() is module


# The copies of a function's code, by kinds, each with what it is a copy of.
_copies: weakref.WeakKeyDictionary[FunctionType, dict[int, tuple[CodeType, CodeType]]] = (
    weakref.WeakKeyDictionary()
)
_lock = lock()


def mark(module: nn.Module, owner: object) -> None:
    """Have code that was compiled before not serve for a module. Twice is no mistake."""
    if isinstance(module, torch.jit.ScriptModule):
        return  # its class has no forward; and no hook on it is ever called
    with _lock:
        note = _note_of(module)
        owners = set() if note is None else note.owners
        owners.add(id(owner))
        _put(module, owners)


def follow(module: nn.Module) -> None:
    """The hooks on a module are others now: if it is marked, have its mark say so."""
    if "forward" in module.__dict__:
        with _lock:
            note = _note_of(module)
            if note is not None:
                _put(module, note.owners)


def unmark(module: nn.Module, owner: object) -> None:
    """Take an owner's mark back; with the last, the module is as it was. Twice is no mistake."""
    with _lock:
        note = _note_of(module)
        if note is None:
            return  # or somebody has put a forward of theirs in its place meanwhile
        note.owners.discard(id(owner))
        if not note.owners:
            _put_back(module)


def unmark_copy(module: nn.Module) -> None:
    """Take away the mark that a copy of a marked module has come with."""
    with _lock:
        note = _note_of(module)
        if note is not None:
            _put(module, note.owners)  # the copy has a line of its own
            return
        _put_back(module)
        # A pickled one came as the forward of its name: that of its class.
        if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
            del module.__dict__["forward"]


def _note_of(module: nn.Module) -> _Note | None:
    """The note of a module's own mark."""
    note = _any_note(module.__dict__.get("forward"))
    return note if note is not None and note.is_of(module) else None


def _any_note(forward: Any) -> _Note | None:
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    note: _Note | None = getattr(function, "__dict__", {}).get(_NOTE)
    return note


def _given(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that a module has of its own, were it not marked."""
    standing: Any = module.__dict__.get("forward")
    note = _any_note(standing)
    if note is None:
        return standing  # type: ignore[no-any-return]
    given = note.given
    if isinstance(given, MethodType) and given.__self__ is not standing.__self__:
        return MethodType(given.__func__, standing.__self__)  # in a copy: that of the copy
    return given


def _put(module: nn.Module, owners: set[int]) -> None:
    note, kinds = _note_of(module), own_kinds(module)
    if note is not None and note.kinds == kinds:
        return
    given = _given(module)
    usual = _of_class(module) if given is None else given
    module.__dict__["forward"] = _alike(usual, _Note(given, kinds, owners, module))


def _put_back(module: nn.Module) -> None:
    given = _given(module)
    if given is not None:
        module.__dict__["forward"] = given
    else:
        module.__dict__.pop("forward", None)


def _of_class(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module has without one of its own."""
    found: Any = inspect.getattr_static(type(module), "forward")
    bind = getattr(type(found), "__get__", None)
    forward: Callable[..., Any] = found if bind is None else bind(found, module, type(module))
    return forward


def _alike(forward: Callable[..., Any], note: _Note) -> Callable[..., Any]:
    """A forward that does the same, and that compiled code can tell from it."""
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    if not isinstance(function, FunctionType):
        other: Any = functools.partial(forward)  # told by its identity: new with each line
        setattr(other, _NOTE, note)
        return other  # type: ignore[no-any-return]
    twin = FunctionType(
        _copy_of_code(function, note.kinds),
        function.__globals__,
        "forward" if note.given is None else function.__name__,  # under which it is pickled
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__module__, twin.__doc__ = function.__module__, function.__doc__
    twin.__qualname__, twin.__annotations__ = function.__qualname__, function.__annotations__
    twin.__dict__.update(function.__dict__, **{_NOTE: note})
    return types.MethodType(twin, forward.__self__) if isinstance(forward, MethodType) else twin


def _copy_of_code(function: FunctionType, kinds: int) -> CodeType:
    copies = _copies.setdefault(function, {})
    original, copy = copies.get(kinds, (None, None))
    if copy is None or original is not function.__code__:
        copy = function.__code__.replace()
        copies[kinds] = function.__code__, copy
    return copy
