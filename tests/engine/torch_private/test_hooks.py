"""Torch's process-wide hooks are where hookline puts its own."""

from __future__ import annotations

import sys

import pytest
import torch

from hookline.engine.torch_private import hooks as internals


@pytest.mark.parametrize(
    ("kind", "register"),
    [
        ("forward_pre", "register_module_forward_pre_hook"),
        ("forward", "register_module_forward_hook"),
        ("after", "register_module_forward_hook"),
        ("parameter", "register_module_parameter_registration_hook"),
        ("buffer", "register_module_buffer_registration_hook"),
        ("module", "register_module_module_registration_hook"),
        ("step_pre", "register_optimizer_step_pre_hook"),
        ("step_post", "register_optimizer_step_post_hook"),
    ],
)
def test_process_wide_hooks_are_where_torch_puts_them(kind, register):
    name = "torch.optim.optimizer" if kind.startswith("step") else "torch.nn.modules.module"
    place = sys.modules[name]
    options = {"forward": {"with_kwargs": True}, "after": {"always_call": True}}.get(kind, {})
    handle = getattr(place, register)(print, **options)
    hooks, *marks = internals.global_hook_and_flag_dicts(kind)
    assert hooks[handle.id] is print
    assert len(marks) == len(options)
    for found in (hooks, *marks):
        assert handle.id in found
        del found[handle.id]


def test_torchs_handle_leaves_the_kwargs_mark_of_a_removed_hook():
    """When torch stops leaving it, a hook can be registered by torch's own function again."""
    handle = torch.nn.modules.module.register_module_forward_hook(print, with_kwargs=True)
    hooks, with_kwargs = internals.global_hook_and_flag_dicts("forward")
    handle.remove()
    assert handle.id not in hooks
    assert with_kwargs.pop(handle.id) is True
