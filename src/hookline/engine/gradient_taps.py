"""Taps that see gradients, by port: they stand in forward, and put hooks on what flows.

Imports gradient_tap.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import unserializable_hook

from hookline.engine import flow, tree
from hookline.engine.arguments import Arguments
from hookline.engine.gradient_tap import BORDER, NO_BACKWARD, Crossing, GradientTap, OnGradient
from hookline.engine.passes import Passes
from hookline.engine.site import Site
from hookline.engine.taps import Rank, Tap, unused
from hookline.engine.torch_internals import backward_number, base_of_view


class GradOutputTap(GradientTap):
    """Sees the gradients of what a module returns: a forward hook."""

    __slots__ = ()

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook on the module."""
        if is_dynamo_compiling():
            value = flow.off_leaves(output)
            self.trace(value)
            return value
        return self.look(module, output, id(sys._getframe(1)))

    def look(self, module: nn.Module, output: Any, key: int) -> Any:
        """What `fire` does, of the call that the key says."""
        current = self.lane.current or self._outside(module)
        if current is None:
            return None
        call = self._call(current)
        if call < 0:
            return None
        value = flow.off_leaves(output)
        meeting = flow.left(key)
        self.wait(current, call, value, meeting, id(module), _itself)
        return None if value is output else value


class GradInputTap(GradientTap):
    """Sees the gradients of what a module is called with: a forward-pre hook."""

    __slots__ = ("arguments",)

    def __init__(self, site: Site, passes: Passes, on: OnGradient, rank: Rank) -> None:
        super().__init__(site, passes, on, rank)
        self.arguments = Arguments()

    def fire(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The hook on the module."""
        if kwargs is None:
            return None  # another thread is taking it off, and has the mark that it wants them
        if is_dynamo_compiling():
            new = flow.apart(args, kwargs, leaves_only=True)
            args, kwargs = new or (args, kwargs)
            self.trace(self.arguments.bind(module, args, kwargs))
            return new
        current = self.lane.current
        is_first = current is None  # called by hand: the pass begins and ends here
        current = current or self._outside(module)
        if current is None:
            return None
        call = self._call(current)
        if call < 0:
            return None
        new = flow.apart(args, kwargs, leaves_only=not is_first)
        args, kwargs = new or (args, kwargs)
        # A raw backward hook may have aliased the inputs by now; what came in is meant.
        entered = flow.entered(id(sys._getframe(1)))
        origin = _itself if entered is None else entered.origin
        try:
            value = self.arguments.bind(module, args, kwargs)
            self.wait(current, call, value, None, id(module), origin)
        except Exception as error:
            self._note(error)
            raise
        return new


class BorderTap(Tap):
    """Where the root begins and ends: what comes back through one pass is apart from all else."""

    __slots__ = ()

    def __init__(self, passes: Passes) -> None:
        super().__init__(Site("", "grad_input"), passes, unused, Rank.JOIN)

    def fire(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The forward-pre hook on the root."""
        if kwargs is None:
            return None  # another thread is taking it off, and has the mark that it wants them
        if is_dynamo_compiling():
            return None
        current = self.lane.current or self._outside(module)
        new = None if current is None else flow.apart(args, kwargs, leaves_only=False)
        if current is None or new is None:
            return None
        # What outlives the pass, and the views of it that the pass has hooks on.
        current.opened.setdefault(BORDER, []).extend(
            (weakref.ref(base), [])
            for _, alias in tree.tensors((new[0], tuple(new[1].values())))
            if (base := base_of_view(alias)) is not None
        )
        return new

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook on the root, always called."""
        if is_dynamo_compiling():
            return
        current = self.lane.current or self.lane.outside
        borders = [] if current is None else current.opened.pop(BORDER, [])
        returned = [base_of_view(tensor) for _, tensor in tree.tensors(output)]
        for base, views in borders:
            outside = base()
            if not any(one is not None and one is outside for one in returned):
                for view in views:
                    if (hooked := view()) is not None:
                        hooked.settle()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@final
class ParameterTap(GradientTap):
    """Sees the gradient of a parameter, or of a tensor: a hook on it."""

    __slots__ = ()

    @unserializable_hook  # type: ignore[untyped-decorator]
    def fire(self, grad: Tensor) -> Tensor | None:
        """The hook itself. Pickling the tensor leaves it behind, and need not say so."""
        number = backward_number()
        current = self.passes.at_parameter(number)
        if current is None:
            return None
        self.ran += 1
        return self.arrive(current, Crossing(0), 0, grad)

    def why_silent(self) -> str | None:
        """Why no gradient arrived."""
        if self.off:
            return "it is frozen: requires_grad is False; call requires_grad_() on it first"
        if self.passes.transformed:
            return (
                "torch.func returns gradients, and accumulates none; take them from what its"
                " transform returns, or select ':grad_output' and ':grad_input' of modules"
            )
        return NO_BACKWARD
