"""EVERYWHERE: any model, this context only."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import warnings
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as tables
from torch.testing import assert_close

import hookline as hl
from second_thread import in_autograds_thread
from thoroughness import examples, tries

MODULE_KINDS = ["forward_pre", "forward", "backward_pre", "backward"]
STATE_KINDS = ["state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict"]


def nothing_is_left(model):
    """Whether nothing is hooked: not on the model, not in torch, not what autograd saves."""
    optimizers = vars(sys.modules["torch.optim.optimizer"])
    on_torch = [
        name for place in (vars(tables), optimizers) for name, found in place.items()
        if name.startswith("_global_") and isinstance(found, dict)
        # an export that fails leaves a hook of torch's own
        and any(not hook.__module__.startswith("torch._functorch.") for hook in found.values())
    ]  # fmt: skip
    a = torch.ones(2, requires_grad=True)
    return not on_torch and not len(hl.inventory(model)) and (a * a).grad_fn._saved_self is a


def test_modules_of_every_model_are_seen():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward_pre(nn.Linear, lambda module, args: seen.append("pre"))
        line.forward([nn.Linear, nn.ReLU], lambda module, args, out: seen.append(type(module)))
        nn.Sequential(nn.Linear(1, 1), nn.ReLU())(torch.zeros(1))
        nn.Linear(1, 1)(torch.zeros(1))
    nn.Linear(1, 1)(torch.zeros(1))
    assert seen == ["pre", nn.Linear, nn.ReLU, "pre", nn.Linear]
    assert not hl.inventory(nn.Linear(1, 1))


def test_values_can_be_replaced_everywhere():
    layer = nn.Linear(1, 1)
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward_pre(None, lambda module, args: (args[0] * 0,))
        line.forward(None, lambda module, args, kwargs, out: out + 1, with_kwargs=True)
        assert layer(torch.ones(1)).item() == layer.bias.item() + 1


@pytest.mark.trap(42)
def test_another_thread_sees_nothing():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward(None, lambda module, args, out: seen.append(threading.get_ident()))
        thread = threading.Thread(target=nn.Linear(1, 1), args=(torch.zeros(1),))
        thread.start()
        thread.join()
        nn.Linear(1, 1)(torch.zeros(1))
    assert seen == [threading.get_ident()]


def test_async_tasks_are_apart():
    seen = {"a": 0, "b": 0}

    async def train(name, gate, other):
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward(None, lambda *a: seen.__setitem__(name, seen[name] + 1))
            for _ in range(3):
                nn.Linear(1, 1)(torch.zeros(1))
                other.set()
                await gate.wait()
                gate.clear()
            other.set()

    async def both():
        one, two = asyncio.Event(), asyncio.Event()
        await asyncio.gather(train("a", one, two), train("b", two, one))

    asyncio.run(both())
    assert seen == {"a": 3, "b": 3}


def test_torchs_process_wide_hooks_are_there_only_while_needed():
    tables = torch.nn.modules.module
    outer = hl.attach(hl.EVERYWHERE)
    assert not tables._has_any_global_hook()
    outer.forward(None, lambda *a: None)
    with hl.attach(hl.EVERYWHERE) as inner:
        inner.forward(None, lambda *a: None)
        assert len(tables._global_forward_hooks) == 1
    assert len(tables._global_forward_hooks) == 1
    outer.remove()
    assert not tables._has_any_global_hook()


def test_what_has_no_meaning_everywhere_is_refused():
    with hl.attach(hl.EVERYWHERE) as line:
        with pytest.raises(hl.SelectionError, match="must need no paths"):
            line.forward("layer1.*", print)
        with pytest.raises(hl.AttachError, match="no keyword arguments"):
            line.forward_pre(None, print, with_kwargs=True)
        with pytest.raises(hl.AttachError, match="always_call"):
            line.forward(None, print, always_call=True)
    with pytest.raises(hl.AttachError, match="record needs a model"):
        hl.record(hl.EVERYWHERE)


def test_a_hook_that_is_refused_leaves_nothing_on_torch():
    line = hl.attach(hl.EVERYWHERE)
    with pytest.raises(hl.SelectionError):
        line.forward("layer*", print)
    assert not torch.nn.modules.module._has_any_global_hook()
    assert line.taps == []


def train(model, steps, meet, seen):
    """Build nothing, train, and wait for the other at each stage."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        meet.wait()
        loss = model(torch.ones(2, 3)).square().sum()
        meet.wait()
        loss.backward()
        meet.wait()
        optimizer.step()
        optimizer.zero_grad()
        model.register_buffer("seen", torch.tensor(len(seen)))


