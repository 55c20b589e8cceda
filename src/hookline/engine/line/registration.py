"""Register hooks on modules, tensors, optimizers and torch itself, and remove them again.

Only this file registers hooks with torch.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookline.engine.compile.guards import update_mark_for_hooks
from hookline.engine.line.attachment import Attachment, retry_interrupted
from hookline.engine.operations.operation_mode import (
    OperationMode,
    drop_leftover_modes,
    operation_mode,
)
from hookline.engine.selection.module_tree import ModuleNode, OperationNode, ParameterNode
from hookline.engine.taps.base import ON_OUTPUT, HookOwner, HookSpec, Order, Tap, iterated_taps
from hookline.engine.taps.mode_tap import ModeTap, choose_active_tap
from hookline.engine.torch_private.distributed import is_in_flat_parameter
from hookline.engine.torch_private.graph.before_backward import BACKWARD_HOOKS
from hookline.engine.torch_private.hooks import (
    HOOK_DICTS,
    HookDict,
    global_hook_and_flag_dicts,
    hook_and_flag_dicts,
    new_hook_id,
    own_hook_id,
    tensor_hook_dict,
)
from hookline.errors import AttachError
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.util.without_gc import without_gc

Hook = Callable[..., Any]
Node = ModuleNode | ParameterNode | Optimizer
# The dictionary that holds a hook, the hook's key, its module, the dictionaries of its flags.
Entry = tuple[Any, int, nn.Module | None, Sequence[Any]]

# The id of most hooks. Compiled code is guarded on the ids, so they are always the same.
_FIRST_ID = own_hook_id(0)
_N_FLAGS = 4  # a hook takes kwargs or not, and is always called or not

# Replaces a removed entry, so that the indices of the other entries stay valid.
_TAKEN_OFF: Entry = ({}, 0, None, ())

# Several threads may attach lines to one model at once, and a signal handler may do so in between.
_lock = fork_safe_lock()


@final
class Registrations(Attachment):
    """The registered hooks of one line.

    Attributes:
        entries: the entries of the hooks, in the order of registration.
    """

    __slots__ = ("_stale", "_watched", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        # The modules that watch for calls of operations, by id, each with the place of its entries.
        self._watched: dict[int, tuple[nn.Module, int]] = {}
        self._stale: dict[int, OperationMode] = {}  # the modes whose operations have got hooks

    @property
    def has_hooks(self) -> bool:
        """Tell whether any hook is registered."""
        return any(entry is not _TAKEN_OFF for entry in self.entries)

    def register_taps(
        self, taps: Iterable[tuple[HookOwner, Node]], *, prepend: bool = False
    ) -> None:
        """Register the hooks of each tap on the tap's node, under one lock.

        Args:
            taps: the taps, each with its node.
            prepend: register each hook before the hooks of its order.

        Raises:
            AttachError: torch would accept a hook and never call it.
        """
        with _lock, without_gc(), self._update_modes_after():
            self._register_all(taps, prepend=prepend)

    def _register_all(self, taps: Iterable[tuple[HookOwner, Node]], *, prepend: bool) -> None:
        name = HOOK_DICTS["forward"]
        plain: set[type] = set()  # the classes of modules that are not scripted
        for tap, node in taps:
            # A line has many taps. Most modules have no other hook, so no order must be kept.
            if tap.hooks is not ON_OUTPUT or type(node) is not ModuleNode:
                self._register_tap(tap, node, prepend=prepend)
                continue
            module = node.module
            kind, attributes = type(module), module.__dict__
            if kind not in plain and not isinstance(module, ScriptModule):
                plain.add(kind)
            if kind not in plain or (hooks := attributes[name]):
                self._register_tap(tap, node, prepend=prepend)
                continue
            self.entries.append((hooks, _FIRST_ID, module, ()))
            hooks[_FIRST_ID] = tap.fire  # type: ignore[attr-defined]
            if "forward" in attributes:
                update_mark_for_hooks(module)

    def _register_tap(self, tap: HookOwner, node: Node, *, prepend: bool) -> None:
        specs = tap.hooks_on(node) if isinstance(node, ParameterNode) else tap.hooks
        for spec in specs:
            hook = getattr(tap, spec.method)
            order = tap.order if spec.order is None else spec.order
            if isinstance(node, Optimizer):
                self._register_by_torch(getattr(node, f"register_{spec.kind}_hook"), hook)
            elif isinstance(node, ParameterNode):
                self._register_on_tensor(node, spec.kind, hook, order, prepend=prepend)
            elif spec.kind == "load_state_dict_pre":  # torch passes the module to the hook, too
                self._register_by_torch(node.module.register_load_state_dict_pre_hook, hook)
            else:
                # An always-called hook closes what another hook of the tap opened. With prepend,
                # the opening hook runs first and the closing hook still runs last.
                is_closing = spec.always_call and len(specs) > 1
                is_first = prepend and not is_closing
                self._register_on_module(node.module, spec, hook, order, prepend=is_first)
        if isinstance(node, OperationNode):
            self._watch_for_operation(node)
        elif isinstance(node, ModuleNode) and "forward" in node.module.__dict__:
            update_mark_for_hooks(node.module)

    def _watch_for_operation(self, node: OperationNode) -> None:
        """Have the module of an operation watch for calls of the operation."""
        host = node.host
        mode = operation_mode(host.module)
        if id(host.module) not in self._watched:
            self._watched[id(host.module)] = host.module, len(self.entries)
            self._register_tap(ModeTap(mode), host, prepend=False)
            choose_active_tap(host.module, mode)
        self._stale[id(mode)] = mode

    @contextmanager
    def _update_modes_after(self) -> Iterator[None]:
        """Update the modes whose operations get hooks in the block, each once."""
        try:
            yield
        finally:
            while self._stale:
                self._stale.popitem()[1].update_hooked_functions()

    def _register_on_module(
        self, module: nn.Module, spec: HookSpec, hook: Hook, order: Order, *, prepend: bool
    ) -> None:
        if isinstance(module, ScriptModule):
            raise AttachError(
                f"{type(module).__name__} is a ScriptModule: torch refuses hooks on its modules, or"
                " never calls them.\nAttach to the Python model, before torch.jit.script or .trace."
            )
        hooks, *marks = hook_and_flag_dicts(
            module, spec.kind, with_kwargs=spec.with_kwargs, always_call=spec.always_call
        )
        is_first = not hooks  # the common case, in which no order must be kept
        key = _free_id(hooks, spec.with_kwargs + 2 * spec.always_call)
        # First, so that an interrupt from here on removes the hook, too.
        self.entries.append((hooks, key, module, marks))
        for flags in marks:
            flags[key] = True
        later = () if is_first else _hooks_after(hooks, order, Order.HOOK, prepend=prepend)
        hooks[key] = hook
        if later:
            _move_to_end(hooks, later)

    def _register_on_tensor(
        self, node: ParameterNode, kind: str, hook: Hook, order: Order, *, prepend: bool
    ) -> None:
        """Register a tensor hook ("grad") or a post-accumulate-grad hook ("accumulated")."""
        tensor = node.tensor
        if is_lazy(tensor):
            raise AttachError(
                f"{node.path} is lazy: it takes no hook on its gradient before the first run has"
                " given it a shape.\nRun the model once, model(x), then attach."
            )
        if not tensor.requires_grad:
            raise AttachError(
                f"the tensor {node.path!r} needs no gradient and has no graph: no hook on it would"
                " ever be called.\nCall .requires_grad_() on it, or on a tensor it is computed"
                " from, before the forward; and do not compute it under no_grad()."
            )
        if is_in_flat_parameter(tensor):
            raise AttachError(
                f"{node.path} must be a parameter with which the model computes, got one that FSDP1"
                " keeps in a flat one (use_orig_params=True): no hook on its gradient would ever be"
                " called.\nShard by fully_shard; or read .grad after backward(), and clip by"
                " model.clip_grad_norm_(...)."
            )
        if kind == "accumulated" and not tensor.is_leaf:
            raise AttachError(
                "only leaf tensors accumulate a .grad; this one was computed"
                f" ({tensor.grad_fn.name() if tensor.grad_fn else ''})."
                "\nFor its gradient as it flows: line.grad(tensor, fn)."
            )
        name = "register_hook" if kind == "grad" else "register_post_accumulate_grad_hook"
        foreign = Order.GRAD_HOOK if kind == "grad" else Order.RECORD
        before = tensor_hook_dict(tensor, kind) or OrderedDict()
        later = _hooks_after(before, order, foreign, prepend=prepend)
        self._register_by_torch(getattr(tensor, name), hook)
        hooks = tensor_hook_dict(tensor, kind)
        assert hooks is not None
        _move_to_end(hooks, later)

    def register_globally(self, kind: str, hook: Hook) -> None:
        """Register a process-wide hook on torch.

        Args:
            kind: "forward_pre", "forward" (which gets kwargs), "after" (a forward hook that is
                always called), "backward" (before each run of autograd), or the kind of a
                registration hook or a step hook.
            hook: the hook.
        """
        dicts: list[Any] = (
            [BACKWARD_HOOKS] if kind == "backward" else global_hook_and_flag_dicts(kind)
        )
        hooks, *marks = dicts
        with _lock:
            # A new id: torch looks up flags by the id alone, so a shared id would flag a module's
            # hook, too.
            key = new_hook_id()
            # First, so that an interrupt from here on removes the hook, too.
            self.entries.append((hooks, key, None, marks))
            for flags in marks:
                flags[key] = True
            hooks[key] = hook

    def _register_by_torch(self, register: Callable[[Hook], RemovableHandle], hook: Hook) -> None:
        """Register a hook with torch's own function; an interrupt leaves no hook registered."""
        handle = None
        try:
            handle = register(hook)
            hooks = handle.hooks_dict_ref()
            assert hooks is not None
            self.entries.append((hooks, handle.id, None, ()))
        except BaseException:
            if handle is not None:
                handle.remove()
            raise

    def end(self) -> None:
        """Remove all hooks."""
        has_modes = bool(self._watched)
        self.remove()
        if has_modes:
            drop_leftover_modes(sys._getframe())

    def remove(self, keep: int = 0) -> None:
        """Remove all hooks after the first `keep`, also if interrupted meanwhile."""
        with _lock:  # held until all are removed: another line's hook may get the same id
            try:
                self._remove(keep)
            except BaseException:
                self.remove(keep)
                raise

    def _remove(self, keep: int) -> None:
        for number, (hooks, key, module, marks) in enumerate(self.entries[keep:], 1):
            hooks.pop(key, None)
            for flags in marks:
                flags.pop(key, None)
            if module is not None and "forward" in module.__dict__:
                try:
                    update_mark_for_hooks(module)
                except BaseException:
                    del self.entries[keep : keep + number]  # `remove` retries for the rest
                    raise
        del self.entries[keep:]
        for module, _ in self._watched.values():
            mode = operation_mode(module)
            mode.update_hooked_functions()
            choose_active_tap(module, mode)
        self._watched = {key: item for key, item in self._watched.items() if item[1] < keep}

    def entries_of(
        self, taps: Iterable[Tap], start: int = 0, hook: str | None = None
    ) -> list[Entry]:
        """Find the entries of taps, from the entry `start` on; with `hook`, only of that method."""
        owners = set(map(id, taps))
        entries = []
        for entry in self.entries[start:]:
            if entry is _TAKEN_OFF:
                continue
            placed = entry[0].get(entry[1])
            placed = getattr(placed, "hook", placed)  # torch wraps load_state_dict pre-hooks
            is_meant = hook is None or getattr(placed, "__name__", None) == hook
            if is_meant and id(getattr(placed, "__self__", None)) in owners:
                entries.append(entry)
        return entries

    def remove_entries(self, entries: Iterable[Entry]) -> None:
        """Remove some of the hooks, also if interrupted meanwhile. Idempotent.

        While torch iterates over a live hook dictionary, the dictionary's hooks stay until the line
        ends. The taps of these hooks must be retired.
        """
        with _lock:
            retry_interrupted(partial(self._remove_entries, entries))

    def _remove_entries(self, entries: Iterable[Entry]) -> None:
        ids = set(map(id, entries))
        for index, entry in enumerate(self.entries):
            # Entries that the line's end has removed are no longer in this list.
            if id(entry) in ids and not _is_being_iterated(entry[0]):
                hooks, key, module, marks = entry
                hooks.pop(key, None)
                for flags in marks:
                    flags.pop(key, None)
                if module is not None and "forward" in module.__dict__:
                    update_mark_for_hooks(module)
                self.entries[index] = _TAKEN_OFF
        for module, _ in self._watched.values():
            operation_mode(module).update_hooked_functions()


