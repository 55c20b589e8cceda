"""Flow: the gradients of one call's inputs, or outputs, on their way back. Imports taps, tree.

A gradient hook on a tensor sees what comes back through every use of it. The gradient of a module's
*input* is what comes back through that module alone, so the module is given an alias of its own (a
view, to which nothing is added but a node in the graph), and the hooks are on the alias.

All hooks on a call's inputs stand in one list, by rank, so that edits, hooks and recorders of
several lines are called in their order. A raw hook that wants all gradients of a call at once,
where there are several, needs them to meet: a `_Meeting` in the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import tree
from hookline.engine.errors import AttachError
from hookline.engine.taps import Rank
from hookline.engine.torch_internals import hook_gradient, hook_node

OneHook = Callable[[Tensor], Any]
AllHook = Callable[[list[Tensor | None]], Any]


class Arrival(partial[Any]):
    """A hook on a tensor of the graph. Pickling that tensor loses it, and need not say so."""

    __slots__ = ()
    __torch_unserializable__ = True


@final
class Flow:
    """The hooks on the gradients of one call.

    Args:
        key: says which call, while it runs.
        tensors: what flowed forward, before it was aliased.
        meet: the gradients are needed all at once.
    """

    __slots__ = (
        "__weakref__",
        "_by_node", "_hooks", "_made", "_origins", "_refs", "is_meeting", "key", "open",
    )  # fmt: skip

    def __init__(self, key: int, tensors: Sequence[Tensor], *, meet: bool) -> None:
        self.key = key
        self.open = True
        self.is_meeting = meet and len(tensors) > 1
        self._hooks: list[tuple[Rank, int | None, OneHook | AllHook]] = []
        self._origins = [(t.grad_fn, t.output_nr, t._version) for t in tensors]
        self._by_node: set[int] = set()
        if self.is_meeting:
            aliases: Sequence[Tensor] = _Meeting.apply(self, *tensors)  # type: ignore[no-untyped-call]
        else:
            aliases = [tensor.view_as(tensor) for tensor in tensors]
            for index, alias in enumerate(aliases):
                hook_gradient(alias, Arrival(self._one, index))
        self._refs = [weakref.ref(alias) for alias in aliases]
        self._made: Sequence[Tensor] = aliases

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

    def subscribe(self, rank: Rank, hook: OneHook | AllHook, index: int | None = None) -> None:
        """Add a hook on one of the gradients, or (without an index) on all of them at once."""
        at = len(self._hooks)
        while at and self._hooks[at - 1][0] > rank:
            at -= 1
        self._hooks.insert(at, (rank, index, hook))

    def close(self, name: str) -> None:
        """The call has ended. What it changed in place lost the hooks on its alias.

        Raises:
            AttachError: it changed one of several inputs whose gradients must meet.
        """
        if not self.open:
            return
        self.open = False
        origins, self._origins = self._origins, []
        for index, ref in enumerate(self._refs):
            alias = ref()
            node, output_nr, version = origins[index]
            if alias is None or node is None or alias._version == version:
                continue
            if self.is_meeting:
                raise AttachError(
                    f"{name} changes one of its several inputs in place, so a raw backward hook"
                    " cannot be given all their gradients at once."
                    f"\nRecord or edit them one by one: '{name}:grad_input'."
                )
            self._by_node.add(index)
            hook_node(node, Arrival(self._at_node, index, output_nr))

    def _at_node(self, index: int, output_nr: int, grads: tuple[Tensor | None, ...]) -> Any:
        grad = grads[output_nr]
        new = None if grad is None else self._call(index, grad)
        if new is None:
            return None
        return (*grads[:output_nr], new, *grads[output_nr + 1 :])

    def _one(self, index: int, grad: Tensor) -> Tensor | None:
        # Behind an in-place change only part of the gradient comes this way.
        return None if index in self._by_node else self._call(index, grad)

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
        """All gradients are there: call the hooks, and give what flows on."""
        new = list(grads)
        for _, wanted, hook in tuple(self._hooks):
            if wanted is None:
                new = hook(list(new)) or new  # type: ignore[arg-type]
            elif (one := new[wanted]) is not None:
                result = hook(one)  # type: ignore[arg-type]
                new[wanted] = one if result is None else result
        return new


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
    key: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, meet: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any], Flow | None]:
    """The flow of a call's inputs, made by the first who asks, with the aliased arguments.

    Tensors inside lists, dicts and objects are not aliased.
    """
    found = _flowing((args, tuple(kwargs.values())), fixed_only=True)
    if not found:
        return args, kwargs, None
    flow = _lane.entering()
    if flow is not None and flow.open and flow.key == key and flow.index(found[0]) is not None:
        return args, kwargs, flow
    flow = Flow(key, found, meet=meet)
    _lane.entering = weakref.ref(flow)
    new = {id(old): alias for old, alias in zip(found, flow.taken(), strict=True)}
    args = tuple(tree.swap(value, new, fixed_only=True) for value in args)
    kwargs = {name: tree.swap(value, new, fixed_only=True) for name, value in kwargs.items()}
    return args, kwargs, flow


def leave(key: int, output: Any) -> tuple[Any, Flow | None]:
    """The flow of a call's outputs, where several of them must meet, and the aliased output."""
    found = _flowing(output, fixed_only=False)
    flow = met(key, found)
    if len(found) < 2 or flow is not None:
        return output, flow
    flow = Flow(key, found, meet=True)
    _lane.leaving = weakref.ref(flow)
    new = {id(old): alias for old, alias in zip(found, flow.taken(), strict=True)}
    return tree.swap(output, new, fixed_only=False), flow


def met(key: int, tensors: Sequence[Tensor]) -> Flow | None:
    """The flow in which these outputs of a call meet, if they do."""
    flow = _lane.leaving()
    if flow is None or flow.key != key or not tensors or flow.index(tensors[0]) is None:
        return None
    return flow


def off_leaves(value: Any) -> Any:
    """The value with aliases for its leaves: a parameter that is returned, an input passed on.

    A leaf outlives the pass, and a hook on it would, too, and see every other use of it.
    """
    if not torch.is_grad_enabled():
        return value
    leaves = {id(t): t for t in _flowing(value, fixed_only=False) if t.is_leaf}
    if not leaves:
        return value
    aliases = {key: leaf.view_as(leaf) for key, leaf in leaves.items()}
    return tree.swap(value, aliases, fixed_only=False)


def _flowing(value: Any, *, fixed_only: bool) -> list[Tensor]:
    """Each tensor through which a gradient can come back, once."""
    found: dict[int, Tensor] = {}
    for tensor in _tensors(value, fixed_only):
        if tensor.requires_grad and tensor.layout is torch.strided:
            found[id(tensor)] = tensor
    return list(found.values())


def _tensors(value: Any, fixed_only: bool) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) or (not fixed_only and tree.is_container(value)):
        for _, part in tree.items(value) or ():
            yield from _tensors(part, fixed_only)
