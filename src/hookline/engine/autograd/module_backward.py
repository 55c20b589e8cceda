"""The gradients of one call on their way back, for raw backward hooks.

torch gives a backward hook what comes back *through a module*, not what comes back to a tensor
through all its uses. So the module is given an alias of each input (a view, to which nothing is
added but a node in the graph), and the hooks are on the alias. Where several gradients are wanted
at once, they need a place to meet: a `_GradBarrier` in the graph.

All hooks of a flow stand in one list, by rank, so that hooks of several lines are called in order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.autograd.aliases import aliases_of, flowing, instead_of, refuse_unaliased
from hookline.engine.autograd.written_views import GradHook, HookedView, hook_value
from hookline.engine.passes.modes import is_transformed
from hookline.engine.pytree import tree
from hookline.engine.taps.base import Order
from hookline.engine.torch_private.autograd import base_of_view, saves_itself, version_counter
from hookline.errors import AttachError

OneHook = Callable[[Tensor], Any]
AllHook = Callable[[list[Tensor | None]], Any]


@final
class CallGradients:
    """The hooks on the gradients of one call.

    Args:
        key: says which call, while it runs.
        name: what errors call the module.
        tensors: what flowed forward, before it was aliased. The gradients of several meet.
    """

    __slots__ = (
        "__weakref__", "_counters", "_given", "_hooks", "_made", "_name", "_origins", "_refs",
        "_views", "is_meeting", "key", "open",
    )  # fmt: skip

    def __init__(self, key: int, name: str, tensors: Sequence[Tensor]) -> None:
        self.key = key
        self.open = True
        self.is_meeting = len(tensors) > 1
        self._name = name
        self._hooks: list[tuple[Order, int | None, OneHook | AllHook]] = []
        self._counters: list[tuple[Tensor, int, bool]] = []
        self._views: list[HookedView | None] = []
        if self.is_meeting:
            if is_transformed():
                raise AttachError(
                    f"{name} takes or returns several tensors, and under torch.func a raw backward"
                    " hook cannot be given all their gradients at once."
                    f"\nRecord or edit them one by one: '{name}:grad_output', '{name}:grad_input'."
                )
            self._counters = [
                (version_counter(tensor), tensor._version, base_of_view(tensor) is not None)
                for tensor in tensors
            ]
            aliases: Sequence[Tensor] = _GradBarrier.apply(self, *tensors)  # type: ignore[no-untyped-call]
        else:
            aliases = [tensor.view_as(tensor) for tensor in tensors]
            self._views = [
                hook_value(alias, GradHook(self._call, index), GradHook(refuse, name))
                for index, alias in enumerate(aliases)
            ]
        self._given = [view for view in self._views if view is not None]
        self._refs = [weakref.ref(alias) for alias in aliases]
        self._origins = [weakref.ref(tensor) for tensor in tensors]
        self._made: Sequence[Tensor] = aliases

    def views(self) -> list[HookedView]:
        """Those of its aliases that may be written to; given once."""
        given, self._given = self._given, []
        return given

    def taken(self) -> Sequence[Tensor]:
        """What flows on in place of the tensors, handed out once: a flow holds no tensor."""
        made, self._made = self._made, ()
        return made

    def index(self, tensor: Tensor) -> int | None:
        """The number of a tensor, if it is one of the aliases."""
        for index, ref in enumerate(self._refs):
            if ref() is tensor:
                return index
        return None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all of these are its aliases: none came, or was replaced, since it was made."""
        return all(self.index(tensor) is not None for tensor in tensors)

    def origin(self, tensor: Tensor) -> Tensor:
        """What an alias is an alias of; any other tensor is itself."""
        index = self.index(tensor)
        origin = None if index is None else self._origins[index]()
        return tensor if origin is None else origin

    def subscribe(self, rank: Order, hook: OneHook | AllHook, index: int | None = None) -> None:
        """Add a hook on one of the gradients, or (without an index) on all of them at once."""
        at = len(self._hooks)
        while at and self._hooks[at - 1][0] > rank:
            at -= 1
        self._hooks.insert(at, (rank, index, hook))

    def close(self, output: Any) -> None:
        """The call has ended: an alias that it neither changed nor returned, nobody will change.

        Raises:
            AttachError: it changed one of several inputs whose gradients must meet.
        """
        if not self.open:
            return
        self.open = False
        if any(counter._version != version for counter, version, _ in self._counters):
            raise AttachError(
                f"{self._name} changes one of its several inputs in place, so a raw backward hook"
                " cannot be given all their gradients at once."
                f"\nRecord or edit them one by one: '{self._name}:grad_input'."
            )
        bases = [base_of_view(tensor) for _, tensor in tree.tensors(output)]
        for ref, view in zip(self._refs, self._views, strict=False):
            if view is None:
                continue
            alias = ref()
            base = None if alias is None else base_of_view(alias)
            view.settle(is_over=not any(one is not None and one is base for one in bases))
        self._views.clear()

    def _call(self, index: int, grad: Tensor) -> Tensor | None:
        new = grad
        for _, wanted, hook in tuple(self._hooks):
            if wanted is None:
                result = hook([new])  # type: ignore[arg-type]
                result = None if result is None else result[0]
            else:
                result = hook(new) if wanted == index else None  # type: ignore[arg-type]
            if result is not None:
                new = result
        return None if new is grad else new

    def met(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All gradients are there: call the hooks, and give what flows on.

        Raises:
            AttachError: one of the tensors was written to, and whoever else holds it, or its base,
                has the new numbers without the new history: the gradients would be wrong.
        """
        for (counter, version, is_view), origin in zip(self._counters, self._origins, strict=True):
            if counter._version != version and (is_view or origin() is not None):
                raise AttachError(
                    f"a tensor that {self._name} took or returned was changed in place later, and"
                    " is held elsewhere too; with a raw backward hook on several of them, its"
                    " gradient would be wrong."
                    f"\nUse hl.record or hl.edit at '{self._name}:grad_output' or ':grad_input'."
                )
        new = list(grads)
        for _, wanted, hook in tuple(self._hooks):
            if wanted is None:
                new = hook(list(new)) or new  # type: ignore[arg-type]
            elif (one := new[wanted]) is not None:
                result = hook(one)  # type: ignore[arg-type]
                new[wanted] = one if result is None else result
        return new


def refuse(name: str) -> None:
    """Refuse a gradient that cannot be told from others.

    Raises:
        AttachError: always.
    """
    raise AttachError(
        f"what {name} took or returned is a view that was changed in place later; a raw backward"
        " hook on it would be given more than what comes back through the module."
        "\nMake that operation not in place, or .clone() before it."
    )


class _GradBarrier(torch.autograd.Function):
    """Lets tensors through unchanged; in backward, waits for the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, flow: CallGradients, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flow = flow
        ctx.set_materialize_grads(False)
        # Detached, not returned as they are: those would be views that refuse in-place operations.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.flow.met(grads)


class _Lane(threading.local):
    """The flows that were made last in each thread: hooks on one call follow one another.

    Not held, or the last one would keep its recording alive; the graph holds it.
    """

    entering: Callable[[], CallGradients | None] = staticmethod(lambda: None)
    leaving: Callable[[], CallGradients | None] = staticmethod(lambda: None)


_lane = _Lane()


def enter(
    key: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], CallGradients | None]:
    """The flow of a call's inputs, made by the first who asks, with the aliased arguments.

    Tensors inside lists, dicts and objects are not aliased.
    """
    found = flowing((args, tuple(kwargs.values())), fixed_only=True)
    refuse_unaliased(name, (args, tuple(kwargs.values())))
    if not found:
        return args, kwargs, None
    flow = entered(key)
    if flow is not None and flow.holds(found):
        return args, kwargs, flow
    flow = CallGradients(key, name, found)
    _lane.entering = weakref.ref(flow)
    new = instead_of(found, flow.taken())
    args = tuple(tree.replace_tensors(value, new, fixed_only=True) for value in args)
    kwargs = {
        name: tree.replace_tensors(value, new, fixed_only=True) for name, value in kwargs.items()
    }
    return args, kwargs, flow


