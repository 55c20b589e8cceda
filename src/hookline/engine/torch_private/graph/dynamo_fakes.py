"""The tensors with which dynamo computes in place of those of the graph that it traces."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class _StoredFakes(threading.local):
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


_noted = _StoredFakes()


def store_fake_tensors(tensors: list[Tensor]) -> None:
    """Note what stands in for these tensors; only for code being compiled."""
    torch._dynamo.comptime.comptime(_store_fakes)


def take_fake_tensors() -> list[Tensor]:
    """Return the tensors that were noted; only while code is compiled."""
    tensors, _noted.tensors = _noted.tensors, []
    return tensors


def _store_fakes(context: Any) -> None:
    # torch's name for access to dynamo's variables, which are not public.
    variables = context.get_local("tensors")._i_will_not_complain_if_bc_breaks_VariableTracker()
    values = [item.as_proxy().node.meta["example_value"] for item in variables.realize().items]
    _noted.tensors = [value for value in values if isinstance(value, Tensor)]
