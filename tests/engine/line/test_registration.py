"""Where hooks stand among others, and that they are taken off whatever happens."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import warnings
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.modules import module as tables

import hookline as hl
from hookline.engine.line import registration
from second_thread import Meanwhile, ToldLock
from zoo import Two

MODULE_KINDS = ["forward_pre", "forward", "backward_pre", "backward"]
STATE_KINDS = ["state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict"]


class Inside(nn.Module):
    def __init__(self, inner, n_inputs):
        super().__init__()
        self.stem, self.inner, self.n_inputs = nn.Linear(3, 3), inner, n_inputs

    def forward(self, x):
        h = self.stem(x)
        found = self.inner(*[h + k for k in range(self.n_inputs)])
        return sum(part.sum() for part in (found if isinstance(found, tuple) else (found,)))


CASES = {"one": lambda: Inside(nn.Tanh(), 1), "two": lambda: Inside(Two(), 2)}


def hooks_of(module):
    """Every hook that torch knows of on a module, and what marks it."""
    return {name: dict(found) for name, found in vars(module).items() if "_hooks" in name and found}


def attach_all(line, model, optimizer, note=lambda *_: None):
    """A hook of every kind there is."""
    for kind in [*MODULE_KINDS, *STATE_KINDS]:
        getattr(line, kind)("**", note)
    line.forward_pre("**", note, with_kwargs=True)
    line.forward("**", note, with_kwargs=True, always_call=True)
    line.saved("**", lambda t: t, lambda t: t)
    for kind in ("grad", "accumulated"):
        getattr(line, kind)("**", note)
    for kind in ("step_pre", "step_post", *STATE_KINDS):
        getattr(line, kind)(optimizer, note)
    for kind in ("parameter", "buffer", "module"):
        line.registered(kind, note)


def is_bare(model, optimizer):
    """Whether nothing at all is hooked: not on modules, parameters, the optimizer, or torch."""
    on_tensors = [
        dict(hooks)
        for p in model.parameters()
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        if hooks
    ]
    on_torch = [
        name for name, found in vars(tables).items()
        if name.startswith("_global_") and isinstance(found, dict) and found
    ]  # fmt: skip
    optimizers = vars(sys.modules["torch.optim.optimizer"])
    on_torch += [name for name in optimizers if name.startswith("_global_opt") and optimizers[name]]
    found = [hooks_of(module) for module in model.modules()] + [hooks_of(optimizer)]
    return not any(found) and not on_tensors and not on_torch and saves_plainly()


def saves_plainly():
    """Whether torch's switch for saved tensors is as it was."""
    a = torch.ones(2, requires_grad=True)
    return (a * a).grad_fn._saved_self is a


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_dictionary_underneath_is_in_the_order_of_calling():
    """Autograd, and dynamo of torch 2.11, go by that."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    handles = [model.register_forward_hook(lambda *_: None) for _ in range(3)]
    handles.append(model.weight.register_hook(lambda grad: None))
    kept = list(model._forward_hooks.values())
    with (
        hl.record(model, "", ports=("output", "grad_output")) as run,
        hl.edit(model, "", hl.edits.scale(2)),
        hl.edit(model, "weight:grad", hl.edits.scale(2)),
    ):
        model(x).sum().backward()
        for hooks in (model._forward_hooks, model._forward_pre_hooks, model.weight._backward_hooks):
            assert list(dict.keys(hooks)) == list(hooks.keys())
        assert [hook for hook in model._forward_hooks.values() if hook in kept] == kept
    assert run[""].shape == (1, 2)
    for handle in handles:
        handle.remove()
    assert not model._forward_hooks


# -- order in backward ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one", "two"])
@pytest.mark.parametrize("with_everywhere", [False, True])
def test_the_order_is_the_same_whatever_was_attached_first(case, with_everywhere):
    log = []

    def note(name):
        return lambda *values: log.append(name)

    def keep(grad):
        log.append("record")
        return grad

    acts = {
        "edit": lambda model: hl.edit(model, "inner:grad_output", lambda g: note("edit")(g) or g),
        "record": lambda model: hl.record(model, "inner:grad_output", keep=keep),
        "before": hl.attach,
        "after": hl.attach,
    }
    if with_everywhere:
        acts["everywhere"] = lambda model: hl.attach(hl.EVERYWHERE)
    for order in itertools.permutations(acts):
        torch.manual_seed(0)
        model = CASES[case]()
        log.clear()
        with ExitStack() as stack:
            for name in order:
                line = stack.enter_context(acts[name](model))
                if name == "before":
                    line.backward_pre("inner", note("second"))
                    line.backward_pre("inner", note("first"), prepend=True)
                elif name == "after":
                    line.backward("inner", note("after"))
                elif name == "everywhere":
                    line.backward_pre(model.inner, note("everywhere"))
            model(torch.ones(2, 3)).backward()
        found = [name for name, _ in itertools.groupby(log)]
        expected = ["everywhere", "edit", "first", "second", "record", "after"]
        assert found == expected[not with_everywhere :], order


@pytest.mark.parametrize("case", ["one", "two"])
def test_on_inputs_everywhere_first_then_hooks_edits_recorders(case):
    names = ["everywhere", "first", "second", "edit", "record"]
    for order in itertools.permutations(["everywhere", "lines", "edit", "record"]):
        torch.manual_seed(0)
        model, log = CASES[case](), []

        def note(name, log=log):
            return lambda *values: log.append(name)

        with ExitStack() as stack:
            for name in order:
                if name == "everywhere":
                    line = stack.enter_context(hl.attach(hl.EVERYWHERE))
                    line.backward(model.inner, note("everywhere"))
                elif name == "lines":
                    other = stack.enter_context(hl.attach(model))
                    other.backward("inner", note("second"))
                    other.backward("inner", note("first"), prepend=True)
                elif name == "edit":
                    callback, site = note("edit"), "inner:grad_input"
                    stack.enter_context(
                        hl.edit(model, site, lambda g, callback=callback: callback(g) or g)
                    )
                else:
                    keep = lambda g, log=log: log.append("record") or g  # noqa: E731
                    stack.enter_context(hl.record(model, "inner:grad_input", keep=keep))
            model(torch.ones(2, 3)).backward()
        assert [k for k in names if k in log] == names
        # What comes back through the module is seen before what comes back past it is added.
        assert log[: log.index("edit")] == names[:3], order


def test_each_hook_is_given_what_the_one_before_returned():
    model, seen = CASES["two"](), []
    with hl.attach(hl.EVERYWHERE) as everywhere, hl.attach(model) as line:
        line.backward("inner", lambda module, grads, _: seen.append(grads))
        line.backward(
            "inner", lambda module, grads, _: tuple(g * 0 + 2 for g in grads), prepend=True
        )
        everywhere.backward(Two, lambda module, grads, _: (grads[0] * 0 + 1, grads[1]))
        line.backward_pre("inner", lambda module, grads: tuple(g * 0 for g in grads))
        model(torch.ones(2, 3)).backward()
    assert [grad.unique().tolist() for grad in seen[0]] == [[2.0], [2.0]]


def test_foreign_hooks_stay_where_they_are_among_themselves(model):
    handles = [model[0].register_forward_hook(lambda *_, k=k: None) for k in range(3)]
    before = list(model[0]._forward_hooks)
    with hl.attach(model) as line:
        line.options.quiet = True
        attach_all(line, model, torch.optim.SGD(model.parameters(), lr=0.1))
        kept = [key for key in model[0]._forward_hooks if key in before]
        assert kept == before
    assert list(model[0]._forward_hooks) == before
    for handle in handles:
        handle.remove()


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["exit", "remove", "ValueError", "KeyboardInterrupt"])
def test_nothing_is_left_however_a_line_ends(model, optimizer, ends):
    errors = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}
    line, seen = hl.attach(model), []
    everywhere = hl.attach(hl.EVERYWHERE)
    line.options.quiet = True
    attach_all(line, model, optimizer, lambda *_: seen.append(1))
    for kind in MODULE_KINDS:
        getattr(everywhere, kind)(None, lambda *_: seen.append(1))
    for kind in ("step_pre", "step_post"):
        getattr(everywhere, kind)(None, lambda *_: seen.append(1))
    assert not is_bare(model, optimizer)

    def fail(*_):
        raise errors[ends]

    if ends == "remove":
        model(torch.ones(2, 3)).sum().backward()
        line.remove()
        everywhere.remove()
    elif ends == "exit":
        with everywhere, line:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    else:
        with pytest.raises(errors[ends]), everywhere, line:
            line.forward("2", fail, prepend=True)
            model(torch.ones(2, 3))
    assert seen
    assert is_bare(model, optimizer)


def step_until_done(interrupted, begin, attach, check, limit=3000):
    """Interrupt at each traced line of hookline's own code, one after the other."""
    for step in range(1, limit):
        begin()
        if not interrupted(
            step, ("hookline.engine.line.registration", "hookline.verbs.attach.on_"), attach
        ):
            return step
        check()
    raise AssertionError("it never came to an end")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*MODULE_KINDS, "saved", "grad", "accumulated", "step_pre", "load_state_dict_pre"]
)
def test_what_is_interrupted_while_it_attaches_is_not_attached(model, optimizer, kind, interrupted):
    def begin():
        nonlocal line
        line = hl.attach(model)
        line.options.quiet = True

    def attach():
        if kind == "step_pre":
            line.step_pre(optimizer, print)
        elif kind == "saved":
            line.saved("*", lambda t: t, lambda t: t)
        else:
            getattr(line, kind)("*", print)

    def check():
        assert is_bare(model, optimizer)
        assert line.taps == []

    line = None
    assert step_until_done(interrupted, begin, attach, check) > 10
    line.remove()
    assert is_bare(model, optimizer)


