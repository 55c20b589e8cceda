"""Notice the state that a model keeps from one batch to the next.

A row then depends on the batches before it, and a module behind the last selected site may be the
one that changes the state.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine import own_buffers, own_parameters
from hookline.engine.pytree import tree
from hookline.files.safetensors_file import view_as_bytes
from hookline.verbs.shared.model_state import tensor_version

_COMPARED_BYTES = 2**20  # of a tensor; a larger one counts by its identity and its version
_MOST_COMPARED_BYTES = 2**26  # of all tensors
_ABSENT: Any = object()  # stands for what was not there
_MOST_DEPTH, _MOST_PARTS = 4, 1000  # of a container or an object in an attribute
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size})
# Packages whose objects are not entered: a logger drags its whole tree along.
_CLOSED = (sys.stdlib_module_names - {"argparse", "collections", "types"}) | {"torch"}
# torch's own attributes of a module: its mode, its hooks, the tables of its parts, and that it is
# compiled. A forward of its own is code; lines put one there where models were compiled.
_OF_TORCH = frozenset(vars(nn.Module())) | {"_is_torch_compile", "forward"}


class _TensorSnapshot(NamedTuple):
    """Remember a tensor at one moment."""

    tensor: weakref.ref[Tensor]  # a weak reference to the tensor
    version: int | None  # its version counter; None for a tensor that has none
    values: Tensor | None  # a copy; None for a tensor that is not compared by its values

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is what was seen."""
        values = self.values
        if values is None or not _has_values(tensor):
            return self.tensor() is tensor and self.version == tensor_version(tensor)
        forms = [(each.dtype, each.shape, each.device) for each in (values, tensor)]
        if forms[0] != forms[1]:
            return False
        now = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # By bytes, because NaN does not equal itself.
        return torch.equal(view_as_bytes(values), view_as_bytes(now))


@final
class ModelStateTracker:
    """Compare parameters, buffers and plain attributes of a model with those of the last look.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = _snapshot(model, {})

    def changed_names(self) -> list[str]:
        """Return the names of the tensors and attributes that have changed since the last look."""
        before, self._last = self._last, _snapshot(self._model, self._last)
        return [
            name
            for name in {**before, **self._last}
            if before.get(name, _ABSENT) is not self._last.get(name, _ABSENT)
        ]


def may_keep_state(model: nn.Module) -> bool:
    """Tell whether a module holds state that its forward may change.

    torch's own modules change their buffers in training mode alone. Another module may change any
    of its buffers and attributes.
    """
    return any(
        module.training and any(True for _ in module.buffers(recurse=False))
        if type(module).__module__.partition(".")[0] == "torch"
        else bool(dict(module.named_buffers(recurse=False)) or vars(module).keys() - _OF_TORCH)
        for module in model.modules()
    )


def _snapshot(model: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is seen of each tensor and plain value, by its name.

    Args:
        model: the model.
        before: what was seen the last time, which stands for all that is still the same.
    """
    marks: dict[str, Any] = {}
    room = _MOST_COMPARED_BYTES
    depths: dict[int, int] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in _state_of(module, depths):
            key = prefix + name
            last = before.get(key, _ABSENT)
            if type(value) in _PLAIN:
                marks[key] = last if _is_same_value(value, last) else value
                continue
            is_still = type(last) is _TensorSnapshot and last.is_unchanged(value)
            mark = marks[key] = (
                last if is_still else _snapshot_tensor(value, min(room, _COMPARED_BYTES))
            )
            if mark.values is not None:
                room -= mark.values.nbytes
    return marks


def _state_of(module: nn.Module, depths: dict[int, int]) -> list[tuple[str, Any]]:
    """Return the tensors and plain values of a module itself, by name.

    Args:
        module: the module.
        depths: for each container and object that modules hold, by its id, how deep it was entered.
    """
    tables = own_parameters(module), own_buffers(module)
    state = [pair for table in tables for pair in table.items() if pair[1] is not None]
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        if type(value) in _PLAIN:
            state.append((name, value))
        else:
            _add_parts(state, name, value, _MOST_DEPTH, depths)
    return state


def _add_parts(
    state: list[tuple[str, Any]], name: str, value: Any, depth: int, depths: dict[int, int]
) -> None:
    if isinstance(value, Tensor):
        state.append((name, value))
    elif depth > depths.get(id(value), 0):
        depths[id(value)] = depth  # many modules may hold one object
        for key, part in _named_parts(value):
            if type(part) in _PLAIN:  # most are: a call for each would be half of the time
                state.append((name + key, part))
            else:
                _add_parts(state, name + key, part, depth - 1, depths)


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container or a plain object, each with its name; [] of large ones."""
    if isinstance(value, dict | list | tuple | deque):
        if len(value) > _MOST_PARTS:
            return []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"[{key!r}]", part) for key, part in pairs]
    if isinstance(value, tree.ATOMS) or type(value).__module__.partition(".")[0] in _CLOSED:
        return []
    attributes = tree.attributes(value) or []
    return [(f".{key}", part) for key, part in attributes] * (len(attributes) <= _MOST_PARTS)


def _is_same_value(value: Any, last: Any) -> bool:
    """Tell whether a plain value is what it was; NaN is NaN."""
    if value is last:
        return True
    is_float = type(value) is float
    return type(value) is type(last) and (repr(value) == repr(last) if is_float else value == last)


def _snapshot_tensor(tensor: Tensor, most_bytes: int) -> _TensorSnapshot:
    values = None
    if _has_values(tensor) and tensor.nbytes <= most_bytes:
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _TensorSnapshot(weakref.ref(tensor), tensor_version(tensor), values)


def _has_values(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
