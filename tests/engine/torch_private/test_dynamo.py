"""The private names of torch.compile: each test says what breaks when one of them moves."""

from __future__ import annotations

import copy
import inspect
import sys

import pytest
import torch
from torch import nn
from torch._dynamo import config, convert_frame, exc
from torch._dynamo.eval_frame import OptimizedModule
from torch._higher_order_ops import effects

import hookline as hl
from hookline.engine.compile import compiled_modules
from hookline.engine.torch_private import dynamo as internals
from hookline.engine.torch_private import hooks
from hookline.engine.torch_private.graph.dynamo_fakes import store_fake_tensors, take_fake_tensors
from warm import run_python

X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    """Nothing compiled is left over."""


@pytest.mark.processes
def test_nothing_loads_dynamo_and_that_alone_compiles_nothing():
    code = (
        "import sys, torch, hookline.engine.torch_private.dynamo as internals\n"
        "assert internals.dynamo_config() is None and not internals.may_have_compiled()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo\n"
        "assert internals.dynamo_config() is torch._dynamo.config\n"
        "assert not internals.may_have_compiled()\n"
        "torch.compile(torch.relu, backend='eager')(torch.ones(1))\n"
        "assert internals.may_have_compiled()\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert isinstance(convert_frame.FRAME_COUNTER, int)


def test_what_is_run_while_tracing_is_not_run_later():
    class Counter:
        n = 0

        @internals.run_at_trace_time
        def count(self):
            self.n += 1

    counter = Counter()

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        counter.count()
        return x + 1

    for _ in range(3):
        assert torch.equal(function(X), X + 1)
    assert counter.n == 1


def test_settings_are_dynamos_and_the_last_of_them_puts_back():
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    assert list(internals._SETTINGS) == [name]
    first, second = internals.DynamoSettings(), internals.DynamoSettings()
    with config.patch({name: False}):
        first.begin()
        second.begin()
        assert getattr(config, name) is True
        first.end()
        first.end()
        assert getattr(config, name) is True
        second.end()
        assert getattr(config, name) is False


class Told:
    def __init__(self, module, within=()):
        self.modules, self.heard = {id(module), *map(id, within)}, []

    def covers(self, module):
        return id(module) in self.modules

    def enter(self, module, frame):
        assert inspect.isframe(frame)
        self.heard.append("enter")

    def leave(self, module, frame, output):
        self.heard.append("leave")

    def add_error_note(self, error):
        self.heard.append(type(error).__name__)


@pytest.mark.parametrize("form", ["torch.compile", "module.compile"])
def test_borders_are_told_of_and_put_back(form):
    model, before = nn.Sequential(nn.Linear(3, 3)), OptimizedModule.__call__
    call = torch.compile(model, backend="eager")
    if form == "module.compile":
        model.compile(backend="eager")
        call = model
    held, told = vars(model).get("_compiled_call_impl"), Told(model)
    borders = compiled_modules.RunSubscription(told)
    borders.open()
    if form == "module.compile":
        borders.watch_module(model)
    call(X)
    assert told.heard == ["enter", "leave"]
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(2, 4))
    assert told.heard[2:] == ["enter", caught.type.__name__, "leave"]
    borders.remove()
    assert OptimizedModule.__call__ is before
    assert vars(model).get("_compiled_call_impl") is held
    call(X)
    assert len(told.heard) == 5


def test_compiled_modules_are_known():
    inner = nn.Linear(1, 1)
    model = nn.Sequential(inner, nn.ReLU())
    assert not compiled_modules.is_compiled(inner)
    assert compiled_modules.is_compiled(torch.compile(inner, backend="eager"))
    assert compiled_modules.unwrap_compiled(torch.compile(inner, backend="eager")) is inner
    assert compiled_modules.find_compiled_in_place(model) == ({id(m) for m in model.modules()}, [])
    inner.compile(backend="eager")
    assert compiled_modules.is_compiled(inner)
    assert compiled_modules.find_compiled_in_place(model)[1] == [inner]


def test_errors_of_dynamo_have_their_names():
    """They are told by name, since to import them would load dynamo."""
    for kind in ("Unsupported", "TorchRuntimeError", "UserError", "FailOnRecompileLimitHit"):
        assert issubclass(getattr(exc, kind), Exception)
    with pytest.raises(exc.Unsupported) as caught:
        torch.compile(lambda x: torch._dynamo.graph_break(), backend="eager", fullgraph=True)(X)
    assert internals.is_untraceable(caught.value)
    assert not internals.is_recompile_limit(caught.value)

    function = torch.compile(lambda x, n: x + n, backend="eager", fullgraph=True, dynamic=False)
    with config.patch(recompile_limit=2), pytest.raises(exc.FailOnRecompileLimitHit) as limit:
        for number in range(4):
            function(X, number)
    assert internals.is_recompile_limit(limit.value)


