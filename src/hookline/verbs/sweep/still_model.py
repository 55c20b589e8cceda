"""Keep a model still for many runs that are compared, and put back the values of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.engine import is_compiled, path_text, require_model
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError
from hookline.recordings import Recording
from hookline.verbs.shared.rerun import lazy_name, untouched


@contextmanager
def undisturbed(model: nn.Module, verb: str) -> Iterator[None]:
    """Run the block without gradients and compiled code, and leave the model as it was.

    Raises:
        InputError: the model is in training mode, or its first run would create parameters.
    """
    _check_model(model, verb)
    with ExitStack() as stack:
        if any(map(is_compiled, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(untouched(model))
        stack.enter_context(torch.no_grad())
        yield


def _check_model(model: nn.Module, verb: str) -> None:
    """Refuse a model whose numbers would change from run to run.

    Raises:
        InputError: the model is in training mode, or its first run would create parameters.
    """
    require_model(model, verb)
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
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


def patches_of(recording: Recording) -> dict[str, Callable[[Any], Any]]:
    """Return changes that put back the values of a clean run.

    Raises:
        AmbiguousError: a module ran several times.
    """
    return {str(site): _Put(recording[site], str(site)) for site in recording.sites}


@final
@dataclass(frozen=True, slots=True)
class _Put:
    """Put in a value of another run, where the value of the running one has its form."""

    value: Any
    site: str

    def __call__(self, value: Any) -> Any:
        difference = describe.difference(value, self.value)
        if difference:
            raise InputError(
                f"the clean run must have values of the same form as the changed run at"
                f" {self.site}: {difference}.\nGive inputs of one length in `clean` and `inputs`."
            )
        # A copy, because a later in-place layer may write to it.
        return tree.map_tensors(Tensor.clone, self.value)
