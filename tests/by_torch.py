"""What a verb has to do to a model's gradients, done with torch's own hooks and functions.

A test of a cell compares the numbers, not what a line reports of itself.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.testing import assert_close

import hookline as hl


class Part(NamedTuple):
    """A tensor within a value: as a site names it, how to get it, how to put another in its place.

    Attributes:
        put: called with the value and the new tensor, makes a new value.
    """

    leaf: str
    get: Callable[[Any], torch.Tensor]
    put: Callable[[Any, torch.Tensor], Any]


WHOLE = Part("", lambda value: value, lambda value, new: new)


def nth(number):
    """A part of a tuple."""
    return Part(
        f"[{number}]", lambda value: value[number],
        lambda value, new: (*value[:number], new, *value[number + 1 :]),
    )  # fmt: skip


VERBS = ("gradients", "edit gradients", "raw hooks", "clip")


def clipped_by_torch(grads, *, norm=None, value=None, total_norm=None, norm_type=2.0):
    """Gradients, clipped by torch's own functions as `hl.clip` is to clip them."""
    held = [torch.empty_like(grad, dtype=_wide(grad)) for grad in grads]
    for one, grad in zip(held, grads, strict=True):
        one.grad = grad.to(one.dtype, copy=True)
    if value is not None:
        clip_grad_value_(held, value)
    for group in [held] if total_norm is not None else [[one] for one in held]:
        if value is None:
            clip_grad_norm_(group, norm if total_norm is None else total_norm, norm_type)
    return [one.grad.to(grad.dtype) for one, grad in zip(held, grads, strict=True)]


def _wide(grad):
    return torch.float32 if grad.dtype in (torch.half, torch.bfloat16) else grad.dtype


@contextmanager
def hooked_by_torch(model, site, change=None, part=None):
    """Put torch's own hooks on the tensor at a site of gradients.

    Without a part, that of a tuple is its first.

    Gives a list of the gradients that came, as they were when `change` had changed them.
    """
    path, port = site.split(":")
    module, came = model.get_submodule(path), []

    def put(value):
        first = WHOLE if torch.is_tensor(value) else nth(0)
        tensor = (part or first).get(value)
        if tensor.requires_grad:
            if change is not None:
                tensor.register_hook(change)
            tensor.register_hook(lambda grad: came.append(grad.detach().clone()))

    if port.startswith("grad_output"):
        handle = module.register_forward_hook(lambda module, args, output: put(output))
    else:
        handle = module.register_forward_pre_hook(lambda module, args: put(args))
    with handle:
        yield came


def triple(grad):
    return grad * 3 + 1


def raw_hook(line, site):
    """Put a raw backward hook on a site that triples the first gradient there."""
    path, port = site.split(":")
    if port == "grad_output":
        line.backward_pre(path, lambda module, given: (triple(given[0]), *given[1:]))
    else:
        line.backward(path, lambda module, given, _: (triple(given[0]), *given[1:]))


