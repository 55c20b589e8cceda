"""Activation checkpointing: the same records, gradients and training as without it."""

from __future__ import annotations

from functools import partial
from io import StringIO

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hookline as hl
from hookline.errors import AttachError, HooklineWarning


def saves(context, operation, *args, **kwargs):
    """Every other multiplication, and what no recorder may add to: views and copies."""
    if operation is torch.ops.aten.addmm.default:
        return args[2].shape[-1] == 4  # the second factor's
    return operation in (torch.ops.aten.view.default, torch.ops.aten.clone.default)


SELECTED = partial(create_selective_checkpoint_contexts, saves)


def plainly(function, *args):
    return function(*args)


def nested(function, *args):
    inner = partial(checkpoint, function, use_reentrant=False)
    return checkpoint(inner, *args, use_reentrant=False)


def nested_reentrant(function, *args):
    inner = partial(checkpoint, function, use_reentrant=True)
    return checkpoint(inner, *args, use_reentrant=True)


def mixed(function, *args):
    inner = partial(checkpoint, function, use_reentrant=False)
    return checkpoint(inner, *args, use_reentrant=True)


def mixed_inside_out(function, *args):
    inner = partial(checkpoint, function, use_reentrant=True)
    return checkpoint(inner, *args, use_reentrant=False)


WAYS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not_reentrant": partial(checkpoint, use_reentrant=False),
    "to_the_end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=SELECTED),
    "nested": nested,
    "nested_reentrant": nested_reentrant,
    "mixed": mixed,
    "mixed_inside_out": mixed_inside_out,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(6, 4)

    def forward(self, x):
        y = self.act(self.up(x.clone()))
        y = self.drop(y.view(y.shape).clone())
        return x + self.down(y) * y.mean()


class Net(nn.Module):
    """Two blocks of their own and one that runs twice, each checkpointed."""

    def __init__(self, way=plainly) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.stem = nn.Linear(3, 4)
        self.first = Block()
        self.shared = Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        x = self.way(self.first, x)
        for _ in range(2):
            x = self.way(self.shared, x)
        return self.head(x)


X = torch.linspace(-1, 1, 15).view(5, 3)


def step(model, x=X):
    torch.manual_seed(1)
    model(x).square().sum().backward()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(one, other):
    assert list(one) == list(other)
    for key in one:
        same = one[key] is other[key] if one[key] is None else torch.equal(one[key], other[key])
        assert same, key


def recorded(way, **options):
    model = Net(way)
    with hl.record(model, **options) as run:
        step(model)
    assert len(run.passes) == 1
    return run


@every_way
@pytest.mark.cell("activation checkpointing", "record", "statistics")
def test_records_come_from_the_first_run_each_once(way):
    options = {"ports": ("output", "input"), "copy": True}
    plain, run = recorded(plainly, **options), recorded(way, **options)
    assert_same(dict(plain.items()), dict(run.items()))
    assert run.passes[0].order == plain.passes[0].order
    assert run.report().fired == plain.report().fired
    kept = []
    recorded(way, selector="shared.up", keep=lambda t: kept.append(t.mean()))
    assert len(kept) == 2


@every_way
@pytest.mark.cell(
    "activation checkpointing", "gradients",
    note="If several checkpoints with `use_reentrant=True` use one parameter, its gradient"
    " arrives in parts, one from each checkpoint.",
)  # fmt: skip
def test_gradients_are_those_without_checkpointing_each_once(way):
    options = {"ports": ("grad_output", "grad_input"), "selector": "**"}
    plain, run = recorded(plainly, **options), recorded(way, **options)
    assert_same(dict(plain.items()), dict(run.items()))
    assert run.report().fired == plain.report().fired
    assert len(run.passes[0].backwards) == 1


@every_way
def test_training_is_the_same_with_a_line_on(way):
    bare, hooked = Net(way), Net(way)
    step(bare)
    ports = ("output", "input", "grad_output", "grad_input")
    with hl.record(hooked, ports=ports, copy=True), hl.record(hooked, "first", ports="grad"):
        step(hooked)
    assert_same(gradients(bare), gradients(hooked))