@pytest.mark.parametrize("kind", ["forward", "backward", "step_pre", "registered"])
def test_what_is_interrupted_everywhere_is_gone_with_the_line(model, optimizer, kind, interrupted):
    def begin():
        nonlocal line
        line = hl.attach(hl.EVERYWHERE)

    def attach():
        if kind == "registered":
            line.registered("module", print)
        else:
            getattr(line, kind)(None, print)

    def check():
        line.remove()
        assert is_bare(model, optimizer)

    line = None
    assert step_until_done(interrupted, begin, attach, check) > 5
    line.remove()
    assert is_bare(model, optimizer)


@pytest.mark.parametrize("kind", [*MODULE_KINDS, *STATE_KINDS, "saved"])
def test_attaching_is_all_or_nothing(model, optimizer, kind):
    model.add_module("scripted", torch.jit.script(nn.Sequential(nn.ReLU())))
    functions = [lambda t: t] * (1 + (kind == "saved"))
    line = hl.attach(model)
    if kind == "load_state_dict_pre":
        pytest.skip("torch calls this kind on a ScriptModule, too")
    with pytest.raises(hl.AttachError, match="ScriptModule") as caught:
        getattr(line, kind)(["0", "scripted"], *functions)
    assert len(str(caught.value).splitlines()) <= 3
    assert line.taps == []
    del model._modules["scripted"]
    assert is_bare(model, optimizer)