def test_of_two_threads_that_train_only_the_lines_own_is_seen():
    torch.manual_seed(0)
    mine, theirs = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    seen, errors, meet = [], [], threading.Barrier(2, timeout=30)

    def other():
        try:
            train(theirs, 3, meet, [])
        except BaseException as error:
            errors.append(error)
            meet.abort()

    thread = threading.Thread(target=other)
    thread.start()
    with hl.attach(hl.EVERYWHERE) as line:
        for kind in MODULE_KINDS:
            getattr(line, kind)(None, lambda m, *_, kind=kind: seen.append((kind, m)))
        line.registered("buffer", lambda m, *_: seen.append(("buffer", m)))
        for kind in ("step_pre", "step_post"):
            getattr(line, kind)(None, lambda o, *_, kind=kind: seen.append((kind, o)))
        train(mine, 3, meet, seen)
        thread.join()
    assert errors == []
    kinds = [kind for kind, owner in seen if owner is mine]
    assert kinds == [*MODULE_KINDS, "buffer"] * 3
    assert [kind for kind, _ in seen].count("step_pre") == 3
    assert [kind for kind, _ in seen].count("step_post") == 3
    assert not any(owner in (theirs, theirs[0]) for _, owner in seen)
    assert nothing_is_left(mine)


def test_a_backward_in_a_foreign_thread_belongs_to_its_line():
    seen, model = [], nn.Linear(3, 2)
    with hl.attach(hl.EVERYWHERE) as line:
        line.backward_pre(None, lambda *_: seen.append("before"))
        line.backward(None, lambda *_: seen.append("after"))
        in_autograds_thread(model(torch.ones(2, 3, requires_grad=True)).sum().backward)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nested_lines_end_one_by_one_also_by_an_exception(error):
    model, log = nn.Linear(3, 2), []
    with hl.attach(hl.EVERYWHERE) as outer:
        outer.forward(None, lambda *_: log.append("outer"))
        with pytest.raises(error), hl.attach(hl.EVERYWHERE) as inner:
            inner.forward(None, lambda *_: log.append("inner"))
            inner.backward(None, lambda *_: log.append("back"))
            model(torch.ones(1, 3)).sum().backward()
            raise error
        model(torch.ones(1, 3)).sum().backward()
    assert log == ["outer", "inner", "back", "outer"]
    assert nothing_is_left(model)


def test_a_task_started_inside_sees_the_line_one_before_does_not():
    seen = []

    async def run(gate):
        await gate.wait()
        nn.Linear(1, 1)(torch.zeros(1, requires_grad=True)).sum().backward()

    async def both():
        gate = asyncio.Event()
        before = asyncio.create_task(run(gate))
        with hl.attach(hl.EVERYWHERE) as line:
            line.backward(None, lambda *_: seen.append("back"))
            inside = asyncio.create_task(run(gate))
            gate.set()
            await asyncio.gather(before, inside)

    asyncio.run(both())
    assert seen == ["back"]


@pytest.mark.parametrize("kind", [*STATE_KINDS, "grad", "accumulated"])
def test_what_torch_has_no_process_wide_hooks_for_is_refused(kind):
    with hl.attach(hl.EVERYWHERE) as line, pytest.raises(hl.AttachError) as caught:
        getattr(line, kind)("fc", print)
    assert "hl.attach(model)" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


# -- order in forward -----------------------------------------------------------------------------


@pytest.mark.slow
def test_forward_order_is_the_same_whatever_was_attached_first():
    acts = ["edit", "hook", "prepended", "record", "everywhere", "saved", "backward"]
    for order in itertools.permutations(acts, tries(5, gate=3)):
        model, log = nn.Sequential(nn.Tanh()), []

        def note(name, log=log):
            return lambda *_: log.append(name)

        def keep(value, log=log):
            log.append("record")
            return value

        with ExitStack() as stack:
            for name in order:
                if name == "edit":
                    see = note("edit")
                    stack.enter_context(hl.edit(model, "0", lambda t, see=see: see(t) or t))
                elif name == "record":
                    stack.enter_context(hl.record(model, "0", keep=keep))
                elif name == "everywhere":
                    line = stack.enter_context(hl.attach(hl.EVERYWHERE))
                    line.forward(nn.Tanh, note("everywhere"))
                else:
                    line = stack.enter_context(hl.attach(model))
                    line.options.quiet = True
                    if name == "saved":
                        line.saved("0", lambda t: t, lambda t: t)
                    elif name == "backward":
                        line.backward("0", note("backward"))
                    else:
                        line.forward("0", note(name), prepend=name == "prepended")
            model(torch.ones(2, requires_grad=True))
        # `prepend` is before what is there at that time.
        hooks = [name for name in order if name in ("hook", "prepended")]
        hooks = ["prepended", "hook"] if len(hooks) == 2 else hooks
        expected = ["everywhere", "edit", *hooks, "record"]
        assert log == [name for name in expected if name in order], order


