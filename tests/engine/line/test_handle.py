"""The handle of what one call on a line registered."""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as tables
from torch.optim import optimizer as steps

import hookline as hl
from second_thread import Meanwhile, ToldLock

MODULE_KINDS = ["forward_pre", "forward", "backward_pre", "backward"]
STATE_KINDS = ["state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict"]
EVENT_KINDS = ["registered", "step_pre", "step_post"]
KINDS = [
    *MODULE_KINDS, *STATE_KINDS, *EVENT_KINDS, "saved", "grad", "accumulated", "optimizer_state",
    "forward_pre_with_kwargs", "forward_always",
]  # fmt: skip
EVERYWHERE_KINDS = [*MODULE_KINDS, *EVENT_KINDS]
# Each kind on a line of a model, and where torch has it, on one of every model.
BOTH = [(kind, False) for kind in KINDS] + [(kind, True) for kind in EVERYWHERE_KINDS]
INTERRUPTED = [
    "forward", "backward", "saved", "grad", "step_pre", "registered", "load_state_dict_pre",
    "forward_pre_with_kwargs",
]  # fmt: skip


class Case:
    """A model that is trained for one step, and hooks of each kind on it."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self):
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self.model.load_state_dict(self.model.state_dict())
        self.optimizer.state_dict()
        self.model.register_module("extra", None)
        self.model.register_module("extra", nn.Identity())
        del self.model._modules["extra"]

    def hook(self, line, kind, note):
        """Register a hook of a kind at several sites, and give its handle."""

        def fn(*_):
            note()

        if kind == "saved":
            return line.saved("*", lambda t: note() or t.detach(), lambda t: t)
        if kind == "registered":
            return line.registered("module", fn)
        if kind in ("step_pre", "step_post"):
            return getattr(line, kind)(None if line.is_everywhere else self.optimizer, fn)
        if kind == "optimizer_state":
            return line.state_dict(self.optimizer, fn)
        if kind == "forward_pre_with_kwargs":
            return line.forward_pre("*", fn, with_kwargs=True)
        if kind == "forward_always":
            return line.forward("*", fn, with_kwargs=True, always_call=True)
        return getattr(line, kind)(None if line.is_everywhere else "*", fn)

    def hooks(self):
        """Every hook that torch knows of, and what marks it."""
        owners = [*self.model.modules(), self.optimizer, *self.model.parameters()]
        tensor_hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return [
            {
                name: list(found)
                for name in {*vars(owner), *tensor_hooks}
                if "_hooks" in name and (found := getattr(owner, name, None))
            }
            for owner in owners
        ] + [
            {name: list(found) for name, found in vars(place).items()
             if name.startswith("_global_") and isinstance(found, dict) and found}
            for place in (tables, steps)
        ]  # fmt: skip


@pytest.fixture
def case():
    return Case()


def line_of(case, is_everywhere):
    return hl.attach(hl.EVERYWHERE if is_everywhere else case.model)


@pytest.mark.parametrize(("kind", "is_everywhere"), BOTH)
def test_it_takes_off_what_its_call_registered_and_no_more(case, kind, is_everywhere):
    mine, others = [], []
    with line_of(case, is_everywhere) as line:
        for other in EVERYWHERE_KINDS if is_everywhere else KINDS:
            if other == kind:
                continue
            case.hook(line, other, lambda: others.append(1))
        before = case.hooks()
        handle = case.hook(line, kind, lambda: mine.append(1))
        assert case.hooks() != before or is_everywhere  # everywhere, all kinds share torch's hooks
        case.step()
        assert mine
        handle.remove()
        assert case.hooks() == before
        n_mine, n_others = len(mine), len(others)
        handle.remove()
        case.step()
        assert len(mine) == n_mine
        assert len(others) > n_others
        again = case.hook(line, kind, lambda: mine.append(1))
        case.step()
        assert len(mine) > n_mine
        assert repr(again).endswith("on)")
    assert repr(again).endswith("off)")
    assert not any(case.hooks())


@pytest.mark.parametrize("kind", EVERYWHERE_KINDS)
def test_the_last_handle_takes_torchs_process_wide_hooks_off(case, kind):
    with hl.attach(hl.EVERYWHERE) as line, case.hook(line, kind, lambda: None):
        assert any(case.hooks())
    with hl.attach(hl.EVERYWHERE) as line:
        with case.hook(line, kind, lambda: None):
            pass
        assert not any(case.hooks())


def test_of_two_hooks_at_a_site_the_other_stays_with_its_key(case):
    seen = []
    with hl.attach(case.model) as one, hl.attach(case.model) as other:
        first = one.forward("0", lambda *_: seen.append("first"))
        _ = one.forward("0", lambda *_: seen.append("second"))
        first.remove()
        _ = other.forward("0", lambda *_: seen.append("third"))  # takes the key that is free
        first.remove()
        one.options.quiet = True
        one.remove()
        case.model(torch.ones(1, 3))
    assert seen == ["third"]


@pytest.mark.filterwarnings("error")
def test_removed_sites_stay_in_the_report_and_are_not_warned_of(case):
    with hl.attach(case.model) as line:
        handle = line.forward("*", lambda *_: None)
        idle = line.grad("0.bias", lambda g: None)
        _ = line.forward_pre("0", lambda *_: None)
        with torch.no_grad():
            case.model(torch.ones(1, 3))
        handle.remove()
        idle.remove()
        with torch.no_grad():
            case.model(torch.ones(1, 3))
        report = line.report()
        shown = str(report)
    assert [count for _, count in report.fired] == [1, 1, 1, 0, 2]
    assert report.removed == (0, 1, 2, 3)
    assert report.silent == ()
    assert "4 fired, 0 never; attached; 4 removed" in " ".join(shown.split())
    assert re.search(r"0\.bias:grad +Linear\.bias +0  removed\n", shown)
    assert re.search(r"0:forward_pre +Linear +2$", shown)
    assert line.report().removed == report.removed
    assert report._repr_html_().count('<td class="wrap">removed</td>') == 4


def test_a_site_of_two_calls_is_removed_for_one_of_them(case):
    line = hl.attach(case.model)
    line.forward("0#1", lambda *_: None).remove()
    _ = line.forward("0#1", lambda *_: None)
    case.model(torch.ones(1, 3))
    with pytest.warns(hl.HooklineWarning, match="1 of 2 sites never fired"):
        line.remove()
    assert line.report().removed == (0,)
    assert len(line.report().silent) == 1


def test_a_handle_keeps_neither_line_nor_model_alive():
    gc.collect()
    gc.disable()
    try:
        case = Case()
        line = hl.attach(case.model)
        handles = [case.hook(line, kind, lambda: None) for kind in KINDS]
        line.options.quiet = True
        refs = [weakref.ref(case.model), weakref.ref(line)]
        with pytest.warns(hl.HooklineWarning, match="was dropped while its hooks were on"):
            del line
        assert not any(case.hooks())
        del case
        assert [ref() for ref in refs] == [None, None]
        for handle in handles:
            assert repr(handle).endswith("off)")
            handle.remove()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("error")
def test_a_line_whose_handles_are_all_removed_may_be_dropped():
    a = torch.ones(2, requires_grad=True)
    line = hl.attach()
    line.grad(a, print).remove()
    del line
    gc.collect()


def test_removing_after_the_line_touches_no_hook_of_another(case):
    seen = []
    line = hl.attach(case.model)
    handle = line.forward("0", lambda *_: None)
    line.options.quiet = True
    line.remove()
    with hl.attach(case.model) as other:
        _ = other.forward("0", lambda *_: seen.append(1))
        handle.remove()
        case.model(torch.ones(1, 3))
    assert seen == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_removed_from_inside_the_hook_it_has_fired_once(case, kind):
    seen = []

    def note():
        seen.append(1)
        handle.remove()

    with hl.attach(case.model) as line:
        handle = case.hook(line, kind, note)
        case.step()
        case.step()
        assert seen == [1]
        counts = [count for _, count in line.report().fired]
        assert sum(counts) == 1
        x = torch.ones(2, requires_grad=True)
        assert (x * x).grad_fn._saved_self is x  # torch's switch for saved tensors is as it was
    assert not any(case.hooks())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "saved"])  # one packs
def test_removed_from_inside_the_hook_the_others_go_on(case, kind):
    """Torch walks over some of its dictionaries while it calls the hooks in them."""
    seen = []

    def note():
        seen.append("one")
        handle.remove()

    with hl.attach(case.model) as line:
        line.options.quiet = True
        before = case.hook(line, kind, lambda: seen.append("before"))
        handle = case.hook(line, kind, note)
        case.hook(line, kind, lambda: (seen.append("after"), before.remove()))
        case.hook(line, kind, lambda: seen.append("last"))
        case.step()
        first, seen[:] = set(seen), []
        case.step()
    assert first == {"before", "one", "after", "last"}
    assert set(seen) == {"after", "last"}
    assert not any(case.hooks())


@pytest.mark.parametrize("path", ["", "0"])
def test_removed_where_the_module_has_failed_its_error_stays(path):
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError("mine")

    model, seen = nn.Sequential(Fails(2, 2)), []

    def note(*_):
        seen.append(1)
        handle.remove()

    with hl.attach(model) as line:
        handle = line.forward(path, note, always_call=True)
        line.forward(path, lambda *_: seen.append(2), always_call=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="mine"):
                model(torch.ones(1, 2))
    assert seen == [1, 2, 2]
    assert not len(hl.inventory(model))


@pytest.mark.parametrize(("kind", "is_everywhere"), BOTH)
def test_removed_while_its_module_runs_it_leaves_numbers_right(case, kind, is_everywhere):
    case.model(torch.ones(2, 3)).sum().backward()
    expected = [p.grad.clone() for p in case.model.parameters()]
    case.model.zero_grad()
    with line_of(case, is_everywhere) as line:
        line.options.quiet = True
        handle = case.hook(line, kind, lambda: None)
        foreign = case.model[1].register_forward_pre_hook(lambda *_: handle.remove())
        case.model(torch.ones(2, 3)).sum().backward()
        foreign.remove()
        found = [p.grad.clone() for p in case.model.parameters()]
        case.model.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(case.hooks())


def test_saved_tensors_inside_stay_packed_when_the_outer_goes():
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Tanh())
    inner, outer = [], []
    x = torch.ones(2, requires_grad=True)
    with hl.attach(model) as line:
        handle = line.saved("0", lambda t: outer.append(1) or t.detach(), lambda t: t)
        _ = line.saved("0.*", lambda t: inner.append(1) or t.detach(), lambda t: t)
        foreign = model[0][1].register_forward_pre_hook(lambda *_: handle.remove())
        model(x).sum().backward()
        foreign.remove()
        assert (len(inner), outer) == (2, [])
        assert (x * x).grad_fn._saved_self is x
        assert not [entry for entry in hl.inventory(model).entries if entry.path == "0"]


@pytest.mark.parametrize("kind", ["forward", "backward", "saved", "forward_pre_with_kwargs"])
def test_another_thread_may_remove_it_in_the_midst_of_a_forward(case, kind):
    seen = []
    with hl.attach(case.model) as line:
        handle = case.hook(line, kind, lambda: seen.append(1))

        def remove_elsewhere(*_):
            thread = threading.Thread(target=handle.remove)
            thread.start()
            thread.join()
            seen.clear()

        foreign = case.model[1].register_forward_pre_hook(remove_elsewhere)
        case.model(torch.ones(2, 3)).sum().backward()
        foreign.remove()
        assert seen == []
        x = torch.ones(2, requires_grad=True)
        assert (x * x).grad_fn._saved_self is x
        line.options.quiet = True
    assert not any(case.hooks())


@pytest.mark.parametrize("kind", ["state_dict", "load_state_dict_pre", "step_pre", "step_post"])
def test_another_thread_may_remove_what_torch_is_walking_over(case, kind):
    seen = []

    def remove_elsewhere():
        thread = threading.Thread(target=handle.remove)
        thread.start()
        thread.join()

    with hl.attach(case.model) as line:
        line.options.quiet = True
        case.hook(line, kind, remove_elsewhere)
        handle = case.hook(line, kind, lambda: seen.append("removed"))
        case.hook(line, kind, lambda: seen.append("last"))
        case.step()
    assert set(seen) == {"last"}
    assert not any(case.hooks())


def test_threads_that_share_a_line_have_handles_of_their_own():
    model = nn.Sequential(*[nn.Identity() for _ in range(8)])
    start, counts = threading.Barrier(8), [0] * 8
    with hl.attach(model, every_thread=True) as line:

        def work(number):
            def note(*_):
                counts[number] += 1

            start.wait()
            for _ in range(20):
                with line.forward(str(number), note):
                    model[number](torch.ones(1))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts == [20] * 8
        assert not any(module._forward_hooks for module in model)
        assert len(line.report().removed) == 160


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_everywhere"), [one for one in BOTH if one[0] in INTERRUPTED])
def test_interrupted_while_it_removes_it_is_on_or_off_as_a_whole(
    case, kind, is_everywhere, interrupted
):
    seen, ways = [], set()
    for step in range(1, 2000):
        line = line_of(case, is_everywhere)
        line.options.quiet = True
        _ = case.hook(line, "forward", lambda: None)
        before = case.hooks()
        handle = case.hook(line, kind, lambda: seen.append(1))
        there = case.hooks()
        stopped = interrupted(step, "hookline.engine", handle.remove)
        is_on = repr(handle).endswith("on)")
        assert case.hooks() == (there if is_on else before)
        seen.clear()
        case.step()
        assert bool(seen) == is_on
        ways.add(is_on)
        handle.remove()
        assert case.hooks() == before
        line.remove()
        assert not any(case.hooks())
        if not stopped:
            break
    assert ways == {True, False}
    assert step > 10


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_calls_what_is_there_and_no_more(fresh_dynamo):
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.ones(2, 3)
    plain = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x)
    with hl.attach(compiled) as line:
        scaled = line.forward("0", lambda module, args, output: output * 2)
        expected = model[2](model[1](model[0](x)))
        assert torch.equal(compiled(x), expected)
        more = line.forward(["0", "1"], lambda module, args, output: output + 1)
        assert torch.equal(compiled(x), model[2](model[1](model[0](x))))
        more.remove()  # another hook is left on the first module, and none on the second
        assert "forward" not in vars(model[1])
        assert torch.equal(compiled(x), expected)
        scaled.remove()
        n_graphs = counters["stats"]["unique_graphs"]
        assert torch.equal(compiled(x), plain)
        again = line.forward("0", lambda module, args, output: output * 2)
        assert torch.equal(compiled(x), expected)
        again.remove()
        assert torch.equal(compiled(x), plain)
        assert counters["stats"]["unique_graphs"] <= n_graphs + 2
        assert not counters["graph_break"]
    assert next(count for _, count in line.report().fired) >= 2
    assert all("forward" not in vars(module) for module in model.modules())


def test_its_repr_says_kind_number_and_state(case):
    with hl.attach(case.model) as line:
        handle = line.backward("*", lambda *_: None)
        assert repr(handle) == "HookHandle(backward, 3 sites, on)"
        handle.remove()
        assert repr(handle) == "HookHandle(backward, 3 sites, off)"
    with hl.attach(hl.EVERYWHERE) as line:
        handle = line.registered("module", print)
        assert repr(handle) == "HookHandle(registered module, 1 site, on)"
        handle.remove()


def test_a_removed_hook_is_let_go(case):
    class Note:
        def __call__(self, *_):
            pass

    with hl.attach(case.model) as line:
        for kind in ("forward", "backward", "grad", "accumulated"):
            note = Note()
            held = weakref.ref(note)
            handle = getattr(line, kind)("*", note)
            handle.remove()
            del note
            gc.collect()
            assert held() is None, kind


def test_a_gradient_in_another_thread_is_said_to_be_there(case):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hl.attach(case.model) as line:
            _ = line.grad("0.bias", lambda g: None)
            _ = line.accumulated("0.weight", lambda p: None)
            _ = line.step_post(case.optimizer, lambda *_: None)
            thread = threading.Thread(target=case.step)
            thread.start()
            thread.join()
    why = {str(site): text for site, text in line.report().why.items()}
    assert all("in another thread or async task" in text for text in why.values())
    assert "every_thread=True" in why["0.bias:grad"]
    assert "no gradient flowed back" not in str(caught[0].message)


class Slow(list):
    """A list that another thread adds to when it has been walked through."""

    def __iter__(self):
        yield from super().__iter__()
        self.meanwhile()


def test_a_hook_added_as_another_thread_removes_one_stays():
    called, model = [], nn.Linear(2, 2)
    with hl.attach(hl.EVERYWHERE, every_thread=True) as line:
        line._registering = lock = ToldLock()
        handle = line.forward(None, lambda *_: called.append("first"))
        line._catch.taps = Slow(line._catch.taps)
        line._catch.taps.meanwhile = meanwhile = Meanwhile(
            lambda: line.forward(None, lambda *_: called.append("second")), lock
        )
        handle.remove()
        meanwhile.end()
        model(torch.ones(1, 2))
    assert called == ["second"]
