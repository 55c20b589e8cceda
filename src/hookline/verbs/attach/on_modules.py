"""Raw hooks on the forward and backward of modules, and on their saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hookline.engine import (
    AtEnd,
    HookHandle,
    HookSpec,
    ModuleNode,
    OperationNode,
    Selector,
    Site,
    Tap,
    bind_own_defaults,
    path_text,
)
from hookline.errors import AttachError, SelectionError
from hookline.verbs.attach import check_returns
from hookline.verbs.attach.backward_taps import BackwardPreTap, BackwardTap
from hookline.verbs.attach.everywhere import EverywhereHooks, everywhere_matcher
from hookline.verbs.attach.raw_taps import AlwaysCalledTap, RawTap
from hookline.verbs.attach.saved_tensors import SavedTap

Hook = Callable[..., Any]


class ModuleHooks(EverywhereHooks):
    """The part of a raw line that registers hooks on modules."""

    def forward_pre(
        self, selector: Selector, hook: Hook, *, with_kwargs: bool = False, prepend: bool = False
    ) -> HookHandle:
        """Call `hook(module, args)` before each selected module runs.

        If the hook returns None, the arguments stay unchanged. A tuple replaces the arguments. Any
        other single value becomes the only argument. With `with_kwargs`, the call is `hook(module,
        args, kwargs)`, and the hook returns None or `(args, kwargs)`.

            >>> model = nn.Linear(2, 2)
            >>> with hl.attach(model) as line:
            ...     _ = line.forward_pre("", lambda module, args: (args[0] * 0,))
            ...     bool((model(torch.ones(1, 2)) == model.bias).all())
            True

        Args:
            selector: which modules, as in `hl.select`, without a port or a leaf.
            hook: the function.
            with_kwargs: whether the hook also gets, and returns, the keyword arguments.
            prepend: whether the hook runs before torch's own hooks and the earlier hooks of
                `hl.attach` on the module. Edits and hooks of `hl.EVERYWHERE` still run before it.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port or a leaf.
            StructureError: (when the model runs) the hook's result cannot be arguments.
            AttachError: `hook` is no function, or the line has no model. Or `with_kwargs` was given
                with `hl.EVERYWHERE`; torch does not offer this.
        """
        if self.is_everywhere and with_kwargs:
            raise AttachError(
                "with_kwargs must be False with hl.EVERYWHERE: torch passes no keyword arguments"
                " to process-wide pre-hooks."
                "\nUse line.forward(..., with_kwargs=True), or attach to a model."
            )
        check = (
            check_returns.check_pre_hook_args_kwargs
            if with_kwargs
            else check_returns.check_pre_hook_args
        )
        spec = HookSpec("forward_pre", with_kwargs=with_kwargs)
        return self._hook_forward(selector, hook, check, spec, prepend=prepend)

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

        If the hook returns None, the output stays unchanged. Any other result replaces it. With
        `with_kwargs`, the call is `hook(module, args, kwargs, output)`.

            >>> model = nn.Linear(2, 2)
            >>> with hl.attach(model) as line:
            ...     _ = line.forward("", lambda module, args, output: torch.zeros_like(output))
            ...     model(torch.ones(1, 2)).tolist()
            [[0.0, 0.0]]

        Args:
            selector: which modules, as in `hl.select`, without a port or a leaf.
            hook: the function.
            with_kwargs: whether the hook also gets the keyword arguments.
            prepend: whether the hook runs before torch's own hooks and the earlier hooks of
                `hl.attach` on the module. Edits and hooks of `hl.EVERYWHERE` still run before it.
            always_call: whether the hook also runs when the module raises; the output is then None.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port or a leaf.
            StructureError: (when the model runs) the output held tensors, and the hook's result
                holds none.
            AttachError: `hook` is no function, or the line has no model. Or `always_call` was given
                with `hl.EVERYWHERE`.
        """
        if self.is_everywhere and always_call:
            raise AttachError(
                "always_call must be False with hl.EVERYWHERE, got True."
                "\nAttach to a model: hl.attach(model)."
            )
        spec = HookSpec("forward", with_kwargs=with_kwargs, always_call=always_call)
        return self._hook_forward(
            selector, hook, check_returns.check_forward_output, spec, prepend=prepend
        )

    def _hook_forward(
        self, selector: Selector, hook: Hook, check: Hook, spec: HookSpec, *, prepend: bool
    ) -> HookHandle:
        kind = spec.kind
        check_callable(kind, hook)
        hook = bind_own_defaults(hook, (2 if kind == "forward_pre" else 3) + spec.with_kwargs)
        make = partial(AlwaysCalledTap if spec.always_call else RawTap, passes=self.passes,
                       function=hook, check=check, spec=spec)  # fmt: skip
        return self._hook_modules(kind, selector, make, calls=True, prepend=prepend)

    def backward_pre(self, selector: Selector, hook: Hook, *, prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_output)` before the gradients enter each selected module.

        `grad_output` is a tuple of the gradients of the outputs, each of its output's shape. For an
        output that is a dict, a dataclass or a `ModelOutput`, `grad_output` has its structure. If
        the hook returns None, the gradients stay unchanged. Gradients of the same structure replace
        them; a lone gradient may be returned as a tensor.

            >>> model = nn.Linear(2, 1)
            >>> with hl.attach(model) as line:
            ...     _ = line.backward_pre("", lambda module, grad_output: grad_output[0] * 2)
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model.bias.grad
            tensor([2.])

        Args:
            selector: which modules, as in `hl.select`, without a port, a leaf or a call.
            hook: the function. It must not change a gradient in place.
            prepend: whether the hook runs before the raw hooks that the module already has.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: `hook` is no function, or the line has no model. Or (when the model runs)
                the module is in compiled code.
            StructureError: (in backward) the hook returned gradients of another structure, shape,
                dtype or device, or changed a gradient in place.
        """
        return self._hook_backward(BackwardPreTap, "backward_pre", selector, hook, prepend=prepend)

    def backward(self, selector: Selector, hook: Hook, *, prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_input, grad_output)` when each module's gradients are complete.

        `grad_input` is a tuple of the gradients of the positional arguments, then of the keyword
        arguments: what flows back through this module, without other uses of the arguments.
        `grad_output` is a tuple of the gradients of the outputs, or has the structure of an output
        that is a dict, a dataclass or a `ModelOutput`. A gradient has its tensor's shape, and is
        None for a tensor that requires none. The hook's result, unless None, replaces `grad_input`.

            >>> model = nn.ReLU()
            >>> x = torch.ones(1, 2, requires_grad=True)
            >>> with hl.attach(model) as line:
            ...     _ = line.backward("", lambda module, grad_input, grad_output: grad_input[0] * 2)
            ...     model(x).sum().backward()
            >>> x.grad
            tensor([[2., 2.]])

        Args:
            selector: which modules, as in `hl.select`, without a port, a leaf or a call.
            hook: the function. It must not change a gradient in place.
            prepend: whether the hook runs before the raw hooks that the module already has.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            StructureError: (in backward) the hook returned gradients of another structure, shape,
                dtype or device, or changed a gradient in place.
            AttachError: `hook` is no function, or the line has no model. Or (when the model runs)
                the module changes one of several inputs in place, or is in compiled code.
        """
        return self._hook_backward(BackwardTap, "backward", selector, hook, prepend=prepend)

    def _hook_backward(
        self, tap: Callable[..., Tap], kind: str, selector: Selector, hook: Hook, *, prepend: bool
    ) -> HookHandle:
        check_callable(kind, hook)
        make = partial(tap, passes=self.passes, function=hook, is_everywhere=self.is_everywhere)
        return self._hook_modules(kind, selector, make, calls=False, prepend=prepend)

    def _hook_modules(
        self, kind: str, selector: Selector, make: Callable[[Site], Tap], *, calls: bool,
        prepend: bool,
    ) -> HookHandle:  # fmt: skip
        """Place a tap on each module that a selector matches, or with `hl.EVERYWHERE` one for all.

        Args:
            calls: whether the selector may name a call.
        """
        if self.is_everywhere:
            tap = make(Site("any module", kind, module_type="any module"))
            return self.hook_everywhere(kind, everywhere_matcher(selector), tap, prepend=prepend)
        places = self._selected_modules(kind, selector, calls=calls)
        return self._hook_sites(kind, places, make, prepend=prepend)

    def saved(
        self, selector: Selector, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> HookHandle:
        """Pack the tensors that autograd saves in the selected modules; unpack them in backward.

        Tensors that were packed while the line lasted are still unpacked after its end. Where one
        selected module is inside another, each tensor is packed once: that of the inner module by
        the inner module's hooks.

            >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            >>> with hl.attach(model) as line:
            ...     _ = line.saved("", lambda t: t.half(), lambda packed: packed.float())
            ...     y = model(torch.ones(1, 2))
            >>> y.sum().backward()

        Args:
            selector: which modules, as in `hl.select`; "" is the whole model.
            pack: a function of each saved tensor; its result is kept in place of the tensor.
            unpack: a function of what `pack` returned, called in backward. It returns a tensor of
                the shape, dtype and device of the saved tensor.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: `pack` or `unpack` is no function, or the line has no model, as with
                `hl.EVERYWHERE`. For code outside of modules, use torch's context manager
                `torch.autograd.graph.saved_tensors_hooks`. Or (when the model runs) the module is
                in compiled code.
            StructureError: (in backward) `unpack` returned no tensor, or one of another shape,
                dtype or device.
        """
        check_callable("saved", pack)
        check_callable("saved", unpack)
        if self.root is None:
            raise AttachError(
                "line.saved must have a model, because it packs the tensors that modules save."
                "\nOutside of modules, use"
                " torch.autograd.graph.saved_tensors_hooks(pack, unpack)."
            )

        def make(site: Site) -> SavedTap:
            tap = SavedTap(site, self.passes, pack, unpack)
            self.attached.append(AtEnd(tap.pop_remaining_hooks))
            return tap

        return self._hook_sites("saved", self._selected_modules("saved", selector), make)

    def _selected_modules(
        self, kind: str, selector: Selector, *, calls: bool = False, port: str = "output"
    ) -> Iterator[tuple[Site, ModuleNode]]:
        """Yield the sites and nodes of the modules that a selector matches.

        Raises:
            SelectionError: the selector names a port, a leaf, or a call where that is not allowed.
        """
        for site, node in self.select(selector, (port,)).places:
            is_port = site.port not in (port, "output")
            is_part = is_port or site.leaf or (site.call is not None and not calls)
            if is_part or not isinstance(node, ModuleNode):
                raise SelectionError(
                    f"line.{kind} must be given modules as a whole, got {site}."
                    f"\nSelect {_module_path(site, node)!r}, or use hl.record or hl.edit for parts."
                )
            if isinstance(node, OperationNode) and kind not in _ON_OPERATIONS:
                raise SelectionError(
                    f"line.{kind} must be given modules, got {site}, which stands for calls of a"
                    f" function.\nSelect the module itself: {path_text(node.host.path)!r}."
                )
            yield replace(site, port=kind), node


# The kinds of hooks that the call of a function has, too.
_ON_OPERATIONS = ("forward_pre", "forward", "backward_pre", "backward")


def _module_path(site: Site, node: Any) -> str:
    return path_text(site.path if isinstance(node, ModuleNode) else site.path.rpartition(".")[0])


def check_callable(kind: str, hook: Any) -> None:
    """Refuse an object that cannot be called.

    Raises:
        AttachError: the object cannot be called.
    """
    if not callable(hook):
        raise AttachError(
            f"the hook of line.{kind} must be a function, got {type(hook).__name__}."
            "\nGive a function that takes torch's arguments for this hook."
        )