def entered(key: int) -> CallGradients | None:
    """The flow of this call's inputs, if it has one."""
    flow = _lane.entering()
    return flow if flow is not None and flow.open and flow.key == key else None


def leave(key: int, name: str, output: Any) -> tuple[Any, CallGradients | None]:
    """The flow of a call's outputs, where several of them must meet, and the aliased output."""
    found = flowing(output, fixed_only=False)
    if len(found) < 2:
        return output, None
    flow = left(key)
    if flow is not None and flow.holds(found):
        return output, flow
    flow = CallGradients(key, name, found)
    _lane.leaving = weakref.ref(flow)
    new = instead_of(found, flow.taken())
    return tree.replace_tensors(output, new, fixed_only=False), flow


def left(key: int) -> CallGradients | None:
    """The flow of this call's outputs, if it has one; not all of them need be in it."""
    flow = _lane.leaving()
    return flow if flow is not None and flow.key == key else None


def off_saved(key: int, output: Any) -> Any:
    """A call's output with aliases for what its own backward saved: what comes back to that in a
    second derivative did not come back to what was returned."""
    flow = left(key)
    saved = [
        tensor for tensor in flowing(output, fixed_only=False)
        if saves_itself(tensor) and (flow is None or flow.index(tensor) is None)
    ]  # fmt: skip
    return tree.replace_tensors(output, aliases_of(saved), fixed_only=False) if saved else output
