"""The names of torch's functions, and of their arguments, as selectors write them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

_SPACES = (torch, F, Tensor, torch.linalg, torch.special, torch.fft)
# The operators whose names differ from the names of torch's functions.
_RENAMED = {"floordiv": "floor_divide", "rfloordiv": "rfloor_divide", "rdiv": "div"}


def selector_name(function: Function) -> str:
    """Return the name by which a function is selected.

    >>> selector_name(torch.add), selector_name(Tensor.__getitem__), selector_name(Tensor.__rdiv__)
    ('add', 'getitem', 'div')
    """
    name: str = getattr(function, "__name__", type(function).__name__)
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    return _RENAMED.get(name, name)


@functools.cache
def functions_by_name() -> dict[str, list[Function]]:
    """Return torch's functions by name.

    The functions of one name are `torch.relu`, `torch.nn.functional.relu` and `Tensor.relu`.
    """
    by_name: dict[str, list[Function]] = {}
    for space in _SPACES:
        for attribute in dir(space):
            function = getattr(space, attribute, None)
            if not callable(function) or isinstance(function, type | ModuleType):
                continue
            known = by_name.setdefault(selector_name(function), [])
            if not any(function is other for other in known):
                known.append(function)
    return by_name


def is_tensor_attribute(name: str) -> bool:
    """Tell whether a name is that of an attribute of tensors, such as `mT`."""
    return inspect.isdatadescriptor(inspect.getattr_static(Tensor, name, None))


class ArgumentNames(NamedTuple):
    """The names of a function's positional arguments."""

    names: tuple[str, ...]  # the arguments that take one value each
    rest: str | None  # the argument that takes all further values, `*rest`; None without one


def argument_names(function: Function) -> ArgumentNames:
    """Return the names of a function's positional arguments.

    A function written in C has no signature, so the first line of its documentation is read. A
    method has the names of the function of the same name, where the two take the same arguments.

        >>> argument_names(F.scaled_dot_product_attention).names[:3]
        ('query', 'key', 'value')
        >>> argument_names(Tensor.matmul).names
        ('input', 'other')
    """
    inner = getattr(function, "__wrapped__", None)  # of a stand-in that dynamo can trace
    if isinstance(inner, MethodDescriptorType):
        function = inner
    if isinstance(function, _OF_C):
        return _builtin_argument_names(function)
    own = _names_in_signature(function)
    is_method = own.names[:1] == ("self",) and function.__module__ == Tensor.split.__module__
    return own._replace(names=("input", *own.names[1:])) if is_method else own


_OF_C = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType


@functools.cache
def _builtin_argument_names(function: Function) -> ArgumentNames:
    own = _names_in_signature(function)
    if isinstance(function, BuiltinFunctionType):
        return own
    names = ("input", *own.names[isinstance(function, WrapperDescriptorType) :])
    like = getattr(torch, selector_name(function), None)
    if like is not None and own.rest is None:
        usual = argument_names(like)
        if usual.rest is None and len(usual.names) >= len(names):
            names = usual.names
    return ArgumentNames(names, own.rest)


def _names_in_signature(function: Function) -> ArgumentNames:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return _names_in_docstring(function)
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in single]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return ArgumentNames(tuple(names), rest[0] if rest else None)


def _names_in_docstring(function: Function) -> ArgumentNames:
    """Return the names in the first line of a documentation: `add(input, other, *, alpha=1)`."""
    text = re.match(r"\s*[\w.]+\(([^)]*)\)", getattr(function, "__doc__", None) or "")
    names, rest = [], None
    for argument in [] if text is None else text[1].split(","):
        name = argument.partition("=")[0].strip()
        if name.startswith("*"):
            rest = name[1:] or None
            break
        if name.isidentifier():
            names.append(name)
    return ArgumentNames(tuple(names), rest)
