"""Placements: hooks put on modules, and taken off again. The only file that registers with torch.

Imports taps, torch_internals, errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from hookline.engine.errors import AttachError
from hookline.engine.taps import Rank, RootTap, Tap
from hookline.engine.torch_internals import (
    HookDict,
    hook_dict,
    hook_flags,
    is_scripted,
    new_hook_id,
)

Hook = Callable[..., Any]


@final
class Placements:
    """The hooks that one line has on modules, in the order in which they were put there."""

    __slots__ = ("_ids", "_placed")

    def __init__(self) -> None:
        self._placed: list[tuple[list[Any], int]] = []
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._placed)

    def place(
        self,
        module: nn.Module,
        kind: str,
        hook: Hook,
        rank: Rank,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> None:
        """Put a hook on a module, among the hooks that are there by its rank.

        Raises:
            AttachError: torch would accept the hook and never call it.
        """
        if is_scripted(module):
            raise AttachError(
                f"{type(module).__name__} is a ScriptModule: torch takes hooks on it and never"
                " calls them.\nAttach to the Python model, before torch.jit.script or .trace."
            )
        hooks = hook_dict(module, kind)
        key = self._free_id(hooks)
        dicts: list[Any] = [hooks]
        if with_kwargs or always_call:
            dicts += hook_flags(module, kind, with_kwargs=with_kwargs, always_call=always_call)
        self._placed.append((dicts, key))  # first: an interrupt after this line still takes it off
        for flags in dicts[1:]:
            flags[key] = True
        others = list(hooks.items()) if hooks else ()
        hooks[key] = hook
        for other, other_hook in others:
            other_rank = _rank_of(other_hook)
            if other_rank > rank or (prepend and other_rank == rank):
                hooks.move_to_end(other)

    def take_off(self, keep: int = 0) -> None:
        """Take off all that was placed after the first `keep`, also when interrupted meanwhile."""
        placed = self._placed
        try:
            while len(placed) > keep:
                dicts, key = placed[-1]
                for hooks in dicts:
                    hooks.pop(key, None)
                placed.pop()
        except BaseException:
            self.take_off(keep)
            raise

    def _free_id(self, hooks: HookDict) -> int:
        """An id of this line that is not taken in this dictionary: one serves many modules."""
        for key in self._ids:
            if key not in hooks:
                return key
        self._ids.append(new_hook_id())
        return self._ids[-1]


def register_everywhere(forward_pre: Hook, forward: Hook) -> list[RemovableHandle]:
    """Put two hooks on every module of the process."""
    return [
        register_module_forward_pre_hook(forward_pre),
        register_module_forward_hook(forward, with_kwargs=True),
    ]


def _rank_of(hook: Hook) -> int:
    owner = getattr(hook, "__self__", None)
    return owner.rank if isinstance(owner, Tap | RootTap) else Rank.HOOK