def test_a_function_not_compiled_alone_is_within_other_code():
    """Alone, a hook would be a frame of its own: `sys._getframe` another, and a graph each."""

    def function(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    seen = []
    internals.never_compile_alone([function])
    torch.compile(function, backend="eager")(X)
    assert seen == [False]
    torch.compile(lambda x: function(x) * 2, backend="eager")(X)
    assert seen == [False, True]


def test_graphs_can_be_told_to_keep_an_operator():
    assert effects._EffectType.ORDERED is not None
    assert callable(effects._register_effectful_op)


def test_the_dictionaries_that_are_asked_for_are_a_modules():
    tables = vars(nn.Linear(1, 1))
    assert set(hooks._CHECKED_BY_DYNAMO) <= set(tables)
    source = inspect.getsource(sys.modules["torch._dynamo.variables.nn_module"])
    for name in hooks._CHECKED_BY_DYNAMO:
        assert f'"{name}"' in source, name  # as those of which the empty ones go unguarded


@pytest.mark.parametrize("port", ["output", "input"])
def test_the_kinds_of_hooks_that_hookline_has_are_told_apart(port):
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda *values: None)
    assert hooks.own_hook_mask(model[0]) == 0  # it is not hookline's
    found = []
    for ports in (port, ("output", "input")):
        with hl.record(model, "0", ports=ports):
            model(X)
            found.append(hooks.own_hook_mask(model[0]))
            assert hooks.own_hook_mask(copy.deepcopy(model)[0]) == found[-1]
    assert len({0, *found}) == 3
    assert hooks.own_hook_mask(model[0]) == 0


def test_the_end_of_a_graph_is_told_once_by_its_interpreter():
    told, found = [], []

    def ask(x):
        found.append(internals.at_end_of_traced_forward(lambda: told.append(len(found))))
        return x * 2

    assert not internals.at_end_of_traced_forward(told.clear)
    torch.compiler.allow_in_graph(ask)

    def function(x):
        return ask(ask(x)) + 1

    y = torch.compile(function, backend="aot_eager", fullgraph=True)(X.clone().requires_grad_())
    # Dynamo itself calls it, and then AOTAutograd traces the graph, it may be more than once.
    assert found[-2:] == [True, True]
    assert told[-2:] == [len(found)] * 2
    assert len(told) == found.count(True)
    y.sum().backward()
    assert len(told) == found.count(True)


def test_an_interpreter_of_the_users_own_is_left_as_it_is():
    touched = []

    def ask(x):
        internals.at_end_of_traced_forward(int)
        touched.append("output" in vars(own))
        return x * 2

    torch.compiler.allow_in_graph(ask)
    graph = torch.fx.Graph()
    call = torch.compile(lambda x: ask(x) + 1, backend="aot_eager", fullgraph=True)
    graph.output(graph.call_function(lambda: call(X.clone().requires_grad_())))
    own = torch.fx.Interpreter(torch.fx.GraphModule({}, graph))
    own.run()
    assert touched
    assert not any(touched)


@pytest.mark.parametrize("verb", [hl.record, hl.check, hl.profile])
def test_a_model_runs_while_another_thread_imports_dynamo(verb, monkeypatch):
    """Its names are there one after the other, and OptimizedModule is a late one."""
    monkeypatch.setattr(torch._dynamo.__spec__, "_initializing", True)
    monkeypatch.delattr(torch._dynamo, "OptimizedModule")
    model = nn.Linear(3, 3)
    with verb(model):
        assert model(X).shape == (2, 3)


def test_what_stands_in_for_tensors_is_seen_while_tracing():
    class Look:
        seen = ()

        @internals.run_at_trace_time
        def take(self):
            self.seen = take_fake_tensors()

    look = Look()

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        store_fake_tensors([x, x.sum(1)])
        look.take()
        return x + 1

    function(X.clone().requires_grad_())
    assert [tuple(tensor.shape) for tensor in look.seen] == [(2, 3), (2,)]
    assert all(type(tensor).__name__ == "FakeTensor" for tensor in look.seen)
    assert all(tensor.requires_grad for tensor in look.seen)
