"""Make compiled code notice a change of hooks, through guards on a module's forward.

Compiled code is guarded on each module that it calls: on the absence of a forward in the module's
`__dict__`, or on the code of that forward. By default no other guard notices a hook on a module
that had none. So as long as a line has hooks on a module, the module carries a mark: a forward in
its `__dict__`. The mark does what the usual forward does, with a copy of its code. There is one
copy for each set of kinds of hooks on the module.
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

from hookline.engine.torch_private.dynamo import is_compile_disabled
from hookline.engine.torch_private.hooks import own_hook_mask
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.util.weak_map import WeakIdentityMap


class _MarkOrigin(NamedTuple):
    """The origin of a mark."""

    source: FunctionType  # the function whose code the mark copies
    is_own: bool  # whether the mark replaces a forward in the module's `__dict__` and holds it


# The ids of the objects that have marked a module.
_owners: WeakIdentityMap[set[int]] = WeakIdentityMap()
# The functions of all marks. An attribute could not identify a mark, because a wrapper copies the
# attributes of the function that it wraps.
_origins: weakref.WeakKeyDictionary[FunctionType, _MarkOrigin] = weakref.WeakKeyDictionary()
# The copies of a function's code, by kinds of hooks, each with the original code.
_copies: weakref.WeakKeyDictionary[FunctionType, dict[int, tuple[CodeType, CodeType]]] = (
    weakref.WeakKeyDictionary()
)
_lock = fork_safe_lock()


def mark_forward(module: nn.Module, owner: object) -> None:
    """Keep code that was compiled before from being used for a module. Idempotent."""
    if isinstance(module, torch.jit.ScriptModule):
        return  # its class has no forward, and torch calls no hook on it
    with _lock:
        owners = _owners.get_or_add(module, set)
        if not owners:
            origin = _mark_origin(module.__dict__.get("forward"))
            if origin is not None:
                _discard_code_copies(origin.source)
        owners.add(id(owner))
        _renew_mark_locked(module)
        _put_mark(module)


@final
@dataclass(slots=True, eq=False)
class ForwardMarks:
    """The marks that one line has put on modules."""

    _marked: dict[int, nn.Module] = field(default_factory=dict)
    # The class of each marked module, and the forward of each class, at the last renewal.
    _kinds: list[type] = field(default_factory=list)
    _forwards: dict[type, Any] = field(default_factory=dict)

    def mark_modules(self, modules: Iterable[nn.Module]) -> None:
        """Mark modules. Idempotent."""
        for module in modules:
            self._marked[id(module)] = module  # first, so that an interrupt removes the mark, too
            mark_forward(module, self)

    def renew_all(self) -> list[nn.Module]:
        """Renew the marks of modules whose class has got another forward.

        Returns:
            The modules whose marks were renewed.
        """
        kinds = list(map(type, self._marked.values()))
        if kinds == self._kinds and all(
            class_forward(kind) is was for kind, was in self._forwards.items()
        ):
            return []
        self._kinds, self._forwards = kinds, {kind: class_forward(kind) for kind in kinds}
        # A copy: another thread may add modules, or end the line.
        return [module for module in list(self._marked.values()) if renew_mark(module)]

    def renew_if_stale(self, module: nn.Module) -> bool:
        """Renew the mark of a module whose class has got another forward; tell whether it had."""
        return id(module) in self._marked and renew_mark(module)

    def discard(self, module_id: int) -> None:
        """Remove the mark of the module with this id, if the module is marked."""
        if module_id in self._marked:
            unmark_forward(self._marked[module_id], self)
            del self._marked[module_id]

    def clear(self) -> None:
        """Remove all marks. Idempotent."""
        while self._marked:
            self.discard(next(iter(self._marked)))


def renew_mark(module: nn.Module) -> bool:
    """Renew the mark of a module whose class has got another forward; tell whether it had.

    The forward changes by `Class.forward = ...`, by another `__class__`, or by `recompile()` of a
    `torch.fx.GraphModule`.
    """
    with _lock:
        return _renew_mark_locked(module)


def _renew_mark_locked(module: nn.Module) -> bool:
    standing: Any = module.__dict__.get("forward")
    origin = _mark_origin(standing)
    if origin is None or origin.is_own or origin.source is class_forward(type(module)):
        return False
    source, bound, _ = _new_mark_parts(module, None)
    if source is origin.source and (source is not _call_forward or bound == standing.__self__):
        return False
    _restore_forward(module)
    _put_mark(module)
    return True


def update_mark_for_hooks(module: nn.Module) -> None:
    """Update the mark of a module whose hooks have changed; a no-op for an unmarked module.

    A module without a forward in its `__dict__` is unmarked, so callers may skip it.
    """
    with _lock:
        if module in _owners:
            _put_mark(module)


def unmark_forward(module: nn.Module, owner: object) -> None:
    """Remove an owner's mark; without owners the module is restored. Idempotent."""
    with _lock:
        owners = _owners.get(module)
        if owners is not None:
            owners.discard(id(owner))
        if not owners:  # None, where an interrupt has left the mark without owners
            _owners.pop(module)
            # A user has replaced the mark and may still hold it.
            if _mark_origin(module.__dict__.get("forward")) is None:
                _discard_code_copies(_call_forward, inspect.getattr_static(type(module), "forward"))
            _restore_forward(module)


