"""Steer along a direction, and project directions out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from float32_device import Float32Device


def test_steer_adds_the_direction_at_each_token():
    value, direction = torch.randn(2, 5, 4), torch.randn(4)
    for strength in (2.0, torch.tensor(2.0)):
        steered = hl.edits.steer(direction, strength)(value)
        assert torch.equal(steered, value + 2.0 * direction)
    assert torch.equal(hl.edits.steer(direction)(value), value + direction)


@pytest.mark.parametrize("strength", [0, 0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strength_0_changes_no_bit(strength, dtype):
    value = torch.tensor([-0.0, 0.0, torch.inf, torch.nan, 1.0], dtype=dtype)
    steered = hl.edits.steer(torch.full((5,), 1e38), strength)(value)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(steered.view(bits), value.view(bits))


def test_a_direction_and_a_strength_can_be_trained():
    model = nn.Linear(3, 2)
    direction = torch.randn(2, requires_grad=True)
    strength = torch.tensor(3.0, requires_grad=True)
    with hl.edit(model, "(root)", hl.edits.steer(direction, strength)):
        model(torch.zeros(4, 3)).sum().backward()
    assert direction.grad.tolist() == [12.0, 12.0]
    torch.testing.assert_close(strength.grad, 4 * direction.detach().sum())


def test_a_direction_that_is_trained_may_begin_at_zero():
    direction = torch.zeros(2, requires_grad=True)
    hl.edits.steer(direction)(torch.ones(1, 2)).sum().backward()
    assert direction.grad.tolist() == [1.0, 1.0]


def test_directions_may_be_mapped():
    steered = torch.func.vmap(lambda row: hl.edits.steer(row)(torch.ones(2)))
    assert steered(torch.eye(2)).tolist() == [[2.0, 1.0], [1.0, 2.0]]


def steered_by(strength):
    value, direction = torch.tensor([[1.0, -0.0], [2.0, 3.0]]), torch.tensor([1.0, -2.0])
    return hl.edits.steer(direction, strength)(value).square().sum()


def backward(strength):
    strength.requires_grad_()
    steered_by(strength).backward()
    return strength.grad


@pytest.mark.slow
@pytest.mark.parametrize(
    "slope",
    [
        backward,
        torch.func.grad(steered_by),
        torch.func.jacfwd(steered_by),
        torch.func.jacrev(steered_by),
        lambda strength: torch.func.jvp(steered_by, (strength,), (torch.tensor(1.0),))[1],
    ],
)
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_a_strength_of_0_can_be_trained(slope, strength):
    # the sum of (v + s·d)² has the slope 2·Σ v·d + 2·s·Σ d²
    assert slope(torch.tensor(strength)).item() == pytest.approx(-6.0 + 20.0 * strength)


def test_a_strength_of_0_changes_no_bit_without_gradients():
    strength = torch.tensor(0.0, requires_grad=True)
    with torch.no_grad():
        steered = hl.edits.steer(torch.ones(1), strength)(torch.tensor([-0.0]))
    assert steered.view(torch.int32).item() == torch.tensor(-0.0).view(torch.int32).item()


@pytest.mark.compiles
def test_a_strength_of_0_is_trained_in_compiled_code():
    strength = torch.tensor(0.0, requires_grad=True)
    torch.compile(steered_by, backend="aot_eager")(strength).backward()
    assert strength.grad.item() == -6.0
    torch.compiler.reset()


@given(
    st.lists(st.integers(-3, 3), min_size=9, max_size=9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_dependent_directions_take_out_only_their_span(numbers, dtype):
    factors = torch.tensor(numbers, dtype=torch.float64).view(3, 3)
    first = torch.randn(2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = first.to(dtype).double()
    third = first.sum(0, keepdim=True)
    directions = torch.cat([first, third, factors[:, :2] @ first, first[:1] * 1e4]).to(dtype)
    value = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1))
    projected = hl.edits.project_out(directions)(value)
    basis = torch.linalg.qr(first.T).Q.T
    wide = value.double()
    expected = wide - wide @ basis.T @ basis
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(projected.double(), expected, rtol=0, atol=tolerance)
    assert (projected.double() @ basis.T).abs().max() < tolerance


def test_one_direction_of_any_length_is_taken_out():
    value = torch.randn(2, 3, 4)
    for length in (1e-6, 1.0, 1e6):
        projected = hl.edits.project_out(torch.tensor([0.0, 0.0, length, 0.0]))(value)
        assert not projected[..., 2].any()
        assert torch.equal(projected[..., [0, 1, 3]], value[..., [0, 1, 3]])
    everything = hl.edits.project_out(torch.randn(9, 4))(value)
    assert everything.abs().max() < 1e-5


@pytest.mark.parametrize(
    "factors", [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]]
)
def test_directions_that_are_trained_get_gradients(factors):
    value = torch.randn(5, 6, dtype=torch.float64)
    directions = (torch.tensor(factors).double() @ torch.randn(2, 6).double()).requires_grad_()
    project = hl.edits.project_out(directions)
    constant = hl.edits.project_out(directions.detach())(value)
    torch.testing.assert_close(project(value), constant, rtol=0, atol=1e-12)
    mixing = torch.randn(6, 6).double()  # of features, so that the span keeps its dimension
    change = directions.detach() @ mixing

    def loss_after(step):
        return hl.edits.project_out(directions.detach() + step * change)(value).square().sum()

    (gradient,) = torch.autograd.grad(project(value).square().sum(), directions)
    slope = (loss_after(1e-6) - loss_after(-1e-6)) / 2e-6
    torch.testing.assert_close((gradient * change).sum(), slope, rtol=1e-5, atol=1e-7)


def test_a_direction_is_taken_out_as_training_has_changed_it():
    direction = torch.tensor([1.0, 0.0], requires_grad=True)
    project = hl.edits.project_out(direction)
    with torch.no_grad():
        direction.copy_(torch.tensor([0.0, 2.0]))
    assert project(torch.tensor([3.0, 4.0])).tolist() == [3.0, 0.0]


def test_a_gradient_is_projected_as_a_value_is():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with hl.edit(model, "0:grad_output", hl.edits.project_out(torch.tensor([1.0, 0.0]))):
        model(torch.ones(1, 2)).sum().backward()
    assert model[0].bias.grad[0] == 0
    assert model[0].bias.grad[1] == model[1].weight[0, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hl.edits.steer(torch.ones(2, 2)), r"direction must be a vector .*\[2, 2\]"),
        (lambda: hl.edits.steer([1.0]), r"direction must be a vector .* got list"),
        (lambda: hl.edits.steer(torch.ones(2), "1"), r"steer must be given a number"),
        (lambda: hl.edits.project_out(torch.ones(2, 2, 2)), r"directions must be floating-point"),
        (lambda: hl.edits.project_out(torch.ones(2).long()), r"directions must be floating-point"),
        (lambda: hl.edits.steer(torch.zeros(2)), r"finite and not all zero, got .* norms \[0.0\]"),
        (lambda: hl.edits.steer(torch.tensor([1, torch.inf])), r"direction must be finite"),
        (lambda: hl.edits.project_out(torch.zeros(2)), r"finite and not all zero"),
        (lambda: hl.edits.project_out(torch.tensor([1, torch.nan])), r"finite and not all zero"),
    ],
)
def test_what_is_no_direction_is_refused(make, said):
    with pytest.raises(hl.AttachError, match=said):
        make()


@pytest.mark.parametrize("name", ["steer", "project_out"])
@pytest.mark.parametrize(
    "value", [torch.ones(2, 3), torch.ones(2, dtype=torch.long), torch.ones(())]
)
def test_a_value_of_other_features_is_refused(name, value):
    with pytest.raises(hl.StructureError, match=rf"hl.edits.{name} must be given floating-point"):
        getattr(hl.edits, name)(torch.ones(2))(value)


@pytest.mark.parametrize("is_trained", [True, False])
def test_directions_may_be_on_a_device_without_float64(is_trained):
    value, direction = torch.randn(2, 4), torch.randn(4).requires_grad_(is_trained)
    expected = hl.edits.project_out(direction)(value), hl.edits.steer(direction)(value)
    with Float32Device():
        assert torch.equal(hl.edits.project_out(direction)(value), expected[0])
        assert torch.equal(hl.edits.steer(direction)(value), expected[1])