@every_way
@pytest.mark.cell("activation checkpointing", "edit")
def test_an_edit_is_made_in_both_runs_with_right_gradients(way):
    plain, model = Net(), Net(way)
    for one in (plain, model):
        with (
            hl.edit(one, "shared.up#1", hl.edits.scale(3.0)) as line,
            hl.edit(one, "first:input", lambda t: t.sin()),
            hl.record(one, "shared.up", copy=True) as run,
        ):
            step(one)
        assert line.report().fired[0][1] == 1
        assert len(run.calls("shared.up")) == 2
    assert_same(gradients(plain), gradients(model))


@every_way
def test_noise_is_the_same_in_both_runs(way):
    plain, model = Net(), Net(way)
    for one in (plain, model):
        with hl.edit(one, ["**.up", "**.down"], hl.edits.noise(0.1, seed=3)):
            step(one)
            one.zero_grad()
            step(one, -X)
    assert_same(gradients(plain), gradients(model))


@every_way
def test_what_an_edit_draws_from_torch_is_the_same_in_both_runs(way):
    plain, model = Net(), Net(way)
    for one in (plain, model):
        with hl.edit(one, "**.up", lambda t: t + torch.randn_like(t)):
            step(one)
    assert_same(gradients(plain), gradients(model))


@every_way
def test_an_edit_that_depends_on_how_often_it_ran_is_refused(way):
    factors = iter(range(100))
    model = Net(way)
    with (
        pytest.raises(AttachError, match=r"(first|shared)\.up gave another value when torch comp"),
        hl.edit(model, "**.up", lambda t: t * next(factors)),
    ):
        step(model)


def raw(model, change):
    line = hl.attach(model)
    line.forward("**.up", lambda module, args, output: change(output))
    return line


@every_way
@pytest.mark.parametrize("attach", [lambda model, change: hl.edit(model, "**.up", change), raw])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_edit_in_one_of_the_two_runs_only_is_refused(way, attach, is_first):
    model = Net(way)

    def change(t):
        return t * 2 if is_running == is_first else None

    is_running = True
    with (
        pytest.raises(AttachError, match=r"up(:forward)? gave another value when torch computed"),
        attach(model, change),
    ):
        loss = model(X).sum()
        is_running = False
        loss.backward()


@every_way
def test_a_hook_that_leaves_every_value_is_not_compared(way):
    model = Net(way)
    with hl.attach(model) as line:
        line.forward(None, lambda module, args, output: None)
        line.forward(None, lambda module, args, output: None, always_call=True)
        step(model)
    with hl.attach(model) as line:
        line.forward(None, lambda module, args, output: None)
        loss = model(X).sum()
    loss.backward()


@every_way
@pytest.mark.parametrize("element", [0, 100, -1])  # the last lies behind equal parts of a value
def test_an_edit_of_one_element_is_compared_in_both_runs(way, element):
    factors = iter(range(2, 100))

    def change(t):
        is_it = torch.arange(t.numel()) == element % t.numel()
        return torch.where(is_it.view_as(t), next(factors), t)

    model = Net(way)
    x = torch.randn(127, X.shape[-1])
    with (
        pytest.raises(AttachError, match=r"up gave another value when torch computed"),
        hl.edit(model, "**.up", change),
    ):
        model(x).sum().backward()


@every_way
def test_an_edit_ended_before_backward_is_refused_if_it_mattered(way):
    model = Net(way)
    with hl.edit(model, "shared.up", lambda t: t * 2):
        loss = model(X).sum()
    with pytest.raises(AttachError, match=r"shared\.up was changed in the forward, but its line e"):
        loss.backward()
    model.zero_grad()
    with hl.edit(model, "head", lambda t: t * 2):
        loss = model(X).sum()
    loss.backward()


def with_gradient_hooks(model):
    got = []
    with (
        hl.edit(model, "**.up:grad_output", lambda g: g * 2),
        hl.edit(model, "shared:grad_input", lambda g: g + 1),
        hl.attach(model) as line,
    ):
        line.backward("shared.down", lambda m, gi, go: got.append((*gi, *go)))
        line.backward_pre("**.up", lambda m, go: got.append(go))
        line.accumulated("first.up.weight", lambda p: got.append((p.grad.clone(),)))
        line.grad("first.down.bias", lambda g: got.append((g,)))
        step(model)
    return got


@every_way
@pytest.mark.cell("activation checkpointing", "edit gradients", "raw hooks")
def test_gradients_are_changed_as_without_checkpointing(way):
    plain, model = Net(), Net(way)
    expected, found = with_gradient_hooks(plain), with_gradient_hooks(model)
    assert len(expected) == len(found) == 7
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
    assert_same(gradients(plain), gradients(model))


