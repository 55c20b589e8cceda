"""Run a model on inputs in any of the forms that the verbs accept."""

from __future__ import annotations

import contextvars
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hookline.display.text import plural
from hookline.engine.pytree import tree
from hookline.errors import InputError
from hookline.verbs.shared.failing_module import add_failing_module_note
from hookline.verbs.shared.model_state import restore_after_run
from hookline.verbs.shared.refused_weights import first_lazy_name

_N_KEYS_SHOWN = 3

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any]


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model: a tuple gives its arguments, a mapping its keyword arguments.

    A function is called without arguments; it runs the model somewhere inside. Any other object is
    the model's only argument. If the model's forward refuses these arguments, a note on the error
    says how to give others; of any other error, a note names the module that raised it.
    """
    is_function = callable(inputs) and not isinstance(inputs, Tensor | nn.Module | Mapping | tuple)
    if is_function:
        return inputs()
    args, kwargs = args_and_kwargs(inputs)
    try:
        return model(*args, **kwargs)
    except Exception as error:
        may_refuse = isinstance(error, TypeError | AttributeError)
        note = _input_advice(model, inputs) if may_refuse else None
        if note:
            error.add_note(f"hookline: {note}")
        add_failing_module_note(model, error)
        raise


def args_and_kwargs(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and the keyword arguments that inputs stand for."""
    if isinstance(inputs, tuple):
        return inputs, {}
    return ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})


def copy_inputs(inputs: Any) -> Any:
    """Return the inputs with copied tensors, because a model may write to its inputs.

    The copies also get the gradients of the run.
    """
    return map_inputs(_copy_tensor, inputs)


def map_inputs(change: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Return the inputs with changed tensors; a function that runs the model, as it is."""
    if isinstance(inputs, Mapping):
        return {key: tree.map_tensors(change, part) for key, part in inputs.items()}
    if callable(inputs) and not isinstance(inputs, Tensor):
        return inputs
    return tree.map_tensors(change, inputs)


def _copy_tensor(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.grad_fn is None:
        return copy
    with torch.enable_grad():
        return copy.clone()  # a non-leaf as well, which may be written to in place


def refuse_function_or_iterator(inputs: Any, of: str) -> None:
    """Refuse a function or an iterator in place of the arguments of a model.

    Args:
        inputs: what was given.
        of: whose arguments they should be, such as "the model".

    Raises:
        InputError: it is no value that a model can be run on twice.
    """
    if isinstance(inputs, Iterator) or (callable(inputs) and not isinstance(inputs, Tensor)):
        raise InputError(
            f"inputs must be the arguments of {of}, got a {type(inputs).__name__}."
            "\nGive a tensor, a tuple of arguments or a dict of keyword arguments."
        )


def sum_of_mean_squares(output: Any) -> Tensor | None:
    """Return the sum of the mean squares of the tensors that require a gradient; None without."""
    tensors = [
        tensor
        for tensor in tree.distinct_tensors(output)
        if isinstance(tensor, Tensor) and tensor.requires_grad
    ]
    if not tensors:
        return None
    return torch.stack([tensor.abs().square().mean() for tensor in tensors]).sum()


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of a model's forward; None if the forward is no Python function."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def binding_error(signature: inspect.Signature, inputs: Any) -> TypeError | None:
    """Return the error of a signature that refuses inputs; None if the signature takes them."""
    args, kwargs = args_and_kwargs(inputs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def unwrap_lone_tensor(model: nn.Module, inputs: Any) -> Any:
    """Return the tensor of a list of one tensor, unless the model takes this list.

    A `DataLoader` makes such lists of a `TensorDataset` of one tensor. The model is called with the
    list, where no line sees it, to find out. Afterwards it is as before.
    """
    if type(inputs) is not list or len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        return inputs
    if first_lazy_name(model) is not None:
        return inputs

    def is_taken() -> bool:
        with restore_after_run(model), torch.no_grad():
            try:
                model(inputs)
            except Exception as error:
                return not isinstance(error, TypeError | AttributeError)
        return True

    # In a context of its own, where no line of the caller sees the run.
    return inputs if contextvars.Context().run(is_taken) else inputs[0]


def _tensor_conversion_advice(inputs: Any) -> str | None:
    """Say how to make a tensor of an array, of numbers or of texts; None for other inputs."""
    first = inputs
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, str):
        make = "the tensors of a tokenizer: tokenizer(texts, return_tensors='pt', padding=True)"
        return f"text is given in place of a tensor.\nGive {make}."
    is_array = isinstance(inputs, np.ndarray)
    if not is_array and not (isinstance(inputs, list) and isinstance(first, int | float)):
        return None
    kind = "an array of NumPy" if is_array else "a list of numbers"
    return f"{kind} is given in place of a tensor.\nGive torch.as_tensor(inputs)."


def _input_advice(model: nn.Module, inputs: Any) -> str | None:
    """Say how to give inputs that the model's forward takes; None where it takes these."""
    if isinstance(inputs, tuple) and inputs and all(type(size) is int for size in inputs):
        return (
            "a tuple is given as arguments, and these are numbers.\nGive"
            f" torch.rand({', '.join(map(str, inputs))}) for an input of this shape."
        )
    is_only = isinstance(inputs, tuple) and len(inputs) == 1
    argument = inputs[0] if is_only else inputs
    if isinstance(argument, DataLoader):
        return (
            "a DataLoader gives batches, and the model takes one batch."
            "\nGive next(iter(loader)), or of a batch with labels next(iter(loader))[0]."
        )
    if isinstance(argument, Iterator):
        return "an iterator gives batches, and the model takes one batch.\nGive next(batches)."
    in_place = _tensor_conversion_advice(argument)
    if in_place is not None:
        return in_place
    if isinstance(argument, list):
        return (
            "a list is one argument of the model.\nGive several arguments as a tuple, and a batch"
            " with labels without them, such as batch[0]."
        )
    signature = signature_of(model)
    refusal = None if signature is None else binding_error(signature, inputs)
    if signature is None or refusal is None:
        return None
    args, kwargs = args_and_kwargs(inputs)
    if kwargs:
        keys = ", ".join(f"{key!r}: ..." for key in itertools.islice(kwargs, _N_KEYS_SHOWN))
        more = ", ..." * (len(kwargs) > _N_KEYS_SHOWN)
        return (
            "a dict is given as keyword arguments, and the model's forward refuses them:"
            f" {refusal}.\nGive a dict that is one argument in a tuple: ({{{keys}{more}}},)."
        )
    names = ", ".join(signature.parameters)
    return (
        f"the model's forward takes ({names}), and refuses {plural(len(args), 'argument')}:"
        f" {refusal}.\nGive its arguments as a tuple, or by name in a dict."
    )