def results_of(model, step):
    """What a run returns, and what it leaves in the parameters."""
    model.zero_grad()
    given = step(model)
    found = list(given) if isinstance(given, tuple | list) else [given]
    return [
        *(value.detach().clone() for value in found if value is not None),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def assert_gradients_are_torchs(make, step, site, verbs=VERBS, *, part=None, plain=None, **close):
    """Hold what each verb does at a site of gradients against torch's own hooks: by numbers.

    Args:
        make: makes the model, in its regime; the same one each time.
        step: runs it forward and backward; may return further tensors to compare.
        site: a site of gradients where one tensor flows.
        verbs: which of `VERBS`.
        part: that of the value, where it is one of several.
        plain: makes the model that torch's hooks are put on, or what that is and its `step`.
        close: for `torch.testing.assert_close`.
    """
    make_plain, plain_step = plain if isinstance(plain, tuple) else (plain or make, step)
    model = make_plain()
    with hooked_by_torch(model, site, part=part) as came:
        bare = results_of(model, plain_step)
    if "gradients" in verbs:
        model = make()
        with hl.record(model, site) as run:
            assert_close(results_of(model, step), bare, **close)
        assert_close([grad for one in run.passes for grad in one.calls(site)], came, **close)
    bound = came[0].float().norm().item() / 4

    def clipped(grad):
        return clipped_by_torch([grad], norm=bound)[0]

    changes = {
        "edit gradients": (triple, lambda model: hl.edit(model, site, triple)),
        "raw hooks": (triple, hl.attach),
        "clip": (clipped, lambda model: hl.clip(model, site, norm=bound)),
    }
    for verb in [verb for verb in verbs if verb != "gradients"]:
        change, attached = changes[verb]
        model = make_plain()
        with hooked_by_torch(model, site, change, part):
            expected = results_of(model, plain_step)
        model = make()
        with attached(model) as line:
            if verb == "raw hooks":
                raw_hook(line, site)
            found = results_of(model, step)
        assert_close(found, expected, **close)
        # The test could fail: what was done matters.
        assert not all(map(torch.equal, found, bare))


VALUES = ("record", "statistics", "edit", "patch", "raw hooks", "features", "watch")


def tripled(value):
    """An edit of values, that works on every kind of tensor that has a product."""
    return value * 3 + 1


@contextmanager
def seen_by_torch(model, path, part=WHOLE, change=None):
    """Put torch's own forward hook on a module.

    Gives a list of the values that came, as they were before `change` changed them.
    """
    came = []

    def hook(module, args, output):
        value = part.get(output)
        came.append(value.detach().clone())
        return None if change is None else part.put(output, change(value))

    with model.get_submodule(path).register_forward_hook(hook):
        yield came


NUMBERS = re.compile(r"mean (\S+)  std (\S+)")


def printed(text):
    """The means and deviations of the outputs that `hl.watch` printed."""
    lines = [line for line in text.splitlines() if not line.startswith("< ")]
    return [tuple(map(float, NUMBERS.search(line).groups())) for line in lines]


def printed_of(value):
    """What `hl.watch` is to print of a value: its mean and deviation, to four digits."""
    wide = torch.Tensor(value).double()
    return wide.mean().item(), wide.std(correction=0).item()


def assert_printed(text, values):
    assert_close(printed(text), [*map(printed_of, values)], rtol=1e-3, atol=1e-6)


def measured(value):
    wide = value.float()
    return wide.mean(), wide.norm(), wide.amax(), wide.amin()


CHANGES = (tripled, tripled), (hl.edits.scale(0.3), lambda value: value * 0.3)


class How(NamedTuple):
    """What is done with values, where it has to be another for their kind.

    Attributes:
        measure: what `keep=` computes.
        changes: what `hl.edit` is given, and what a hook does for it.
    """

    measure: Callable[[torch.Tensor], Any] = measured
    changes: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = CHANGES


PLAINLY = How()


def assert_values_are_torchs(
    make, step, path, verbs=VALUES, *, part=WHOLE, plain=None, how=PLAINLY, **close
):
    """Hold what each verb does with a module's output against torch's own hooks: by numbers.

    Args:
        make: makes the model, in its regime; the same one each time.
        step: runs it, and returns what comes out; may run it backward, too.
        path: the module's.
        verbs: which of `VALUES`.
        part: which part of its output, if it has several.
        plain: makes the model that torch's hooks are put on, or what that is and its `step`.
        how: what is done with the values.
        close: for `torch.testing.assert_close`.
    """
    make_plain, plain_step = plain if isinstance(plain, tuple) else (plain or make, step)
    site = f"{path}:output{part.leaf}" if part.leaf else path
    model = make_plain()
    with seen_by_torch(model, path, part) as came:
        bare = results_of(model, plain_step)
    assert came
    for verb, keep in (("record", None), ("statistics", how.measure)):
        if verb in verbs:
            model = make()
            with hl.record(model, site, keep=keep, copy=True) as run:
                assert_close(results_of(model, step), bare, **close)
            found = [value for one in run.passes for value in one.calls(site)]
            expected = came if keep is None else [keep(value) for value in came]
            assert_close(found, expected, **close)
    if "features" in verbs:
        model = make()
        found = hl.features(model, lambda: step(model), site, eval=False)[site]
        assert_close(found, came[0], **close)
    if "watch" in verbs:
        model, file = make(), io.StringIO()
        with hl.watch(model, path, file=file):
            assert_close(results_of(model, step), bare, **close)
        assert_printed(file.getvalue(), came)
    for change, by_hand in how.changes if {"edit", "raw hooks"} & {*verbs} else ():
        model = make_plain()
        with seen_by_torch(model, path, part, by_hand):
            expected = results_of(model, plain_step)
        # The test could fail: what is done matters.
        assert not all(map(torch.equal, expected, bare))

        def changing(module, args, output, by_hand=by_hand):
            return part.put(output, by_hand(part.get(output)))

        if "edit" in verbs:
            model = make()
            with hl.edit(model, site, change):
                assert_close(results_of(model, step), expected, **close)
        if "raw hooks" in verbs:
            model = make()
            with hl.attach(model) as line:
                line.forward(path, changing)
                assert_close(results_of(model, step), expected, **close)
    if "patch" in verbs:
        assert_patch_is_torchs(make, step, path, part, (make_plain, plain_step), how, **close)


def assert_patch_is_torchs(make, step, path, part, plain, how, **close):
    """Put the changed values of one run into another, and hold it against constants by hand."""
    make_plain, plain_step = plain
    site = f"{path}:output{part.leaf}" if part.leaf else path
    bare = results_of(make_plain(), plain_step)
    change, by_hand = how.changes[0]
    model = make_plain()
    with seen_by_torch(model, path, part, by_hand) as came:
        results_of(model, plain_step)
    constants = iter([by_hand(value) for value in came])
    model = make_plain()
    with seen_by_torch(model, path, part, lambda _: next(constants).clone()):
        expected = results_of(model, plain_step)
    assert not all(map(torch.equal, expected, bare))
    model = make()
    with hl.edit(model, site, change), hl.record(model, site, copy=True) as run:
        results_of(model, step)
    model = make()
    with hl.edit(model, site, hl.edits.patch(run)):
        assert_close(results_of(model, step), expected, **close)
