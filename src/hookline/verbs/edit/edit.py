"""Change the values at the selected sites."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    Bound,
    GradientCallback,
    Lapse,
    Line,
    Order,
    Pass,
    PendingGradient,
    Selector,
    Site,
    call_read_only,
    defaults_by_name,
    guarded,
    ports_for,
)
from hookline.engine.pytree import describe
from hookline.errors import AttachError, StructureError
from hookline.verbs.edit import edits


def edit(
    model: nn.Module | Mapping[str, Tensor],
    selector: Selector,
    change: Callable[[Any], Any],
    *,
    ports: str | Sequence[str] = "output",
    every_thread: bool = False,
) -> Line:
    """Change the values at the selected sites, while the block lasts.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with hl.edit(model, "1", lambda t: t + 1):
        ...     bool((model(torch.zeros(1, 2)) >= 1).all())
        True

    A gradient is changed as it flows back, and the layers before it get the changed gradient. In a
    value of several tensors the gradients arrive one by one, and `change` is called with each. Call
    `backward()` inside the block, because gradients are no longer changed after it.

        >>> weight = model[0].weight
        >>> with hl.edit(model, "0:grad_output", lambda g: g * 0):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> weight.grad.abs().sum()
        tensor(0.)

    Edits run in the order in which they were made, before the other hooks of a module. So recorders
    and hooks of libraries see the value that the next module gets. Only two kinds of hooks run
    before an edit: process-wide hooks, and hooks that torch's own functions register with
    `prepend=True` after the edit.

    Args:
        model: the model. Or tensors by name, `{"b": b}`, whose gradients are changed.
        selector: which sites, as in `hl.select`. Select a leaf (`"h.*:output[0]"`) to change one
            part of a nested value.
        change: a function of the value. Its result replaces the value, and has the same structure,
            shapes, dtypes and devices. None leaves the value unchanged. If the function returned
            None at every call, a warning says so at the end. The result must be a new value: write
            `t * 0` or `t.clone().zero_()`, not `t.zero_()`. A write to the given value raises an
            error and is undone. `hl.edits` makes common functions: scale, add, replace, noise,
            clamp.
        ports: one or several of "output", "input", "grad_output", "grad_input" and "grad" (of
            parameters), for selectors that name no port.
        every_thread: True changes values in every thread and async task. False changes them in the
            calling thread or task, and in code that runs in a copy of its context.

    Returns:
        A line. Use it in a `with` block, or end it with `line.remove()`. `line.report()` says how
        often each site fired.

    Raises:
        AttachError: `change` cannot be called with the value alone, or the model cannot be hooked.
        SelectionError: the selector matches nothing, or a port is unknown.
        SiteError: (when the model runs) a value lacks the selected leaf.
        StructureError: (when the model runs) `change` returned a value of another structure, shape,
            dtype or device, or wrote in place to the value or gradient. To return another
            structure, use a raw hook (`hl.attach`, `line.forward`).
    """
    line = Line(model, name="edit", every_thread=every_thread)
    _check_change(change)
    line.options.lenient = selector is None
    line.originals.lapse = _LAPSE
    selection = line.select(selector, ports_for(model, ports))

    everywhere = defaults_by_name(change, 1)
    at = getattr(change, "at", None)  # a change that differs by site has a method `at(site)`
    effects: list[_NoOpDetector] = []

    def bind(site: Site) -> Bound:
        effects.append(_NoOpDetector(site))
        function = defaults_by_name(at(site), 1) if callable(at) else everywhere
        bound = EditGradient if site.is_gradient else _value_changer
        return bound(function, effects[-1])

    line.tap(selection, bind, Order.EDIT)
    line.options.remark = partial(_no_op_warning, effects)
    return line


_LAPSE = Lapse("the edit of {sites} no longer happens", "the edit of {sites} is at {now} now")


def _check_change(change: Any) -> None:
    if not callable(change):
        raise AttachError(
            f"change must be a function of the value, got {type(change).__name__}."
            "\nUse hl.edits.replace(value) to put in a fixed value."
        )
    if any(change is getattr(edits, name) for name in edits.__all__):
        raise AttachError(
            f"change must be a function of the value, got hl.edits.{change.__name__}, which makes"
            f" one.\nCall it: hl.edits.{change.__name__}(...), with its argument."
        )
    try:
        signature = inspect.signature(change)
    except (TypeError, ValueError):  # a function in C may have no signature
        return
    try:
        signature.bind(None)
    except TypeError:
        raise AttachError(
            f"change must take the value alone, got a function that takes {signature}."
            "\nUse line = hl.attach(model); line.forward(...) for torch's (module, args, output)."
        ) from None


@final
class _NoOpDetector:
    """Call an edit's function at a site, and note whether the function has changed anything.

    In compiled code this cannot be noted, so there is no warning.
    """

    __slots__ = ("has_changed", "was_left", "where")

    def __init__(self, site: Site) -> None:
        self.where = str(site)
        self.has_changed = self.was_left = False

    def of_value(self, change: Callable[[Any], Any], value: Any) -> Any:
        """Call the function on a value, which it may not write to."""
        new = call_read_only(change, value, self._refusal, self._unreturned)
        return new if is_dynamo_compiling() else self._note(new)

    def of_gradient(self, change: Callable[[Any], Any], grad: Any) -> Any:
        """Call the function on a gradient, which it may not write to."""
        return self._note(guarded(change, grad, self.where))

    def inside(self, change: Callable[[Any], Any], grad: Any) -> Any:
        """Call the function on a gradient in compiled code."""
        return call_read_only(change, grad, self._refusal, self._unreturned)

    def _note(self, new: Any) -> Any:
        if new is None:
            self.was_left = True
        else:
            self.has_changed = True
        return new

    def _refusal(self) -> StructureError:
        return StructureError(
            f"the edit at {self.where or 'the root'} wrote in place to the value it was given,"
            " which other parts of the model, or the caller, may hold."
            "\nReturn a new tensor instead: lambda t: t * 0, or lambda t: t.clone().zero_(), not"
            " lambda t: t.zero_()."
        )

    def _unreturned(self) -> StructureError:
        return StructureError(
            f"the edit at {self.where or 'the root'} must return the new value, got None after it"
            " changed a container in place or consumed an iterator."
            "\nReturn the container. Instead of an iterator, return a new one:"
            " iter([t * 2 for t in values])."
        )


def _no_op_warning(effects: list[_NoOpDetector]) -> str | None:
    """Write the warning about edits that never changed anything; None if there are none."""
    idle = [effect for effect in effects if effect.was_left and not effect.has_changed]
    if not idle:
        return None
    sites = ", ".join(effect.where or "the root" for effect in idle[:3])
    more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
    return (
        f"hl.edit changed nothing at {sites}{more}: the function returned None each time, which"
        " leaves a value unchanged.\nReturn the new value, or only look at values with"
        " hl.record(keep=), hl.watch or hl.attach."
    )


@final
class EditGradient(GradientCallback):
    """Change the gradients at one site."""

    __slots__ = ("_change", "_where", "inside")
    changes = True

    def __init__(self, change: Callable[[Any], Any], effect: _NoOpDetector) -> None:
        self.inside = partial(_changed_in_graph, partial(effect.inside, change), effect.where)
        self._change = partial(effect.of_gradient, change)
        self._where = effect.where

    def arrived(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> Any:
        """Change the gradient of one tensor."""
        new = self._change(grad)
        difference = None if new is None else describe.difference(grad, new)
        if difference:
            raise _other_gradient(self._where, difference)
        return new


def _changed_in_graph(change: Callable[[Any], Any], where: str, grad: Tensor) -> Any:
    """Change a gradient in compiled code, where autograd would add up one of a larger shape."""
    new = change(grad)
    # A graph of a backward allows no look at the layout.
    if isinstance(new, Tensor) and new.shape != grad.shape:
        forms = [f"Tensor{describe.shape(tensor)}" for tensor in (grad, new)]
        raise _other_gradient(where, "expected {}, got {}".format(*forms))
    return new


def _other_gradient(where: str, difference: str) -> StructureError:
    return StructureError(
        f"the edit at {where} would change the gradient's form: {difference}."
        "\nReturn a gradient of the same shape, dtype and device, or None to leave it."
    )


def _value_changer(
    change: Callable[[Any], Any], effect: _NoOpDetector
) -> Callable[[Pass, Any], Any]:
    where = effect.where

    def callback(current: Pass, value: Any) -> Any:
        new = effect.of_value(change, value)
        if new is None:
            if current.region is not None:
                current.region.left(where)
            return None
        difference = describe.difference(value, new)
        if difference:
            raise StructureError(
                f"the edit at {where or 'the root'} would change the value's structure:"
                f" {difference}."
                "\nReturn a value of the same form (for a part of it, select a leaf such as"
                " ':output[0]'), or use a raw hook: hl.attach(model), line.forward(...)."
            )
        if current.region is not None:
            current.region.changed(where, value, new)
        return new

    return callback
