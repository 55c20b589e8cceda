"""Tell the calls of torch's functions that a module's own forward makes from all others."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import final

import torch.nn.functional as F
from torch import nn

from hookline.engine.operations.operation import Operation
from hookline.engine.torch_private.graph.function_modes import (
    calling_module,
    is_hook_code,
    runs_compiled_graph,
    traced_calling_modules,
)
from hookline.util.weak_map import WeakIdentityMap


@final
class OwnCalls:
    """The calls that one module itself makes, also in helper functions, and not its children.

    Args:
        module: the module.

    Attributes:
        has_graph: whether a call of the module was compiled from within. The functions that the
            graph calls, when it runs, are then no calls of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module_id: int = id(module)
        self.has_graph: bool = False
        self._module = weakref.ref(module)
        self._parts: WeakIdentityMap[bool] = WeakIdentityMap()

    def is_own(self, frame: FrameType | None) -> bool:
        """Tell whether the module itself makes the present call, and not a module inside it.

        Args:
            frame: the frame that makes the call.
        """
        start = frame
        while frame is not None:
            module, code, frame = calling_module(frame)
            if frame is None or _is_opaque_operation(module):
                return False
            if id(module) == self.module_id:
                is_of_graph = self.has_graph and runs_compiled_graph(start, frame)
                return not is_of_graph and not is_hook_code(code, module)
            if self._is_inside_module(module):
                return False
            frame = frame.f_back  # the forward has made this module: nn.Softmax(dim=-1)(x)
        return False

    def is_own_in_graph(self) -> bool:
        """Tell the same of the call that dynamo traces at present."""
        self.has_graph = True
        for module in traced_calling_modules():
            if id(module) == self.module_id:
                return True
            if _is_opaque_operation(module) or self._is_inside_module(module):
                return False
        return self.is_own(sys._getframe(1))  # a function is compiled that the module calls

    def _is_inside_module(self, module: nn.Module) -> bool:
        """Tell whether a module is inside the module of this mode."""
        if module in self._parts:
            return True
        own = self._module()
        for part in () if own is None else own.modules():
            self._parts[part] = True
        return module in self._parts


def _is_opaque_operation(module: nn.Module) -> bool:
    """Tell whether a module is an operation, whose calls are its own."""
    return type(module) is Operation and module.name != F.multi_head_attention_forward.__name__
