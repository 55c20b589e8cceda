"""Raw hooks on modules: before and after their forward and their backward, and what they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookline.engine.compile.in_graph import defaults_by_name
from hookline.engine.line.handle import HookHandle
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.selection.selectors import Selector
from hookline.engine.selection.site import Site, path_text
from hookline.engine.taps.base import Order, Tap
from hookline.errors import AttachError, SelectionError
from hookline.verbs.attach import returns
from hookline.verbs.attach.backward_taps import BackwardPreTap, BackwardTap
from hookline.verbs.attach.everywhere import EverywhereHooks, everywhere_matcher
from hookline.verbs.attach.raw_taps import AlwaysCalledTap, RawTap
from hookline.verbs.attach.saved_tensors import SavedTap

Hook = Callable[..., Any]


class ModuleHooks(EverywhereHooks):
    """The part of a raw line that hooks modules."""

    def forward_pre(
        self, selector: Selector, hook: Hook, *, with_kwargs: bool = False, prepend: bool = False
    ) -> HookHandle:
        """Call `hook(module, args)` before each selected module runs.

        Returning None changes nothing; a tuple replaces the arguments, and any other single value
        becomes the only one. With `with_kwargs`, it is `hook(module, args, kwargs)`, and returns
        None or `(args, kwargs)`.

            >>> model = nn.Linear(2, 2)
            >>> with hl.attach(model) as line:
            ...     _ = line.forward_pre("", lambda module, args: (args[0] * 0,))
            ...     bool((model(torch.ones(1, 2)) == model.bias).all())
            True

        Args:
            selector: which modules; as in `hl.select`, without a port or a leaf.
            hook: the function.
            with_kwargs: also pass, and expect back, the keyword arguments.
            prepend: before the hooks that are there, not after them.

        Raises:
            SelectionError: the selector matches nothing, or names a port or a leaf.
            StructureError: (when the model runs) the hook returned what cannot be arguments.
            AttachError: `with_kwargs` with `hl.EVERYWHERE`, which torch does not offer.
        """
        if self.is_everywhere and with_kwargs:
            raise AttachError(
                "torch passes no keyword arguments to process-wide pre-hooks."
                "\nUse line.forward(..., with_kwargs=True), or attach to a model."
            )
        check = returns.check_forward_pre(with_kwargs)
        return self._forward("forward_pre", selector, hook, check, prepend=prepend,
                      with_kwargs=with_kwargs)  # fmt: skip

    def forward(
        self,
        selector: Selector,
        hook: Hook,
        *,
        with_kwargs: bool = False,
        prepend: bool = False,
        always_call: bool = False,
    ) -> HookHandle:
        """Call `hook(module, args, output)` after each selected module has run.

        Returning None changes nothing; anything else replaces the output. With `with_kwargs`, it
        is `hook(module, args, kwargs, output)`.

            >>> model = nn.Linear(2, 2)
            >>> with hl.attach(model) as line:
            ...     _ = line.forward("", lambda module, args, output: torch.zeros_like(output))
            ...     model(torch.ones(1, 2)).tolist()
            [[0.0, 0.0]]

        Args:
            selector: which modules; as in `hl.select`, without a port or a leaf.
            hook: the function.
            with_kwargs: also pass the keyword arguments.
            prepend: before the hooks that are there, not after them.
            always_call: also when the module raises; the output is then None.

        Raises:
            SelectionError: the selector matches nothing, or names a port or a leaf.
            StructureError: (when the model runs) the hook returned what cannot be an output.
        """
        if self.is_everywhere and always_call:
            raise AttachError("always_call is not offered with hl.EVERYWHERE.")
        return self._forward("forward", selector, hook, returns.check_forward, prepend=prepend,
                      with_kwargs=with_kwargs, always_call=always_call)  # fmt: skip

    def _forward(
        self, kind: str, selector: Selector, hook: Hook, check: Hook, *, prepend: bool,
        with_kwargs: bool = False, always_call: bool = False,
    ) -> HookHandle:  # fmt: skip
        check_callable(kind, hook)
        hook = defaults_by_name(hook, (2 if kind == "forward_pre" else 3) + with_kwargs)
        if self.is_everywhere:
            tap = RawTap(_everywhere(kind), self.passes, hook, check)
            return self._caught(
                kind, everywhere_matcher(selector), tap, with_kwargs=with_kwargs, prepend=prepend
            )
        with self.hooking(kind) as (registrations, handle):
            make = AlwaysCalledTap if always_call else RawTap
            for site, node in self._each_module(kind, selector, calls=True):
                tap = make(site, self.passes, hook, check)
                registrations.register(node.module, kind, tap.fire, Order.HOOK, prepend=prepend,
                                 with_kwargs=with_kwargs, always_call=always_call)  # fmt: skip
                self.keep(tap, node)
            return handle

    def backward_pre(self, selector: Selector, hook: Hook, *, prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_output)` before the gradients enter each selected module.

        They are a tuple, or where the output is a dict, a dataclass or a `ModelOutput`, that.
        Returning None changes nothing; gradients of the same form, or for a lone one the tensor
        alone, take their place.

            >>> model = nn.Linear(2, 1)
            >>> with hl.attach(model) as line:
            ...     _ = line.backward_pre("", lambda module, grad_output: grad_output[0] * 2)
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model.bias.grad
            tensor([2.])

        Args:
            selector: which modules; as in `hl.select`, without a port, a leaf or a call.
            hook: the function. It may not change a gradient in place.
            prepend: before the hooks that are there, not after them.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            StructureError: (in backward) the hook returned gradients of another form, or changed
                one in place.
        """
        return self._backward("backward_pre", selector, hook, BackwardPreTap, prepend=prepend)

    def backward(self, selector: Selector, hook: Hook, *, prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_input, grad_output)` when each module's gradients are there.

        Both are tuples: of the positional arguments and then the keyword ones, and of the outputs;
        None for what needs no gradient. What is returned, unless None, takes the place of
        `grad_input`: the gradients that flow on, through this module alone.

            >>> model = nn.ReLU()
            >>> x = torch.ones(1, 2, requires_grad=True)
            >>> with hl.attach(model) as line:
            ...     _ = line.backward("", lambda *gradients: gradients[1][0] * 2)
            ...     model(x).sum().backward()
            >>> x.grad
            tensor([[2., 2.]])

        Args:
            selector: which modules; as in `hl.select`, without a port, a leaf or a call.
            hook: the function. It may not change a gradient in place.
            prepend: before the hooks that are there, not after them.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            StructureError: (in backward) the hook returned gradients of another form, or changed
                one in place.
            AttachError: (when the model runs) the module changes one of several inputs in place.
        """
        return self._backward("backward", selector, hook, BackwardTap, prepend=prepend)

    def _backward(
        self,
        kind: str,
        selector: Selector,
        hook: Hook,
        make: type[BackwardPreTap | BackwardTap],
        *,
        prepend: bool,
    ) -> HookHandle:
        check_callable(kind, hook)
        if self.is_everywhere:
            tap = make(_everywhere(kind), self.passes, hook, is_everywhere=True)
            return self._caught(kind, everywhere_matcher(selector), tap, prepend=prepend)
        return self._hook_all(
            kind, selector, lambda site: make(site, self.passes, hook), prepend=prepend
        )

    def _hook_all(
        self, kind: str, selector: Selector, make: Callable[[Site], Tap], *, prepend: bool = False
    ) -> HookHandle:
        """Register all hooks of a tap on each selected module."""
        with self.hooking(kind) as (registrations, handle):
            for site, node in self._each_module(kind, selector):
                tap = make(site)
                self.keep(tap, node)
                registrations.register_all(node.module, tap, prepend=prepend)
            return handle

    def saved(
        self, selector: Selector, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> HookHandle:
        """Pack what autograd saves for backward in the selected modules, and unpack it there.

        Unpacking goes on after the line has ended, for what was packed while it lasted. Packers
        nest: what a module inside another saves is packed by the inner one's.

            >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            >>> with hl.attach(model) as line:
            ...     _ = line.saved("", lambda t: t.half(), lambda packed: packed.float())
            ...     y = model(torch.ones(1, 2))
            >>> y.sum().backward()

        Args:
            selector: which modules; "" is the whole model.
            pack: called with each tensor that is saved; what it returns is kept instead.
            unpack: called with that in backward; gives a tensor of the same shape and dtype.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: the line has no model: `torch.autograd.graph.saved_tensors_hooks` is
                torch's own, a context manager, for code outside of modules.
        """
        check_callable("saved", pack)
        check_callable("saved", unpack)
        if self.root is None:
            raise AttachError(
                "line.saved needs a model: it packs what its modules save."
                "\nOutside of modules: torch.autograd.graph.saved_tensors_hooks(pack, unpack)."
            )
        return self._hook_all(
            "saved", selector, lambda site: SavedTap(site, self.passes, pack, unpack)
        )

    def _each_module(
        self, kind: str, selector: Selector, *, calls: bool = False, port: str = "output"
    ) -> Iterator[tuple[Site, ModuleNode]]:
        """Yield the modules that a selector matches; refuse parts of them."""
        for site, node in self.select(selector, (port,)).places():
            is_port = site.port not in (port, "output")
            is_part = is_port or site.leaf or (site.call is not None and not calls)
            if is_part or not isinstance(node, ModuleNode):
                raise SelectionError(
                    f"line.{kind} must be given modules, got {site}; a line hooks modules whole."
                    f"\nSelect {_module_of(site, node)!r}, or use hl.record or hl.edit for parts."
                )
            yield replace(site, port=kind), node


def _module_of(site: Site, node: Any) -> str:
    return path_text(site.path if isinstance(node, ModuleNode) else site.path.rpartition(".")[0])


def _everywhere(kind: str) -> Site:
    return Site("any module", kind, module_type="any module")


def check_callable(kind: str, hook: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        AttachError: it is no function.
    """
    if not callable(hook):
        raise AttachError(f"the hook of line.{kind} must be a function, got {type(hook).__name__}.")
