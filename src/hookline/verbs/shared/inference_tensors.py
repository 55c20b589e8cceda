"""Tell of weights that were made in inference mode, which autograd cannot save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hookline.errors import InputError
from hookline.verbs.shared.model_state import first_name


@contextmanager
def explain_inference_weights(verb: str, model: nn.Module) -> Iterator[None]:
    """Run the block, and name the weight that autograd cannot save where torch refuses one.

    Args:
        verb: the name of the verb, as in "hl.cam".
        model: the model that runs in the block.

    Raises:
        InputError: autograd needs a parameter or buffer that was made in inference mode.
    """
    try:
        yield
    except RuntimeError as error:
        name = first_name(model, Tensor.is_inference)
        if name is None or "nference tensor" not in str(error):
            raise
        raise InputError(
            f"{verb} must have weights that autograd can save, got {name}, which was made in"
            " inference mode.\nGive copy.deepcopy(model), made outside torch.inference_mode()."
        ) from error
