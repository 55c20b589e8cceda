"""A device without float64, as MPS of macOS is, played by the CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU, _MPS = torch.device("cpu"), torch.device("mps")
_WIDE = (torch.float64, torch.complex128)


class Float32Device(TorchFunctionMode):
    """Have tensors say that they are on MPS, unless `cpu()` made them or they are float64.

    A conversion to float64 of those on MPS raises the error that MPS raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_cpu: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [_CPU if arg == _MPS else arg for arg in args] if _MPS in map(_kind, args) else args
        kwargs = {name: _CPU if _kind(arg) == _MPS else arg for name, arg in (kwargs or {}).items()}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return function(*args, **kwargs)
        is_on_cpu = self._is_on_cpu(first)
        if function == Tensor.device.__get__:
            return _CPU if is_on_cpu else _MPS
        if function is Tensor.cpu:
            return self._put_on_cpu(first if is_on_cpu else first.clone())
        result = function(*args, **kwargs)
        if is_on_cpu:
            for part in result if isinstance(result, tuple) else (result,):
                self._put_on_cpu(part)
            return result
        if isinstance(result, Tensor) and result.dtype in _WIDE:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result

    def _is_on_cpu(self, tensor: Tensor) -> bool:
        known = self._on_cpu.get(id(tensor))
        return tensor.dtype in _WIDE or (known is not None and known() is tensor)

    def _put_on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._on_cpu[id(value)] = weakref.ref(value)
        return value


def _kind(argument: Any) -> torch.device | None:
    return argument if isinstance(argument, torch.device) else None
