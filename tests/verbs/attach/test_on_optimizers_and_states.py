"""Raw hooks on registrations, optimizers and state dicts."""

from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as internals
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookline as hl

REGISTRIES = [
    internals._global_parameter_registration_hooks, internals._global_buffer_registration_hooks,
    internals._global_module_registration_hooks, _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left_in_torch():
    before = [dict(hooks) for hooks in REGISTRIES]  # an export that failed left one
    yield
    assert [dict(hooks) for hooks in REGISTRIES] == before
    assert not internals._has_any_global_hook()


def test_what_is_registered_is_seen_as_it_is_built():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        for kind in ("parameter", "buffer", "module"):
            line.registered(kind, lambda module, name, value, kind=kind: seen.append((kind, name)))
        nn.Sequential(nn.BatchNorm1d(2))
    assert seen == [
        ("parameter", "weight"), ("parameter", "bias"), ("buffer", "running_mean"),
        ("buffer", "running_var"), ("buffer", "num_batches_tracked"), ("module", "0"),
    ]  # fmt: skip


def test_what_a_hook_returns_is_registered_instead():
    with hl.attach(hl.EVERYWHERE) as line:
        line.registered("module", lambda module, name, child: nn.Identity())
        line.registered("buffer", lambda module, name, buffer: buffer + 7)
        line.registered("parameter", lambda module, name, p: nn.Parameter(torch.zeros_like(p)))
        module = nn.Module()
        module.register_buffer("b", torch.zeros(2))
        module.p = nn.Parameter(torch.ones(2))
        model = nn.Sequential(nn.Linear(2, 2))
    assert isinstance(model[0], nn.Identity)
    assert module.b.tolist() == [7.0, 7.0]
    assert module.p.tolist() == [0.0, 0.0]


def test_several_hooks_each_get_what_the_one_before_made():
    with hl.attach(hl.EVERYWHERE) as line:
        line.registered("buffer", lambda module, name, buffer: buffer + 1)
        line.registered("buffer", lambda module, name, buffer: buffer * 10)
        module = nn.Module()
        module.register_buffer("b", torch.zeros(1))
    assert module.b.tolist() == [10.0]


def test_a_line_of_a_model_sees_its_registrations_alone(net):
    seen = []
    with hl.attach(net) as line:
        line.registered("parameter", lambda module, name, value: seen.append(name))
        net.fc.scale = nn.Parameter(torch.ones(1))
        nn.Linear(1, 1)
        net.added = nn.Linear(1, 1)
        net.added.more = nn.Parameter(torch.ones(1))
    assert seen == ["scale", "more"]


@pytest.mark.parametrize(
    ("kind", "returned"),
    [("parameter", torch.ones(2)), ("buffer", 3), ("module", torch.ones(1)), ("module", "x")],
)
def test_what_cannot_be_registered_is_refused(kind, returned):
    with hl.attach(hl.EVERYWHERE) as line:
        line.registered(kind, lambda *_: returned)
        with pytest.raises(hl.StructureError, match=f"to be registered as the {kind}"):
            nn.Sequential(nn.BatchNorm1d(2))


@pytest.mark.trap(42)
def test_another_thread_that_builds_and_trains_sees_nothing():
    entered, done = threading.Event(), threading.Event()
    errors = []

    def other():
        try:
            entered.wait()
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    seen = []

    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with hl.attach(hl.EVERYWHERE) as line:
        for kind in ("forward_pre", "forward", "backward_pre", "backward"):
            getattr(line, kind)(None, lambda *_, kind=kind: seen.append(kind))
        line.registered("parameter", lambda *_: seen.append("registered"))
        line.step_pre(None, lambda *_: seen.append("step_pre"))
        line.step_post(None, lambda *_: seen.append("step_post"))
        entered.set()
        done.wait()
        thread.join()
        assert (seen, errors) == ([], [])
        train()
    assert seen == [
        "registered", "registered", "forward_pre", "forward", "backward_pre", "backward",
        "step_pre", "step_post",
    ]  # fmt: skip
    train()
    assert len(seen) == 8


def test_steps_are_seen_and_their_arguments_replaced(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []

    def closure():
        return torch.tensor(3.0)

    with hl.attach(net) as line:
        line.step_pre(optimizer, lambda o, args, kwargs: ((o, closure), {}))
        line.step_pre(optimizer, lambda o, args, kwargs: seen.append((o, args, kwargs)))
        line.step_post(optimizer, lambda o, args, kwargs: seen.append((o, args, kwargs)))
        assert optimizer.step() == 3.0
    assert seen == [(optimizer, (optimizer, closure), {})] * 2
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_copied_optimizer_has_no_hooks(net):
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    with hl.attach() as line:
        line.step_pre(optimizer, lambda *_: seen.append(1))
        copy.deepcopy(optimizer).step()
        assert seen == []
        optimizer.step()
    assert seen == [1]


@pytest.mark.parametrize(
    ("attach", "says"),
    [
        (
            lambda line, o: line.step_pre(o, print),
            "got SGD with none of its 20.",
        ),
        (lambda line, o: line.step_post("sgd", print), "must be given an optimizer, got str"),
        (lambda line, o: line.step_pre(None, print), "must be given an optimizer, got NoneType"),
        (lambda line, o: line.step_pre(o, 3), "must be a function"),
        (lambda line, o: line.state_dict(o, print), "must hold parameters of"),
        (lambda line, o: line.registered("tensor", print), "got .tensor."),
        (lambda line, o: hl.attach().registered("buffer", print), "must have a model"),
    ],
)
def test_what_cannot_be_hooked_is_refused_with_the_remedy(net, attach, says):
    foreign = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with hl.attach(net) as line, pytest.raises(hl.AttachError, match=says) as caught:
        attach(line, foreign)
    assert len(str(caught.value).splitlines()) <= 3


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class, whose hooks do not exist."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


@pytest.mark.parametrize("kind", ["step_post", "state_dict"])
def test_a_wrapper_of_an_optimizer_is_refused_with_the_remedy(net, kind):
    optimizer = Wrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    with hl.attach(net) as line:
        with pytest.raises(hl.AttachError, match=r"got Wrapper(.|\n)*such as optimizer.optimizer"):
            getattr(line, kind)(optimizer, lambda *_: None)
        getattr(line, kind)(optimizer.optimizer, lambda *_: None)
        optimizer.optimizer.step()
        optimizer.optimizer.state_dict()


def test_a_step_hook_that_returns_something_else_is_refused(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hl.attach(net) as line:
        line.step_pre(optimizer, lambda *_: 3)
        with pytest.raises(hl.StructureError, match=r"must return \(args, kwargs\), got"):
            optimizer.step()
    for args in ((), ("closure",), [optimizer]):
        with hl.attach(net) as line:
            line.step_pre(optimizer, lambda _o, _args, kwargs, args=args: (args, kwargs))
            with pytest.raises(hl.StructureError, match=r"must return .*args"):
                optimizer.step()
    with hl.attach(net) as line:
        line.step_post(optimizer, lambda *_: 3)
        with pytest.raises(hl.StructureError, match="would be ignored"):
            optimizer.step()


STATE_DICTS = ["state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict"]


@pytest.mark.parametrize("kind", STATE_DICTS)
def test_hooks_on_an_optimizers_state_bear_the_methods_name(net, kind):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hl.attach(net) as line:
        handle = getattr(line, kind)(optimizer, lambda *_: None)
        assert str(handle) == f"HookHandle({kind}, 1 site, on)"
        optimizer.load_state_dict(optimizer.state_dict())
    assert re.search(rf"^  SGD:{kind} +\S+ +1$", str(line.report()), re.M)


def test_the_state_dicts_of_modules_are_changed_in_place(net):
    seen = []

    def rename(module, state, prefix, metadata):
        state[prefix + "extra"] = torch.ones(1)

    def before_load(module, state, prefix, *rest):
        seen.append((type(module), prefix, len(rest)))
        del state[prefix + "extra"]

    with hl.attach(net) as line:
        line.state_dict_pre("fc", lambda module, prefix, keep: seen.append((prefix, keep)))
        line.state_dict("fc", rename)
        line.load_state_dict_pre("fc", before_load)
        line.load_state_dict("fc", lambda module, keys: seen.append(keys.missing_keys))
        state = net.state_dict()
        assert state["fc.extra"].tolist() == [1.0]
        net.load_state_dict(state)
    assert seen == [("fc.", False), (nn.Linear, "fc.", 5), []]
    assert "fc.extra" not in net.state_dict()
    assert not len(hl.inventory(net))


class Owner(nn.Module):
    """Owns a parameter, and has no forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


HOLDERS = {
    "a list as the root": (lambda: nn.ModuleList([nn.Linear(1, 1)]), "", 2),
    "a list inside": (lambda: nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), "0", 3),
    "a dict": (lambda: nn.Sequential(nn.ModuleDict({"a": nn.Linear(1, 1)})), "0", 3),
    "parameters": (lambda: nn.ParameterDict({"a": torch.ones(1)}), "", 1),
    "a parameter's owner": (lambda: nn.Sequential(Owner(), nn.Linear(3, 3)), "0", 3),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "kind", ["state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict"]
)
def test_state_dicts_of_modules_that_nothing_calls_are_seen(holder, kind):
    make, path, n_modules = HOLDERS[holder]
    model = make()
    seen, all_seen = [], []
    with hl.attach(model) as line:
        hook = getattr(line, kind)
        for selector in (path, model.get_submodule(path), type(model.get_submodule(path))):
            hook(selector, lambda module, *_: seen.append(module))
        hook(None, lambda module, *_: all_seen.append(module))
        model.load_state_dict(model.state_dict())
    assert [module is model.get_submodule(path) for module in seen] == [True] * 3
    assert {id(module) for module in all_seen} == {id(module) for module in model.modules()}
    assert len(all_seen) == n_modules
    assert not len(hl.inventory(model))


def test_a_part_of_a_module_has_no_state_dict(net):
    with hl.attach(net) as line:
        for part in ("fc:input", "fc:output[0]", "fc#0", "fc.weight:grad"):
            with pytest.raises(hl.SelectionError, match="must be given modules"):
                line.state_dict(part, print)
        line.state_dict("fc:output", lambda *_: None)
        net.state_dict()


def test_a_state_dict_hook_that_returns_something_is_refused(net):
    with hl.attach(net) as line:
        line.state_dict("", lambda *_: {})
        with pytest.raises(hl.StructureError, match="change the state_dict in place"):
            net.state_dict()


def test_the_state_dicts_of_optimizers_may_be_replaced(net):
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    with hl.attach(net) as line:
        line.state_dict_pre(optimizer, lambda o: seen.append("pre"))
        line.state_dict(optimizer, lambda o, state: {**state, "mine": 1})
        line.load_state_dict_pre(
            optimizer, lambda o, state: {k: v for k, v in state.items() if k != "mine"}
        )
        line.load_state_dict(optimizer, lambda o: seen.append("loaded"))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    assert seen == ["pre", "loaded"]
    assert state["mine"] == 1
    assert "mine" not in optimizer.state_dict()


def test_what_did_not_happen_is_said(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(hl.HooklineWarning, match="the optimizer made no step"):
        with hl.attach(net) as line:
            line.step_post(optimizer, lambda *_: None)
    with pytest.warns(hl.HooklineWarning, match="nothing of the kind was registered"):
        with hl.attach(net) as line:
            line.registered("buffer", lambda *_: None)
