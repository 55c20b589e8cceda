"""Keep a model as it is for many runs that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hookline.engine import hook_dict, is_compiled, path_text, require_model
from hookline.engine.pytree import describe
from hookline.errors import InputError
from hookline.recordings import PassRecord, Recording
from hookline.verbs.shared.model_state import restore_after_run
from hookline.verbs.shared.refused_weights import (
    explain_inference_weights,
    refuse_lazy_parameters,
    refuse_meta_tensors,
)
from hookline.verbs.sweep.agreement import is_same_number
from hookline.verbs.sweep.metric import Metric, metric_number


def require_clean_inputs(clean: Any) -> None:
    """Refuse what other libraries take: a baseline such as captum's 0, or the clean activations.

    Raises:
        InputError: it is a number, None or a recording.
    """
    if isinstance(clean, Recording | PassRecord):
        raise InputError(
            "clean must be inputs of the model, got a recording.\nGive the inputs that it was"
            " recorded on: the model runs on them again."
        )
    if clean is None or isinstance(clean, int | float):
        raise InputError(
            f"clean must be inputs of the model, got {describe.in_words(clean)}."
            "\nGive them as the model takes them, such as torch.zeros_like(x)."
        )


@contextmanager
def without_side_effects(model: nn.Module, verb: str, *inputs: Any) -> Iterator[None]:
    """Run the block without gradients and compiled code, and leave the model as it was.

    Args:
        model: the model.
        verb: the verb, as in "hl.sweep(model, ...)".
        inputs: what the model will be run on.

    Raises:
        InputError: the model is in training mode, holds shapes alone, or has lazy parameters; or
            the block needs gradients, and a weight was made in inference mode.
    """
    require_model(model, verb)
    training = [path for path, module in model.named_modules() if module.training]
    if training:
        raise InputError(
            f"the model must be in eval mode, got {path_text(training[0])!r} in training mode,"
            " where dropout and batch norm change the numbers.\nCall model.eval() first."
        )
    refuse_lazy_parameters(model)
    name = verb.partition("(")[0]
    refuse_meta_tensors(name, model, inputs)
    with ExitStack() as stack:
        if any(map(is_compiled, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(restore_after_run(model))
        # Inference tensors have no versions, which tell of writes in place.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(explain_inference_weights(name, model))
        yield


def has_hooks(model: nn.Module) -> bool:
    """Tell whether a run of a model calls hooks, which may draw numbers from generators of theirs.

    A line, of whatever modules, has hooks at the model itself.
    """
    return any(
        hook_dict(module, kind) for module in model.modules() for kind in ("forward_pre", "forward")
    )


def refuse_random(metric: Metric, *outputs: Callable[[], Any]) -> None:
    """Refuse a model whose metric depends on random numbers.

    Args:
        metric: the metric.
        outputs: return the output of a run that may have drawn some, and that of another one.

    Raises:
        InputError: both metrics differ.
    """
    if not is_same_number(*[metric_number(metric, run()) for run in outputs]):
        raise InputError(
            "the model must give the same metric twice, got another one the second time: its"
            " forward, or a hook on it such as an edit, draws random numbers."
            "\nSwitch this off, as model.eval() does for dropout. As a change of hl.sweep,"
            " hl.edits.noise begins again in each forward."
        )
