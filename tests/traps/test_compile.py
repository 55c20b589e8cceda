"""Traps of raw hooks under torch.compile: what goes wrong by hand, and what a line does.

1, 7, 9 and 14 are in `tests/regimes/test_compile.py`.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hookline as hl

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"backend": "aot_eager", "fullgraph": True}
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        return self.act(self.linear(x)) + x


def make(n=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Step() for _ in range(n)])


def linears(n):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)])


def by_part(model):
    for part in model:
        part.compile(**OPTIONS)
    return model


def n_graphs():
    return counters["stats"]["unique_graphs"]


class Tap:
    """A raw hook that keeps the last value, as compiled code can: in an attribute."""

    value = None

    def __call__(self, module, args, output):
        self.value = output


@pytest.mark.trap(2)
def test_a_hooked_block_is_served_the_code_of_an_unhooked_one():
    model, tap = by_part(make()), Tap()
    handle = model[2].linear.register_forward_hook(tap)  # before anything is compiled
    model(X)
    handle.remove()
    assert tap.value is None
    torch.compiler.reset()
    with hl.record(model, "2.linear") as seen:
        model(X)
    assert torch.equal(seen["2.linear"], model[2].linear(model[1](model[0](X))))


@pytest.mark.trap(3)
@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
def test_nothing_tells_of_a_hook_that_was_compiled_out():
    model, tap = make(), Tap()
    run = torch.compile(model, **OPTIONS)
    run(X)
    handle = model[1].register_forward_hook(tap)
    run(X)  # a warning would be an error here
    assert tap.value is None
    assert tap in model[1]._forward_hooks.values()  # all that can be asked says that it is on
    handle.remove()
    with hl.record(model, "1") as seen:
        run(X)
    assert [count for _, count in seen.report().fired] == [1]
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward(nn.Linear, lambda *_: None)
        run(X)
    assert "in compiled code, which hl.EVERYWHERE does not reach" in str(line.report())


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


def stop(module, args, output):
    raise StopIteration


LOCK = threading.Lock()


def locked(module, args, output):
    with LOCK:
        pass


UNTRACEABLE = {
    "print": lambda module, args, output: print(output.shape),
    "a lock": locked,
    "time": lambda module, args, output: print(time.perf_counter()),
    "an if on values": lambda module, args, output: None if output.isnan().any() else output,
    "an exception to stop early": stop,
}


@pytest.mark.trap(6)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("what", UNTRACEABLE)
def test_what_hooks_usually_do_is_refused_by_a_full_graph(what, capsys):
    model = make()
    handle = model[1].register_forward_hook(UNTRACEABLE[what])
    run = torch.compile(model, **OPTIONS)
    with pytest.raises(Unsupported) as failed:
        run(X)
    handle.remove()
    assert not any("hookline" in note for note in getattr(failed.value, "__notes__", []))
    capsys.readouterr()
    torch.compiler.reset()
    printed = io.StringIO()
    with hl.record(model, "1") as seen, hl.watch(model, "2", file=printed):
        run(X)
    expected = model[1](model[0](X))
    assert torch.equal(seen["1"], expected)
    assert "[2, 8] float32" in printed.getvalue()
    assert not counters["graph_break"]
    torch.compiler.reset()
    with hl.attach(model) as line:
        line.options.quiet = True
        line.forward("1", UNTRACEABLE[what])
        with pytest.raises(Unsupported) as failed:
            run(X)
    (note,) = failed.value.__notes__
    assert "the hook at 1:forward (Step)" in note
    assert "set_stance('force_eager')" in note
    capsys.readouterr()


@pytest.mark.trap(8)
def test_full_backward_hooks_break_the_graph():
    model = make()
    handle = model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="backwards hooks require compiled autograd"):
        torch.compile(model, **OPTIONS)(X)
    torch.compiler.reset()
    counters.clear()
    torch.compile(model, backend="aot_eager")(X).sum().backward()
    assert sum(counters["graph_break"].values()) == 1
    handle.remove()
    torch.compiler.reset()
    counters.clear()
    h = model[1](model[0](X)).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[3](model[2](h)).sum(), h)
    run = torch.compile(model, **OPTIONS)
    with hl.record(model, "1:grad_output") as found:
        run(X).sum().backward()
    assert torch.equal(found["1:grad_output"], expected)
    with hl.attach(model) as line:
        line.options.quiet = True
        line.backward("1", lambda module, grads_in, grads_out: None)
        with pytest.raises(Exception, match=r"raw backward hooks cannot.*\n.*hl.record or hl.edit"):
            run(X)
    assert not counters["graph_break"]


sunk: list[torch.Tensor] = []


@torch.library.custom_op("hookline_traps::sink", mutates_args=())
def sink(value: torch.Tensor) -> torch.Tensor:
    sunk.append(value.clone())
    return value.clone()


sink.register_fake(torch.empty_like)


@pytest.mark.trap(10)
def test_an_operator_that_keeps_gradients_is_dead_code_if_unused():
    def hook(module, args, output):
        output.register_hook(lambda grad: (sink(grad), None)[1])

    model = make()
    handles = [part.register_forward_hook(hook) for part in model]
    model(X).sum().backward()
    assert len(sunk) == 4
    torch.compile(model, **OPTIONS)(X).sum().backward()
    assert len(sunk) == 4  # none of the compiled run
    for handle in handles:
        handle.remove()
    torch.compiler.reset()
    with hl.record(model, "*:grad_output") as found:
        torch.compile(model, **OPTIONS)(X).sum().backward()
    assert list(found) == [f"{k}:grad_output" for k in range(4)]
    assert all(map(torch.equal, found.values(), reversed(sunk)))
    sunk.clear()


@pytest.mark.trap(11)
def test_an_in_place_operation_changes_a_record_and_hides_it():
    torch.manual_seed(0)
    model, tap = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), Tap()
    handle = model[0].register_forward_hook(tap)
    with torch.no_grad():
        torch.compile(model, **OPTIONS)(X)
    handle.remove()
    expected = model[0](X)
    assert (expected < 0).any()
    assert not (tap.value < 0).any()
    assert tap.value._version == 0
    torch.compiler.reset()
    with torch.no_grad(), hl.record(model, "0") as seen:
        torch.compile(model, **OPTIONS)(X)
    assert torch.equal(seen["0"], expected)


@pytest.mark.trap(12)
def test_a_hook_that_keeps_in_a_compiled_checkpoint_is_unsafe():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Step(), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    torch.manual_seed(0)
    model = Net()
    handle = model.block.linear.register_forward_hook(Tap())
    with pytest.raises(Exception, match=r"(?i)unsafe side effect"):
        torch.compile(model, **OPTIONS)(X)
    handle.remove()
    torch.compiler.reset()
    run = torch.compile(model, **OPTIONS)
    with hl.record(model, "block.linear", ports=("output", "grad_output")) as seen:
        run(X).sum().backward()
    assert seen.passes[0].order == ["block.linear", "block.linear:grad_output"]
    assert torch.equal(seen["block.linear"], model.block.linear(X))


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
    assert "hooks at other sites" in failed.value.__notes__[0]
    assert "hl.edits.scale(1.0)" in failed.value.__notes__[0]
    torch.compiler.reset()
    model = make(5)
    sweep(by_part(model))  # blocks that are compiled one by one share their code
