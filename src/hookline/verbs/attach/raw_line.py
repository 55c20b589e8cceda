"""A line of raw hooks, of every kind that torch has.

Signatures are torch's. Where torch's semantics are a trap, they are mended: returns are checked, a
gradient may not be changed in place, backward hooks see every structure and allow in-place
operations behind the module, and what is hooked ends with the line.
"""

from __future__ import annotations

from typing import NoReturn, final

from torch import nn

from hookline.engine.selection.ground import Everywhere
from hookline.verbs.attach.on_events import EventHooks
from hookline.verbs.attach.on_tensors import TensorHooks

# What torch calls it -> what it is here.
_TORCH_NAMES = {
    "register_forward_pre_hook": "line.forward_pre(selector, fn)",
    "register_forward_hook": "line.forward(selector, fn)",
    "register_full_backward_pre_hook": "line.backward_pre(selector, fn)",
    "register_full_backward_hook": "line.backward(selector, fn)",
    "register_hook": "line.grad(parameter or tensor, fn)",
    "register_post_accumulate_grad_hook": "line.accumulated(parameter, fn)",
    "register_step_pre_hook": "line.step_pre(optimizer, fn)",
    "register_step_post_hook": "line.step_post(optimizer, fn)",
    "register_state_dict_pre_hook": "line.state_dict_pre(selector, fn)",
    "register_state_dict_post_hook": "line.state_dict(selector, fn)",
    "register_load_state_dict_pre_hook": "line.load_state_dict_pre(selector, fn)",
    "register_load_state_dict_post_hook": "line.load_state_dict(selector, fn)",
    "register_multi_grad_hook": "line.grad(tensor, fn) for each",
    "register_module_forward_pre_hook": "hl.attach(hl.EVERYWHERE), line.forward_pre(None, fn)",
    "register_module_forward_hook": "hl.attach(hl.EVERYWHERE), line.forward(None, fn)",
    "register_module_full_backward_pre_hook": (
        "hl.attach(hl.EVERYWHERE), line.backward_pre(None, fn)"
    ),
    "register_module_full_backward_hook": "hl.attach(hl.EVERYWHERE), line.backward(None, fn)",
    "register_optimizer_step_pre_hook": "hl.attach(hl.EVERYWHERE), line.step_pre(None, fn)",
    "register_optimizer_step_post_hook": "hl.attach(hl.EVERYWHERE), line.step_post(None, fn)",
    "register_module_parameter_registration_hook": 'line.registered("parameter", fn)',
    "register_module_buffer_registration_hook": 'line.registered("buffer", fn)',
    "register_module_module_registration_hook": 'line.registered("module", fn)',
}


@final
class RawLine(EventHooks, TensorHooks):
    """A line of raw hooks, of every kind that torch has; `hl.attach` makes one.

    Hooks of one module are called in this order: those of `hl.EVERYWHERE`, edits, hooks as they
    were added (or, with `prepend`, before those that are there), recorders.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("register_backward_hook", "register_module_backward_hook"):
            raise AttributeError(
                f"{name} is not offered: what it calls grad_input is not dL/dx for a"
                " module of several operations.\nUse line.backward(selector, fn), or"
                " hl.record(model, selector, ports=('grad_input', 'grad_output'))."
            )
        if name in _TORCH_NAMES:
            raise AttributeError(f"a line has no {name}; here it is {_TORCH_NAMES[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def attach(model: nn.Module | Everywhere | None = None, *, every_thread: bool = False) -> RawLine:
    """Attach raw hooks to a model, or everywhere, for as long as the line lasts.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with attach(model) as line:
        ...     _ = line.forward("*", lambda module, args, output: print(type(module).__name__))
        ...     _ = model(torch.zeros(1, 2))
        Linear
        ReLU

    Args:
        model: the model; or `hl.EVERYWHERE`: every module of every model that runs in this context
            (thread, async task), selected by type, module, predicate or None; or nothing, for hooks
            on tensors and optimizers that are given themselves.
        every_thread: see every thread and async task. False: see the one that calls this, and what
            runs in a copy of its context.

    Returns:
        A line. Its methods add hooks: `forward_pre`, `forward`, `backward_pre`, `backward`,
        `saved`, `grad`, `accumulated`, `registered`, `step_pre`, `step_post`, `state_dict_pre`,
        `state_dict`, `load_state_dict_pre`, `load_state_dict`. Each returns a handle, whose
        `remove()` takes off what that call added; the end of the line takes off all.

    Raises:
        AttachError: what was given is no model, or one that torch never calls hooks on.
    """
    return RawLine(model, every_thread=every_thread)