def _free_id(hooks: HookDict, flags: int = 0) -> int:
    """Return the first of hookline's hook ids for these flags that is free in this dictionary.

    Hooks with other flags never have the same id. torch looks the flags up when it calls a hook:
    meanwhile another thread may have removed that hook and registered another one.
    """
    index = flags
    while (key := own_hook_id(index)) in hooks:
        index += _N_FLAGS
    return key


def _move_to_end(hooks: HookDict, keys: list[Any]) -> None:
    """Move hooks to the end of the dictionary, so that torch calls them last.

    The hooks are taken out and put in again. autograd, and dynamo up to torch 2.11, read the
    underlying plain dictionary, whose order `OrderedDict.move_to_end` does not change. The loop
    runs in C, so that no other thread and no signal handler finds a hook missing.
    """
    deque(map(hooks.__setitem__, keys, map(hooks.pop, keys)), maxlen=0)


def _is_being_iterated(hooks: HookDict) -> bool:
    """Tell whether torch is iterating over this dictionary itself to call its hooks."""
    if not iterated_taps:
        return False
    owners = [getattr(getattr(h, "hook", h), "__self__", None) for h in list(hooks.values())]
    return any(owner is tap for owner in owners for tap in list(iterated_taps))


def _hooks_after(hooks: HookDict, order: Order, foreign: Order, *, prepend: bool) -> list[Any]:
    """Return the keys of the hooks that are called after a new hook of this order."""
    return [
        key
        for key, hook in list(hooks.items())
        if (other := _order_of(hook, foreign)) > order or (prepend and other == order)
    ]


def _order_of(hook: Hook, foreign: Order) -> Order:
    owner = getattr(hook, "__self__", None)
    if not isinstance(owner, HookOwner):
        return foreign
    specs: tuple[HookSpec, ...] = getattr(owner, "hooks", ())  # an inert raw tap has none
    orders = (spec.order for spec in specs if spec.method == hook.__name__)
    order = next(orders, None)
    return owner.order if order is None else order
