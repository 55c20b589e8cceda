"""Have compiled code notice that a module has other hooks: by guards on its forward.

Compiled code is guarded on each module that it calls: that it has no forward of its own, or on the
code of the one that it has. By default nothing else in it shows that a hook was put where none was.
So as long as a line has hooks on a module, the module has a forward of its own, which does what the
usual one does and has a copy of its code: one copy for each set of kinds of hooks that are there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, final

import torch
from torch import nn

from hookline.engine.torch_private.dynamo import is_disabled
from hookline.engine.torch_private.hooks import own_kinds
from hookline.util.locks import fork_safe_lock
from hookline.util.weak_map import WeakIdentityMap


class _Note(NamedTuple):
    """The origin of a mark.

    Args:
        source: the function that its code is a copy of.
        is_own: whether it stands for a forward that the module has of its own, which it holds.
    """

    source: FunctionType
    is_own: bool


# Who has marked a module.
_owners: WeakIdentityMap[set[int]] = WeakIdentityMap()
# The functions of all marks. What wraps a mark copies its attributes, so that none would tell.
_notes: weakref.WeakKeyDictionary[FunctionType, _Note] = weakref.WeakKeyDictionary()
# The copies of a function's code, by kinds, each with what it is a copy of.
_copies: weakref.WeakKeyDictionary[FunctionType, dict[int, tuple[CodeType, CodeType]]] = (
    weakref.WeakKeyDictionary()
)
_lock = fork_safe_lock()


def mark(module: nn.Module, owner: object) -> None:
    """Have code that was compiled before not serve for a module. Idempotent."""
    if isinstance(module, torch.jit.ScriptModule):
        return  # its class has no forward; and no hook on it is ever called
    with _lock:
        owners = _owners.get(module)
        if owners is None:
            owners = _owners[module] = set()
            note = _note_of(module.__dict__.get("forward"))
            if note is not None:
                _retire(note.source)
        owners.add(id(owner))
        _renew(module)
        _put(module)


@final
@dataclass(slots=True, eq=False)
class Marks:
    """The marks that one line has put on modules."""

    _marked: dict[int, nn.Module] = field(default_factory=dict)
    # The class of each, and the forward of each class, as last looked at.
    _kinds: list[type] = field(default_factory=list)
    _forwards: dict[type, Any] = field(default_factory=dict)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Mark modules. Idempotent."""
        for module in modules:
            self._marked[id(module)] = module  # first: an interrupt from here on takes it off, too
            mark(module, self)

    def renew(self) -> list[nn.Module]:
        """Have each mark stand for the forward that the class has now; list those that did not."""
        kinds = list(map(type, self._marked.values()))
        if kinds == self._kinds and all(
            forward_of(kind) is was for kind, was in self._forwards.items()
        ):
            return []
        self._kinds, self._forwards = kinds, {kind: forward_of(kind) for kind in kinds}
        return [module for module in self._marked.values() if renew(module)]

    def is_stale(self, module: nn.Module) -> bool:
        """Renew the mark of a module whose class got another forward; tell whether it had to."""
        return id(module) in self._marked and renew(module)

    def discard(self, number: int) -> None:
        """Take back the mark of the module with this id, if it has one."""
        if number in self._marked:
            unmark(self._marked[number], self)
            del self._marked[number]

    def clear(self) -> None:
        """Take back all marks. Idempotent."""
        while self._marked:
            self.discard(next(iter(self._marked)))


def renew(module: nn.Module) -> bool:
    """Renew the mark of a module whose class got another forward; tell whether that was needed.

    For `Class.forward = ...`, another `__class__`, and `recompile()` of a `torch.fx.GraphModule`.
    """
    with _lock:
        return _renew(module)


def _renew(module: nn.Module) -> bool:
    standing: Any = module.__dict__.get("forward")
    note = _note_of(standing)
    if note is None or note.is_own or note.source is forward_of(type(module)):
        return False
    source, held, _ = _usual(module, None)
    if source is note.source and (source is not _through or held == standing.__self__):
        return False
    _put_back(module)
    _put(module)
    return True


def follow(module: nn.Module) -> None:
    """Update the mark of a module whose hooks have changed; a no-op for an unmarked module.

    A module without a forward of its own is not marked, and need not be asked about.
    """
    with _lock:
        if module in _owners:
            _put(module)


