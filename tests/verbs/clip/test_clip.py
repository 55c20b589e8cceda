"""clip: as torch's own functions do it to the last bit, as gradients flow, and counted."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import hookline as hl
from thoroughness import examples


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 10


def backward(model, x):
    model(x).pow(2).sum().backward()


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def clipped_by_torch(model, x, clip):
    other = copy.deepcopy(model)
    other.zero_grad()
    backward(other, x)
    clip(list(other.parameters()))
    return gradients(other)


@pytest.mark.parametrize("bound", [0.0, 0.05, 1.0, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_total_norm_is_clipped_exactly_as_clip_grad_norm_does(model, x, bound, norm_type):
    expected = clipped_by_torch(model, x, lambda ps: clip_grad_norm_(ps, bound, norm_type))
    with hl.clip(model, total_norm=bound, norm_type=norm_type):
        backward(model, x)
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize("bound", [0.0, 0.05, 1.0, 1e6])
def test_values_are_clipped_exactly_as_clip_grad_value_does(model, x, bound):
    expected = clipped_by_torch(model, x, lambda ps: clip_grad_value_(ps, bound))
    with hl.clip(model, value=bound):
        backward(model, x)
    assert all(map(torch.equal, gradients(model), expected))


def test_each_norm_is_clipped_by_itself(model, x):
    expected = clipped_by_torch(model, x, lambda ps: [clip_grad_norm_([p], 0.5) for p in ps])
    with hl.clip(model, norm=0.5):
        backward(model, x)
    assert all(map(torch.equal, gradients(model), expected))


@settings(max_examples=examples(25), deadline=None)
@given(st.floats(0, 100), st.sampled_from(["value", "norm", "total_norm"]), st.integers(0, 99))
def test_clipping_keeps_to_the_bound_and_spares_smaller_ones(bound, kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    x = torch.randn(4, 3) * 10 ** (seed % 4)
    bare = clipped_by_torch(model, x, lambda parameters: None)
    with hl.clip(model, **{kind: bound}):
        backward(model, x)
    found = gradients(model)
    slack = bound * 1e-4 + 1e-6
    sizes = {
        "value": [gradient.abs().max() for gradient in found],
        "norm": [gradient.norm() for gradient in found],
        "total_norm": [torch.cat([gradient.flatten() for gradient in found]).norm()],
    }[kind]
    assert all(size <= bound + slack for size in sizes)
    if kind != "total_norm":
        for now, before in zip(found, bare, strict=True):
            size = before.abs().max() if kind == "value" else before.norm()
            if size < bound - slack:
                assert torch.equal(now, before)


def test_the_gradients_that_were_there_before_count_too(model, x):
    other = copy.deepcopy(model)
    for _ in range(2):
        backward(other, x)
    clip_grad_norm_(other.parameters(), 1.0)
    backward(model, x)
    with hl.clip(model, total_norm=1.0):
        backward(model, x)
    assert all(map(torch.equal, gradients(model), gradients(other)))


def test_only_the_selected_parameters_are_clipped(model, x):
    bare = clipped_by_torch(model, x, lambda parameters: None)
    with hl.clip(model, "2", norm=0.1) as line:  # a module stands for its parameters
        backward(model, x)
    found = gradients(model)
    assert all(map(torch.equal, found[:2], bare[:2]))
    assert all(gradient.norm() <= 0.1001 for gradient in found[2:])
    assert [row.site for row in line.report().rows] == ["2.weight:grad", "2.bias:grad"]


def test_what_flows_between_modules_is_clipped_before_going_on(model, x):
    with (
        hl.clip(model, "1:grad_output", norm=0.01) as line,
        hl.record(model, ["1:grad_output", "1:grad_input", "0:grad_output"]) as run,
    ):
        backward(model, x)
    assert run["1:grad_output"].norm() == pytest.approx(0.01, rel=1e-3)
    assert run["0:grad_output"].norm() <= 0.01
    assert model[0].weight.grad.norm() < 1
    (row,) = line.report().rows
    assert (row.seen, row.clipped) == (1, 1)
    assert row.factor == pytest.approx(0.01 / row.largest)


def test_values_between_modules_are_clamped(model, x):
    with (
        hl.clip(model, nn.Tanh, value=0.5, ports="grad_input"),
        hl.record(model, "1:grad_input") as run,
    ):
        backward(model, x)
    assert run["1:grad_input"].abs().max() <= 0.5


BOUNDS = [
    {"norm": 0.01}, {"norm": 0.01, "norm_type": 1.0}, {"norm": 0.01, "norm_type": math.inf},
    {"norm": 1e6}, {"norm": 0.0}, {"value": 0.02}, {"value": 1e6},
]  # fmt: skip


def clipped_by_hand(grad, options):
    """A gradient between modules, as torch's own functions clip one in `.grad`."""
    held = torch.empty_like(grad)
    held.grad = grad.clone()
    if "value" in options:
        clip_grad_value_([held], options["value"])
    else:
        clip_grad_norm_([held], options["norm"], options.get("norm_type", 2.0))
    return held.grad


