"""Under autocast: the model computes in 16 bits, hookline's statistics in 32."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hookline as hl

NARROW = [torch.bfloat16, torch.float16]


def make(features=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, 8))


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 100


@pytest.mark.cell("autocast", "record", note="A recorded value has the same dtype as in the model.")
@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_recorded_is_what_flows_and_numbers_are_kept(dtype):
    model = make()
    with torch.autocast("cpu", dtype=dtype):
        expected = model(X)
        with hl.record(model) as run:
            assert torch.equal(model(X), expected)
    assert run["0"].dtype is dtype
    assert torch.equal(run["2"], expected.detach())


STATISTICS = {
    "mean": (lambda t: t.mean(), lambda t: t.mean()),
    "norm": (lambda t: t.norm(), lambda t: t.norm()),
    "torch.linalg": (torch.linalg.vector_norm, torch.linalg.vector_norm),
    "sum": (torch.sum, torch.sum),
    "mean square": (lambda t: (t**2).mean(), lambda t: (t**2).mean()),
    "std": (lambda t: t.std(dim=0), lambda t: t.std(dim=0)),
    "a product of float32": (lambda t: t.float().T @ t.float(), lambda t: t.T @ t),
}


def error(found, expected):
    return (found.float() - expected).norm() / expected.norm()


@pytest.mark.trap(27)
@pytest.mark.cell(
    "autocast",
    "statistics",
    note="Sums, means, norms and powers of 16-bit values, as in `hl.record(...,"
    " keep=torch.norm)`, are computed in float32.",
)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_is_that_of_the_values_in_float32(name, dtype):
    model = make()
    keep, exact = STATISTICS[name]
    by_hand = []
    handle = model[0].register_forward_hook(
        lambda module, args, output: by_hand.append(keep(output))
    )
    with torch.autocast("cpu", dtype=dtype):
        with hl.record(model, "0") as whole:
            model(X)
        handle.remove()
        with hl.record(model, "0", keep=keep) as run:
            model(X)
        assert torch.is_autocast_enabled("cpu")
    expected = exact(whole["0"].float())
    assert run["0"].dtype is torch.float32
    assert error(run["0"], expected) < 1e-6
    assert by_hand[0].dtype is dtype  # a hook written by hand: three digits, or none at all
    assert not error(by_hand[0], expected) < 1e-5


@pytest.mark.trap(27)
def test_a_norm_that_float16_cannot_hold_is_a_number():
    model = nn.Sequential(nn.Identity())
    big = torch.full((100, 100), 60000.0, dtype=torch.float16)
    assert big.norm().isinf()
    with hl.record(model, "0", keep=lambda t: (t.norm(), t.sum())) as run:
        model(big)
    norm, total = run["0"]
    torch.testing.assert_close(norm, torch.tensor(6e6), rtol=1e-4, atol=0)
    torch.testing.assert_close(total, torch.tensor(6e8), rtol=1e-4, atol=0)


def test_a_running_sum_of_bfloat16_does_not_stall():
    model = nn.Sequential(nn.Identity())
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    by_hand = torch.zeros((), dtype=torch.bfloat16)
    totals = []
    with hl.record(model, "0", keep=lambda t: totals.append(t.sum())):
        for _ in range(400):
            by_hand += model(ones).sum()
    assert by_hand == 256
    assert sum(totals) == 400


def test_what_is_cut_from_a_value_stays_in_its_dtype():
    model = make()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        hl.record(model, "0", keep=lambda t: (t[:, -1], t[:, -1] * 2, t)) as run,
    ):
        model(X)
    assert {part.dtype for part in run["0"]} == {torch.bfloat16}


def test_nothing_is_switched_without_autocast_numbers_are_wide():
    model, seen = make(), []

    def keep(value):
        seen.append((torch.is_autocast_enabled("cpu"), torch.overrides._len_torch_function_stack()))
        return value.mean()

    with hl.record(model, "0", keep=keep) as run:
        model(X)
    assert seen == [(False, 0)]
    assert run["0"] == model[0](X).mean()


@pytest.mark.cell("autocast", "gradients", "edit gradients")
def test_gradients_are_a_hand_hooks_and_their_statistics_exact():
    model, by_hand = make(), []

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(X).square().mean()

    handle = model[0].register_forward_hook(
        lambda module, args, output: (
            output.register_hook(lambda g: by_hand.append(g.clone())) and None
        )
    )
    loss().backward()
    handle.remove()
    with hl.record(model, "0:grad_output") as run:
        loss().backward()
    assert torch.equal(run["0:grad_output"], by_hand[0])
    with hl.record(model, "0:grad_output", keep=lambda g: g.norm()) as norms:
        loss().backward()
    assert norms["0:grad_output"].dtype is torch.float32
    torch.testing.assert_close(norms["0:grad_output"], by_hand[0].float().norm())
    with hl.edit(model, "0:grad_output", lambda g: g * 0), hl.record(model, ports="grad") as run:
        loss().backward()
    assert not run["0.weight:grad"].any()
    assert run["2.weight:grad"].any()


@pytest.mark.cell(
    "autocast",
    "edit",
    "raw hooks",
    note="The edit function or raw hook runs under autocast, like the model's own code.",
)
def test_edits_run_as_the_models_own_code_and_keep_the_dtype():
    model, seen = make(), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model[0](X) * 0.5
        with hl.edit(model, "0", hl.edits.scale(0.5)), hl.record(model, "0") as run:
            model(X)
        assert torch.equal(run["0"], half.detach())
        for change in (hl.edits.add(1.0), hl.edits.replace(3.0), hl.edits.clamp(0, 1)):
            with hl.edit(model, "0", change), hl.record(model, "0") as run:
                model(X)
            assert run["0"].dtype is torch.bfloat16
        with hl.attach(model) as line:
            line.forward("0", lambda *a: seen.append(torch.is_autocast_enabled("cpu")))
            model(X)
    assert seen == [True]


@pytest.mark.cell("autocast", "watch", "features")
def test_what_hookline_measures_itself_is_in_float32():
    model, file = make(), io.StringIO()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = hl.features(model, X, ["0"])
        with hl.watch(model, "0", file=file):
            model(X)
        std, mean = torch.std_mean(features["0"].float(), correction=0)
    assert f"mean {mean.item():.4g}  std {std.item():.4g}" in file.getvalue()
    with hl.clip(model, "0", norm=1.0, ports="grad_output") as line:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(X).square().sum()
        loss.backward()
    assert line.report().clipped == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
def test_in_compiled_code_the_statistics_are_the_same():
    torch.compiler.reset()
    model = make()
    keep = lambda t: (t.norm(), t.mean(), t.float().T @ t.float(), t[:, -1])  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with hl.record(model, "0", keep=keep) as eager:
            model(X)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with hl.record(model, "0", keep=keep) as run:
            compiled(X)
    for found, expected in zip(run["0"], eager["0"], strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected)
    torch.compiler.reset()
