"""torch.compile: a line is honoured whenever it is attached, without graph breaks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters

import hookline as hl
from hookline.engine.compile.compiled_modules import RunSubscription
from hookline.engine.compile.compiler_errors import explain_error
from hookline.engine.line import compile_support as module
from hookline.engine.line.compile_support import stale_forward_text
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Tap
from second_thread import Meanwhile, ToldLock
from warm import run_python
from zoo import Step, steps

# Dynamo looks at the .grad of whatever comes into a graph, with or without hooks.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

FORMS = ["whole", "method", "regional"]
CALL = OptimizedModule.__call__

INDUCTOR = pytest.param("inductor", marks=pytest.mark.processes)  # it compiles in workers


@pytest.fixture(autouse=True)
def whole_and_put_back(fresh_dynamo):
    yield
    assert OptimizedModule.__call__ is CALL
    assert not counters["graph_break"]


def compiled(model, form, backend="eager", fullgraph=True):
    """The model, compiled in one of the ways there are; for gradients by `aot_eager`."""
    options = {"backend": backend, "fullgraph": fullgraph}
    if form == "whole":
        return torch.compile(model, **options)
    for part in [model] if form == "method" else model:
        part.compile(**options)
    return model


def n_graphs():
    return counters["stats"]["unique_graphs"]


def is_bare(model):
    return not len(hl.inventory(model)) and all("forward" not in vars(m) for m in model.modules())


def same(found, expected, tolerance=0.0):
    assert list(found) == list(expected)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)
    return True


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
PORTS = ("output", "input", "grad_output", "grad")


def recorded(model, call, ports=PORTS, select=Step, x=X):
    model.zero_grad()
    with hl.record(model, select, ports=ports) as run:
        loss = call(x).square().sum()
        if any(port.startswith("grad") for port in ports):
            loss.backward()
    return dict(run.items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_records_are_those_of_the_eager_model(form, backend):
    model = steps()
    expected = recorded(model, model)
    run = compiled(model, form, backend)
    tolerance = 0.0 if backend == "aot_eager" else 1e-5
    assert same(recorded(model, run), expected, tolerance)
    assert is_bare(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_lines_come_and_go_and_cost_one_graph(form, is_compiled_before):
    model = steps()
    expected = recorded(model, model, ("output",))
    run = compiled(model, form)
    run(X)
    if not is_compiled_before:
        torch.compiler.reset()
        recorded(model, run, ("output",))
    for _ in range(2):
        recorded(model, run, ("output",))
        run(X)
    before = n_graphs()
    for _ in range(12):
        assert same(recorded(model, run, ("output",)), expected)
        run(X)
    assert n_graphs() == before


@pytest.mark.parametrize("form", FORMS)
def test_a_line_on_the_compiled_object_is_the_same(form):
    model = steps()
    expected = recorded(model, model, ("output", "grad_output"))
    run = compiled(model, form, "aot_eager")
    run(X)
    assert same(recorded(run, run, ("output", "grad_output")), expected)
    assert is_bare(model)


@pytest.mark.parametrize("form", FORMS)
def test_a_line_made_before_the_first_compiled_call_is_honoured(form):
    model = steps()
    expected = recorded(model, model, ("output",))
    run = compiled(model, form)
    assert same(recorded(model, run, ("output",)), expected)
    with hl.record(model, Step) as seen:
        pass_through = run(X)
    assert torch.equal(run(X), pass_through)
    assert len(seen.passes) == 1


@pytest.mark.parametrize("form", FORMS)
def test_one_of_many_alike_is_hooked_alone(form):
    model = steps()
    run = compiled(model, form)
    run(X)
    with hl.record(model, "2") as seen:
        run(X)
        run(X * 2)
    expected = recorded(model, model.eval(), ("output",), "2", X * 2)
    assert torch.equal(seen.passes[1]["2"], expected["2"])
    assert [len(one) for one in seen.passes] == [1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_edits_are_made_inside_the_graph_a_sweep_is_one_graph(form):
    model, found = steps(), []
    run = compiled(model, form)
    run(X)
    graphs = []
    for number in range(20):
        with hl.edit(model, "1", hl.edits.scale(number / 10)), hl.record(model, "3") as seen:
            out = run(X)
        assert torch.equal(seen["3"], out)
        found.append(out)
        graphs.append(n_graphs())
    assert graphs[0] == graphs[-1]
    for number, out in enumerate(found):
        h = model[1](model[0](X)) * (number / 10)
        torch.testing.assert_close(out, model[3](model[2](h)))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_edited_inside_the_graph(form):
    model = steps()
    run = compiled(model, form, "aot_eager")

    def gradients(call):
        model.zero_grad()
        with hl.edit(model, "2:grad_output", lambda g: g.clamp(min=0)) as line:
            call(X).square().sum().backward()
        assert line.report().fired[0][1] == 1
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    with torch.compiler.set_stance("force_eager"):
        expected = gradients(run)
    assert same(gradients(run), expected)


@pytest.mark.parametrize("form", FORMS)
@torch._functorch.config.patch(donated_buffer=False)  # or torch allows no retain_graph
def test_passes_stay_apart_when_backward_comes_later(form):
    model = steps()
    run = compiled(model, form, "aot_eager")
    with hl.record(model, "1", ports="grad_output") as seen:
        first, second = run(X), run(X * 2)
        second.square().sum().backward()
        first.square().sum().backward(retain_graph=True)
        first.square().sum().backward()
    backwards = seen.passes[0].backwards
    assert len(backwards) == 2
    for x, value in ((X, backwards[1]["1:grad_output"]), (X * 2, seen.passes[1]["1:grad_output"])):
        h = model[1](model[0](x)).detach().requires_grad_()
        (grad,) = torch.autograd.grad(model[3](model[2](h)).square().sum(), h)
        torch.testing.assert_close(value, grad)


def test_batches_of_any_size_are_recorded():
    model = steps()
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with hl.record(model, "1", ports=("output", "grad_output")) as seen:
        for size in (2, 3, 5, 8):
            run(torch.ones(size, 8)).sum().backward()
    assert [len(one["1"]) for one in seen.passes] == [2, 3, 5, 8]
    assert [len(one["1:grad_output"]) for one in seen.passes] == [2, 3, 5, 8]


class Keep:
    """A raw hook that keeps the last value, as compiled code can: in an attribute."""

    value = None

    def __call__(self, module, args, output):
        self.value = output


@pytest.mark.trap(11)
def test_what_is_written_to_in_the_graph_was_recorded_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    kept = Keep()
    handle = model[0].register_forward_hook(kept)
    with torch.no_grad():
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    handle.remove()
    assert torch.equal(kept.value, model[0](X).relu())
    assert kept.value._version == 0  # which should tell
    torch.compiler.reset()
    with hl.record(model, "0") as seen:
        torch.compile(model, backend="inductor", fullgraph=True)(X)
    torch.testing.assert_close(seen["0"], model[0](X))
    assert (seen["0"] < 0).any()


Both = namedtuple("Both", ["one", "rest"])


@dataclass
class Out:
    hidden: torch.Tensor
    extra: object = None


class Structured(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x, *, scale):
        y = self.linear(x) * scale
        return {
            "tuple": (y, [x, None]),
            "named": Both(y, (x * 2,)),
            "dict": {"a": y, "b": 3},
            "dataclass": Out(y, {"deep": x * 2}),
        }[self.kind]


class Holds(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = Structured(kind)

    def forward(self, x):
        found = self.inner(x, scale=2.0)
        return x if found is None else x * 1


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Structured("tuple")

    def forward(self, x):
        y, (z, _) = self.inner(x, scale=2.0)
        return y.square() + z


@pytest.mark.parametrize("kind", ["tuple", "named", "dict", "dataclass"])
def test_any_structure_comes_out_of_the_graph(kind):
    torch.manual_seed(0)
    model = Holds(kind)
    run = torch.compile(model, backend="eager", fullgraph=True)
    with hl.record(model, "inner", ports=("output", "input")) as seen:
        run(X)
    with hl.record(model, "inner", ports=("output", "input")) as expected:
        model(X)
    assert type(seen["inner"]) is type(expected["inner"])
    assert str(seen["inner"]) == str(expected["inner"])
    assert seen["inner:input"]["scale"] == 2.0
    assert torch.equal(seen["inner:input"]["x"], X)


def test_raw_hooks_are_traced():
    model = steps()
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(X)
    with hl.attach(model) as line:
        line.forward("1", lambda module, args, output: output * 2)
        line.forward_pre("3", lambda module, args: (args[0] + 1,))
        out = run(X)
        assert [count for _, count in line.report().fired] == [1, 1]
    h = model[2](model[1](model[0](X)) * 2) + 1
    torch.testing.assert_close(out, model[3](h))


def test_keep_is_what_the_graph_computes():
    model = steps()
    run = torch.compile(model, backend="eager", fullgraph=True)
    with hl.record(model, Step, keep=lambda t: torch.stack([t.mean(), t.std()])) as seen:
        run(X)
    assert seen["2"].shape == (2,)
    h = model[2](model[1](model[0](X)))
    torch.testing.assert_close(seen["2"], torch.stack([h.mean(), h.std()]))


def test_a_model_in_a_compiled_function_is_refused():
    model = steps()
    run = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    run(X)
    with hl.record(model, Step) as line:
        with pytest.raises(
            hl.AttachError, match=r"inside a compiled function.*\n.*torch.compile\(model"
        ):
            run(X)
        model(X)
    assert len(line.passes) == 1
    assert is_bare(model)


def test_copies_of_a_model_with_a_line_on_are_clean():
    model = steps()
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(X)
    with hl.record(model, Step) as seen:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(X), run(X))
    assert len(seen.passes) == 2
    assert is_bare(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_raw_backward_hooks_in_compiled_code_are_refused(form, kind, fullgraph):
    model = steps()
    run = compiled(model, form, fullgraph=fullgraph)
    run(X)
    with hl.attach(model) as line:
        line.options.quiet = True
        getattr(line, kind)("1", lambda *_: None)
        with pytest.raises(Exception, match=r"for raw backward hooks.*\n.*hl.record or hl.edit"):
            run(X)
    run(X)
    assert is_bare(model)


def test_a_leaf_that_comes_into_a_graph_keeps_no_hook():
    model, x = steps(), X.clone().requires_grad_()
    with hl.record(model, "0", ports="grad_input") as expected:
        model(x).square().sum().backward()
    x.grad = None  # or what was recorded would be added to
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.record(model, "0", ports="grad_input") as seen:
        run(x).square().sum().backward()
    assert torch.equal(seen["0:grad_input"], expected["0:grad_input"])
    assert not x._backward_hooks


def test_gradients_of_one_part_are_right():
    model = Parts()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.record(model, "inner:grad_output") as expected:
        model(X).sum().backward()
    with hl.record(model, "inner:grad_output[0]") as seen:
        run(X).sum().backward()
    assert torch.equal(seen["inner:grad_output[0]"], expected["inner:grad_output"][0])


BEFORE_DYNAMO = """
import sys
import torch
from torch import nn
import hookline as hl

