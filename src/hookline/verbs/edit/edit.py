"""Change the values at the selected sites."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Never, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    Bound,
    Callback,
    Consequence,
    GradientCallback,
    Line,
    Order,
    Pass,
    PendingGradient,
    Selection,
    Selector,
    Site,
    bind_own_defaults,
    call_gradient_function,
    call_undoing_writes,
    ports_for,
)
from hookline.engine.pytree import describe
from hookline.errors import AttachError, StructureError, check_option_names
from hookline.verbs.edit import edits
from hookline.verbs.edit.indices import parse_indices
from hookline.verbs.edit.steps_and_tokens import EditLimits, SiteEditLimits
from hookline.verbs.shared.refused_ports import refuse_ignored_ports


def edit(
    model: nn.Module | Mapping[str, Tensor],
    selector: Selector,
    change: Callable[[Any], Any] | None = None,
    *,
    ports: str | Sequence[str] = "output",
    at: int | slice | Sequence[int] | None = None,
    steps: int | slice | Sequence[int] | None = None,
    every_thread: bool = False,
    **others: Never,
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

    Several changes make one line with one report:

        >>> with hl.edit(model, {"0": hl.edits.scale(2.0), "1": hl.edits.clamp(max=0.5)}):
        ...     bool((model(torch.ones(1, 2)) <= 0.5).all())
        True

    `at=` changes only some tokens of each row. The other tokens keep their bits.

        >>> block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 4)
        >>> before = block(x)
        >>> with hl.edit(block, "(root)", hl.edits.scale(0.0), at=-1):
        ...     after = block(x)
        >>> torch.equal(after[:, :-1], before[:, :-1]), bool(after[:, -1].any())
        (True, False)

    Edits run in the order in which they were made, before the other hooks of a module. So recorders
    and hooks of libraries see the value that the next module gets. Only two kinds of hooks run
    before an edit: process-wide hooks, and hooks that torch's own functions register with
    `prepend=True` after the edit.

    Args:
        model: the model. Or tensors by name, `{"b": b}`, whose gradients are changed.
        selector: which sites, as in `hl.select`. Select a leaf (`"h.*:output[0]"`) to change one
            part of a nested value. Or a mapping from selectors to changes, without `change`. A site
            that several of them select is changed in the order of the mapping.
        change: a function of the value. Its result replaces the value, and has the same structure,
            shapes, dtypes and devices. None leaves the value unchanged. If the function returned
            None at every call, a warning says so at the end. The result must be a new value: write
            `t * 0` or `t.clone().zero_()`, not `t.zero_()`. A write to the given value raises an
            error and is undone. `hl.edits` makes common functions: scale, add, replace, noise,
            clamp, patch, steer, project_out, round_to, reroute. A change with a method
            `at(site)` is asked for the function of each site.
        ports: one or several of "output", "input", "grad_output", "grad_input" and "grad" (of
            parameters), for selectors that name no port.
        at: the positions of the tokens to change: an integer, a slice or a list of integers. None
            changes all. The tokens are dimension 1 of the value, `(rows, tokens, features)`; a
            value `(rows * tokens, features)` is known, too. If the model gets ids of tokens, a
            position counts the tokens of its row: padding is left out, and cached tokens are
            counted. -1 is the last token of each row so far. For other models, a position is an
            index. A warning at the end names the positions that never occurred.
        steps: the steps of `generate` to change, in the same forms, from 0 for the prompt. Each run
            of the model is a step; the chunks of a prompt (`prefill_chunk_size`) are one. The count
            begins again when the model is given an empty cache. A failed run is not counted.
        every_thread: True changes values in every thread and async task. False changes them in the
            calling thread or task, and in code that runs in a copy of its context.
        **others: none are allowed. For a name of another package (`edit_output`), the error says
            what to write here.

    Returns:
        A line. Use it in a `with` block, or end it with `line.remove()`. `line.report()` says how
        often each site fired.

    Raises:
        AttachError: `change` cannot be called with the value alone, the model cannot be hooked, or
            `at` or `steps` is malformed, or given for parameters. (When the model runs) compiled
            code cannot tell the step or the tokens, or the site ran outside a run of the model.
        SelectionError: the selector matches nothing, or a port is unknown.
        SiteError: (when the model runs) a value lacks the selected leaf.
        StructureError: (when the model runs) `change` returned a value of another structure, shape,
            dtype or device, or wrote in place to the value or gradient. To return another
            structure, use a raw hook (`hl.attach`, `line.forward`). Or the value has no dimension
            of tokens for `at`, or the mask of the model does not tell its tokens.
        TypeError: another argument is given.
    """
    check_option_names(edit, others)
    line = Line(model, name="edit", every_thread=every_thread)
    changes = _changes_by_selector(selector, change)
    limits = EditLimits(
        parse_indices("at", at, allows_negative=True),
        parse_indices("steps", steps, allows_negative=False),
    )
    line.options.lenient = any(which is None for which, _ in changes)
    line.originals.consequence = _CONSEQUENCE
    for which, _ in changes:
        refuse_ignored_ports(ports, which)
    selected = [(line.select(which, ports_for(model, ports)), how) for which, how in changes]
    if limits.is_limited:
        _refuse_parameters(selection for selection, _ in selected)
    site_edits: list[_SiteEdit] = []
    with line.undo_on_error():
        for selection, how in selected:
            line.attach_taps(selection, _change_binder(how, limits, site_edits), Order.EDIT)
    if line.root is not None and any(site_edit.limits is not None for site_edit in site_edits):
        limits.set_root(line.root)
        line.passes.at_root = limits.begin_pass
    line.options.remark = partial(_closing_remark, site_edits, limits)
    return line


