"""The nodes of autograd's graph, by torch's private names."""

from __future__ import annotations

import torch

from hookline.engine.torch_private.graph.nodes import next_number, running_node_traceback


def test_the_running_node_knows_its_forward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    assert running_node_traceback() is None
    before = next_number()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = x.sqrt()
    assert next_number() == before + 1

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(running_node_traceback())
            return grad

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        z = Seen.apply(y)
    z.sum().backward()
    ((number, name, traceback),) = seen
    assert (number, name) == (before + 1, "SeenBackward")
    assert any("test_nodes.py" in entry and "Seen.apply(y)" in entry for entry in traceback)
