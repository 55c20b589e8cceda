"""A line of raw hooks: the kinds of hooks of torch, as methods.

The signatures are torch's. hookline adds four things to torch's hooks:

- results of hooks are checked
- a hook must not change a gradient in place
- backward hooks support every structure, and in-place operations after the module
- all hooks are removed at the end of the line
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, final

from torch import Tensor, nn

from hookline.engine import Consequence, Everywhere
from hookline.verbs.attach.on_optimizers_and_states import EventHooks
from hookline.verbs.attach.on_tensors import TensorHooks

# torch's name of a registration -> the same on a line.
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
    """A line of raw hooks, with a method for each kind; `hl.attach` makes it.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with hl.attach(model) as line:
        ...     _ = line.forward("1", lambda module, args, output: output + 1)
        ...     bool((model(torch.zeros(1, 2)) >= 1).all())
        True

    The forward hooks of one module run in this order: hooks of `hl.EVERYWHERE`, edits, raw hooks
    and torch's own in the order of registration, recorders (`hl.record`). A raw hook with `prepend`
    runs before torch's own hooks and earlier ones of `hl.attach`, but after edits.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("register_backward_hook", "register_module_backward_hook"):
            raise AttributeError(
                f"{name} must be replaced on a line: for a module of several operations, its"
                " grad_input is not dL/dx.\nUse line.backward(selector, fn), or"
                " hl.record(model, selector, ports=('grad_input', 'grad_output'))."
            )
        if name in _TORCH_NAMES:
            raise AttributeError(f"a line has no {name}.\nUse {_TORCH_NAMES[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def attach(
    model: nn.Module | Mapping[str, Tensor] | Everywhere | None = None,
    *,
    every_thread: bool = False,
) -> RawLine:
    """Attach raw hooks to a model, or everywhere, for as long as the line lasts.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with hl.attach(model) as line:
        ...     _ = line.forward("*", lambda module, args, output: print(type(module).__name__))
        ...     _ = model(torch.zeros(1, 2))
        Linear
        ReLU

    With tensors by name, `line.grad` and `line.accumulated` select them by these names, and the
    report shows the names:

        >>> a = torch.ones(2, requires_grad=True)
        >>> with hl.attach({"a": a}) as line:
        ...     _ = line.grad("a", lambda grad: grad * 10)
        ...     a.sum().backward()
        >>> a.grad
        tensor([10., 10.])

    Args:
        model: the model. Or tensors by name, `{"a": a}`, for hooks on their gradients. Or
            `hl.EVERYWHERE`: every module of every model that runs in this context (thread, async
            task). A selector is then a module type, a module, a predicate or None. Or None, for
            hooks on tensors and optimizers that you give to the methods.
        every_thread: True runs the hooks in every thread and async task. False runs them in the
            calling thread or task, and in code that runs in a copy of its context.

    Returns:
        A line. Its methods add hooks: `forward_pre`, `forward`, `backward_pre`, `backward`,
        `saved`, `grad`, `accumulated`, `registered`, `step_pre`, `step_post`, `state_dict_pre`,
        `state_dict`, `load_state_dict_pre`, `load_state_dict`. Each returns a handle. The handle's
        `remove()` removes the hooks of that call. The end of the line removes all hooks.

    Raises:
        AttachError: `model` is none of these, or torch calls no hooks on it.
    """
    line = RawLine(model, every_thread=every_thread)
    line.originals.consequence = _CONSEQUENCE
    return line


_CONSEQUENCE = Consequence(
    "the hooks at {sites} are on the old {kind}", "the hooks at {sites} are at {now} now"
)
