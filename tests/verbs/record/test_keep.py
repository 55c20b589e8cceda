"""What is kept of a value, and that it is still what it was when somebody looks it up."""

from __future__ import annotations

import collections
import functools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from thoroughness import examples


class Giver(nn.Module):
    """Returns what a function makes of its weight or its buffer."""

    def __init__(self, make, source="weight", requires_grad=True):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0).reshape(2, 2), requires_grad)
        self.register_buffer("running", torch.arange(1.0, 5.0).reshape(2, 2))
        self.make, self.source = make, source

    def forward(self, x):
        return self.make(getattr(self, self.source))


class Around(nn.Module):
    """Hands on what its part gives: as an input of another one, and as its own output."""

    def __init__(self, giver):
        super().__init__()
        self.giver, self.same = giver, nn.Identity()

    def forward(self, x):
        return self.same(self.giver(x))


VIEWS = {
    "itself": lambda t: t,
    "a row": lambda t: t[1],
    "transposed": lambda t: t.t(),
    "detached": lambda t: t.detach(),
    "a part of .data": lambda t: t.data[1:, 1:],
    "in a list": lambda t: [t, t[0]],
    "in a set": lambda t: {t.view(4)},
    "in a list of a user": lambda t: collections.UserList([t]),
}


def fused_step(giver):
    held = giver.weight if giver.source == "weight" else giver.running
    held.grad = torch.ones_like(held)
    before = held._version
    torch._fused_sgd_(
        [held.data], [held.grad], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
    held.grad = None
    assert held._version == before


def through_data(giver):
    getattr(giver, giver.source).data.add_(1)


def to_half_and_back(giver):
    giver.half()
    through_data(giver)


def swapped(giver):
    old = getattr(giver, giver.source)
    if not old.requires_grad:  # torch swaps nothing that a graph holds
        new = torch.zeros(2, 2)
        new = nn.Parameter(new, False) if giver.source == "weight" else new
        torch.utils.swap_tensors(old, new)


WRITES = [fused_step, through_data, to_half_and_back, swapped]
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def numbers(value):
    return [torch.as_tensor(t).detach().clone() for t in all_tensors(value)]


def all_tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [*value]


@settings(deadline=None, max_examples=examples(150))
@given(
    view=st.sampled_from(sorted(VIEWS)),
    source=st.sampled_from(["weight", "running"]),
    write=st.sampled_from(WRITES),
    mode=st.sampled_from(sorted(MODES)),
    trained=st.booleans(),
    keep=st.sampled_from([None, lambda value: value]),
    moved=st.booleans(),
)
def test_what_shares_memory_with_the_model_stays_as_it_was_seen(
    view, source, write, mode, trained, keep, moved
):
    model = Around(Giver(VIEWS[view], source, trained))
    sites = ["giver:output", "same:input", "same:output", "(root)"]
    with hl.record(model, sites, keep=keep) as run:
        if moved:  # the memory that the line saw when it was made is no more
            model.double().float()
        with MODES[mode]():
            expected = numbers(model(torch.zeros(1)))
    write(model.giver)
    for site in sites:
        value = run[site]
        value = value["input"] if isinstance(value, dict) else value
        for kept, true in zip(all_tensors(value), expected, strict=True):
            assert torch.equal(kept, true)
            assert not isinstance(kept, nn.Parameter)


def test_running_statistics_of_a_kernel_are_kept_pass_by_pass():
    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x):
            self.norm(x)
            return self.norm.running_mean

    model, x = Statistics(), torch.full((8, 1), 10.0)
    with hl.record(model, "") as run:
        expected = [model(x).clone() for _ in range(3)]
    assert torch.equal(run.stack(""), torch.stack(expected))
    assert len({float(one) for one in expected}) == 3


def test_the_statistics_of_an_observer_are_kept_pass_by_pass():
    fake = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver,
        quant_min=0, quant_max=255, dtype=torch.quint8,
    )  # fmt: skip

    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fake = fake

        def forward(self, x):
            self.fake(x)
            return self.fake.scale

    model = Observed()
    with hl.record(model, "") as run:
        expected = [model(torch.linspace(-n, n, 8)).clone() for n in (1.0, 10.0)]
    assert [run.passes[n][""].item() for n in (0, 1)] == [one.item() for one in expected]
    assert expected[0] != expected[1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_given_to_a_module_is_kept_through_a_step(fused):
    class Tied(nn.Module):
        def forward(self, x, w):
            return x @ w

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.tied = nn.Parameter(torch.ones(1, 1)), Tied()

        def forward(self, x):
            return self.tied(x, self.w).sum()

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=fused)
    with hl.record(model, "tied:input") as run:
        model(torch.ones(1, 1)).backward()
        optimizer.step()
    assert model.w.item() < 1
    assert run["tied:input"]["w"].item() == 1


