"""Raw hooks on registrations, on steps of optimizers and on state dicts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.engine import HookHandle, HookSpec, Selector, Site, parameter_ids
from hookline.errors import AttachError, check_one_of
from hookline.verbs.attach import check_returns
from hookline.verbs.attach.on_modules import ModuleHooks, check_callable
from hookline.verbs.attach.raw_taps import EventTap

Hook = Callable[..., Any]


class EventHooks(ModuleHooks):
    """The part of a raw line that hooks registrations, optimizers and state dicts."""

    def registered(self, kind: str, hook: Hook) -> HookHandle:
        """Call `hook(module, name, value)` when a parameter, buffer or module is registered.

        On a line of a model, this covers the modules of the model. With `hl.EVERYWHERE`, it covers
        every module in this context.

            >>> with hl.attach(hl.EVERYWHERE) as line:
            ...     _ = line.registered("parameter", lambda module, name, value: print(name))
            ...     _ = nn.Linear(2, 2)
            weight
            bias

        Args:
            kind: "parameter", "buffer" or "module".
            hook: the function. Its result is registered in place of the value; None changes
                nothing.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            AttachError: the kind is unknown, `hook` is no function, or the line has no model.
            StructureError: (when it fires) the hook returned an object of another type.
        """
        check_callable("registered", hook)
        kinds = {"parameter": nn.Parameter, "buffer": Tensor, "module": nn.Module}
        check_one_of("kind", kind, kinds, "Write line.registered('parameter', fn).", AttachError)
        root = self.root
        if root is None and not self.is_everywhere:
            raise AttachError(
                "line.registered must have a model to watch, got none.\nUse hl.attach(model), or"
                " hl.attach(hl.EVERYWHERE) while a model is being built."
            )
        site = Site("any module", f"registered {kind}", module_type=self.module_tree.name)
        check, spec = check_returns.make_registration_check(kind, kinds[kind]), HookSpec(kind)
        tap = EventTap(site, self.passes, hook, check, spec)

        def matches(module: nn.Module) -> bool:
            return root is None or any(module is own for own in root.modules())

        return self.hook_everywhere(kind, matches, tap)

    def step_pre(self, optimizer: Optimizer | None, hook: Hook) -> HookHandle:
        """Call `hook(optimizer, args, kwargs)` before each step of an optimizer.

            >>> model = nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with hl.attach(model) as line:
            ...     _ = line.step_pre(optimizer, lambda optimizer, args, kwargs: print("step"))
            ...     optimizer.step()
            step

        Args:
            optimizer: the optimizer. With `hl.EVERYWHERE`, None covers every optimizer in this
                context.
            hook: the function. `args` begins with the optimizer itself. The hook returns None, or
                the `(args, kwargs)` of the step, where `args` begins with the optimizer, too.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            AttachError: `optimizer` is not an optimizer, or holds none of the model's parameters.
                Or `hook` is no function.
            StructureError: (at the step) the hook returned something else.
        """
        return self._hook_optimizer("step_pre", optimizer, hook, check_returns.check_step_pre)

    def step_post(self, optimizer: Optimizer | None, hook: Hook) -> HookHandle:
        """Call `hook(optimizer, args, kwargs)` after each step of an optimizer.

            >>> model = nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with hl.attach(model) as line:
            ...     _ = line.step_post(optimizer, lambda optimizer, args, kwargs: print("stepped"))
            ...     optimizer.step()
            stepped

        Args:
            optimizer: the optimizer. With `hl.EVERYWHERE`, None covers every optimizer in this
                context.
            hook: the function. `args` begins with the optimizer itself. The hook must return None.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            AttachError: `optimizer` is not an optimizer, or holds none of the model's parameters.
                Or `hook` is no function.
            StructureError: (at the step) the hook returned something other than None.
        """
        check = check_returns.make_none_check("line.step_post", "change the parameters")
        return self._hook_optimizer("step_post", optimizer, hook, check)

    def state_dict_pre(self, where: Selector | Optimizer, hook: Hook) -> HookHandle:
        """Call a hook before a state dict is made.

        On a module the call is `hook(module, prefix, keep_vars)`, on an optimizer
        `hook(optimizer)`. `prefix` is the path of the module with a dot at its end, such as "fc.".

            >>> model = nn.Sequential(nn.Linear(2, 1))
            >>> with hl.attach(model) as line:
            ...     _ = line.state_dict_pre("0", lambda module, prefix, keep_vars: print(prefix))
            ...     state = model.state_dict()
            0.

        Args:
            where: which modules, as in `hl.select`, also containers such as `ModuleList`; or an
                optimizer.
            hook: the function. It must return None.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: `hook` is no function, the line has no model, or the optimizer holds none
                of the model's parameters. `hl.EVERYWHERE` takes an optimizer only.
            StructureError: (when it fires) the hook returned something other than None.
        """
        return self._hook_state_dict("state_dict_pre", where, hook, "change the module")

    def state_dict(self, where: Selector | Optimizer, hook: Hook) -> HookHandle:
        """Call a hook after a state dict is made.

        On a module the call is `hook(module, state_dict, prefix, local_metadata)`, on an optimizer
        `hook(optimizer, state_dict)`. `prefix` begins the module's keys, such as "fc.".

            >>> model = nn.Linear(2, 1)
            >>> def without_bias(module, state_dict, prefix, local_metadata):
            ...     del state_dict[prefix + "bias"]
            >>> with hl.attach(model) as line:
            ...     _ = line.state_dict("", without_bias)
            ...     list(model.state_dict())
            ['weight']

        Args:
            where: which modules, as in `hl.select`, also containers such as `ModuleList`; or an
                optimizer.
            hook: the function. A module's hook changes the state dict in place and returns None.
                An optimizer's hook may return another state dict.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: `hook` is no function, the line has no model, or the optimizer holds none
                of the model's parameters. `hl.EVERYWHERE` takes an optimizer only.
            StructureError: (when it fires) a module's hook returned something other than None, or
                an optimizer's hook something other than None or a dict.
        """
        return self._hook_state_dict("state_dict", where, hook, "change the state_dict")

    def load_state_dict_pre(self, where: Selector | Optimizer, hook: Hook) -> HookHandle:
        """Call a hook before a state dict is loaded.

        On a module the call is `hook(module, state_dict, prefix, local_metadata, strict,
        missing_keys, unexpected_keys, error_msgs)`, on an optimizer `hook(optimizer, state_dict)`.

            >>> model = nn.Linear(2, 1)
            >>> old = {"w": torch.zeros(1, 2), "bias": torch.zeros(1)}
            >>> def rename(module, state_dict, prefix, *others):
            ...     state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
            >>> with hl.attach(model) as line:
            ...     _ = line.load_state_dict_pre("", rename)
            ...     model.load_state_dict(old)
            <All keys matched successfully>

        Args:
            where: which modules, as in `hl.select`, also containers such as `ModuleList`; or an
                optimizer.
            hook: the function. A module's hook changes the state dict in place and returns None.
                An optimizer's hook may return another state dict.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: `hook` is no function, the line has no model, or the optimizer holds none
                of the model's parameters. `hl.EVERYWHERE` takes an optimizer only.
            StructureError: (when it fires) a module's hook returned something other than None, or
                an optimizer's hook something other than None or a dict.
        """
        return self._hook_state_dict("load_state_dict_pre", where, hook, "change the state_dict")

    def load_state_dict(self, where: Selector | Optimizer, hook: Hook) -> HookHandle:
        """Call a hook after a state dict is loaded.

        On a module the call is `hook(module, incompatible_keys)`, on an optimizer
        `hook(optimizer)`. `incompatible_keys` has the lists `missing_keys` and `unexpected_keys`.

            >>> model = nn.Linear(2, 1)
            >>> with hl.attach(model) as line:
            ...     _ = line.load_state_dict("", lambda module, keys: print(keys.missing_keys))
            ...     _ = model.load_state_dict({}, strict=False)
            ['weight', 'bias']

        Args:
            where: which modules, as in `hl.select`, also containers such as `ModuleList`; or an
                optimizer.
            hook: the function. It must return None, and may change `incompatible_keys` in place.

        Returns:
            A handle. `handle.remove()` removes the hooks of this call before the line ends.

        Raises:
            SelectionError: the selector matches nothing, or names a port, a leaf or a call.
            AttachError: `hook` is no function, the line has no model, or the optimizer holds none
                of the model's parameters. `hl.EVERYWHERE` takes an optimizer only.
            StructureError: (when it fires) the hook returned something other than None.
        """
        return self._hook_state_dict("load_state_dict", where, hook, "change incompatible_keys")

    def _hook_optimizer(self, kind: str, optimizer: Any, hook: Hook, check: Hook) -> HookHandle:
        check_callable(kind, hook)
        is_any = optimizer is None and self.is_everywhere
        name = "any optimizer" if is_any else type(optimizer).__name__
        site = Site(name, kind, module_type="Optimizer")
        torch_kind = f"{kind}_post" if kind.endswith("state_dict") else kind
        tap = EventTap(site, self.passes, hook, check, HookSpec(torch_kind))
        if is_any:
            return self.hook_everywhere(kind, lambda owner: True, tap)
        if not isinstance(optimizer, Optimizer):
            raise AttachError(
                f"line.{kind} must be given an optimizer, got {type(optimizer).__name__}."
                f"\nWrite line.{kind}(optimizer, fn); with hl.EVERYWHERE, None is every optimizer."
            )
        self._check_holds_parameters(optimizer)
        with self.new_handle(kind) as handle:
            try:
                self.register_taps([(tap, optimizer)])
            except AttributeError as error:  # torch's own names, which Optimizer.__init__ sets
                raise AttachError(
                    f"line.{kind} must be given an optimizer with hooks, got {name}, which has not"
                    " called Optimizer.__init__, such as a wrapper of another optimizer."
                    "\nGive the optimizer inside it, such as optimizer.optimizer."
                ) from error
            return handle

    def _check_holds_parameters(self, optimizer: Optimizer) -> None:
        ids = {id(node.tensor) for node in self.module_tree.tensors}
        if ids and ids.isdisjoint(parameter_ids(optimizer)):
            raise AttachError(
                f"the optimizer must hold parameters of {self.module_tree.name}, got"
                f" {type(optimizer).__name__} with none of its {len(ids)}. Perhaps it was made"
                " before the model was built or copied."
                "\nMake it from model.parameters(), or use hl.attach() for an optimizer alone."
            )

    def _hook_state_dict(self, kind: str, where: Any, hook: Hook, instead: str) -> HookHandle:
        check = check_returns.make_none_check(f"line.{kind}", instead)
        if isinstance(where, Optimizer):
            if kind in ("state_dict", "load_state_dict_pre"):  # it may return another state dict
                check = check_returns.check_optimizer_state
            return self._hook_optimizer(kind, where, hook, check)
        check_callable(kind, hook)
        if self.is_everywhere:
            raise AttachError(
                f"line.{kind} must be given a model or an optimizer: torch has no process-wide"
                f" hooks on state dicts.\nUse hl.attach(model), or line.{kind}(optimizer, fn)."
            )
        make = partial(EventTap, passes=self.passes, function=hook, check=check,
                       spec=HookSpec(kind))  # fmt: skip
        # Containers included: a ModuleList is never called, but it has a state dict.
        return self._hook_sites(kind, self._selected_modules(kind, where, port=kind), make)
