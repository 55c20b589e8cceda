"""Refuse models and inputs on the meta device: they have shapes, and no numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.engine import hook_dict
from hookline.engine.pytree import tree
from hookline.errors import InputError
from hookline.verbs.shared.model_state import first_name


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
    name = first_name(model, lambda tensor: tensor.is_meta)
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
