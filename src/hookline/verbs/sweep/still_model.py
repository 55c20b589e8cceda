"""Keep a model as it is for many runs that are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from hookline.engine import is_compiled, path_text, require_model
from hookline.errors import InputError
from hookline.verbs.shared.rerun import lazy_name, untouched


@contextmanager
def undisturbed(model: nn.Module, verb: str) -> Iterator[None]:
    """Run the block without gradients and compiled code, and leave the model as it was.

    Raises:
        InputError: the model is in training mode, or its first run would create parameters.
    """
    require_model(model, verb)
    modules = list(model.modules())
    _check_model(model, modules)
    with ExitStack() as stack:
        if any(map(is_compiled, modules)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(untouched(model))
        # Inference tensors have no versions, which tell of writes in place.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _check_model(model: nn.Module, modules: list[nn.Module]) -> None:
    """Refuse a model whose numbers would change from run to run.

    Raises:
        InputError: the model is in training mode, or its first run would create parameters.
    """
    if any(module.training for module in modules):
        training = next(path for path, module in model.named_modules() if module.training)
        raise InputError(
            f"the model must be in eval mode, got {path_text(training)} in training mode, where"
            " dropout and batch norm change the numbers.\nCall model.eval() first."
        )
    name = lazy_name(model)
    if name is not None:
        raise InputError(
            f"the model must have no lazy parameters, got {name}: the first run would create it."
            "\nRun the model once yourself, then call this again."
        )
