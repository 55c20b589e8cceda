"""torch.compile: what a line does at the border of compiled code, and what graphs cannot hold.

`tests/engine/line/test_compile_support.py` holds what goes on inside of one graph.
"""

from __future__ import annotations

import io
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

import hookline as hl
from hookline.engine.compile import compiled_runs
from hookline.engine.memory import unversioned_memory
from zoo import Step, steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"backend": "eager", "fullgraph": True}
AOT = {"backend": "aot_eager", "fullgraph": True}  # which compiles the backward, too
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))


class Loop(nn.Module):
    """One block, three times in each pass."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Step(), nn.Linear(8, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Parts(nn.Module):
    """A part that returns a structure, with one tensor in it twice."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, *, scale):
            y = self.linear(x) * scale
            return {"y": y, "again": [y, x, None]}

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        found = self.inner(x, scale=2.0)
        return found["y"].square() + found["again"][0] + found["again"][1]


class Inside(nn.Module):
    """A compiled function inside, which has no border."""

    def __init__(self):
        super().__init__()
        self.inner = steps()
        self.fast = torch.compile(lambda x: self.inner(x) * 2, **OPTIONS)

    def forward(self, x):
        return self.fast(x)


def by_part(model, options=OPTIONS):
    for part in model.children():
        if isinstance(part, Step):
            part.compile(**options)
    return model


def is_bare(model):
    return not len(hl.inventory(model)) and all("forward" not in vars(m) for m in model.modules())


def n_graphs():
    return counters["stats"]["unique_graphs"]


def same(found, expected):
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    return True


@pytest.mark.cell("torch.compile", "gradients", "edit gradients")
def test_gradients_of_structures_come_out_in_their_form():
    torch.manual_seed(0)
    model, found = Parts(), []
    for run in (model, torch.compile(model, **AOT)):
        x = X.clone().requires_grad_() * 1
        with hl.record(model, ["inner:grad_output", ":grad_input", "inner:grad_input"]) as seen:
            run(x).sum().backward()
        with hl.edit(model, "inner:grad_output", lambda g: g * 3) as line:
            model.zero_grad()
            run(X).sum().backward()
        assert line.report().fired[0][1] == 1
        found.append({**seen, "weight": model.inner.linear.weight.grad.clone()})
    assert found[0]["inner:grad_output"]["again"][2] is None
    assert same(found[1], found[0])


@pytest.mark.parametrize("form", ["whole", "by part"])
def test_calls_are_kept_apart_and_one_of_them_can_be_meant(form):
    torch.manual_seed(0)
    model, found = Loop(), []
    sites = ["block", "block#2", "block:grad_output", "block:grad_output#1", "block:input#2"]
    for run in (model, torch.compile(model, **AOT) if form == "whole" else by_part(model, AOT)):
        for _ in range(2):
            with hl.record(model, sites) as seen:
                run(X).sum().backward()
            model.zero_grad()
            with (
                hl.edit(model, "block#1", lambda value: value * 2),
                hl.edit(model, "block:grad_output#2", lambda g: g * 3),
                hl.record(model, "block#2", keep=lambda value: value.sum()) as part,
            ):
                run(X).sum().backward()
        values = dict(seen.items())
        found.append({**values, "sum": part["block#2"], "w": model.block.linear.weight.grad})
        model.zero_grad()
    assert {"block#0", "block#2", "block:grad_output#0", "block:input#2"} <= found[0].keys()
    assert same(found[1], found[0])


@pytest.mark.cell(
    "torch.compile", "watch",
    note="`hl.watch` prints modules in compiled code after this code has run, without inputs"
    " and times.",
)  # fmt: skip
def test_watch_prints_what_compiled_code_has_done():
    model, out = steps(), io.StringIO()
    run = torch.compile(model, **AOT)
    with hl.watch(model, file=out):
        run(X).sum().backward()
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("(root)")
    assert lines[2].startswith("    0.linear")
    assert " ms" not in out.getvalue()
    assert sum(line.startswith("< ") for line in lines) == 13
    mean = model(X).float().mean().item()
    assert f"[2, 8] float32  mean {mean:.4g}" in lines[0]


