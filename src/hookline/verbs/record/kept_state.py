"""Notice the state that a model keeps from one batch to the next.

A row then depends on the batches before it, and a module behind the last selected site may be the
one that changes the state.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine import buffers, parameters
from hookline.files.safetensors_file import flat_bytes

_COMPARED_BYTES = 2**20  # of a tensor; a larger one counts by its identity and its version
_MOST_COMPARED_BYTES = 2**26  # of all tensors
_MOST_DEPTH, _MOST_PARTS = 4, 1000  # of a container in an attribute
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size})
# torch's own attributes of a module: its mode, its hooks, the tables of its parts, and that it is
# compiled. A forward of its own is code; lines put one there where models were compiled.
_OF_TORCH = frozenset(vars(nn.Module())) | {"_is_torch_compile", "forward"}


class _Seen(NamedTuple):
    """Remember a tensor at one moment.

    Args:
        tensor: a weak reference to the tensor.
        version: its version counter; None for a tensor that has none.
        values: a copy; None for a tensor that is not compared by its values.
    """

    tensor: weakref.ref[Tensor]
    version: int | None
    values: Tensor | None


@final
class KeptState:
    """Compare parameters, buffers and plain attributes of a model with those of the last look.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = _marks(model)

    def changed(self) -> list[str]:
        """Return the names of the tensors and attributes that have changed since the last look."""
        before, self._last = self._last, _marks(self._model)
        return [
            name
            for name in {**before, **self._last}
            if name not in before
            or name not in self._last
            or not _are_same(before[name], self._last[name])
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


def _marks(model: nn.Module) -> dict[str, Any]:
    marks: dict[str, Any] = {}
    room = _MOST_COMPARED_BYTES
    for path, module in model.named_modules():
        for name, value in _state_of(module):
            key = f"{path}.{name}" if path else name
            if type(value) in _PLAIN:  # as most are
                marks[key] = (type(value), repr(value) if type(value) is float else value)
            else:
                mark = marks[key] = _seen(value, min(room, _COMPARED_BYTES))
                room -= 0 if mark.values is None else mark.values.nbytes
    return marks


def _state_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a module itself, by name."""
    for table in (parameters(module), buffers(module)):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        if type(value) in _PLAIN:
            yield name, value
        else:
            yield from _parts(name, value, _MOST_DEPTH)


def _parts(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        yield name, value
    elif depth and isinstance(value, Mapping | list | tuple | deque) and len(value) <= _MOST_PARTS:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _parts(f"{name}[{key!r}]", part, depth - 1)


def _seen(tensor: Tensor, most_bytes: int) -> _Seen:
    version = None if tensor.is_inference() else tensor._version
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    is_compared = is_plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    values = None
    if is_compared and tensor.nbytes <= most_bytes:
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _Seen(weakref.ref(tensor), version, values)


def _are_same(before: Any, now: Any) -> bool:
    if not isinstance(before, _Seen) or not isinstance(now, _Seen):
        return bool(before == now)
    old_values, new_values = before.values, now.values
    if old_values is None or new_values is None:
        return before.tensor() is now.tensor() and before.version == now.version
    pair = old_values, new_values
    old_form, new_form = ((values.dtype, values.shape, values.device) for values in pair)
    # By bytes, because NaN does not equal itself.
    return old_form == new_form and torch.equal(*map(flat_bytes, pair))