def test_a_line_that_holds_every_kind_keeps_nothing_alive():
    def one():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hl.attach(model) as line, hl.attach(hl.EVERYWHERE) as everywhere:
            line.options.quiet = True
            attach_all(line, model, optimizer)
            for kind in MODULE_KINDS:
                getattr(everywhere, kind)(None, lambda *_: None)
            y = model(torch.ones(2, 3))
            y.sum().backward()
            optimizer.step()
            model.load_state_dict(model.state_dict())
        return [weakref.ref(one) for one in (model, model[0], model[0].weight, y)]

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in one()] == [None] * 4
    finally:
        gc.enable()


# -- copies ---------------------------------------------------------------------------------------


def test_copies_are_clean_after_a_first_run_whose_pre_hook_fails(model, optimizer):
    seen = []

    def fail(module, args):
        raise ValueError("before the hooks of the line")

    with hl.attach(model) as line:
        line.options.quiet = True
        for kind in MODULE_KINDS:
            getattr(line, kind)("**", lambda *_: seen.append(1))
        line.saved("**", lambda t: seen.append(1) or t, lambda t: t)
        model[0].register_forward_pre_hook(fail, prepend=True)
        other = copy.deepcopy(model)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="before the hooks"):
        warnings.simplefilter("error")
        other(torch.ones(2, 3))
    for module in (model, other):
        module[0]._forward_pre_hooks.popitem(last=False)
    other(torch.ones(2, 3)).sum().backward()
    assert seen == []
    assert not len(hl.inventory(other))
    assert is_bare(other, copy.deepcopy(optimizer))