@pytest.mark.cell(
    "torch.compile",
    "features",
    note="`hl.features` runs the whole compiled graph, because compiled code cannot stop in"
    " the middle.",
)
@pytest.mark.parametrize("form", ["whole", "by part"])
def test_features_are_those_of_the_eager_model(form):
    model = steps()
    expected = hl.features(model, X, ["2", "0.linear"])
    run = torch.compile(model, **OPTIONS) if form == "whole" else by_part(model)
    assert same(hl.features(run, X, ["2", "0.linear"]), expected)
    assert is_bare(model)


class Static:
    """A backend whose graphs return the same memory in each run, as CUDA graphs do."""

    def __call__(self, graph, examples):
        kept = []

        def run(*args):
            out = graph(*args)
            kept.extend(map(torch.empty_like, out[len(kept) :]))
            for memory, tensor in zip(kept, out, strict=True):
                memory.data.copy_(tensor)
            return tuple(kept)

        return run


@pytest.mark.parametrize("form", ["whole", "by part"])
def test_values_in_memory_of_cuda_graphs_are_copied(form, monkeypatch):
    for module in (compiled_runs, unversioned_memory):
        monkeypatch.setattr(module, "may_use_cudagraph_memory", lambda: True)
    model, batches = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 2)), (X, X + 1)
    expected = [hl.features(model, x, ["0", "1"]) for x in batches]
    run = torch.compile(model, backend=Static()) if form == "whole" else model
    if form == "by part":
        model[0].compile(backend=Static())
    with torch.no_grad(), hl.record(model, ["0", "1"]) as seen:
        for x in batches:
            run(x)
    with torch.no_grad(), hl.record(model, "0", keep=torch.sum) as sums:
        for x in batches:
            run(x)
    for recorded, total, values in zip(seen.passes, sums.passes, expected, strict=True):
        assert same(dict(recorded), values)
        torch.testing.assert_close(total["0"], values["0"].sum())


def test_a_compiled_part_that_is_called_by_hand_is_seen():
    model = steps()
    expected = model[1].linear(X)
    fast = torch.compile(model[1], **OPTIONS)
    by_part(model)
    for call in (model[1], fast):
        line = hl.record(model, "1.linear")
        call(X)
        call(X * 2)
        with pytest.warns(
            hl.HooklineWarning, match=r"only modules inside it \('1\.linear'\), so all"
        ):
            line.remove()
        seen = line.recording
        assert torch.equal(seen.calls("1.linear")[0], expected)
        assert len(seen.calls("1.linear")) == 2
    assert is_bare(model)


def test_a_line_on_a_compiled_part_has_a_pass_for_each_run():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = steps()

        def forward(self, x):
            return self.model(x).sum()

    outer = Outer()
    run = torch.compile(outer, **OPTIONS)
    run(X)
    with hl.record(outer.model, Step) as seen:
        run(X)
        run(X * 2)
    assert [len(one) for one in seen.passes] == [4, 4]
    assert torch.equal(seen.passes[1]["3"], outer.model(X * 2))


def test_what_is_compiled_inside_the_block_is_seen():
    model = steps()
    with hl.record(model, Step) as seen:
        by_part(model)
        for _ in range(3):
            model(X)
    assert [len(one) for one in seen.passes] == [4, 4, 4]


def test_a_compiled_function_inside_is_one_graph_for_all_lines():
    model, graphs = Inside(), []
    for _ in range(12):
        with hl.record(model, "inner.*", ports=("output", "grad_output")) as seen:
            for _ in range(2):
                model(X).sum().backward()
        assert [len(one) for one in seen.passes] == [8, 8]
        graphs.append(n_graphs())
    assert graphs[1] == graphs[-1]
    assert torch.equal(seen.passes[1]["inner.3"] * 2, model(X))


