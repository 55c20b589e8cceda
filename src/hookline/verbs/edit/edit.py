"""edit: change the values at the selected sites."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    Bound,
    GradientCallback,
    Ground,
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
    model: Ground,
    selector: Selector,
    change: Callable[[Any], Any],
    *,
    ports: str | Sequence[str] = "output",
    every_thread: bool = False,
) -> Line:
    """Change the values at the selected sites, while the block lasts.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with edit(model, "1", lambda t: t + 1):
        ...     bool((model(torch.zeros(1, 2)) >= 1).all())
        True

    A gradient is changed as it flows back, and what is before it in the model gets the new one.
    Where a value holds several tensors, their gradients arrive one by one, and `change` is called
    with each. Call `backward()` inside the block: after it, a gradient is no longer changed.

        >>> weight = model[0].weight
        >>> with edit(model, "0:grad_output", lambda g: g * 0):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> weight.grad.abs().sum()
        tensor(0.)

    Edits run before the hooks that a module has, and before those that are added later, in the
    order in which they were made, so that recorders and hooks of libraries see what the next module
    sees. Only what torch registers with `prepend=True` after the edit, and process-wide hooks, come
    before it.

    Args:
        model: the model, or tensors by name, `{"b": b}`, whose gradients are changed.
        selector: which sites; as in `hl.select`. Select a leaf (`"h.*:output[0]"`) to change one
            part of a nested value.
        change: called with the value; what it returns takes the value's place, None leaves it.
            One that never changes anything is warned of at the end.
            It must return a new value: one that writes to the value it was given (`t.zero_()`) is
            refused, and what it wrote is undone. Write `t * 0`, or `t.clone().zero_()`.
            `hl.edits` holds the common ones: scale, add, replace, noise, clamp.
        ports: one or several of "output", "input", "grad_output", "grad_input" and "grad" (of
            parameters), for selectors that name no port.
        every_thread: see every thread and async task. False: see the one that calls this, and what
            runs in a copy of its context.

    Returns:
        A line: a context manager, or ended by `remove()`. `line.report()` says how often it fired.

    Raises:
        AttachError: `change` cannot be called with the value alone.
        SelectionError: the selector matches nothing.
        StructureError: (when the model runs) `change` returned another structure, shape, dtype or
            device; a raw hook (`hl.attach`, `line.forward`) may return anything. Or it wrote in
            place to the value or gradient it was given.
    """
    line = Line(model, name="edit", every_thread=every_thread)
    _check_change(change)
    line.options.lenient = selector is None
    selection = line.select(selector, ports_for(model, ports))

    change = defaults_by_name(change, 1)
    effects: list[_NoOpDetector] = []

    def bind(site: Site) -> Bound:
        effects.append(_NoOpDetector(site))
        if site.is_gradient:
            return EditGradient(change, effects[-1])
        return _checked(change, effects[-1])

    line.tap(selection, bind, Order.EDIT)
    line.options.remark = partial(_left_alone, effects)
    return line


def _check_change(change: Any) -> None:
    if not callable(change):
        raise AttachError(
            f"hl.edit needs a function of the value, got {type(change).__name__}."
            "\nTo put a fixed value there: hl.edits.replace(value)."
        )
    if any(change is getattr(edits, name) for name in edits.__all__):
        raise AttachError(
            f"hl.edits.{change.__name__} makes the function that hl.edit needs, and was not called."
            f"\nWrite hl.edits.{change.__name__}(...), with what it takes."
        )
    try:
        signature = inspect.signature(change)
    except (TypeError, ValueError):  # of a function in C, nobody may know it
        return
    try:
        signature.bind(None)
    except TypeError:
        raise AttachError(
            f"hl.edit calls its function with the value alone, got one that takes {signature}."
            "\nFor torch's (module, args, output): line = hl.attach(model); line.forward(...)."
        ) from None


@final
class _NoOpDetector:
    """Calls an edit's function at a site, and tells whether the function has changed anything.

    In compiled code nobody can tell, and then nothing is said.
    """

    __slots__ = ("has_changed", "was_left", "where")

    def __init__(self, site: Site) -> None:
        self.where = str(site)
        self.has_changed = self.was_left = False

    def of_value(self, change: Callable[[Any], Any], value: Any) -> Any:
        """Call the function on a value, to which it may not write."""
        new = call_read_only(change, value, self._refusal, self._unreturned)
        return new if is_dynamo_compiling() else self._seen(new)

    def of_gradient(self, change: Callable[[Any], Any], grad: Any) -> Any:
        """Call the function on a gradient, to which it may not write."""
        return self._seen(guarded(change, grad, self.where))

    def inside(self, change: Callable[[Any], Any], grad: Any) -> Any:
        """Call the function on a gradient in compiled code."""
        return call_read_only(change, grad, self._refusal, self._unreturned)

    def _seen(self, new: Any) -> Any:
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
            " changed a container in place, or used an iterator up."
            "\nReturn the container, or of an iterator a new one: iter([t * 2 for t in values])."
        )


def _left_alone(effects: list[_NoOpDetector]) -> str | None:
    """Write the warning about edits that never changed anything."""
    found = [one for one in effects if one.was_left and not one.has_changed]
    if not found:
        return None
    sites = ", ".join(one.where or "the root" for one in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"hl.edit changed nothing at {sites}{more}: the function returned None each time, which"
        " leaves a value as it was.\nReturn the new value; a function that only looks belongs in"
        " hl.record(keep=), hl.watch or hl.attach."
    )


@final
class EditGradient(GradientCallback):
    """Changes the gradients at one site."""

    __slots__ = ("_change", "_where", "inside")
    changes = True

    def __init__(self, change: Callable[[Any], Any], effect: _NoOpDetector) -> None:
        self.inside = partial(effect.inside, change)
        self._change = partial(effect.of_gradient, change)
        self._where = effect.where

    def arrived(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> Any:
        """Change the gradient of one tensor."""
        new = self._change(grad)
        found = None if new is None else describe.difference(grad, new)
        if found:
            raise StructureError(
                f"the edit at {self._where} would change the gradient's form: {found}."
                "\nReturn a gradient of the same shape, dtype and device, or None to leave it."
            )
        return new


def _checked(change: Callable[[Any], Any], effect: _NoOpDetector) -> Callable[[Pass, Any], Any]:
    where = effect.where

    def callback(current: Pass, value: Any) -> Any:
        new = effect.of_value(change, value)
        if new is None:
            return None
        found = describe.difference(value, new)
        if found:
            raise StructureError(
                f"the edit at {where or 'the root'} would change the value's structure: {found}."
                "\nReturn a value of the same form (for a part of it, select a leaf such as"
                " ':output[0]'), or use a raw hook: hl.attach(model), line.forward(...)."
            )
        if current.region is not None:
            current.region.changed(where, value, new)
        return new

    return callback