def test_only_what_shares_memory_with_the_model_is_copied(net, image):
    shown = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, output, path=path: shown.update({path: output.data_ptr()})
        )
        for path, module in net.named_modules()
    ]
    with torch.no_grad(), hl.record(net) as run:
        net(image)
    for hook in hooks:
        hook.remove()
    for path, address in shown.items():
        try:
            assert run[path].data_ptr() == address
        except hl.OverwrittenError:
            continue


@pytest.mark.parametrize("mode", sorted(MODES))
def test_copy_false_copies_nothing(mode):
    model = Around(Giver(VIEWS["a row"]))
    with MODES[mode](), hl.record(model, copy=False, ports=("output", "input")) as run:
        given = torch.zeros(1)
        out = model(given)
        outputs = [run[path].data_ptr() for path in ("giver", "same", "")]
    assert outputs == [out.data_ptr()] * 3
    assert run[":input"].data_ptr() == given.data_ptr()


def test_copy_must_be_true_false_or_none(net):
    with pytest.raises(hl.AttachError, match="copy= must be True, False or None, got str"):
        hl.record(net, copy="yes")


def test_with_its_graph_a_changed_parameter_is_told_of():
    model = Around(Giver(lambda t: t))
    with hl.record(model, "same:input", detach=False) as run:
        out = model(torch.zeros(1))
    (grad,) = torch.autograd.grad(out.sum(), [run["same:input"]])
    assert torch.equal(grad, torch.ones(2, 2))
    fused_step(model.giver)
    with pytest.raises(hl.OverwrittenError, match="same:input was overwritten"):
        run["same:input"]


def test_with_its_graph_a_nan_does_not_count_as_a_change():
    model = Around(Giver(lambda t: t))
    model.giver.weight.data[0, 0] = float("nan")
    with hl.record(model, "giver", detach=False) as run:
        model(torch.zeros(1))
    assert run["giver"].isnan().sum() == 1


@pytest.mark.parametrize("keep", [None, lambda t: t, lambda t: t.view(-1)])
def test_inference_tensors_are_copied_in_time_keep_or_not(keep):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model[0](x)
        with hl.record(model, "0", keep=keep) as run:
            model(x)
    assert (expected < 0).any()
    assert torch.equal(run["0"].view(64, 2), expected)


@pytest.mark.parametrize("keep", [None, lambda value: value])
def test_a_parameter_of_another_model_is_kept_through_its_step(keep):
    model, other = nn.Identity(), Giver(VIEWS["itself"])
    with torch.no_grad(), hl.record(model, "", ports="input", keep=keep) as run:
        model(other.weight)
    expected = other.weight.detach().clone()
    fused_step(other)
    assert torch.equal(run[":input"], expected)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_the_values_of_a_sparse_buffer_are_kept_as_seen(layout):
    values = {torch.sparse_coo: torch.Tensor._values, torch.sparse_csr: torch.Tensor.values}[layout]
    model = Around(Giver(values, "running"))
    with warnings.catch_warnings(action="ignore"):  # torch: sparse CSR is in beta state
        model.giver.running = model.giver.running.to_sparse(layout=layout)
    with torch.no_grad(), hl.record(model, "giver") as run:
        model(torch.zeros(1))
    expected = values(model.giver.running).clone()
    values(model.giver.running).data.add_(1)
    assert torch.equal(run["giver"], expected)


def test_what_keep_takes_from_the_model_itself_is_copied():
    model = Around(Giver(lambda t: t * 2))
    with torch.no_grad(), hl.record(model, "", keep=lambda _: model.giver.running.data) as run:
        model(torch.zeros(1))
    expected = model.giver.running.clone()
    model.giver.running.data.add_(1)
    assert torch.equal(run[""], expected)


def test_an_inference_parameter_is_copied_even_with_its_graph():
    with torch.inference_mode():
        model = Around(Giver(VIEWS["itself"]))
        with hl.record(model, "giver", detach=False) as run:
            expected = model(torch.zeros(1)).clone()
        model.giver.weight.data.add_(1)
    assert torch.equal(run["giver"], expected)


def test_memory_that_was_freed_is_an_error_and_no_crash():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    with hl.record(model, "0") as run:
        out = model(torch.ones(1, 2))
    out.untyped_storage().resize_(0)  # as FSDP frees the weights that it has gathered
    with pytest.raises(
        hl.OverwrittenError, match="0 has no numbers any more: its memory was freed"
    ):
        run["0"]


def test_a_buffer_put_in_a_layers_place_is_told_at_the_look_up():
    model = Around(Giver(VIEWS["itself"]))
    model.same = nn.Linear(2, 2)  # which by itself never shows a parameter
    with torch.no_grad(), hl.record(model, "same") as run:
        with hl.edit(model, "same", lambda t: model.giver.running.data):
            model(torch.zeros(1))
    with pytest.raises(hl.OverwrittenError, match="same shares memory with a parameter or buffer"):
        run["same"]
    with torch.no_grad(), hl.record(model, "same", copy=True) as run:
        with hl.edit(model, "same", lambda t: model.giver.running.data):
            model(torch.zeros(1))
    assert torch.equal(run["same"], model.giver.running)