@pytest.mark.parametrize("kind", ["limit", "untraceable"])
def test_what_fails_in_a_compiled_function_is_explained_once(kind):
    model = Inside()

    def sweep():
        for k in range(12):
            change = (lambda value, k=k: value * k) if kind == "limit" else (lambda v: v.tolist())
            with hl.edit(model, "inner.1", change):
                model(X)

    with pytest.raises(Exception, match=r"fullgraph|Unsupported|tolist") as failed:
        sweep()
    notes = [note for note in failed.value.__notes__ if note.startswith("hookline: ")]
    said = {"limit": "Make the function once", "untraceable": "the hook at inner.1 (Step) cannot"}
    assert [said[kind] in note for note in notes] == [True]
    assert is_bare(model)


def test_a_thread_that_runs_the_compiled_model_is_not_mixed_in():
    model = steps()
    run = torch.compile(model, **OPTIONS)
    expected, n_runs = model(X), 0
    over = threading.Event()

    def elsewhere():
        nonlocal n_runs
        while not over.is_set():
            run(X * 7)
            n_runs += 1

    thread = threading.Thread(target=elsewhere)
    with hl.record(model, "3") as seen, hl.edit(model, "0", lambda value: value * 1):
        run(X)
        thread.start()
        while n_runs < 20:
            run(X)
        over.set()
        thread.join()
    assert all(torch.equal(one["3"], expected) for one in seen.passes)


def test_threads_of_a_line_of_every_thread_have_their_own_passes():
    model = steps()
    run = torch.compile(model, **AOT)
    run(X)
    line = hl.record(model, "3", ports=("output", "grad_output"), every_thread=True)

    def work(k):
        for _ in range(10):
            run(X * k).mul(k).sum().backward()

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.remove()
    counts = {1: 0, 2: 0, 3: 0}
    for one in line.recording.passes:
        k = int(one["3:grad_output"][0, 0].item())
        assert torch.equal(one["3"], model(X * k))
        counts[k] += 1
    assert counts == {1: 10, 2: 10, 3: 10}


def test_a_line_that_another_thread_ends_leaves_dynamos_settings():
    model = steps()
    run = torch.compile(model, **OPTIONS)
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    line = hl.record(model, "1")
    run(X)
    thread = threading.Thread(target=line.remove)
    thread.start()
    thread.join()
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint is before
    assert torch.equal(line.recording["1"], model[1](model[0](X)))


def test_compiled_parts_inside_a_compiled_model_join_its_graph():
    model = steps()
    model[1] = torch.compile(model[1], **AOT)
    model[2].compile(**AOT)
    expected = model[3](model[2]._call_impl(model[1]._orig_mod(model[0](X))))
    run = torch.compile(model, **AOT)
    for _ in range(3):
        with hl.record(model, Step, ports=("output", "grad_output")) as seen:
            run(X).sum().backward()
        assert len(seen) == 8
        assert torch.equal(seen["3"], expected)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_hook_that_no_graph_can_hold_is_named_with_the_choices(fullgraph):
    model = steps()
    run = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    run(X)
    sums = []

    def keep(value):
        print(end="")
        sums.append(value.sum().item())
        return sums[-1]

    recording = hl.record(model, "1", keep=keep)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported) as failed, recording:
            run(X)
        (note,) = failed.value.__notes__
        assert "the hook at 1 (Step)" in note
        assert "set_stance('force_eager')" in note
        recording = hl.record(model, "1", keep=keep)
        with torch.compiler.set_stance("force_eager"), recording as seen:
            run(X)
    else:
        with recording as seen:
            run(X)
    assert seen["1"] == pytest.approx(model[1](model[0](X)).sum().item())
    assert is_bare(model)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("verb", ["record", "edit", "attach"])