@every_way
def test_raw_forward_hooks_run_in_both_runs_and_are_counted_once(way):
    plain, model = Net(), Net(way)
    for one in (plain, model):
        with hl.attach(one) as line:
            line.forward("**.up", lambda m, args, out: out * 2)
            line.forward_pre("shared", lambda m, args: (args[0] + 1,))
            line.saved("first.down", lambda t: t.double(), lambda t: t.float())
            step(one)
        line_report = line.report()
        counts = {str(site): count for site, count in line_report.fired}
        assert (counts["first.up:forward"], counts["shared:forward_pre"]) == (1, 2)
    assert_same(gradients(plain), gradients(model))


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 3)

    def forward(self, x, depth):
        x = self.fc(x).tanh()
        return self(x, depth - 1) if depth else x


@every_way
@pytest.mark.parametrize(("n_runs", "depth"), [(1, 2), (3, 0), (3, 1)])
def test_each_run_of_the_model_inside_a_region_is_a_pass(way, n_runs, depth):
    def run(x):
        for _ in range(n_runs):
            x = model(x, depth)
        return x

    model = Recursive()
    found = []
    for one in (plainly, way):
        model.zero_grad()
        with hl.record(model, "fc", ports=("output", "grad_output")) as recording:
            one(run, X.clone().requires_grad_()).square().sum().backward()
        passes = [(entry.calls("fc"), entry.calls("fc:grad_output")) for entry in recording.passes]
        found.append((passes, model.fc.weight.grad))
    assert len(found[0][0]) == n_runs
    torch.testing.assert_close(found[0], found[1])


def test_a_gradient_that_comes_in_parts_is_said_to():
    model = Net(WAYS["reentrant"])
    warns = pytest.warns(HooklineWarning, match=r"shared\.up\.bias:grad comes in parts: several re")
    with hl.record(model, "shared.up.bias:grad") as run, warns:
        step(model)
    assert torch.equal(sum(run.calls("shared.up.bias:grad")), model.shared.up.bias.grad)
    with pytest.raises(hl.AmbiguousError, match=r"Write 'shared.up.bias:grad#0' to '.*:grad#1'"):
        run["shared.up.bias:grad"]


def first_parameters(run):
    return {site: run[site] for site in ("first.up.weight:grad", "first.down.bias:grad")}


@every_way
def test_gradients_of_parameters_belong_to_the_pass(way):
    plain, run = recorded(plainly, ports="grad"), recorded(way, ports="grad", selector="first*")
    assert_same(first_parameters(plain), first_parameters(run))
    assert len(run.passes[0].backwards) == 1


@every_way
@pytest.mark.cell("activation checkpointing", "watch")
def test_each_call_is_printed_once(way):
    out = StringIO()
    model = Net(way)
    with hl.watch(model, "**.up", file=out):
        step(model)
    lines = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    assert lines == ["first.up", *["shared.up"] * 2, *["< shared.up"] * 2, "< first.up"]


@every_way
@pytest.mark.cell("activation checkpointing", "clip")
def test_gradients_are_clipped_as_without_checkpointing(way):
    for options in ({"norm": 0.1}, {"value": 0.01}, {"total_norm": 0.1}):
        plain, model = Net(), Net(way)
        reports = []
        for one in (plain, model):
            with hl.clip(one, **options) as line:
                step(one)
            reports.append(line.report().rows)
        assert_same(gradients(plain), gradients(model))
        assert reports[0] == reports[1]
    plain, model = Net(), Net(way)
    for one in (plain, model):
        with hl.clip(one, "**.up", norm=0.1, ports="grad_output") as line:
            step(one)
        assert line.report().seen == 3
    assert_same(gradients(plain), gradients(model))


KINDS = {
    "conjugated": lambda: torch.randn(3, dtype=torch.cfloat).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "eight bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_any_kind_can_be_changed_in_a_region(kind):
    class Gives(nn.Module):
        def forward(self, x):
            return x * 2, KINDS[kind]()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Gives()

        def forward(self, x):
            return checkpoint(lambda x: self.inner(x)[0], x, use_reentrant=False)

    model, x = Outer(), torch.ones(2, requires_grad=True)
    with hl.edit(model, "inner", lambda pair: (pair[0] * 3, pair[1])):
        model(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
