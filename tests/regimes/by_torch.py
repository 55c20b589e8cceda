"""What a verb has to do to a model's gradients, done with torch's own hooks and functions.

A test of a cell compares the numbers, not what a line reports of itself.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.testing import assert_close

import hookline as hl

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
def hooked_by_torch(model, site, change=None):
    """Put torch's own hooks on the tensor at a site of gradients.

    Gives a list of the gradients that came, as they were when `change` had changed them.
    """
    path, port = site.split(":")
    module, came = model.get_submodule(path), []

    def put(value):
        tensor = value if torch.is_tensor(value) else value[0]
        if tensor.requires_grad:
            if change is not None:
                tensor.register_hook(change)
            tensor.register_hook(lambda grad: came.append(grad.detach().clone()))

    if port == "grad_output":
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


def gradients_of(model, step):
    """What a run of forward and backward leaves in the parameters, and what it returns itself."""
    given = step(model)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *(() if given is None else given)]


def assert_gradients_are_torchs(make, step, site, verbs=VERBS, *, plain=None, **close):
    """Hold what each verb does at a site of gradients against torch's own hooks: by numbers.

    Args:
        make: makes the model, in its regime; the same one each time.
        step: runs it forward and backward; may return further tensors to compare.
        site: a site of gradients where one tensor flows.
        verbs: which of `VERBS`.
        plain: makes the model that torch's hooks are put on, or what that is and its `step`.
        close: for `torch.testing.assert_close`.
    """
    make_plain, plain_step = plain if isinstance(plain, tuple) else (plain or make, step)
    model = make_plain()
    with hooked_by_torch(model, site) as came:
        bare = gradients_of(model, plain_step)
    if "gradients" in verbs:
        model = make()
        with hl.record(model, site) as run:
            assert_close(gradients_of(model, step), bare, **close)
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
        with hooked_by_torch(model, site, change):
            expected = gradients_of(model, plain_step)
        model = make()
        with attached(model) as line:
            if verb == "raw hooks":
                raw_hook(line, site)
            found = gradients_of(model, step)
        assert_close(found, expected, **close)
        # The test could fail: what was done matters.
        assert not all(map(torch.equal, found, bare))