def test_a_line_made_inside_a_compiled_function_is_refused(fullgraph, verb):
    model = steps()
    make_line = {
        "record": lambda: hl.record(model, "1"),
        "edit": lambda: hl.edit(model, "1", hl.edits.scale(2)),
        "attach": lambda: hl.attach(model),
    }[verb]

    def inside(x):
        with make_line():
            return model(x)

    run = torch.compile(inside, backend="eager", fullgraph=fullgraph)
    with pytest.raises(
        hl.AttachError, match=rf"hl\.{verb} is called inside a compiled.*\n.*around"
    ):
        run(X)
    assert is_bare(model)


@pytest.mark.parametrize("verb", ["edit", "record", "forward", "forward_pre"])
def test_functions_that_differ_in_defaults_alone_are_told_apart(verb):
    """Torch 2.11 guards on a function's code, not on its defaults."""
    model = steps()
    run = torch.compile(model, backend="eager", fullgraph=True)
    h = model[1](model[0](X))
    for k in (1, 2, 3):
        expected = model[3](model[2](h * k))
        with hl.attach(model) as line:
            if verb == "forward":
                line.forward("1", lambda module, args, output, k=k: output * k)
            elif verb == "forward_pre":
                line.forward_pre("2", lambda module, args=None, k=k: (args[0] * k,))
            elif verb == "edit":
                with hl.edit(model, "1", lambda value, k=k: value * k):
                    assert torch.equal(run(X), expected)
                continue
            else:
                with hl.record(model, "1", keep=lambda value, k=k: value * k) as seen:
                    run(X)
                assert torch.equal(seen["1"], h * k)
                continue
            assert torch.equal(run(X), expected)


def test_an_interrupt_while_attaching_or_ending_leaves_nothing(interrupted):
    model = by_part(steps())
    torch.compile(model, **OPTIONS)(X)
    impl, call = model[0]._compiled_call_impl, OptimizedModule.__call__

    def action():
        with hl.record(model, Step):
            pass

    step, was_interrupted = 0, True
    while was_interrupted:
        step += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model did not run
            was_interrupted = interrupted(step, ("hookline.engine.compile",), action)
        assert OptimizedModule.__call__ is call
        assert model[0]._compiled_call_impl is impl
        assert is_bare(model)
    assert step > 50


@pytest.mark.cell(
    "torch.compile",
    "raw hooks",
    refused="AttachError",
    note="Backward hooks and hooks on saved tensors do not work. The call of the model raises"
    " dynamo's error, whose message contains hookline's `AttachError`.",
)
def test_packing_what_is_saved_is_refused_with_the_remedy():
    model = steps()
    run = torch.compile(model, **OPTIONS)
    run(X)
    with hl.attach(model) as line:
        line.options.quiet = True
        line.saved("1", lambda t: t, lambda t: t)
        with pytest.raises(Exception, match=r"must run outside compiled code.*\n.*force_eager"):
            run(X)
    assert is_bare(model)


@pytest.mark.cell("torch.compile", "clip")
def test_gradients_of_parameters_are_clipped_and_seen():
    model, found = steps(), []
    for run in (model, torch.compile(model, **AOT)):
        model.zero_grad()
        with hl.clip(model, norm=0.1), hl.attach(model) as line:
            line.grad("1.linear.weight", lambda g: g * 2)
            line.accumulated("0.*", lambda parameter: None)
            run(X).sum().backward()
        assert [count for _, count in line.report().fired] == [1, 1, 1]
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert same(found[1], found[0])


@pytest.mark.cell("torch.compile", "record", "edit", "statistics", "gradients", "edit gradients")
@pytest.mark.trap(1)
def test_a_raw_hook_after_compiling_is_silent_a_line_is_not():
    model, fired = steps(), []
    run = torch.compile(model, **AOT)
    expected = run(X)
    handle = model[1].register_forward_hook(lambda *_: fired.append(1))
    run(X)
    handle.remove()
    assert not fired
    with hl.record(model, "1", ports=("output", "grad_output")) as seen:
        run(X).sum().backward()
    with hl.record(model, "1", keep=lambda value: value.mean()) as mean:
        run(X)
    with hl.edit(model, "1", hl.edits.scale(2)), hl.edit(model, "2:grad_output", torch.zeros_like):
        edited = run(X)
        edited.sum().backward()
    assert torch.equal(seen["1"], model[1](model[0](X)))
    assert torch.equal(mean["1"], seen["1"].mean())
    assert not torch.equal(edited, expected)
    assert torch.equal(run(X), expected)


