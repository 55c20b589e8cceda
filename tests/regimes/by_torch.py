"""What a verb has to do to a model's gradients, done with torch's own hooks and functions.

A test of a cell compares the numbers, not what a line reports of itself.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import hookline as hl


def clipped_by_torch(grads, *, norm=None, value=None, total_norm=None, norm_type=2.0):
    """Gradients, clipped by torch's own functions as `hl.clip` is to clip them."""
    held = [torch.empty_like(grad) for grad in grads]
    for one, grad in zip(held, grads, strict=True):
        one.grad = grad.clone()
    if value is not None:
        clip_grad_value_(held, value)
    for group in [held] if total_norm is not None else [[one] for one in held]:
        if value is None:
            clip_grad_norm_(group, norm if total_norm is None else total_norm, norm_type)
    return [one.grad for one in held]


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


def raw_hook(line, site, fn):
    """Put a raw backward hook of the line's at a site: `fn` of the first gradient there."""
    path, port = site.split(":")
    if port == "grad_output":
        return line.backward_pre(path, lambda module, given: (fn(given[0]), *given[1:]))
    return line.backward(path, lambda module, given, _: (fn(given[0]), *given[1:]))


def gradients_of(model, step):
    """What a run of forward and backward leaves in the parameters, and what it returns itself."""
    model.zero_grad()
    given = step(model)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *(() if given is None else given)]


def assert_gradients_are_torchs(model, step, site, verbs, expected_model=None, **close):
    """Hold what each verb does at a site of gradients against torch's own hooks: by numbers.

    Args:
        model: the model, in its regime.
        step: runs it forward and backward; may return further tensors to compare.
        site: a site of gradients where one tensor flows.
        verbs: some of "gradients", "edit gradients", "raw hooks" and "clip".
        expected_model: the model that torch's hooks are put on, if not the same one.
        close: for `torch.testing.assert_close`.
    """
    plain = model if expected_model is None else expected_model

    def triple(grad):
        return grad * 3 + 1

    with hooked_by_torch(plain, site) as came:
        bare = gradients_of(plain, step)
    bound = came[0].float().norm().item() / 4
    changes = {
        "edit gradients": (triple, lambda: hl.edit(model, site, triple)),
        "raw hooks": (triple, lambda: hl.attach(model)),
        "clip": (
            lambda grad: clipped_by_torch([grad], norm=bound)[0],
            lambda: hl.clip(model, site, norm=bound),
        ),
    }
    if "gradients" in verbs:
        with hl.record(model, site) as run:
            torch.testing.assert_close(gradients_of(model, step), bare, **close)
        found = [run.calls(site, pass_=k) for k in range(len(run.passes))]
        torch.testing.assert_close([grad for calls in found for grad in calls], came, **close)
    for verb in verbs:
        if verb == "gradients":
            continue
        change, make = changes[verb]
        with hooked_by_torch(plain, site, change):
            expected = gradients_of(plain, step)
        with make() as line:
            if verb == "raw hooks":
                raw_hook(line, site, triple)
            found = gradients_of(model, step)
        torch.testing.assert_close(found, expected, **close)
        assert any(not torch.equal(one, other) for one, other in zip(found, bare, strict=True))
