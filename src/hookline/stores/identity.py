"""What identifies a model and a function, across processes and machines."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import full_value, is_dtensor, local_shards, own_class
from hookline.engine.pytree import describe

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_N_DIGITS = 16  # of a fingerprint of code


def model_identity(model: nn.Module, *, whole: bool = False) -> dict[str, str]:
    """Return a model's type, a fingerprint of its structure, and the sha256 of its weights.

    The structure is the class and the `extra_repr` of each module. The weights are the parameters
    and buffers with their names, shapes and dtypes.

    Args:
        model: the model.
        whole: gather sharded weights, one at a time: a collective. The identity is then that of
            the same model in one process. False takes of them what this rank holds.
    """
    kind = own_class(model)
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "structure": _short("\n".join(_structure(model)).encode()),
        "weights": _weights(model, whole=whole),
    }


def _structure(model: nn.Module) -> Iterator[str]:
    # Not repr(model): it has the names of the classes that FSDP2 makes.
    for path, module in model.named_modules():
        yield f"{path}: {own_class(module).__name__}({_ADDRESS.sub('', module.extra_repr())})"


def _weights(model: nn.Module, *, whole: bool = False) -> str:
    digest = hashlib.sha256()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(named):
        tensor = named[name].detach()
        tensor = full_value(tensor) if whole and is_dtensor(tensor) else local_shards(tensor)
        digest.update(f"{name} {describe.in_words(tensor)}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return repr(tensor).encode()
    if tensor.is_meta:
        return b""
    try:
        flat = tensor.cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data
    except (RuntimeError, TypeError):  # quantised, sparse, a subclass: by its numbers
        return repr(tensor.dequantize() if tensor.is_quantized else tensor.tolist()).encode()


def function_identity(function: Callable[..., Any] | None) -> str | None:
    """Return a fingerprint of a function: its name, code, constants, defaults and closure.

    The same source gives the same fingerprint in another process. Functions that it calls by name
    are not part of it. An object that is called counts by its type and its repr.
    """
    if function is None:
        return None
    digest = hashlib.sha256()
    _describe(function, digest.update)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {digest.hexdigest()[:_N_DIGITS]}"


def _describe(thing: Any, note: Callable[[bytes], None]) -> None:
    """Note what a function does: of code what is executed, of other objects their repr."""
    if isinstance(thing, functools.partial):
        for part in (thing.func, thing.args, sorted(thing.keywords.items())):
            _describe(part, note)
    elif hasattr(thing, "__code__"):
        _describe(thing.__code__, note)
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        for part in (thing.__defaults__, thing.__kwdefaults__, cells):
            _describe(part, note)
    elif isinstance(thing, CodeType):
        note(thing.co_code)
        for part in (thing.co_names, thing.co_varnames, thing.co_consts):
            _describe(part, note)
    elif isinstance(thing, tuple | list):
        for part in thing:
            _describe(part, note)
    elif isinstance(thing, Tensor):
        note(_bytes_of(thing.detach()))
    elif isinstance(thing, nn.Module):
        note(_weights(thing).encode())
        note(_ADDRESS.sub("", repr(thing)).encode())
    else:
        note(_ADDRESS.sub("", repr(thing)).encode())


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_N_DIGITS]
