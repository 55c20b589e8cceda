"""Flow: the gradients of one call on their way back, for raw backward hooks. Imports values, tree,
regime, identity.

torch gives a backward hook what comes back *through a module*, not what comes back to a tensor
through all its uses. So the module is given an alias of each input (a view, to which nothing is
added but a node in the graph), and the hooks are on the alias. Where several gradients are wanted
at once, they need a place to meet: a `_Meeting` in the graph.

All hooks of a flow stand in one list, by rank, so that hooks of several lines are called in order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import tree
from hookline.engine.identity import ByIdentity
from hookline.engine.regime import is_transformed
from hookline.engine.taps import Rank
from hookline.engine.torch_internals import base_of_view, saves_itself, version_counter
from hookline.engine.values import Arrival, View, hook_value
from hookline.errors import AttachError

OneHook = Callable[[Tensor], Any]
AllHook = Callable[[list[Tensor | None]], Any]


@final
class Flow:
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
        self._hooks: list[tuple[Rank, int | None, OneHook | AllHook]] = []
        self._counters: list[tuple[Tensor, int, bool]] = []
        self._views: list[View | None] = []
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
            aliases: Sequence[Tensor] = _Meeting.apply(self, *tensors)  # type: ignore[no-untyped-call]
        else:
            aliases = [tensor.view_as(tensor) for tensor in tensors]
            self._views = [
                hook_value(alias, Arrival(self._call, index), Arrival(refuse, name))
                for index, alias in enumerate(aliases)
            ]
        self._given = [view for view in self._views if view is not None]
        self._refs = [weakref.ref(alias) for alias in aliases]
        self._origins = [weakref.ref(tensor) for tensor in tensors]
        self._made: Sequence[Tensor] = aliases

    def views(self) -> list[View]:
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

    def subscribe(self, rank: Rank, hook: OneHook | AllHook, index: int | None = None) -> None:
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


class _Meeting(torch.autograd.Function):
    """Lets tensors through unchanged; in backward, waits for the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, *tensors: Tensor) -> tuple[Tensor, ...]:
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

    entering: Callable[[], Flow | None] = staticmethod(lambda: None)
    leaving: Callable[[], Flow | None] = staticmethod(lambda: None)


_lane = _Lane()


def enter(
    key: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Flow | None]:
    """The flow of a call's inputs, made by the first who asks, with the aliased arguments.

    Tensors inside lists, dicts and objects are not aliased.
    """
    found = _flowing((args, tuple(kwargs.values())), fixed_only=True)
    _refuse_unaliased(name, (args, tuple(kwargs.values())))
    if not found:
        return args, kwargs, None
    flow = entered(key)
    if flow is not None and flow.holds(found):
        return args, kwargs, flow
    flow = Flow(key, name, found)
    _lane.entering = weakref.ref(flow)
    new = _instead(found, flow.taken())
    args = tuple(tree.swap(value, new, fixed_only=True) for value in args)
    kwargs = {name: tree.swap(value, new, fixed_only=True) for name, value in kwargs.items()}
    return args, kwargs, flow


def entered(key: int) -> Flow | None:
    """The flow of this call's inputs, if it has one."""
    flow = _lane.entering()
    return flow if flow is not None and flow.open and flow.key == key else None


def leave(key: int, name: str, output: Any) -> tuple[Any, Flow | None]:
    """The flow of a call's outputs, where several of them must meet, and the aliased output."""
    found = _flowing(output, fixed_only=False)
    if len(found) < 2:
        return output, None
    flow = left(key)
    if flow is not None and flow.holds(found):
        return output, flow
    flow = Flow(key, name, found)
    _lane.leaving = weakref.ref(flow)
    new = _instead(found, flow.taken())
    return tree.swap(output, new, fixed_only=False), flow


def left(key: int) -> Flow | None:
    """The flow of this call's outputs, if it has one; not all of them need be in it."""
    flow = _lane.leaving()
    return flow if flow is not None and flow.key == key else None


def off_leaves(value: Any) -> Any:
    """An output with aliases for its leaves: a parameter that is returned, an input passed on.

    A leaf outlives the pass, and a hook on it would, too, and see every other use of it.
    """
    leaves = [tensor for tensor in _flowing(value, fixed_only=False) if tensor.is_leaf]
    return tree.swap(value, _aliases(leaves), fixed_only=False) if leaves else value


def off_saved(key: int, output: Any) -> Any:
    """A call's output with aliases for what its own backward saved: what comes back to that in a
    second derivative did not come back to what was returned."""
    flow = left(key)
    saved = [
        tensor for tensor in _flowing(output, fixed_only=False)
        if saves_itself(tensor) and (flow is None or flow.index(tensor) is None)
    ]  # fmt: skip
    return tree.swap(output, _aliases(saved), fixed_only=False) if saved else output


def apart(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, leaves_only: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with aliases for what outlives the pass: leaves, or where it begins, all.

    Hooks on a tensor that several passes share would see what comes back from all of them.

    Returns:
        The new (args, kwargs); None if there was nothing to alias.
    """
    found = _flowing((args, tuple(kwargs.values())), fixed_only=True)
    wanted = [tensor for tensor in found if tensor.is_leaf or not leaves_only]
    if not wanted:
        return None
    new = _aliases(wanted)
    return (
        tuple(tree.swap(value, new, fixed_only=True) for value in args),
        {name: tree.swap(value, new, fixed_only=True) for name, value in kwargs.items()},
    )


def _aliases(tensors: list[Tensor]) -> ByIdentity[Tensor]:
    return _instead(tensors, [tensor.view_as(tensor) for tensor in tensors])


def _instead(tensors: Sequence[Tensor], aliases: Sequence[Tensor]) -> ByIdentity[Tensor]:
    new: ByIdentity[Tensor] = ByIdentity()
    for tensor, alias in zip(tensors, aliases, strict=True):
        new[tensor] = alias
    return new


def _flowing(value: Any, *, fixed_only: bool) -> list[Tensor]:
    """Each tensor through which a gradient can come back, once."""
    found: ByIdentity[None] = ByIdentity()
    if not torch.is_grad_enabled():
        return []
    for tensor in _tensors(value, fixed_only):
        if tensor.requires_grad and has_aliases(tensor):
            found[tensor] = None
    return found.things()


def has_aliases(tensor: Tensor) -> bool:
    """Whether torch can make an alias of it: not if sparse, nor nested in the older layout."""
    return tensor.layout is torch.jagged or (
        tensor.layout is torch.strided and not tensor.is_nested
    )


def _refuse_unaliased(name: str, values: tuple[Any, ...]) -> None:
    for tensor in _tensors(values, fixed_only=True):
        if torch.is_grad_enabled() and tensor.requires_grad and not has_aliases(tensor):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise AttachError(
                f"{name} takes a {kind} tensor, of which torch makes no alias, so a raw backward"
                " hook cannot be given its gradient."
                f"\nUse line.backward_pre, or record '{name}:grad_output'."
            )


def _tensors(value: Any, fixed_only: bool) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) or (not fixed_only and tree.is_container(value)):
        for _, part in tree.items(value) or ():
            yield from _tensors(part, fixed_only)