_CONSEQUENCE = Consequence(
    "the edit of {sites} no longer happens", "the edit of {sites} is at {now} now"
)


def _changes_by_selector(
    selector: Selector, change: Any
) -> list[tuple[Selector, Callable[[Any], Any]]]:
    """Return each selector with its change, in order.

    Raises:
        AttachError: a change is no function of the value, or there is none.
    """
    if not isinstance(selector, Mapping):
        _check_change(change)
        return [(selector, change)]
    if change is not None or not selector:
        got = "a mapping and a change" if change is not None else "an empty mapping"
        raise AttachError(
            f"hl.edit must be given a selector and a change, or a mapping of them, got {got}."
            '\nWrite hl.edit(model, {"layer1": change, "layer2": other_change}).'
        )
    for each in selector.values():
        _check_change(each)
    return list(selector.items())


def _refuse_parameters(selections: Iterable[Selection]) -> None:
    for site in (site for selection in selections for site in selection):
        if site.port == "grad":
            raise AttachError(
                f"at and steps must be given for values of a run, got {site}, the gradient of a"
                " parameter, which is over all tokens and runs.\nLeave them out, or select"
                " :grad_output of a module."
            )


def _change_binder(
    change: Any, limits: EditLimits, site_edits: list[_SiteEdit]
) -> Callable[[Site], Bound]:
    """Return a function that makes the callback of a change for each site.

    Args:
        change: the change.
        limits: the steps and tokens of the line.
        site_edits: takes the edit of each site.
    """
    change_at = getattr(change, "at", None)  # a change that differs by site has `at(site)`
    everywhere = bind_own_defaults(change, 1)

    def bind(site: Site) -> Bound:
        change_here = bind_own_defaults(change_at(site), 1) if callable(change_at) else everywhere
        wants_pass_and_call = getattr(change_here, "wants_pass_and_call", False)
        where = None
        if wants_pass_and_call or limits.is_limited:
            where = SiteEditLimits(limits, site, wants_pass_and_call=wants_pass_and_call)
        site_edit = _SiteEdit(site, where)
        site_edits.append(site_edit)
        return (EditGradient if site.is_gradient else _value_callback)(change_here, site_edit)

    return bind


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
class _SiteEdit:
    """The edit of one site: call its function, and note whether the function has changed anything.

    In compiled code this cannot be noted, so there is no warning.

    Args:
        site: the site.
        limits: the steps and tokens that are changed; None for all, by a function of the value
            alone.
    """

    __slots__ = ("has_changed", "limits", "was_left", "where")

    def __init__(self, site: Site, limits: SiteEditLimits | None) -> None:
        self.where: str = str(site)
        self.limits: SiteEditLimits | None = limits
        self.has_changed: bool = False
        self.was_left: bool = False

    def edit_value(self, change: Callable[..., Any], current: Pass, value: Any) -> Any:
        """Call the function on a value, which it may not write to."""
        if self.limits is not None:
            return self.limits.apply(partial(self._call_on_value, change), current, value)
        return self._call_on_value(change, value)

    def _call_on_value(self, change: Callable[..., Any], value: Any, **extra: Any) -> Any:
        change = partial(change, **extra) if extra else change
        new = call_undoing_writes(change, value, self._in_place_error, self._missing_return_error)
        return new if is_dynamo_compiling() else self._record_whether_changed(new)

    def edit_gradient(self, change: Callable[..., Any], current: Pass, call: int, grad: Any) -> Any:
        """Call the function on a gradient, which it may not write to."""
        if self.limits is not None:
            return self.limits.apply(partial(self._call_on_gradient, change), current, grad, call)
        return self._call_on_gradient(change, grad)

    def _call_on_gradient(self, change: Callable[..., Any], grad: Any, **extra: Any) -> Any:
        change = partial(change, **extra) if extra else change
        return self._record_whether_changed(call_gradient_function(change, grad, self.where))

    def edit_gradient_in_graph(self, change: Callable[..., Any], grad: Any) -> Any:
        """Call the function on a gradient in compiled code."""
        if self.limits is not None:
            self.limits.refuse_compiled_gradient()
        return call_undoing_writes(change, grad, self._in_place_error, self._missing_return_error)

    def _record_whether_changed(self, new: Any) -> Any:
        if new is None:
            self.was_left = True
        else:
            self.has_changed = True
        return new

    def _in_place_error(self) -> StructureError:
        return StructureError(
            f"the edit at {self.where or 'the root'} wrote in place to the value it was given,"
            " which other parts of the model, or the caller, may hold."
            "\nReturn a new tensor instead: lambda t: t * 0, or lambda t: t.clone().zero_(), not"
            " lambda t: t.zero_()."
        )

    def _missing_return_error(self) -> StructureError:
        return StructureError(
            f"the edit at {self.where or 'the root'} must return the new value, got None after it"
            " changed a container in place or consumed an iterator."
            "\nReturn the container. Instead of an iterator, return a new one:"
            " iter([t * 2 for t in values])."
        )