@pytest.mark.parametrize("options", BOUNDS, ids=str)
@pytest.mark.parametrize("site", ["2:grad_output", "1:grad_input", ":grad_output"])
def test_what_flows_is_clipped_as_torchs_functions_do(model, x, options, site):
    path, port = site.split(":")
    bare = copy.deepcopy(model)
    with hl.record(bare, site) as run, hl.edit(bare, site, lambda g: clipped_by_hand(g, options)):
        backward(bare, x)
    with hl.clip(model, path, ports=port, **options) as line, hl.record(model, site) as clipped:
        backward(model, x)
    torch.testing.assert_close(clipped[site], run[site])
    torch.testing.assert_close(gradients(model), gradients(bare))
    assert line.report().clipped == (next(iter(options.values())) < 1)


def test_half_precision_does_not_overflow_on_the_way_to_the_norm():
    model, x = nn.Linear(64, 64).half(), torch.ones(64, 64).half()
    with hl.record(model, "", ports="grad_output") as run:
        (model(x) * 4000).sum().backward()
    given = run[":grad_output"].float()
    assert given.norm() > torch.finfo(torch.half).max
    for bound in (1.0, 1e-3):  # the factor of the second is 0 in half precision
        with (
            hl.clip(model, "", norm=bound, ports="grad_output") as line,
            hl.record(model, "", ports="grad_output") as run,
        ):
            (model(x) * 4000).sum().backward()
        torch.testing.assert_close(run[":grad_output"], (given * (bound / given.norm())).half())
        assert line.report().rows[0].largest == pytest.approx(given.norm().item())


@pytest.mark.parametrize("options", [{"norm": 5.0}, {"value": 4.0}])
@pytest.mark.parametrize("port", ["grad", "grad_output"])
def test_a_gradient_at_the_bound_was_not_too_large(options, port):
    model = nn.Linear(1, 2, bias=False)
    with hl.clip(model, ports=port, **options) as line:
        (model(torch.ones(1, 1)) * torch.tensor([3.0, 4.0])).sum().backward()
    (row,) = line.report()
    assert (row.seen, row.clipped, row.largest) == (1, 0, next(iter(options.values())))
    torch.testing.assert_close(model.weight.grad, torch.tensor([[3.0], [4.0]]))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_without_elements_has_the_norm_0(norm_type):
    model = nn.Linear(2, 3)
    with hl.clip(model, norm=1.0, norm_type=norm_type, ports="grad_output") as line:
        model(torch.ones(0, 2)).sum().backward()
    assert [(row.seen, row.largest) for row in line.report()] == [(1, 0.0)]
    assert not model.weight.grad.any()


def test_the_report_says_how_often_and_how_much(model, x):
    with hl.clip(model, "0.weight", norm=1.0) as line:
        for scale in (1e-9, 1.0, 2.0):
            model.zero_grad()
            (model(x).pow(2).sum() * scale).backward()
    report = line.report()
    (row,) = report
    largest = row.largest
    assert (row.seen, row.clipped, row.nonfinite) == (3, 2, 0)
    assert row.factor == pytest.approx(1.0 / largest)
    assert (report.seen, report.clipped) == (3, 2)
    text = str(report)
    assert "clipped 2 of 3 gradients; ended" in text
    assert f"0.weight:grad        2     3    {largest:.4g}" in text


def test_gradients_that_are_not_finite_are_counted_and_warned_of(model, x):
    with (
        pytest.warns(hl.HooklineWarning, match="inf or NaN") as caught,
        hl.clip(model, "2.bias", norm=1.0) as line,
    ):
        (model(x).sum() * math.inf).backward()
    assert line.report().rows[0].nonfinite == 1
    assert len(caught) == 1
    assert "hl.record(" in str(caught[0].message)


def test_a_backward_that_raised_does_not_stop_later_clipping(model, x):
    def fail(grad):
        raise ValueError("once")

    with hl.clip(model, total_norm=1.0):
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="once"):
            backward(model, x)
        handle.remove()
        model.zero_grad()
        backward(model, x)
    assert torch.cat([g.flatten() for g in gradients(model)]).norm() == pytest.approx(1.0, rel=1e-3)