class Own(nn.Linear):  # dynamo compiles no module of torch's alone
    def forward(self, x):
        return super().forward(x)

model = nn.Sequential(Own(2, 2), nn.ReLU())
with hl.record(model, "0") as run:
    assert "torch._dynamo" not in sys.modules
    model[0].compile(backend="eager")
    outputs = [model(torch.ones(1, 2)) for _ in range(3)]
from torch._dynamo.utils import counters
assert all(torch.equal(one["0"].relu(), out) for one, out in zip(run.passes, outputs, strict=True))
assert counters["stats"]["unique_graphs"] == 1, counters
"""


@pytest.mark.processes
def test_a_line_made_before_dynamo_was_loaded_costs_one_graph():
    done = run_python("-c", BEFORE_DYNAMO)
    assert done.returncode == 0, done.stderr


def test_an_ended_line_is_freed_at_once():
    model = nn.Sequential(nn.Linear(2, 2))
    gc.disable()  # what lives on in a cycle would otherwise be freed by chance
    try:
        with hl.edit(model, "0", hl.edits.scale(2.0)) as line:
            model(torch.ones(1, 2))
        taps = [weakref.ref(tap) for tap in line.taps]
        del line
        assert [tap() for tap in taps] == [None]
    finally:
        gc.enable()


def test_two_threads_that_first_meet_dynamo_leave_nothing(monkeypatch, left_as_found):
    model, lock = nn.Sequential(nn.Linear(2, 2)), ToldLock()
    before = left_as_found(model)
    with monkeypatch.context() as patch:
        patch.setattr(module, "dynamo_config", lambda: None)
        line = hl.record(model, every_thread=True)
    line._line._compiled._lock = lock
    meanwhile = Meanwhile(lambda: model(torch.ones(1, 2)), lock)
    monkeypatch.setattr(module, "never_compile_alone", meanwhile)
    model(torch.ones(1, 2))
    meanwhile.end()
    line.remove()
    assert not RunSubscription._all
    assert left_as_found(model) == before


def test_a_line_that_ends_as_a_pass_begins_leaves_no_mark(monkeypatch, left_as_found):
    model, lock = nn.Sequential(nn.Linear(2, 2)), ToldLock()
    before, prepare = left_as_found(model), Tap.prepare_capture
    monkeypatch.setattr(module, "may_have_compiled", lambda: False)
    line = hl.record(model, every_thread=True)
    line._line._compiled._lock, line._line.options.quiet = lock, True
    meanwhile = Meanwhile(line.remove, lock)

    def slowly(tap):
        meanwhile()
        prepare(tap)

    monkeypatch.setattr(Tap, "prepare_capture", slowly)
    monkeypatch.setattr(module, "may_have_compiled", lambda: True)
    model(torch.ones(1, 2))
    meanwhile.end()
    assert left_as_found(model) == before


SITE = Site("fc", module_type="Linear")


class Unsupported(Exception):
    """Named as dynamo's error for code that it cannot trace."""


class FailOnRecompileLimitHit(Exception):
    """Named as dynamo's error."""


def test_what_dynamo_cannot_trace_is_said_of_the_last_hook():
    value, gradient = SITE, Site("fc", "grad_output", module_type="Linear")
    assert "the hook at fc (Linear) cannot be" in explain_error(Unsupported(), value)
    assert "the gradients at fc:grad_output (Linear)" in explain_error(Unsupported(), gradient)
    assert explain_error(Unsupported(), None) is None


def test_at_the_recompile_limit_the_causes_are_named():
    assert "torch._dynamo.config.recompile_limit" in explain_error(FailOnRecompileLimitHit(), SITE)
    assert "torch._dynamo.config.recompile_limit" in explain_error(FailOnRecompileLimitHit(), None)


def test_other_errors_get_no_note():
    assert explain_error(ValueError("mine"), SITE) is None


def test_a_stale_forward_is_named_by_the_class():
    assert stale_forward_text(nn.Linear(1, 1)).startswith("Linear got another forward")
