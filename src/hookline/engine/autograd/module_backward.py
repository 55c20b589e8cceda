"""The gradients of one call of a module, for raw backward hooks.

torch gives a backward hook the gradient that flows *through a module*, not the gradient of a tensor
over all its uses. So the module gets an alias of each input, with the hooks on the alias. The alias
is a view that adds only a node to the graph. Where a hook needs several gradients at once, a node
of the graph waits for all of them: a `_GradBarrier`.

All hooks of a call are in one list, by order, so that the hooks of several lines are called in
order. So a call's gradients belong to the thread that runs it. They do not belong to a pass, since
a pass is one line's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hookline.engine.autograd.aliases import (
    Call,
    alias_map,
    aliasable_tensors,
    make_aliases,
    must_be_aliased,
    refuse_unaliasable,
    register_leaf_alias,
    replace_in_arguments,
)
from hookline.engine.autograd.view_hooks import GradHook, HookedView, hook_value_gradient
from hookline.engine.passes.modes import is_in_transform
from hookline.engine.pytree import tree
from hookline.engine.taps.base import Order
from hookline.engine.torch_private.autograd import (
    base_in_graph,
    grad_fn_saves_output,
    version_counter,
)
from hookline.errors import AttachError

OneHook = Callable[[Tensor], Any]
AllHook = Callable[[list[Tensor | None]], Any]


@final
class CallGradients:
    """The hooks on the gradients of one call.

    Args:
        key: identifies the call while it runs.
        name: the module's name in errors.
        tensors: the call's inputs or outputs, before they were aliased. A barrier joins several.
        call: the call whose inputs the tensors are; None for outputs.

    Attributes:
        view: the only alias, while the call may write to it.
    """

    __slots__ = (
        "__weakref__", "_aliases", "_counters", "_hooks", "_name", "_origins", "_refs", "key",
        "open", "view",
    )  # fmt: skip

    def __init__(
        self, key: int, name: str, tensors: Sequence[Tensor], call: Call | None = None
    ) -> None:
        self.key: int = key
        self.open: bool = True
        self._name = name
        self._hooks: list[tuple[Order, int | None, OneHook | AllHook]] = []
        self._counters: list[tuple[Tensor, int, bool]] = []
        self.view: HookedView | None = None
        if len(tensors) > 1:
            aliases = self._alias_jointly(tensors)
        else:
            aliases = (tensors[0].view_as(tensors[0]),)
            self.view = hook_value_gradient(
                aliases[0],
                GradHook(self._handle_gradient),
                GradHook(refuse_ambiguous_gradient, name),
            )
        self._refs = [weakref.ref(alias) for alias in aliases]
        self._origins: list[Callable[[], Tensor | None]] = [_no_input] * len(tensors)
        if call is not None:
            for index, tensor in enumerate(tensors):
                if must_be_aliased(tensor, call):
                    register_leaf_alias(aliases[index], call)
                else:
                    self._origins[index] = weakref.ref(tensor)
        self._aliases = aliases

    def _alias_jointly(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Alias several tensors through a node that waits for all their gradients."""
        duals = map(unpack_dual, tensors)
        has_tangent = any(dual.tangent is not None for dual in duals)
        if has_tangent or is_in_transform():
            where = "in forward-mode AD" if has_tangent else "under torch.func"
            raise AttachError(
                f"{self._name} takes or returns several tensors, and {where} a raw"
                " backward hook cannot be given all their gradients at once.\nRecord or edit them"
                f" one by one: '{self._name}:grad_output', '{self._name}:grad_input'."
            )
        self._counters = [
            (version_counter(tensor), tensor._version, base_in_graph(tensor) is not None)
            for tensor in tensors
        ]
        aliases: tuple[Tensor, ...] = _GradBarrier.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return aliases

    def take_aliases(self) -> Sequence[Tensor]:
        """Return the aliases, once, so that no tensor is held."""
        aliases, self._aliases = self._aliases, ()
        return aliases

    def alias_index(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor among the aliases; None if it is not an alias."""
        for index, ref in enumerate(self._refs):
            if ref() is tensor:
                return index
        return None

    def are_all_aliases(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether all of these tensors are aliases, so that none was added or replaced."""
        return all(self.alias_index(tensor) is not None for tensor in tensors)

    def aliased_input(self, index: int) -> Tensor | None:
        """Return the input that an alias stands for; None for a leaf and for an output.

        The gradient of an input in the graph is that of all its uses. The gradient of a leaf or an
        output is that of the alias alone.
        """
        return self._origins[index]()

    def add_hook(self, order: Order, hook: OneHook | AllHook, index: int | None = None) -> None:
        """Add a hook on one of the gradients, or (without an index) on all of them at once."""
        at = len(self._hooks)
        while at and self._hooks[at - 1][0] > order:
            at -= 1
        self._hooks.insert(at, (order, index, hook))

    def end_call(self, output: Any) -> None:
        """End the call; an alias that it neither changed nor returned will not change any more.

        Raises:
            AttachError: the call changed one of several inputs whose gradients must meet.
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
        view, self.view = self.view, None
        if view is not None:
            alias = self._refs[0]()
            base = None if alias is None else base_in_graph(alias)
            returned = [base_in_graph(tensor) for _, tensor in tree.tensors(output)]
            view.find_write(is_over=base is None or all(other is not base for other in returned))

    def _handle_gradient(self, grad: Tensor) -> Tensor | None:
        """Call the hooks with the gradient of a lone tensor."""
        (new,) = self._call_hooks([grad])
        return None if new is grad else new

    def handle_gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Call the hooks with the gradients of several tensors. Return the gradients that flow on.

        Raises:
            AttachError: one of the tensors was written to. Another holder of the tensor, or of its
                base, then has the new numbers without the new history. The gradients would be
                wrong.
        """
        for (counter, version, is_view), origin in zip(self._counters, self._origins, strict=True):
            if counter._version != version and (is_view or origin() is not None):
                raise AttachError(
                    f"a tensor that {self._name} took or returned was changed in place later, and"
                    " is held elsewhere too; with a raw backward hook on several of them, its"
                    " gradient would be wrong."
                    f"\nUse hl.record or hl.edit at '{self._name}:grad_output' or ':grad_input'."
                )
        return self._call_hooks(grads)

    def _call_hooks(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        new = list(grads)
        for _, index, hook in tuple(self._hooks):
            if index is None:
                new = hook(list(new)) or new  # type: ignore[arg-type]
            elif (grad := new[index]) is not None:
                result = hook(grad)  # type: ignore[arg-type]
                new[index] = grad if result is None else result
        return new


def refuse_ambiguous_gradient(name: str) -> None:
    """Refuse a gradient that cannot be told from others.

    Raises:
        AttachError: always.
    """
    raise AttachError(
        f"an input or output of {name} is a view that was changed in place later; a raw backward"
        " hook on it would be given more than the gradient through the module."
        "\nMake that operation not in place, or .clone() before it."
    )


def _no_input() -> None:
    """Stand for the input of a call that has none in the graph."""


class _GradBarrier(torch.autograd.Function):
    """An identity function whose backward waits for the gradients of all its inputs."""

    @staticmethod
    def forward(ctx: Any, call: CallGradients, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Detached: tensors returned as they are would be views that refuse in-place operations.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.call.handle_gradients(grads)


class _LatestAliasedCalls(threading.local):
    """The calls whose tensors each thread aliased last, since the hooks on one call run in turn.

    The references are weak: a strong one would keep the last recording alive. The graph holds the
    call.
    """

    inputs: Callable[[], CallGradients | None] = staticmethod(lambda: None)
    outputs: Callable[[], CallGradients | None] = staticmethod(lambda: None)


_latest = _LatestAliasedCalls()


def alias_inputs(
    call: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], CallGradients | None]:
    """Alias the inputs of a call, for the first hook that asks.

    Tensors inside lists, dicts and objects are not aliased.

    Returns:
        The arguments with aliases, and the hooks on their gradients; None instead of hooks if no
        input has a gradient.
    """
    tensors = aliasable_tensors((args, tuple(kwargs.values())), tuples_only=True)
    refuse_unaliasable(name, (args, tuple(kwargs.values())))
    if not tensors:
        return args, kwargs, None
    gradients = input_gradients(call[0])
    if gradients is not None and gradients.are_all_aliases(tensors):
        return args, kwargs, gradients
    new_gradients = CallGradients(call[0], name, tensors, call)
    _latest.inputs = weakref.ref(new_gradients)
    new = alias_map(tensors, new_gradients.take_aliases())
    return *replace_in_arguments(args, kwargs, new), new_gradients


def input_gradients(key: int) -> CallGradients | None:
    """Return the hooks on the gradients of this call's inputs; None if no input was aliased."""
    latest = _latest.inputs()
    return latest if latest is not None and latest.open and latest.key == key else None


def alias_several_outputs(key: int, name: str, output: Any) -> tuple[Any, CallGradients | None]:
    """Alias the outputs of a call if there are several, for the first hook that asks.

    Returns:
        The output with aliases, and the hooks on their gradients; None instead of hooks if nothing
        was aliased.
    """
    tensors = aliasable_tensors(output, tuples_only=False)
    if len(tensors) < 2:
        return output, None
    gradients = output_gradients(key)
    if gradients is not None and gradients.are_all_aliases(tensors):
        return output, gradients
    new_gradients = CallGradients(key, name, tensors)
    _latest.outputs = weakref.ref(new_gradients)
    new = alias_map(tensors, new_gradients.take_aliases())
    return tree.replace_tensors(output, new, tuples_only=False), new_gradients


def output_gradients(key: int) -> CallGradients | None:
    """Return the hooks on the gradients of this call's outputs; None if no output was aliased."""
    latest = _latest.outputs()
    return latest if latest is not None and latest.key == key else None


def alias_saved_outputs(key: int, output: Any) -> Any:
    """Alias the outputs that a call's own backward has saved.

    In a second derivative, the saved tensor gets a gradient that does not flow through the returned
    output.
    """
    gradients = output_gradients(key)
    saved = [
        tensor for tensor in aliasable_tensors(output, tuples_only=False)
        if (gradients is None or gradients.alias_index(tensor) is None)
        and grad_fn_saves_output(tensor)
    ]  # fmt: skip
    return tree.replace_tensors(output, make_aliases(saved), tuples_only=False) if saved else output
