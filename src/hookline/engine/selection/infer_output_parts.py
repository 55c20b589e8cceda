"""Tell from a module's code which parts its output can have by name, without running it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import Any

from torch import nn


def may_return_part(module: nn.Module, name: str) -> bool:
    """Tell whether the code of a module's forward shows that its output has a part of this name.

    The annotation of what it returns decides. Without one, or where this is a mapping, the names in
    its code decide: the keys that it writes, and the fields of the classes that it uses.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    try:
        annotation = typing.get_type_hints(forward).get("return", Any)
    except Exception:  # a name that only a type checker knows
        annotation = Any
    if any(_has_field(kind, name) for kind in _union_members(annotation)):
        return True
    if not isinstance(code, CodeType) or not any(map(_allows_any_name, _union_members(annotation))):
        return False
    used = (forward.__globals__.get(used) for used in code.co_names)
    # The keys of a dict are constants; the names of arguments are a constant tuple.
    constants = (each if isinstance(each, tuple) else (each,) for each in code.co_consts)
    return any(name in each for each in constants) or any(_has_field(kind, name) for kind in used)


def _union_members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _allows_any_name(annotation: Any) -> bool:
    """Tell whether an annotation leaves open which parts there are by name."""
    kind = typing.get_origin(annotation) or annotation
    return kind is Any or (isinstance(kind, type) and issubclass(kind, Mapping))


def _has_field(kind: Any, name: str) -> bool:
    if not isinstance(kind, type):
        return False
    named = getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()
    of_class = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    is_typed_dict = typing.is_typeddict(kind)
    return name in (*named, *of_class, *(kind.__annotations__ if is_typed_dict else ()))