def unmark_copied_module(module: nn.Module) -> None:
    """Remove the mark that was copied along with a marked module."""
    with _lock:
        if module in _owners:
            return
        _restore_forward(module)
        standing: Any = module.__dict__.get("forward")
        # A pickled mark was loaded by its name: as the class's forward, or as `__call__` of the
        # module's own forward.
        if getattr(standing, "__name__", None) == "__call__" and hasattr(standing, "__self__"):
            standing = module.__dict__["forward"] = standing.__self__
        if type(module).forward in (standing, getattr(standing, "__func__", None)):
            del module.__dict__["forward"]


def has_own_forward(module: nn.Module) -> bool:
    """Tell whether a user gave the module itself a forward; a mark alone does not count."""
    standing = module.__dict__.get("forward")
    origin = _mark_origin(standing)
    return standing is not None and (origin is None or origin.is_own)


def class_forward(kind: type) -> Any:
    """Return the forward of a class; None where only its instances have a forward."""
    return getattr(kind, "forward", None)


def _mark_origin(forward: Any) -> _MarkOrigin | None:
    function = getattr(forward, "__func__", None)
    return _origins.get(function) if isinstance(function, FunctionType) else None


def _discard_code_copies(*sources: object) -> None:
    """Use other copies of the code for later marks.

    A marked forward has escaped and may have been compiled without a line.
    """
    for source in sources:
        if isinstance(source, FunctionType):
            _copies.pop(source, {})


def _put_mark(module: nn.Module) -> None:
    standing: Any = module.__dict__.get("forward")
    origin, kinds = _mark_origin(standing), own_hook_mask(module)
    source: Any
    if origin is None:
        source, bound, is_own = _new_mark_parts(module, standing)
    else:
        source, bound, is_own = origin.source, standing.__self__, origin.is_own
    code = _cached_code_copy(source, kinds)
    if origin is not None and standing.__func__.__code__ is code:
        return
    twin = _copy_function(source, code, bound)
    _origins[twin] = _MarkOrigin(source, is_own)
    new_mark = module.__dict__["forward"] = MethodType(twin, bound)
    # `forward` is a property, so the guard of compiled code would fail.
    if module.forward is not new_mark:
        _restore_forward(module)


def _new_mark_parts(module: nn.Module, standing: Any) -> tuple[Any, Any, bool]:
    """Return the parts of a mark: a function, its bound object and `_MarkOrigin.is_own`."""
    if standing is not None:
        return _call_forward, standing, True
    forward: Any = inspect.getattr_static(type(module), "forward")
    if isinstance(forward, FunctionType) and not is_compile_disabled(forward):
        return forward, module, False
    bind = getattr(type(forward), "__get__", None)
    return _call_forward, forward if bind is None else bind(forward, module, type(module)), False


def _call_forward(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a forward that has no code to copy, or is not bound to the module."""
    return forward(*args, **kwargs)


def _restore_forward(module: nn.Module) -> None:
    standing: Any = module.__dict__.get("forward")
    origin = _mark_origin(standing)
    if origin is None:
        return  # no mark, or a user's forward has replaced the mark
    if origin.is_own:
        # In a copied module, this forward was copied as well.
        module.__dict__["forward"] = standing.__self__
    else:
        del module.__dict__["forward"]


def _copy_function(source: FunctionType, code: CodeType, bound: Any) -> FunctionType:
    """Copy a function such that compiled code can tell the copy from the original."""
    is_through = source.__globals__ is globals()
    twin = FunctionType(
        code,
        source.__globals__,
        "__call__" if is_through else "forward",  # the name under which the function is pickled
        source.__defaults__,
        source.__closure__,
    )
    twin.__kwdefaults__ = source.__kwdefaults__
    like: Any = bound if is_through else source
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(twin, name, getattr(like, name, None) or getattr(source, name))
    twin.__annotations__ = getattr(like, "__annotations__", {})
    twin.__dict__.update(source.__dict__)
    if is_through:
        twin.__signature__ = _mark_signature(bound)  # type: ignore[attr-defined]
    return twin


def _mark_signature(forward: Callable[..., Any]) -> Any:
    """Return the signature of a function that takes a forward and the forward's arguments."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return "written in C"  # inspect raises an error for a string, as it does for the forward
    first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def _cached_code_copy(function: FunctionType, hook_mask: int) -> CodeType:
    copies = _copies.setdefault(function, {})
    original, copy = copies.get(hook_mask, (None, None))
    if copy is None or original is not function.__code__:
        copy = function.__code__.replace()
        copies[hook_mask] = function.__code__, copy
    return copy
