"""Raw hooks on the gradients of parameters and tensors, and on their accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torch import Tensor

from hookline.engine import (
    GradientCallback,
    HookHandle,
    HookSpec,
    Order,
    ParameterNode,
    ParameterTap,
    Pass,
    PendingGradient,
    Selector,
    Site,
    call_gradient_function,
    path_text,
)
from hookline.errors import AttachError, SelectionError
from hookline.util.hide_from_dir import hide_from_dir
from hookline.verbs.attach import check_returns
from hookline.verbs.attach.everywhere import EverywhereHooks
from hookline.verbs.attach.on_modules import check_callable
from hookline.verbs.attach.raw_taps import EventTap

Hook = Callable[..., Any]


@hide_from_dir("accumulated_in_order")
class TensorHooks(EverywhereHooks):
    """The part of a raw line that registers hooks on parameters and tensors."""

    def grad(self, selector: Selector, hook: Hook, *, prepend: bool = False) -> HookHandle:
        """Call `hook(grad)` when the gradient of a parameter or tensor has been computed.

            >>> a = torch.ones(2, requires_grad=True)
            >>> b = 2 * a
            >>> with hl.attach() as line:
            ...     _ = line.grad(b, print)
            ...     b.mean().backward()
            tensor([0.5000, 0.5000])

        Args:
            selector: which parameters, by their paths (`"fc*.bias"`) or by the modules that hold
                them; frozen ones are left out. Or a tensor, of the model or not.
            hook: the function. It gets the gradient, of the tensor's shape. Its result, unless
                None, replaces the gradient. It must not change the gradient in place.
            prepend: whether the hook runs before torch's own hooks and the earlier hooks of
                `hl.attach` on the tensor. Edits still run before it.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches no parameter.
            AttachError: the tensor, or each selected parameter, requires no gradient. Or `hook` is
                no function, or with `hl.EVERYWHERE` the selector is not a tensor.
            StructureError: (in backward) the hook's result is not a gradient of the same shape,
                dtype and device, or the hook changed the gradient in place.
        """
        check_callable("grad", hook)

        def make(site: Site) -> ParameterTap:
            return ParameterTap(
                site, self.passes, _CheckedGradientHook(hook, str(site)), Order.GRAD_HOOK
            )

        places = self._selected_parameters("grad", selector)
        return self._hook_sites("grad", places, make, prepend=prepend)

    def accumulated(self, selector: Selector, hook: Hook, *, prepend: bool = False) -> HookHandle:
        """Call `hook(parameter)` after a gradient has been accumulated in its `.grad`.

        Use it to change `.grad` itself, or to step an optimizer while backward still runs.

            >>> model = nn.Linear(2, 1)
            >>> with hl.attach(model) as line:
            ...     _ = line.accumulated("bias", lambda p: print(tuple(p.grad.shape)))
            ...     model(torch.ones(1, 2)).sum().backward()
            (1,)

        Args:
            selector: which parameters, as for `line.grad`; or a leaf tensor.
            hook: the function. It must return None.
            prepend: whether the hook runs before the hooks that the tensor already has.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches no parameter.
            AttachError: the tensor, or each selected parameter, accumulates no gradient. Or `hook`
                is no function, or with `hl.EVERYWHERE` the selector is not a tensor.
            StructureError: (in backward) the hook returned a value, which torch would ignore.
        """
        # After the taps that change and read the gradient of a sharded parameter.
        return self.accumulated_in_order(selector, hook, Order.RECORD, prepend=prepend)

    def accumulated_in_order(
        self, selector: Selector, hook: Hook, order: Order, *, prepend: bool = False
    ) -> HookHandle:
        """Do as `accumulated`, at a place in the order of hooks."""
        check_callable("accumulated", hook)
        spec = HookSpec("accumulated", order=order)

        def make(site: Site) -> EventTap:
            check = check_returns.make_none_check(f"line.accumulated at {site}", "change p.grad")
            return EventTap(site, self.passes, hook, check, spec)

        places = self._selected_parameters("accumulated", selector)
        return self._hook_sites("accumulated", places, make, prepend=prepend)

    def _selected_parameters(
        self, kind: str, selector: Selector
    ) -> Iterator[tuple[Site, ParameterNode]]:
        """Yield the sites and nodes of the parameters that a selector matches.

        A tensor selects itself, whether or not the model holds it. Frozen parameters are left out.

        Raises:
            AttachError: all selected parameters are frozen, or a parameter is selected by path with
                `hl.EVERYWHERE`.
            SelectionError: the selector names a gradient of a module.
        """
        if isinstance(selector, Tensor) and not any(
            node.tensor is selector for node in self.module_tree.tensors
        ):
            name = f"tensor{list(selector.shape)}"
            site = Site(name, "grad", module_type="Tensor")
            yield site, ParameterNode(name, selector, (0, 0), "Tensor")
            return
        if self.is_everywhere:
            raise AttachError(
                f"line.{kind} must be given a tensor with hl.EVERYWHERE, where parameters have no"
                f" paths.\nUse hl.attach(model), or line.{kind}(model.fc.weight, fn)."
            )
        places = list(self.select(selector, ("grad",)).places)
        if all(isinstance(n, ParameterNode) and not n.tensor.requires_grad for _, n in places):
            raise AttachError(
                f"{places[0][0]} must require a gradient, got a frozen parameter, on which torch"
                " calls no gradient hooks.\nCall requires_grad_() on it first."
            )
        for site, node in places:
            if site.port != "grad" or not isinstance(node, ParameterNode):
                raise SelectionError(
                    f"line.{kind} must be given parameters or tensors, got {site}, which is a"
                    f" module's.\nUse line.backward({path_text(site.path)!r}, fn), or"
                    f" hl.edit(model, {str(site)!r}, fn)."
                )
            if node.tensor.requires_grad:
                yield site, node


@final
class _CheckedGradientHook(GradientCallback):
    """Call a user's function on a gradient, and check its result."""

    __slots__ = ("_function", "_where")
    changes = True

    def __init__(self, function: Hook, where: str) -> None:
        self._function = function
        self._where = where

    def on_gradient(
        self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor
    ) -> Tensor | None:
        new = call_gradient_function(self._function, grad, self._where)
        return None if new is None else check_returns.check_gradient(new, grad, self._where)