def _closing_remark(site_edits: list[_SiteEdit], limits: EditLimits) -> str | None:
    """Write the notes at the end of the line; None without any."""
    notes = [note for note in (_no_op_warning(site_edits), limits.unmet_text()) if note is not None]
    return "\n".join(notes) or None


def _no_op_warning(site_edits: list[_SiteEdit]) -> str | None:
    """Write the warning about edits that never changed anything; None if there are none."""
    idle = [
        site_edit for site_edit in site_edits if site_edit.was_left and not site_edit.has_changed
    ]
    if not idle:
        return None
    sites = ", ".join(site_edit.where or "the root" for site_edit in idle[:3])
    more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
    return (
        f"hl.edit changed nothing at {sites}{more}: the function returned None each time, which"
        " leaves a value unchanged.\nReturn the new value, or only look at values with"
        " hl.record(keep=), hl.watch or hl.attach."
    )


@final
class EditGradient(GradientCallback):
    """Change the gradients at one site."""

    __slots__ = ("_change", "_site_edit", "inside")
    changes = True

    def __init__(self, change: Callable[[Any], Any], site_edit: _SiteEdit) -> None:
        self.inside: partial[Any] = partial(
            _change_gradient_in_graph,
            partial(site_edit.edit_gradient_in_graph, change),
            site_edit.where,
        )
        self._change = change
        self._site_edit = site_edit

    def on_gradient(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> Any:
        """Change the gradient of one tensor."""
        new = self._site_edit.edit_gradient(self._change, current, pending.call, grad)
        difference = None if new is None else describe.difference(grad, new)
        if difference:
            raise _gradient_form_error(self._site_edit.where, difference)
        return new


def _change_gradient_in_graph(change: Callable[[Any], Any], where: str, grad: Tensor) -> Any:
    """Change a gradient in compiled code, where autograd would add up one of a larger shape."""
    new = change(grad)
    # A graph of a backward allows no look at the layout.
    if isinstance(new, Tensor) and new.shape != grad.shape:
        forms = [f"Tensor{describe.shape(tensor)}" for tensor in (grad, new)]
        raise _gradient_form_error(where, "expected {}, got {}".format(*forms))
    return new


def _gradient_form_error(where: str, difference: str) -> StructureError:
    return StructureError(
        f"the edit at {where} would change the gradient's form: {difference}."
        "\nReturn a gradient of the same shape, dtype and device, or None to leave it."
    )


def _value_callback(change: Callable[[Any], Any], site_edit: _SiteEdit) -> Callback:
    where = site_edit.where

    def callback(current: Pass, value: Any) -> Any:
        new = site_edit.edit_value(change, current, value)
        if new is None:
            if current.region is not None:
                current.region.record_no_change(where)
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
            current.region.record_change(where, value, new)
        return new

    return callback