def test_a_gradient_that_shows_a_parameter_is_kept_or_told_of():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    ours = model[0].weight
    with hl.record(model, "1", ports=("grad_output", "grad_input")) as run:
        torch.autograd.grad(model(torch.ones(2, 2)), [ours], grad_outputs=[ours.data])
    expected = ours.detach().clone()
    ours.data.zero_()
    assert torch.equal(run["1:grad_input"], expected)
    with pytest.raises(hl.OverwrittenError, match="shares memory with a parameter or buffer"):
        run["1:grad_output"]


STRUCTURES = {
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset({t}),
    "list of a user": lambda t: collections.UserList([t]),
    "values of a dict": lambda t: {"a": t}.values(),
    "items of a dict": lambda t: {"a": t}.items(),
    "deque": lambda t: collections.deque([t]),
    "set in a tuple": lambda t: ({t}, 1),
}
CLOSED = {
    "partial function": lambda t: functools.partial(print, t),
    "iterator": lambda t: iter([t]),
    "generator": lambda t: (one for one in [t]),
    "keys of a dict": lambda t: {t: 1},
}


class Structured(nn.Module):
    """Returns a structure of a tensor that is then overwritten in place."""

    def __init__(self, make):
        super().__init__()
        self.inner = Wrap(make)

    def forward(self, x):
        y = x * 1
        self.inner(y)
        return y.zero_()


class Wrap(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def only(value):
    while not isinstance(value, torch.Tensor):
        value = next(one for one in reversed([*value]) if not isinstance(one, int | str))
    return value


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_of_any_kind_are_copied_or_change_is_noticed(kind):
    model, x = Structured(STRUCTURES[kind]), torch.ones(1)
    with hl.record(model, "inner", copy=True) as run:
        model(x)
    assert only(run["inner"]).item() == 1
    with hl.record(model, "inner") as run:
        model(x)
    with pytest.raises(hl.OverwrittenError):
        run["inner"]
    with torch.inference_mode(), hl.record(model, "inner") as run:
        model(x)
    assert only(run["inner"]).item() == 1


@pytest.mark.parametrize("kind", CLOSED)
def test_what_cannot_be_copied_is_an_error_or_noticed(kind):
    model, x = Structured(CLOSED[kind]), torch.ones(1)
    with hl.record(model, "inner", copy=True) as run:
        with pytest.raises(hl.SiteError, match="copy=True must copy every tensor") as caught:
            model(x)
        assert any("inner" in note for note in caught.value.__notes__)
    with hl.record(model, "inner") as run:
        model(x)
    with pytest.raises(hl.OverwrittenError, match=r"overwritten in place.*\nRecord with keep="):
        run["inner"]
    with torch.inference_mode(), hl.record(model, "inner") as run:
        model(x)
    with pytest.raises(hl.OverwrittenError, match=r"cannot be copied.*\nRecord with keep="):
        run["inner"]
    with hl.record(model, "inner", copy=True, keep=lambda value: None) as run:
        model(x)
    assert run["inner"] is None


def test_arrays_are_copied_as_containers_are():
    model = Wrap(lambda x: (np.ones(2), bytearray(b"a")))
    with hl.record(model, "") as run:
        array, text = model(torch.ones(1))
    array[:] = 0
    text[0] = 0
    assert run[""][0].tolist() == [1, 1]
    assert run[""][1] == b"a"


@pytest.mark.parametrize("copied", [None, True])
@pytest.mark.parametrize(
    ("site", "keep"),
    [
        ("0", lambda t: t.sub_(t.mean()).norm()),
        ("0:grad_output", lambda t: t.div_(t.norm()).abs().max()),
        ("0", lambda t: t[:, :2].relu_()),
    ],
    ids=["an output", "a gradient", "a part"],
)  # fmt: skip
def test_a_keep_function_that_writes_to_the_value_is_refused(site, keep, copied):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with (
        hl.record(model, site, keep=keep, copy=copied),
        pytest.raises(hl.StructureError, match=r"keep= must not write .*\n.* begin with t.clone"),
    ):
        model(torch.randn(3, 4)).square().sum().backward()


def test_a_keep_function_may_write_to_what_it_made():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with hl.record(model, "0", keep=lambda t: t.abs().sub_(1)) as run:
        out = model(x)
    assert torch.equal(run["0"], model[0](x).abs() - 1)
    assert torch.equal(out, model(x))


def test_in_inference_mode_a_keep_function_gets_a_copy():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with torch.inference_mode(), hl.record(model, "0", keep=lambda t: t.sub_(1).norm()):
        out = model(x)
    assert torch.equal(out, model(x))


@pytest.mark.compiles
def test_in_a_graph_a_keep_function_that_writes_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    run = torch.compile(model, backend="eager", fullgraph=True)
    with (
        hl.record(model, "0", keep=lambda t: t.sub_(t.mean()).norm()),
        pytest.raises(Exception, match="keep= must not write"),
    ):
        run(torch.randn(3, 4))