def test_nothing_is_left_and_nothing_is_clipped_after_the_end(model, x, left_as_found):
    before = left_as_found(model)
    bare = clipped_by_torch(model, x, lambda parameters: None)
    line = hl.clip(model, total_norm=0.1)
    other = hl.clip(model, None, value=0.1, ports=("grad", "grad_output", "grad_input"))
    for one in (line, other):
        with pytest.warns(hl.HooklineWarning, match="no gradient was accumulated"):
            one.remove()
    assert left_as_found(model) == before
    assert not len(hl.inventory(model))
    backward(model, x)
    assert all(map(torch.equal, gradients(model), bare))


@pytest.mark.parametrize("kind", ["norm", "value", "total_norm"])
def test_a_bound_of_infinity_measures_and_changes_nothing(model, x, kind):
    backward(model, x)
    bare = gradients(model)
    model.zero_grad()
    with hl.clip(model, **{kind: math.inf}) as line:
        backward(model, x)
    report = line.report()
    assert report.clipped == 0
    assert all(row.seen for row in report.rows)
    assert all(map(torch.equal, gradients(model), bare))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "one bound, got none"),
        ({"norm": 1.0, "value": 1.0}, "one bound, got norm, value"),
        ({"norm": -1.0}, "norm must be a number >= 0, got -1.0."),
        ({"value": math.nan}, "value must be a number >= 0, got nan."),
        ({"norm": True}, "norm must be a number >= 0, got True."),
        ({"norm": "1"}, "norm must be a number >= 0, got '1'."),
        ({"total_norm": 1.0, "ports": "grad_output"}, "total_norm must be given parameters"),
        ({"norm": 1.0, "ports": "output"}, "hl.clip must be given gradients, got '0'."),
    ],
)
def test_what_cannot_be_clipped_is_refused_with_the_remedy(model, options, says):
    with pytest.raises(hl.AttachError, match=says) as caught:
        hl.clip(model, "0", **options)
    assert 2 <= len(str(caught.value).splitlines()) <= 3
    assert not len(hl.inventory(model))


def test_frozen_parameters_are_refused_if_all_left_out_if_some(model, x):
    model[0].weight.requires_grad_(False)
    with pytest.raises(hl.AttachError, match="frozen"):
        hl.clip(model, "0.weight", norm=1.0)
    with hl.clip(model, "0", norm=1.0) as line:
        backward(model, x)
    assert {row.site: row.seen for row in line.report()} == {"0.weight:grad": 0, "0.bias:grad": 1}


@pytest.mark.parametrize("bounds", [{"norm": 0.5}, {"total_norm": 0.5}, {"value": 0.5}])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_sparse_gradients_are_clipped_as_the_dense_ones(bounds, norm_type):
    torch.manual_seed(0)
    sparse = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    dense = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2))
    dense.load_state_dict(sparse.state_dict())
    indices = torch.tensor([[1, 1, 4]])  # one of them twice: its gradients are to be summed
    reports = []
    for model in (sparse, dense):
        with hl.clip(model, **bounds, norm_type=norm_type) as line:
            backward(model, indices)
            backward(model, indices)
        reports.append([(row.seen, row.clipped, row.nonfinite) for row in line.report()])
    assert sparse[0].weight.grad.is_sparse
    for found, expected in zip(gradients(sparse), gradients(dense), strict=True):
        torch.testing.assert_close(found.to_dense(), expected)
    assert reports[0] == reports[1]
    assert reports[0][0][1] > 0


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


# Torch 2.11 warns of it whatever is asked for.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_sparse_gradient_between_modules_is_clipped_too():
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 3, sparse=True)
    nn.utils.parametrize.register_parametrization(embedding, "weight", Doubled())
    model = nn.Sequential(embedding, nn.Linear(3, 2))
    site = "0.parametrizations.weight:grad_output"
    with hl.clip(model, site, norm=0.1) as line, hl.record(model, site) as run:
        backward(model, torch.tensor([[1, 1, 4]]))
    assert run[site].is_sparse
    assert run[site].to_dense().norm() == pytest.approx(0.1, rel=1e-3)
    assert line.report().clipped == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_norm", r"no max_norm=.\nGive norm= \(each .*total_norm= \(all together"),
        ("clip_value", r"no clip_value=.\nGive value="),
        ("foreach", "no foreach="),
    ],
)
def test_torchs_names_of_bounds_are_answered_with_those_here(model, name, says):
    with pytest.raises(TypeError, match=says):
        hl.clip(model, **{name: 1.0})
