"""The dictionaries in which torch keeps hooks."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

HookDict = OrderedDict[Any, Callable[..., Any]]


_CALL_KINDS = ("forward_pre", "forward", "backward_pre", "backward")
# kind of hook -> the dictionary on a module that holds it
HOOK_DICTS = {kind: f"_{kind}_hooks" for kind in (*_CALL_KINDS, "state_dict_pre", "state_dict")}
HOOK_DICTS["load_state_dict_pre"] = "_load_state_dict_pre_hooks"
HOOK_DICTS["load_state_dict"] = "_load_state_dict_post_hooks"

_own_ids: list[int] = []


def own_hook_id(index: int) -> int:
    """Return the hook id of hookline with this index, which no other hook of torch has or gets.

    torch's counter hands out each id once. hookline uses the same id in many dictionaries.
    """
    while len(_own_ids) <= index:
        _own_ids.append(new_hook_id())
    return _own_ids[index]


def new_hook_id() -> int:
    """Return a new hook id."""
    return int(RemovableHandle(OrderedDict()).id)


# The dictionaries of a module of which dynamo checks, while compiling, whether they are empty.
_CHECKED_BY_DYNAMO = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


def own_hook_mask(module: nn.Module) -> int:
    """Return which of these dictionaries contain hooks of hookline, as a bit for each.

    By default compiled code does not notice when an empty dictionary gets a hook.
    """
    tables = [module.__dict__[name].keys() for name in _CHECKED_BY_DYNAMO]
    return sum(1 << bit for bit, keys in enumerate(tables) if not keys.isdisjoint(_own_ids))


def hook_dict(module: nn.Module, kind: str) -> HookDict:
    """Return the ordered dictionary of hooks of this kind on this module.

    Writing to the dictionary costs a tenth of `register_forward_hook`. It is also the only way to
    put a hook before or after particular other hooks.
    """
    hooks: HookDict = module.__dict__[HOOK_DICTS[kind]]
    return hooks


def hook_and_flag_dicts(
    module: nn.Module, kind: str, *, with_kwargs: bool = False, always_call: bool = False
) -> list[Any]:
    """Return the dictionary of hooks of this kind, then the dictionaries of the requested flags.

    The flags mark hooks that take kwargs or are always called.
    """
    attributes = module.__dict__
    dicts = [attributes[HOOK_DICTS[kind]]]
    if with_kwargs:
        dicts.append(attributes[f"_{kind}_hooks_with_kwargs"])
    if always_call:
        dicts.append(attributes[f"_{kind}_hooks_always_called"])
    return dicts


def discard_hooks_of(module: nn.Module, owner: object, is_alike: Callable[[object], bool]) -> None:
    """Remove every hook of `owner` from this module, from within one of these hooks.

    torch iterates over the live dictionaries of state-dict hooks. So these hooks are removed when
    the last hook is called, together with all hooks whose owner `is_alike`.
    """
    for kind in HOOK_DICTS:
        hooks = hook_dict(module, kind)
        placed = list(hooks.items())  # another thread may remove hooks meanwhile
        unwanted = [key for key, hook in placed if _bound_object(hook) is owner]
        if "state_dict" in kind and unwanted:
            is_last = unwanted[-1] == placed[-1][0]
            alike = [key for key, hook in placed if is_alike(_bound_object(hook))]
            unwanted = alike if is_last else []
        for key in unwanted:
            discard_hook(module, kind, key)


def discard_hook(module: nn.Module, kind: str, key: Any) -> None:
    """Remove a hook from a module, if it is there."""
    for flag in ("", "_with_kwargs", "_always_called"):
        module.__dict__.get(HOOK_DICTS[kind] + flag, {}).pop(key, None)


def _bound_object(hook: Callable[..., Any]) -> object:
    # torch wraps load_state_dict pre-hooks.
    return getattr(getattr(hook, "hook", hook), "__self__", None)


# The dictionary of each kind of process-wide hook, then the dictionaries of its flags.
_GLOBAL_HOOKS = {
    "forward_pre": ("_global_forward_pre_hooks",),
    "forward": ("_global_forward_hooks", "_global_forward_hooks_with_kwargs"),
    "after": ("_global_forward_hooks", "_global_forward_hooks_always_called"),
    "parameter": ("_global_parameter_registration_hooks",),
    "buffer": ("_global_buffer_registration_hooks",),
    "module": ("_global_module_registration_hooks",),
    "step_pre": ("_global_optimizer_pre_hooks",),
    "step_post": ("_global_optimizer_post_hooks",),
}


def global_hook_and_flag_dicts(kind: str) -> list[Any]:
    """Return the dictionary of a kind of process-wide hook, then the dictionaries of its flags.

    They are written to directly. torch's own functions may be interrupted before they return a
    handle, and then leave the flag for kwargs behind.
    """
    name = "torch.optim.optimizer" if kind.startswith("step") else "torch.nn.modules.module"
    return [getattr(sys.modules[name], hooks) for hooks in _GLOBAL_HOOKS[kind]]


def global_hooks() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every process-wide module hook, as (kind, hook)."""
    for kind in _CALL_KINDS:
        table: HookDict = getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
        yield from ((kind, hook) for hook in table.values())


def tensor_hooks(tensor: torch.Tensor) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every hook on a tensor's gradient, as (kind, hook)."""
    for kind in ("grad", "accumulated"):
        yield from ((kind, hook) for hook in (tensor_hook_dict(tensor, kind) or {}).values())


def tensor_hook_dict(tensor: Tensor, kind: str) -> HookDict | None:
    """Return the dictionary of a tensor's hooks of this kind; None if there never was one."""
    name = "_backward_hooks" if kind == "grad" else "_post_accumulate_grad_hooks"
    hooks: HookDict | None = getattr(tensor, name, None)
    return hooks