@pytest.mark.parametrize("has_foreign", [False, True])
def test_a_copy_with_several_hooks_on_its_state_dict_gives_one(model, has_foreign):
    with hl.attach(model) as line:
        line.options.quiet = True
        for _ in range(2):
            for kind in STATE_KINDS:
                getattr(line, kind)("", lambda *_: None)
        other = copy.deepcopy(model)
    if has_foreign:  # behind which nothing may be taken off while torch walks
        other.register_state_dict_pre_hook(lambda *_: None)
        other.register_load_state_dict_pre_hook(lambda *_: None)
    for _ in range(2):
        other.load_state_dict(other.state_dict())
    left = {kind for kind in hooks_of(other) if "state_dict" in kind}
    foreign = {"_state_dict_pre_hooks", "_load_state_dict_pre_hooks"}
    assert left == (foreign if has_foreign else set())
    assert not len(hl.inventory(model))


class Slow(nn.Parameter):
    """A parameter whose hook is registered while another thread acts."""

    meanwhile = None

    def register_hook(self, hook):
        if self.meanwhile is not None:
            self.meanwhile()
        return super().register_hook(hook)


def test_a_tensor_hook_may_be_removed_as_another_is_registered(monkeypatch):
    lock = ToldLock()
    monkeypatch.setattr(registration, "_lock", lock)
    model = nn.Linear(2, 1, bias=False)
    model.weight = Slow(torch.ones(1, 2))
    first = hl.record(model, "weight:grad", every_thread=True)
    first._line.options.quiet = True
    model.weight.meanwhile = Meanwhile(first.remove, lock)
    with hl.edit(model, "weight:grad", hl.edits.scale(2.0)):
        model.weight.meanwhile.end()
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("no")


@pytest.mark.parametrize("verb", [hl.record, lambda *a: hl.edit(*a, torch.sin), hl.watch])
@pytest.mark.parametrize("begins", [True, False])
def test_torch_refuses_any_line_in_a_hook_after_an_exception(verb, begins):
    """As docs/hooks.md says of every line, and not of those of hl.attach alone."""
    model = Raises()
    lines = [] if begins else [verb(model, "")]
    for _ in range(2):
        model.register_forward_hook(
            lambda *_: lines.append(verb(model, "")) if begins else lines[0].remove(),
            always_call=True,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)
        with pytest.raises(RuntimeError, match="OrderedDict mutated during iteration"):
            model(torch.ones(1))
        for line in lines:
            line.remove()


@pytest.fixture
def collects_after():
    """`collects_after(n)`: let Python collect garbage once n more objects are made."""
    thresholds = gc.get_threshold()
    yield lambda n: gc.set_threshold(n, 1000, 1000)
    gc.set_threshold(*thresholds)


@pytest.mark.filterwarnings("ignore:an hl.edit line was dropped:hookline.HooklineWarning")
def test_garbage_collected_while_a_line_attaches_harms_no_hook(collects_after):
    model = nn.Linear(2, 2)
    for n in range(1, 400, 3):
        collects_after(10**6)
        dropped = [hl.edit(model, "", lambda value: value)]
        dropped.append(dropped)
        del dropped
        collects_after(n)
        with hl.edit(model, "", lambda value: value * 0):
            collects_after(10**6)
            assert not model(torch.ones(1, 2)).any()
    gc.collect()
    assert not hooks_of(model)


def test_hooks_with_other_flags_never_have_the_same_id():
    # Torch takes the hooks of a call first and their flags later, when another thread may have
    # removed one hook and registered another.
    model, ids = nn.Sequential(nn.Linear(2, 2)), []
    for flags in ({}, {"with_kwargs": True}, {"always_call": True}):
        with hl.attach(model) as line:
            line.forward("0", lambda *_: None, **flags)
            model(torch.ones(1, 2))
            ids += model[0]._forward_hooks
    assert len(set(ids)) == 3
