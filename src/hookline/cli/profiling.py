"""The command `profile`: run a model several times and measure its modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.cli.inspecting import inputs_of
from hookline.cli.terminal import Busy
from hookline.engine.pytree import tree
from hookline.errors import HooklineError, InputError
from hookline.models import Batch
from hookline.verbs.profile.profile import Profile
from hookline.verbs.shared.run_model import call, eval_without_side_effects


def profile_by_name(
    model: nn.Module, batch: Batch, steps: int, *, backward: bool, busy: Busy
) -> Profile:
    """Run a model several times, in eval mode, under `hl.profile`.

    If the model raises, the profile holds what ran, and its `failure` names the module.

    Args:
        model: the model.
        batch: the input.
        steps: the number of passes.
        backward: whether a backward follows each forward.
        busy: told of each pass.

    Raises:
        HooklineError: no output has a gradient.
    """
    inputs = inputs_of(model, batch)
    profiling = hl.profile(model)
    try:
        with eval_without_side_effects(model), profiling, torch.set_grad_enabled(backward):
            for _ in range(steps):
                output = call(model, inputs)
                if backward:
                    _backward(output)
                    model.zero_grad()
                busy.step()
    except HooklineError:
        raise
    except Exception:
        if profiling.failure is None:
            raise
    return profiling


def _backward(output: object) -> None:
    tensors = [
        one for one in tree.distinct(output) if isinstance(one, Tensor) and one.requires_grad
    ]
    if not tensors:
        raise InputError(
            "with --backward, an output must be one that requires a gradient, got none."
            "\nProfile without --backward, or unfreeze the model's parameters."
        )
    loss = torch.stack([one.abs().square().mean() for one in tensors]).sum()
    torch.autograd.backward(loss)