# -- any model, any hooks, any failure ------------------------------------------------------------


@st.composite
def trees(draw, depth=2):
    """A small tree of modules that takes and returns 2 x 3 numbers."""
    leaf = st.sampled_from([nn.Linear, nn.Tanh, nn.Identity, nn.ReLU, nn.LayerNorm])
    if depth == 0 or draw(st.booleans()):
        kind = draw(leaf)
        sizes = {nn.Linear: (3, 3), nn.LayerNorm: (3,)}.get(kind, ())
        return (
            kind(*sizes, inplace=True) if kind is nn.ReLU and draw(st.booleans()) else kind(*sizes)
        )
    children = draw(st.lists(trees(depth=depth - 1), min_size=1, max_size=3))
    return nn.Sequential(*children, *children[: draw(st.integers(0, 1))])


KINDS = [*MODULE_KINDS, "saved", "grad", "accumulated", *STATE_KINDS]


def run(model):
    model.zero_grad()
    x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    y = model(x * 2)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(model=trees(), data=st.data())
def test_hooks_of_any_kind_and_order_change_and_leave_nothing(model, data):
    try:
        expected = run(model)
    except RuntimeError:  # an in-place layer where torch allows none
        assume(False)
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    fails = data.draw(st.sampled_from([None, None, *kinds]))
    is_everywhere = data.draw(st.lists(st.booleans(), min_size=6, max_size=6))
    has_parameters = any(True for _ in model.parameters())

    def hook(kind):
        def call(*values):
            if kind == fails:
                raise ArithmeticError(kind)

        return call

    def keep(call):
        return lambda tensor: call(tensor) or tensor

    with ExitStack() as stack:
        line, everywhere = hl.attach(model), hl.attach(hl.EVERYWHERE)
        line.options.quiet = True
        stack.enter_context(pytest.raises(ArithmeticError) if fails else ExitStack())
        stack.enter_context(line)
        stack.enter_context(everywhere)
        for kind, wide in zip(kinds, is_everywhere, strict=False):
            prepend = {"prepend": data.draw(st.booleans())} if kind in MODULE_KINDS else {}
            if kind == "saved":
                line.saved("**", keep(hook(kind)), lambda t: t)
            elif wide and kind in MODULE_KINDS:
                getattr(everywhere, kind)(None, hook(kind), **prepend)
            elif has_parameters or kind not in ("grad", "accumulated"):
                getattr(line, kind)("**", hook(kind), **prepend)
        found = run(model)
        model.load_state_dict(model.state_dict())
        assert all(map(torch.equal, found, expected))
        if fails:
            raise ArithmeticError("nothing of the kind was saved or hooked here")
    assert nothing_is_left(model)
    assert all(map(torch.equal, run(model), expected))


# -- the line itself ------------------------------------------------------------------------------


def test_a_line_everywhere_is_entered_once():
    with hl.attach(hl.EVERYWHERE) as line:
        line.options.quiet = True
        with pytest.raises(hl.AttachError, match="is on already"):
            line.__enter__()
    with pytest.raises(hl.AttachError, match="has ended"):
        line.__enter__()


def test_a_named_tensor_or_optimizer_is_seen_in_its_context():
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen = []

    def step():
        weight.square().sum().backward()
        optimizer.step()

    with hl.attach(hl.EVERYWHERE) as line:
        line.grad(weight, lambda grad: seen.append("grad"))
        line.accumulated(weight, lambda tensor: seen.append("accumulated"))
        line.step_pre(optimizer, lambda *_: seen.append("step"))
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert seen == []
        step()
    assert seen == ["grad", "accumulated", "step"]


def test_a_signal_handler_may_attach_while_a_line_is_attached():
    from hookline.verbs.attach.everywhere import DISPATCHER

    with DISPATCHER._lock, hl.attach(hl.EVERYWHERE) as line:
        line.forward(nn.Linear, lambda *_: None)
        nn.Linear(1, 1)(torch.ones(1))