def unmark(module: nn.Module, owner: object) -> None:
    """Take an owner's mark back; with the last, the module is as it was. Idempotent."""
    with _lock:
        owners = _owners.get(module)
        if owners is None:
            return
        owners.discard(id(owner))
        if not owners:
            if _note_of(module.__dict__.get("forward")) is None:  # replaced, so it may be kept
                _retire(_through, inspect.getattr_static(type(module), "forward"))
            _put_back(module)
            _owners.pop(module)


def unmark_copy(module: nn.Module) -> None:
    """Take away the mark that a copy of a marked module has come with."""
    with _lock:
        if module in _owners:
            return
        _put_back(module)
        standing: Any = module.__dict__.get("forward")
        # A pickled one came under its name: as the class's forward, or as the call of the own one.
        if getattr(standing, "__name__", None) == "__call__" and hasattr(standing, "__self__"):
            standing = module.__dict__["forward"] = standing.__self__
        if type(module).forward in (standing, getattr(standing, "__func__", None)):
            del module.__dict__["forward"]


def has_own_forward(module: nn.Module) -> bool:
    """Tell whether somebody gave the module itself a forward; a mark alone is not one."""
    standing = module.__dict__.get("forward")
    note = _note_of(standing)
    return standing is not None and (note is None or note.is_own)


def forward_of(kind: type) -> Any:
    """Return the forward of a class; None where only its instances have one."""
    return getattr(kind, "forward", None)


def _note_of(forward: Any) -> _Note | None:
    function = getattr(forward, "__func__", None)
    return _notes.get(function) if isinstance(function, FunctionType) else None


def _retire(*sources: object) -> None:
    """Use other copies of the code for later marks.

    A mark has escaped: code may have been compiled with it while no line was on.
    """
    for source in sources:
        if isinstance(source, FunctionType):
            _copies.pop(source, {})


def _put(module: nn.Module) -> None:
    standing: Any = module.__dict__.get("forward")
    note, kinds = _note_of(standing), own_kinds(module)
    source: Any
    if note is None:
        source, held, is_own = _usual(module, standing)
    else:
        source, held, is_own = note.source, standing.__self__, note.is_own
    code = _copy_of_code(source, kinds)
    if note is not None and standing.__func__.__code__ is code:
        return
    twin = _twin(source, code, held)
    _notes[twin] = _Note(source, is_own)
    ours = module.__dict__["forward"] = MethodType(twin, held)
    if module.forward is not ours:  # it is a property: compiled code would fail at its guard
        _put_back(module)


def _usual(module: nn.Module, own: Any) -> tuple[Any, Any, bool]:
    """Return the parts of a module's mark: a function, what it is bound to, and `_Note.is_own`."""
    if own is not None:
        return _through, own, True
    found: Any = inspect.getattr_static(type(module), "forward")
    if isinstance(found, FunctionType) and not is_disabled(found):
        return found, module, False
    bind = getattr(type(found), "__get__", None)
    return _through, found if bind is None else bind(found, module, type(module)), False


def _through(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a forward that has no code to copy, or is not bound to the module."""
    return forward(*args, **kwargs)


def _put_back(module: nn.Module) -> None:
    standing: Any = module.__dict__.get("forward")
    note = _note_of(standing)
    if note is None:
        return  # there is none, or somebody has put a forward of theirs in its place
    if note.is_own:
        module.__dict__["forward"] = standing.__self__  # in a copy it is a copy as well
    else:
        del module.__dict__["forward"]


def _twin(source: FunctionType, code: CodeType, held: Any) -> FunctionType:
    """Copy a function such that compiled code can tell the copy from the original."""
    is_through = source.__globals__ is globals()
    twin = FunctionType(
        code,
        source.__globals__,
        "__call__" if is_through else "forward",  # under which it is pickled
        source.__defaults__,
        source.__closure__,
    )
    twin.__kwdefaults__ = source.__kwdefaults__
    like: Any = held if is_through else source
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(twin, name, getattr(like, name, None) or getattr(source, name))
    twin.__annotations__ = getattr(like, "__annotations__", {})
    twin.__dict__.update(source.__dict__)
    if is_through:
        twin.__signature__ = _signature(held)  # type: ignore[attr-defined]
    return twin


def _signature(forward: Callable[..., Any]) -> Any:
    """Return the signature of a function that takes a forward, and then its arguments."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return "written in C"  # for which inspect raises an error, as for the forward itself
    first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def _copy_of_code(function: FunctionType, kinds: int) -> CodeType:
    copies = _copies.setdefault(function, {})
    original, copy = copies.get(kinds, (None, None))
    if copy is None or original is not function.__code__:
        copy = function.__code__.replace()
        copies[kinds] = function.__code__, copy
    return copy
