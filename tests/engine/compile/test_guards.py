"""Marks: compiled code notices every hook that comes where none was, and modules are put back."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import pickle
import random
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters

import hookline as hl
from hookline.engine.compile import guards as marks
from hookline.engine.line.attachment import retry_interrupted
from thoroughness import tries

# Dynamo looks at the .grad of whatever comes into a graph, with or without hooks.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
OWNER, OTHER = object(), object()


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, k: float = 1.0):
        """One step."""
        return self.linear(x).tanh() * k


def doubled(self, x):
    return self.linear(x) * 2


class Block(nn.Sequential):
    """Torch does not compile its own `nn.Sequential` alone, but this."""

    def forward(self, x):
        return self[1](self[0](x))


def model_of_steps():
    torch.manual_seed(0)
    return nn.Sequential(*[Block(Step(), nn.ReLU()) for _ in range(3)])


class Triple:
    """A callable that is no function."""

    def __call__(self, module, x):
        return module.linear(x) * 3


def ninefold(x):
    return x * 9


def compiled(model, form, backend="eager"):
    options = {"backend": backend, "fullgraph": True}
    if form == "whole":
        return torch.compile(model, **options)
    for k, part in enumerate(list(model)):
        if form == "regional":
            part.compile(**options)
        else:
            model[k] = torch.compile(part, **options)
    return model


# What a module may have as a forward of its own.
OWN = {
    "method": lambda module: types.MethodType(doubled, module),
    "function": lambda module: lambda x: doubled(module, x),
    "partial": lambda module: functools.partial(doubled, module),
    "bound object": lambda module: types.MethodType(Triple(), module),
}
TRACEABLE = ["method", "function", "partial"]  # by dynamo, in all versions of torch


@pytest.fixture(autouse=True)
def whole(fresh_dynamo):
    yield
    assert not counters["graph_break"]


def lines(model, rng):
    """A line of any kind, at any places."""
    paths = rng.sample([f"{k}.{j}" for k in range(3) for j in range(2)], rng.randint(1, 3))
    kind = rng.choice(["output", "input", "both", "grad_output", "grad_input", "edit", "edit in"])
    if kind == "edit":
        return hl.edit(model, paths, hl.edits.scale(rng.choice([0.5, 2.0])))
    if kind == "edit in":
        return hl.edit(model, [f"{path}:input" for path in paths], hl.edits.scale(3.0))
    ports = ("output", "input") if kind == "both" else kind
    return hl.record(model, paths, ports=ports)


FORMS = ["whole", "regional", "parts"]


@pytest.mark.parametrize(
    ("form", "seed"),
    tries([*itertools.product(FORMS, range(3))], gate=[*zip(FORMS, (1, 0, 1), strict=True)]),
)
def test_lines_that_come_and_go_in_any_order_see_as_in_eager(form, seed):
    """Each state of the hooks is met by code that was compiled for another one."""
    rng = random.Random(seed)
    model = model_of_steps()
    if seed % 2:
        for step, own in zip(model, rng.sample(TRACEABLE, 3), strict=True):
            step[0].forward = OWN[own](step[0])
    call = compiled(model, form)
    own = [vars(module).get("forward") for module in model.modules()]
    call(X)
    with config.patch(recompile_limit=1000), contextlib.ExitStack() as stack:
        open_lines = []
        for _ in range(11):
            if open_lines and rng.random() < 0.45:
                open_lines.pop(rng.randrange(len(open_lines))).close()
            else:
                ends = contextlib.ExitStack()
                ends.line = ends.enter_context(lines(model, rng))
                stack.push(ends)
                open_lines.append(ends)
            found = call(X.clone().requires_grad_())
            found.sum().backward()
            with torch.compiler.set_stance("force_eager"):
                expected = call(X.clone().requires_grad_())
                expected.sum().backward()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            for run in (ends.line for ends in open_lines):
                if isinstance(run, hl.Recording):
                    mine, theirs = run.passes[-2], run.passes[-1]
                    assert list(mine) == list(theirs)
                    assert len(mine) > 0
                    for site in mine:
                        torch.testing.assert_close(mine[site], theirs[site], rtol=0, atol=0)
    assert own == [vars(module).get("forward") for module in model.modules()]


@pytest.mark.parametrize("form", FORMS)
def test_an_edit_beside_other_hooks_is_honoured_each_time(form):
    """Code that was compiled without it, and without a guard on its place, is not served again."""
    model = model_of_steps()
    call, plain = compiled(model, form), model(X)
    with hl.record(model, "1.0") as seen:
        for _ in range(3):
            assert torch.equal(call(X), plain)
            with hl.edit(model, "1.0:input", hl.edits.scale(2.0)):
                edited = call(X)
            with torch.compiler.set_stance("force_eager"):
                with hl.edit(model, "1.0:input", hl.edits.scale(2.0)):
                    assert torch.equal(edited, call(X))
            assert not torch.equal(edited, plain)
    assert len(seen.passes) == 9


@pytest.mark.parametrize("own", [None, *OWN])
def test_a_marked_module_does_what_it_did_and_is_restored(own):
    module = Step()
    if own is not None:
        module.forward = OWN[own](module)
    before, expected = vars(module).get("forward"), module(X)
    for owner in (OWNER, OTHER, OWNER):
        marks.mark_forward(module, owner)
        assert vars(module)["forward"] is not before
        assert torch.equal(module(X), expected)
    for owner in (OWNER, OWNER):
        marks.unmark_forward(module, owner)
        assert vars(module)["forward"] is not before
    marks.unmark_forward(module, OTHER)
    marks.unmark_forward(module, OTHER)
    assert vars(module).get("forward") is before
    assert ("forward" in vars(module)) == (own is not None)


def test_an_interrupt_at_any_line_of_unmarking_leaves_no_mark(interrupted):
    module, step, is_interrupted = nn.Linear(2, 2), 0, True
    while is_interrupted:
        step += 1
        of_line = marks.ForwardMarks()
        of_line.mark_modules([module])
        assert "forward" in vars(module)
        is_interrupted = interrupted(
            step, (marks.__name__,), partial(retry_interrupted, of_line.clear)
        )
        assert "forward" not in vars(module), step
        assert module not in marks._owners, step
    assert step > 8


def test_a_mark_is_the_same_for_the_same_kinds_of_hooks_only():
    """Or each line would need code of its own; or none would be noticed."""
    module, codes = Step(), []
    for ports in ("output", "input", ("output", "input"), "output", "input"):
        marks.mark_forward(module, OWNER)
        with hl.record(module, "linear", ports=ports):
            module(X)
            marks.mark_forward(module.linear, OWNER)
            codes.append(module.linear.forward.__func__.__code__)
        assert module.linear.forward.__func__.__code__ not in map(Same, codes)
        marks.unmark_forward(module.linear, OWNER)
    assert len({id(code) for code in codes}) == 3
    assert codes[0] is codes[3]
    assert codes[1] is codes[4]
    assert nn.Linear.forward.__code__ not in map(Same, codes)


class Same:
    """Equal to a thing only: copies of code are equal."""

    def __init__(self, thing):
        self.thing = thing

    def __eq__(self, other):
        return self.thing is other


@pytest.mark.parametrize("own", TRACEABLE)
def test_lines_on_a_module_with_its_own_forward_are_one_graph(own):
    model = nn.Sequential(Step())
    model[0].forward = OWN[own](model[0])
    call, expected = torch.compile(model, backend="eager", fullgraph=True), model(X)
    call(X)
    for _ in range(12):
        with hl.record(model, "0") as seen:
            assert torch.equal(call(X), expected)
        assert torch.equal(seen["0"], expected)
    assert counters["stats"]["unique_graphs"] == 2


WRAPS = {
    "wraps": lambda forward: functools.wraps(forward)(lambda x: forward(x) + 100),
    "update_wrapper": lambda forward: functools.update_wrapper(
        functools.partial(lambda inner, x: inner(x) + 100, forward), forward
    ),
}


@pytest.mark.parametrize("how", WRAPS)
def test_what_wraps_a_mark_under_a_line_is_the_users_and_stays(how):
    model = nn.Sequential(Step())
    expected = model(X) + 100
    torch.compile(Step(), backend="eager")(X)
    with hl.record(model, "0"):
        model[0].forward = wrapper = WRAPS[how](model[0].forward)
        assert torch.equal(model(X), expected)
        with hl.edit(model, "0:input", hl.edits.scale(1.0)):
            assert torch.equal(model(X), expected)
    assert vars(model[0])["forward"] is wrapper
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("form", ["regional", "parts"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_mark_that_was_kept_and_put_back_hides_no_line(form, is_replaced):
    model, step = nn.Sequential(Block(Step(), nn.Tanh())), Step()
    model[0][0] = step
    call = compiled(model, form)
    call(X)
    with hl.edit(model, "0.0", hl.edits.scale(2.0)):
        call(X)
        kept = step.forward
        if is_replaced:
            step.forward = OWN["function"](step)
    step.forward = kept
    expected = call(X)
    for _ in range(2):
        with hl.edit(model, "0.0", hl.edits.scale(0.0)), hl.record(model, "0.0") as seen:
            assert not torch.equal(call(X), expected)
        assert not seen["0.0"].any()
        assert torch.equal(call(X), expected)
    assert "forward" not in vars(step)


def test_a_forward_not_to_be_compiled_is_not_under_a_line_either():
    class Off(Step):
        @torch.compiler.disable(recursive=False)
        def forward(self, x):
            return self.linear(x) * (5.0 if torch.compiler.is_compiling() else 1.0)

    model = nn.Sequential(Block(Off(), nn.ReLU()))
    call, expected = torch.compile(model, backend="eager"), model(X)
    assert torch.equal(call(X), expected)
    with hl.edit(model, "0.0", hl.edits.scale(2.0)):
        assert torch.equal(call(X), expected * 2)
    counters.clear()  # such a forward breaks the graph, with a line or without


def test_a_part_with_a_function_for_a_forward_is_pickled():
    model = nn.Sequential(Step())
    model[0].forward = ninefold
    torch.compile(Step(), backend="eager")(X)
    with hl.record(model, "0"):
        other = pickle.loads(pickle.dumps(model))
        assert torch.equal(other(X), model(X))
    assert vars(other[0])["forward"] is ninefold
    assert vars(model[0])["forward"] is ninefold


def test_a_forward_that_is_a_property_is_left_alone():
    class Odd(Step):
        @property
        def forward(self):
            return lambda x: self.linear(x) * 4

    model = nn.Sequential(Block(Odd(), nn.ReLU()))
    call, expected = torch.compile(model, backend="eager"), model(X)
    call(X)
    with hl.record(model, "0.0") as seen:
        assert torch.equal(call(X), expected)
    assert torch.equal(seen["0.0"].relu(), expected)
    assert "forward" not in vars(model[0][0])


@pytest.mark.parametrize("own", [None, *OWN])
def test_inputs_have_the_same_names_under_a_mark(own):
    model = nn.Sequential(Step())
    if own is not None:
        model[0].forward = OWN[own](model[0])
    before = str(inspect.signature(model[0].forward))
    marks.mark_forward(model[0], OWNER)
    assert str(inspect.signature(model[0].forward)) == before
    marks.unmark_forward(model[0], OWNER)


def test_inputs_of_a_forward_in_c_keep_their_names_under_a_mark():
    model = nn.Sequential(Step())
    model[0].forward = torch.atan2
    found = []
    for is_marked in (False, True):
        if is_marked:
            marks.mark_forward(model[0], OWNER)
        with hl.record(model, "0", ports="input") as seen:
            model[0](X, X)
        found.append(list(seen["0:input"]))
    assert found[0] == found[1]
    marks.unmark_forward(model[0], OWNER)


class Alike(Step):
    """Modules that are all equal."""

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


class Hashless(Alike):
    """Torch runs them; it does not compile them."""

    __hash__ = None


@pytest.mark.parametrize("form", ["eager", "whole", "method"])
def test_modules_that_are_all_equal_are_marked_one_by_one(form):
    torch.manual_seed(0)
    kind = Hashless if form == "eager" else Alike
    model = nn.ModuleDict({"a": kind(), "b": kind()})
    model.forward = lambda x: model["b"](model["a"](x))
    call = model
    if form == "whole":
        call = torch.compile(model, backend="eager", fullgraph=True)
    elif form == "method":
        for part in model.values():
            part.compile(backend="eager", fullgraph=True)
    expected = call(X)
    for path in ("a", "b", "*"):
        with hl.record(model, path) as seen, hl.edit(model, "a", hl.edits.scale(0.0)):
            assert torch.equal(call(X), model["b"](torch.zeros(2, 4)))
        with hl.record(model, path) as seen:
            assert torch.equal(call(X), expected)
        assert all(torch.equal(seen["b"], expected) for _ in seen if path != "a")
    assert not any("forward" in vars(part) for part in model.values())


def test_a_mark_looks_like_the_forward_that_it_stands_for():
    module = Step()
    marks.mark_forward(module, OWNER)
    assert module.forward.__doc__ == "One step."
    assert module.forward.__qualname__ == "Step.forward"
    assert module.forward.__annotations__ == Step.forward.__annotations__
    assert torch.equal(module(X, k=2.0), module(X) * 2)
    marks.unmark_forward(module, OWNER)


def test_a_forward_that_needs_no_self_is_called_without():
    class Static(nn.Module):
        @staticmethod
        def forward(x):
            return x + 1

    module = Static()
    marks.mark_forward(module, OWNER)
    assert torch.equal(module(X), X + 1)
    marks.unmark_forward(module, OWNER)
    assert vars(module).get("forward") is None


def test_what_somebody_puts_in_the_place_of_a_mark_stays():
    module = Step()
    marks.mark_forward(module, OWNER)
    module.forward = theirs = OWN["function"](module)
    marks.unmark_forward(module, OWNER)
    assert vars(module)["forward"] is theirs


def test_a_reloaded_forward_is_marked_with_the_new_code():
    def forward(self, x):
        return x

    def reloaded(self, x):
        return x + 1

    module = type("Net", (nn.Module,), {"forward": forward})()
    marks.mark_forward(module, OWNER)
    assert torch.equal(module(X), X)
    marks.unmark_forward(module, OWNER)
    forward.__code__ = reloaded.__code__
    marks.mark_forward(module, OWNER)
    assert torch.equal(module(X), X + 1)
    marks.unmark_forward(module, OWNER)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module))}
# The others cannot be pickled: with a mark or without.
COPIED = [("deepcopy", own) for own in (None, *OWN)] + [("pickle", None), ("pickle", "partial")]


@pytest.mark.parametrize(("how", "own"), COPIED)
def test_copies_of_marked_modules_shed_it_and_are_their_own(how, own):
    module = Step()
    if own is not None:
        module.forward = OWN[own](module)
    marks.mark_forward(module, OWNER)
    other = COPIES[how](module)
    marks.unmark_copied_module(other)
    marks.unmark_forward(module, OWNER)
    assert type(vars(other).get("forward")) is type(vars(module).get("forward"))
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.zero_()
    # A closure holds the original, as it would without a mark.
    assert other(X).any() == (own == "function")


@pytest.mark.parametrize("own", [None, *OWN])
def test_a_marked_module_that_nobody_holds_is_freed(own):
    module = Step()
    if own is not None:
        module.forward = OWN[own](module)
    marks.mark_forward(module, OWNER)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_by_default_compiled_code_sees_forwards_not_first_hooks(kind):
    """When torch notices the hook, marks can go; when it does not notice the forward, they must."""
    module, seen = nn.Sequential(Step()), []
    call = torch.compile(module, backend="eager", fullgraph=True)
    x = X.clone().requires_grad_()
    call(x)
    handle = getattr(module[0], f"register_{kind}_hook")(lambda *values: seen.append(kind))
    call(x).sum().backward()
    assert not seen
    handle.remove()
    module[0].forward = types.MethodType(doubled, module[0])
    assert torch.equal(call(x), doubled(module[0], x))


@pytest.fixture
def shift():
    """A model of two classes of its own, in a process where something was compiled."""
    torch.compile(lambda x: x + 1, backend="eager")(X)

    class Inner(nn.Module):
        def forward(self, x):
            return x + 1

    class Other(nn.Module):
        def forward(self, x):
            return x + 20

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    model.others = Inner, Other, Outer
    return model


def plus_300(self, x):
    return x + 300


def replace_forward(model):
    type(model.inner).forward = plus_300
    return 300


def replace_class(model):
    model.inner.__class__ = model.others[1]
    return 20


@pytest.mark.parametrize("replace", [replace_forward, replace_class])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_part_of_another_class_runs_what_that_has(shift, replace, is_compiled):
    call = torch.compile(shift, backend="eager") if is_compiled else shift
    zero = torch.zeros(1)
    with hl.record(shift, "inner") as run:
        assert call(zero) == 1
        expected = replace(shift)
        assert call(zero) == expected
    assert [one["inner"].item() for one in run.passes] == [1, expected]
    assert "forward" not in vars(shift.inner)
    assert call(zero) == expected


def test_a_root_is_not_run_with_a_forward_its_class_had(shift):
    with hl.record(shift) as run:
        assert shift(torch.zeros(1)) == 1
        type(shift).forward = plus_300
        with pytest.raises(hl.AttachError, match="Outer got another forward while this line is on"):
            shift(torch.zeros(1))
        assert run.passes[-1].failed  # at once, not when the next pass begins
        assert shift(torch.zeros(1)) == 300
    assert [one.failed for one in run.passes] == [False, True, False]


def test_a_part_by_hand_is_not_run_with_the_old_forward(shift):
    with hl.record(shift, "inner"):
        assert shift(torch.zeros(1)) == 1
        expected = replace_forward(shift)
        with pytest.raises(hl.AttachError, match="Inner got another forward"):
            shift.inner(torch.zeros(1))
        assert shift.inner(torch.zeros(1)) == expected


def test_a_second_line_on_a_part_has_the_forward_of_its_class(shift):
    with hl.record(shift, "inner"):
        shift(torch.zeros(1))
        expected = replace_forward(shift)
        with hl.record(shift, "inner") as run:
            assert shift(torch.zeros(1)) == expected
        assert run["inner"].item() == expected


def test_a_recompiled_graph_module_runs_its_new_graph():
    torch.compile(lambda x: x + 1, backend="eager")(X)
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    model = nn.Sequential(traced)
    with hl.record(model, "0") as run:
        assert model(torch.tensor([-1.0])) == 0
        node = next(one for one in traced.graph.nodes if one.op == "call_module")
        node.replace_all_uses_with(next(iter(traced.graph.nodes)))
        traced.recompile()
        assert model(torch.tensor([-1.0])) == -1
    assert [one["0"].item() for one in run.passes] == [0, -1]


def test_marks_may_be_removed_while_they_are_renewed(monkeypatch):
    found = marks.ForwardMarks()
    found.mark_modules([nn.Linear(1, 1), nn.ReLU()])
    monkeypatch.setattr(marks, "renew_mark", lambda module: found.clear())
    assert found.renew_all() == []
