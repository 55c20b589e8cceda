"""torch.compile: what makes a new graph, and what is said where there may be no more."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd, config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters

import hookline as hl
from hookline.engine.passes.passes import Passes
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Order
from hookline.engine.taps.forward import OutputTap
from zoo import steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"backend": "eager", "fullgraph": True}
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))


def linears(n):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)])


def by_part(model):
    for part in model:
        part.compile(**OPTIONS)
    return model


def n_graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.trap(4)
@config.patch(recompile_limit=3)
def test_a_hook_that_appends_to_a_list_is_recompiled_each_call():
    kept = []
    model = linears(3)
    handle = model[1].register_forward_hook(lambda module, args, output: kept.append(output))
    run = torch.compile(model, **OPTIONS)
    with pytest.raises(FailOnRecompileLimitHit):
        for _ in range(5):
            run(X)
    handle.remove()
    assert len(kept) == n_graphs() == 3
    torch.compiler.reset()
    counters.clear()
    with hl.record(model, "1") as seen:
        for _ in range(5):
            run(X)
    assert len(seen.passes) == 5
    assert n_graphs() == 1


@pytest.mark.trap(5)
@config.patch(recompile_limit=3)
def test_a_hook_that_reads_its_name_is_recompiled_for_each_block():
    class Named:
        def __init__(self, name):
            self.name, self.kept = name, {}

        def __call__(self, module, args, output):
            self.kept[self.name] = output

    model = linears(5)
    handles = [part.register_forward_hook(Named(f"block {k}")) for k, part in enumerate(model)]
    by_part(model)
    with pytest.raises(FailOnRecompileLimitHit):
        model(X)
    for handle in handles:
        handle.remove()
    torch.compiler.reset()
    counters.clear()
    with hl.record(model, "*") as seen:
        model(X)
    assert list(seen) == [str(k) for k in range(5)]
    assert n_graphs() <= 2


def test_a_tap_that_is_imported_later_is_no_graph():
    model = by_part(linears(1))
    with hl.record(model, "0"):
        model(X)

    class Late(OutputTap):
        def fire(self, module, args, output):
            return self.callback(None, output)

    def n_graphs_with(kind):
        tap = kind(Site("0"), Passes(), lambda current, output: output * 1, Order.HOOK)
        handle = model[0].register_forward_hook(tap.fire)
        counters.clear()
        with hl.record(model, "0"):
            model(X)
        handle.remove()
        return n_graphs()

    assert n_graphs_with(Late) == n_graphs_with(OutputTap)


@pytest.mark.trap(13)
@config.patch(recompile_limit=3)
def test_a_sweep_of_one_edit_over_sites_hits_the_recompile_limit():
    model = linears(5)
    run = torch.compile(model, **OPTIONS)

    def sweep():
        for part in model:
            handle = part.register_forward_hook(lambda module, args, output: output * 0)
            try:
                run(X)
            finally:
                handle.remove()

    with config.patch(skip_nnmodule_hook_guards=False), pytest.raises(FailOnRecompileLimitHit):
        sweep()
    torch.compiler.reset()
    counters.clear()
    for k in range(5):
        with contextlib.ExitStack() as edits:
            for j in range(5):  # at all sites, so that the graph is one; times 1 changes nothing
                edits.enter_context(hl.edit(model, str(j), hl.edits.scale(float(j != k))))
            assert torch.equal(run(X), model[k + 1 :](torch.zeros(2, 8)))
    assert n_graphs() <= 2


@pytest.mark.trap(13)
@config.patch(recompile_limit=3)
def test_a_sweep_of_lines_says_at_the_limit_what_to_do():
    model = linears(5)

    def sweep(run):
        for k in range(5):
            with hl.edit(model, str(k), hl.edits.scale(0.0)):
                assert torch.equal(run(X), model[k + 1 :](torch.zeros(2, 8)))

    with pytest.raises(FailOnRecompileLimitHit) as failed:
        sweep(torch.compile(model, **OPTIONS))
    assert "a different set of sites triggers a recompilation" in failed.value.__notes__[0]
    assert "hl.edits.scale at every site, with 1.0 where" in failed.value.__notes__[0]
    torch.compiler.reset()
    model = steps(5)
    sweep(by_part(model))  # blocks that are compiled one by one share their code


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_graph_limit_reached_is_explained_and_never_wrong(fullgraph):
    model = steps()
    run = torch.compile(model, backend="eager", fullgraph=fullgraph)
    run(X)
    h = model[1](model[0](X))

    def sweep():
        for k in range(12):
            with hl.edit(model, "1", lambda value, k=k: value * k):
                assert torch.equal(run(X), model[3](model[2](h * k)))

    if not fullgraph:
        sweep()
        return
    with pytest.raises(Exception, match="fullgraph") as failed:
        sweep()
    assert "Make the function once" in failed.value.__notes__[0]
    assert not len(hl.inventory(model))


class Branches(nn.Module):
    """Calls one of two layers in a branch of torch.cond."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        def high(x):
            return self.high(x)

        def low(x):
            return self.low(x)

        return self.head(torch.cond(x.sum() > 0, high, low, (x,)))


@pytest.mark.compiles
@pytest.mark.parametrize("compiles", [False, True])
def test_hooks_in_a_branch_of_cond_are_named_with_the_remedy(compiles):
    model, x = Branches(), torch.ones(3, 2)
    run = torch.compile(model, backend="aot_eager") if compiles else model
    with hl.record(model), pytest.raises(RuntimeError) as failed:
        run(x)
    (note,) = failed.value.__notes__
    assert "the hook at high (Linear) cannot be in a function" in note
    assert "Select modules outside" in note
    with hl.record(model, "head") as seen:
        result = run(x)
    torch.testing.assert_close(result, model.head(model.high(x)))
    assert torch.equal(seen["head"], result)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_a_gradient_lost_to_compiled_autograd_is_told():
    model = linears(2)
    with pytest.warns(hl.HooklineWarning, match="compiled_autograd = False"):
        with hl.record(model, "0:grad_output") as run:
            loss = torch.compile(model, backend="aot_eager")(X).sum()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
    with pytest.raises(hl.NotRecordedError, match="compiled autograd"):
        run["0:grad_output"]
    with pytest.warns(hl.HooklineWarning, match="no gradient flowed") as warned:
        with hl.record(model, "0:grad_output"):
            model(X)
    assert "compiled autograd" not in str(warned[0].message)  # it is not compiled


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_an_error_under_compiled_autograd_has_a_note():
    def failing(graph, inputs):
        raise TypeError("no such node")

    model = linears(2)
    with pytest.raises(TorchDynamoException) as raised:
        with hl.edit(model, "0:grad_output", hl.edits.scale(0.0)):
            loss = torch.compile(model, backend="aot_eager")(X).sum()
            with compiled_autograd._enable(torch.compile(backend=failing)):
                loss.backward()
    (note,) = raised.value.__notes__
    assert note.startswith("hookline: the gradient of 0:grad_output leaves compiled code")
    assert "compiled_autograd = False" in note


def test_code_that_skips_the_guards_on_modules_is_told():
    model = linears(2)
    skip = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    run = torch.compile(model, backend="eager", options=skip)
    run(X)
    with pytest.warns(hl.HooklineWarning, match=r"\(guard_filter_fn\); attach before the first"):
        with hl.edit(model, "0", hl.edits.scale(0.0)):
            run(X)
    torch.compiler.reset()
    with hl.record(model, "0") as seen:
        run(X)
    torch.testing.assert_close(seen["0"], model[0](X))
