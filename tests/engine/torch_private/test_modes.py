"""What breaks when torch moves one of the names by which it says what runs."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from hookline.engine.torch_private import modes


def test_what_wraps_the_tensors_of_torch_func_can_be_taken_off():
    """If one moves, recordings hold wrappers, or take a past transform for one that runs."""
    seen = []

    def look(tensor):
        assert modes.is_wrapped(tensor)
        assert modes.is_of_running_transform(tensor)
        seen.append((modes.running_transform(), tensor))
        return tensor.sum()

    batch = torch.ones(3, 2)
    assert modes.running_transform() is None
    torch.func.vmap(look, in_dims=1)(batch)
    torch.func.grad(look)(batch)
    (vmap, one), (grad, whole) = seen
    assert (vmap, grad) == ("Vmap", "Grad")
    assert modes.is_vmapped(one)
    assert not modes.is_vmapped(whole)
    assert not modes.is_of_running_transform(one)
    assert not modes.is_of_running_transform(whole)
    assert modes.unwrap_transform(one)[1] == 1
    assert torch.equal(modes.unwrap_transform(one)[0], batch)
    assert modes.unwrap_transform(whole)[1] is None
    assert not modes.is_wrapped(modes.unwrap_transform(whole)[0])


def test_under_vmap_only_what_is_wrapped_counts_its_versions():
    """When torch counts them on the wrapper, too, `regime.innermost` can go."""

    def write(tensor):
        inner, _ = modes.unwrap_transform(tensor)
        before = tensor._version, inner._version
        tensor.add_(1)
        assert (tensor._version, inner._version) == (before[0], before[1] + 1)
        return tensor

    torch.func.vmap(write)(torch.ones(3, 2))


def test_who_makes_a_graph_is_known():
    """If one moves, a line is baked into that tracer's graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    found = []

    class Model(nn.Module):
        def forward(self, x):
            found.append(modes.running_tracer())
            return x * 2

    model, x = Model(), torch.ones(2)
    model(x)
    torch.export.export(model, (x,), strict=False)
    torch.jit.trace(model, (x,), check_trace=False)
    make_fx(model)(x)
    torch.fx.symbolic_trace(model)
    names = ["torch.export", "torch.jit.trace", "make_fx", "torch.fx.symbolic_trace"]
    assert list(dict.fromkeys(found)) == [None, *names]


def test_a_trace_in_another_thread_is_none_of_this_one():
    class Model(nn.Module):
        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                elsewhere.append(pool.submit(modes.running_tracer).result())
            here.append(modes.running_tracer())
            return x + 1

    here, elsewhere = [], []
    torch.fx.symbolic_trace(Model())
    assert (here, elsewhere) == (["torch.fx.symbolic_trace"], [None])


def test_where_torch_fx_has_another_word_for_it_the_stack_tells(monkeypatch):
    """Or a line would become part of the graph, and say nothing."""
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "torch.fx._symbolic_trace", unknown)
                seen.append(modes.running_tracer())
            return x + 1

    unknown = types.SimpleNamespace(__file__=torch.fx._symbolic_trace.__file__)
    torch.fx.symbolic_trace(Model())
    Model()(torch.ones(1))
    assert seen == ["torch.fx.symbolic_trace", None]


def test_the_precision_of_float32_is_that_of_the_public_setting():
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    assert modes.float32_precision("mkldnn", "matmul") == before
    backend.fp32_precision = "bf16"
    try:
        assert modes.float32_precision("mkldnn", "matmul") == "bf16"
    finally:
        backend.fp32_precision = before


def test_forward_mode_is_on_in_a_dual_level_alone():
    assert not modes.is_in_dual_level()
    with torch.autograd.forward_ad.dual_level():
        assert modes.is_in_dual_level()
    assert not modes.is_in_dual_level()
