"""Refuse weights that a verb cannot use: shapes alone, lazy ones, and those of inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine import hook_dict, own_buffers, own_parameters
from hookline.engine.pytree import tree
from hookline.errors import InputError


def refuse_meta_tensors(
    verb: str, model: nn.Module, inputs: Any, *, refuse_offloaded: bool = False
) -> None:
    """Refuse a model or an input that holds shapes alone, where a verb needs numbers.

    Args:
        verb: the name of the verb, as in "hl.cam".
        model: the model. An offloaded one has numbers: its hooks load them as its modules run.
        inputs: its inputs.
        refuse_offloaded: whether the verb reads the weights itself, so that an offloaded model will
            not do.

    Raises:
        InputError: a parameter, a buffer or a tensor of the inputs is on the meta device.
    """
    name = _first_tensor_name(model, lambda tensor: tensor.is_meta)
    if name is not None and refuse_offloaded and execution_device(model) is not None:
        raise InputError(
            f"{verb} reads the weights, and accelerate has offloaded {name}: it is loaded only"
            " while its module runs.\nLoad the model without offloading: device_map='cpu'."
        )
    if name is not None and (refuse_offloaded or not _is_offloaded(model)):
        raise InputError(
            f"{verb} must have a model with numbers, got {name} on the meta device, which holds"
            " shapes alone.\nLoad the weights, or fill them: model.to_empty(device='cpu'), then"
            " initialise."
        )
    if any(tensor.is_meta for _, tensor in tree.tensors(inputs)):
        raise InputError(
            f"{verb} must have inputs with numbers, got a tensor on the meta device, which holds"
            " a shape alone.\nMake it on the device of the model."
        )


def _is_offloaded(model: nn.Module) -> bool:
    """Tell whether hooks, such as those of accelerate, may load parameters as modules run."""
    return any(
        hasattr(module, "_hf_hook") or hook_dict(module, "forward_pre")
        for module in model.modules()
    )


def execution_device(model: nn.Module) -> torch.device | None:
    """Return the device to which accelerate loads weights as modules run; None if it does not."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    place = next((place for place in places if place is not None), None)
    return None if place is None else torch.device(place)


def refuse_lazy_parameters(model: nn.Module) -> None:
    """Refuse a model that its first run would change for good.

    Raises:
        InputError: the model has lazy parameters.
    """
    name = first_lazy_name(model)
    if name is not None:
        raise InputError(
            f"the model must have no lazy parameters, got {name}: the first run would create it"
            " for good.\nRun the model once yourself, then call this again."
        )


def first_lazy_name(model: nn.Module) -> str | None:
    """Return the first parameter or buffer that the first run will create; None if all exist."""
    tables = (table(m) for m in model.modules() for table in (own_parameters, own_buffers))
    if not any(t is not None and is_lazy(t) for table in tables for t in table.values()):
        return None  # as of most models, whose names need not be made
    return _first_tensor_name(model, is_lazy)


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
        name = _first_tensor_name(model, Tensor.is_inference)
        if name is None or "nference tensor" not in str(error):
            raise
        raise InputError(
            f"{verb} must have weights that autograd can save, got {name}, which was made in"
            " inference mode.\nGive copy.deepcopy(model), made outside torch.inference_mode()."
        ) from error


def _first_tensor_name(model: nn.Module, is_odd: Callable[[Tensor], bool]) -> str | None:
    """Return the name of the first odd parameter or buffer; None without one."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_odd(tensor)), None)
