"""How gradients leave compiled code: the operator is defined when the first line needs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hookline.engine.autograd import gradient_operator


def test_one_thread_at_a_time_defines_the_operator(monkeypatch):
    """Torch refuses an operator that is defined a second time."""
    may_another = []

    def try_the_lock():
        is_free = gradient_operator._defining.acquire(blocking=False)
        if is_free:
            gradient_operator._defining.release()
        may_another.append(is_free)

    def define():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(try_the_lock).result()

    monkeypatch.setattr(gradient_operator, "_define_operators_once", define)
    gradient_operator.register_receiver(try_the_lock)  # as the first line does
    try_the_lock()
    assert may_another == [False, True]


@pytest.mark.parametrize("name", ["gradient", "jagged_gradient"])
def test_the_operator_is_left_out_of_cuda_graphs(name):
    """A replay of a CUDA graph runs no Python, so gradients would come in the first runs alone."""
    from torch._inductor.ir import FallbackKernel

    gradient_operator.define_operators()
    arguments = getattr(torch.ops.hookline, name).default._schema.arguments
    assert arguments[0].name == "tap"
    args = [SimpleNamespace(get_device=lambda at=at: torch.device(at)) for at in ("cpu", "cuda")]
    assert FallbackKernel.find_device(args, None).type == "cpu"