class Tap:
    """A raw hook that keeps the last value, as compiled code can: in an attribute."""

    value = None

    def __call__(self, module, args, output):
        self.value = output


@pytest.mark.trap(2)
def test_a_hooked_block_is_served_the_code_of_an_unhooked_one():
    model, tap = by_part(steps()), Tap()
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
    model, tap = steps(), Tap()
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
    assert "in compiled code, which hl.EVERYWHERE does not reach" in " ".join(
        str(line.report()).split()
    )


@pytest.mark.trap(7)
def test_a_hook_that_leaves_the_code_is_silent_a_line_is_not():
    model, kept = steps(), []

    def hook(module, args, output):
        if torch.compiler.is_compiling():
            return
        kept.append(output)

    handle = model[1].register_forward_hook(hook)
    run = torch.compile(model, **OPTIONS)
    run(X)
    handle.remove()
    assert not kept
    with hl.record(model, "1") as seen:
        run(X)
    assert "1" in seen


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
    model = steps()
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
    assert is_bare(model)


@pytest.mark.trap(9)
def test_a_stored_compiled_value_has_no_gradient_the_port_has():
    model, kept = steps(), {}
    handle = model[1].register_forward_hook(lambda m, a, output: kept.update(one=output))
    loss = torch.compile(model, **AOT)(X).sum()
    handle.remove()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, kept["one"])
    with hl.record(model, "1", ports="grad_output") as seen:
        torch.compile(model, **AOT)(X).sum().backward()
    h = model[1](model[0](X)).detach().requires_grad_()
    assert torch.equal(
        seen["1:grad_output"], torch.autograd.grad(model[3](model[2](h)).sum(), h)[0]
    )


@pytest.mark.trap(8)
def test_full_backward_hooks_break_the_graph():
    model = steps()
    handle = model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="backwards hooks require compiled autograd"):
        torch.compile(model, **AOT)(X)
    torch.compiler.reset()
    counters.clear()
    torch.compile(model, backend="aot_eager")(X).sum().backward()
    assert sum(counters["graph_break"].values()) == 1
    handle.remove()
    torch.compiler.reset()
    counters.clear()
    h = model[1](model[0](X)).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[3](model[2](h)).sum(), h)
    run = torch.compile(model, **AOT)
    with hl.record(model, "1:grad_output") as found:
        run(X).sum().backward()
    assert torch.equal(found["1:grad_output"], expected)
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

    model = steps()
    handles = [part.register_forward_hook(hook) for part in model]
    model(X).sum().backward()
    assert len(sunk) == 4
    torch.compile(model, **AOT)(X).sum().backward()
    assert len(sunk) == 4  # none of the compiled run
    for handle in handles:
        handle.remove()
    torch.compiler.reset()
    with hl.record(model, "*:grad_output") as found:
        torch.compile(model, **AOT)(X).sum().backward()
    assert list(found) == [f"{k}:grad_output" for k in range(4)]
    assert all(map(torch.equal, found.values(), reversed(sunk)))
    sunk.clear()


@pytest.mark.cell("torch.compile", "raw hooks", note="Dynamo traces forward hooks into the graph.")
@pytest.mark.trap(14)
def test_paths_are_those_of_the_model():
    model = steps()
    run = torch.compile(model, **OPTIONS)
    assert "_orig_mod.0" in dict(run.named_modules())
    assert [site.path for site in hl.select(run, Step)] == ["0", "1", "2", "3"]
    with hl.attach(run) as line:
        line.forward("1", lambda module, args, output: output * 2)
        out = run(X)
    assert torch.equal(out, model[3](model[2](model[1](model[0](X)) * 2)))