# -- in torch's order, and interrupted anywhere ----------------------------------------------------


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
@pytest.mark.parametrize("n_lines", [1, 2])
def test_each_hook_gets_what_the_one_before_it_made(kind, n_lines):
    seen = []

    def add_one(module, args, *output):
        value = output[0] if output else args[0]
        seen.append(value.item())
        return value + 1

    with ExitStack() as stack:
        lines = [stack.enter_context(hl.attach(hl.EVERYWHERE)) for _ in range(n_lines)]
        for number in range(3):
            getattr(lines[number % n_lines], kind)(nn.Identity, add_one)
        assert nn.Identity()(torch.zeros(1)).item() == 3
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("first", ["backward_pre", "backward"])
@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("n_lines", [1, 2])
def test_the_hooks_before_backward_come_before_it_as_in_torch(first, needs_input, n_lines):
    model, log = nn.Linear(2, 1), []

    def before(module, grad_output):
        log.append(("before", grad_output[0].item()))
        return grad_output[0] * 2

    def after(module, grad_input, grad_output):
        log.append(("after", grad_output[0].item()))

    kinds = (
        ["backward_pre", "backward"] if first == "backward_pre" else ["backward", "backward_pre"]
    )
    with ExitStack() as stack:
        lines = [stack.enter_context(hl.attach(hl.EVERYWHERE)) for _ in range(n_lines)]
        for line, kind in zip(lines * 2, kinds, strict=False):
            getattr(line, kind)(nn.Linear, before if kind == "backward_pre" else after)
        model(torch.ones(1, 2, requires_grad=needs_input)).sum().backward()
    assert log == [("before", 1.0), ("after", 2.0)]


def test_backward_hooks_are_on_what_the_forward_hooks_made():
    grads = []
    with hl.attach(hl.EVERYWHERE) as line:
        line.backward_pre(
            nn.Linear, lambda module, grad_output: grads.append(grad_output[0].item())
        )
        line.forward(nn.Linear, lambda module, args, output: output * 3)
        (nn.Linear(2, 1)(torch.ones(1, 2)) * 5).sum().backward()
    assert grads == [5.0]


def test_a_hook_may_be_removed_while_torch_calls_its_modules():
    model, line = nn.Identity(), hl.attach(hl.EVERYWHERE)
    line.forward(None, lambda *_: None)
    # By now torch has listed the hooks; of the next one it has yet to see that it wants kwargs.
    handle = tables.register_module_forward_hook(lambda *_: line.remove())
    tables._global_forward_hooks.move_to_end(handle.id, last=False)
    assert model(torch.zeros(1)) == 0
    handle.remove()
    assert nothing_is_left(model)


@pytest.mark.filterwarnings("ignore:an hl.attach line was dropped")
@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_nothing_on_torch(interrupted):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def action():
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward_pre(None, lambda *_: None)
            line.backward(None, lambda *_: None)
            line.registered("buffer", lambda *_: None)
            line.step_pre(None, lambda *_: None)
            model(x).sum().backward()
            optimizer.step()

    step = 1
    while interrupted(step, ("hookline.",), action):
        assert nothing_is_left(model), step
        step += 1
    assert step > 500


class TwoResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.one(x), self.other(x)


def doubled(module, grad_output):
    return tuple(grad * 2 for grad in grad_output)


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), TwoResults])
@pytest.mark.parametrize("changer", ["line", "edit"])
@pytest.mark.parametrize("is_first", [True, False])
def test_backward_everywhere_reads_what_modules_own_hooks_made(
    changer, is_first, make, needs_input
):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    x = torch.rand(3, 2, requires_grad=needs_input)

    def came_to(attached):
        came = []
        with ExitStack() as stack:
            for attach in attached if is_first else reversed(attached):
                attach(stack, lambda module, given, grads: came.append((type(module), grads)))
            found = model(x)
            (found if torch.is_tensor(found) else found[0] * found[1]).square().sum().backward()
        return came

    def by_torch(stack, see):
        stack.enter_context(tables.register_module_full_backward_hook(see))

    def by_line(stack, see):
        stack.enter_context(hl.attach(hl.EVERYWHERE)).backward(None, see)

    def own_by_torch(stack, see):
        stack.enter_context(model[0].register_full_backward_pre_hook(doubled))

    def own_by_line(stack, see):
        if changer == "line":
            stack.enter_context(hl.attach(model)).backward_pre("0", doubled)
        else:
            stack.enter_context(hl.edit(model, "0:grad_output", hl.edits.scale(2)))

    with warnings.catch_warnings():  # torch's, of inputs that need no gradient
        warnings.simplefilter("ignore" if not needs_input else "error")
        expected = came_to([own_by_torch, by_torch])
    found = came_to([own_by_line, by_line])
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    assert_close([grads for _, grads in found], [grads for _, grads in expected])


def test_it_is_shown_as_it_is_written():
    assert repr(hl.EVERYWHERE) == "hl.EVERYWHERE"


def test_a_hook_removed_everywhere_leaves_the_others():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        first = line.forward(None, lambda *_: seen.append("first"))
        line.forward(None, lambda *_: seen.append("second"))
        first.remove()
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert seen == ["second"]
