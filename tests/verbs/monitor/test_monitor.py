"""Monitoring a training: what is measured, when, and that nothing of the training changes."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import pickle
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from thoroughness import tries
from zoo import Looped, Nested, SmallNet

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
OPTIMIZER = importlib.import_module("torch.optim.optimizer")
EVERYTHING = ("input", "output", "grad_input", "grad_output", "value", "grad", "update")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(k, n=16):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(k))


def sgd(model):
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, optimizer, steps, n_parts=1):
    for k in range(steps):
        optimizer.zero_grad()
        for part in batch(k).chunk(n_parts):
            (model(part).square().sum() / 16).backward()
        optimizer.step()


def moments_of(tensor):
    statistic = hl.stats.moments()
    return statistic.result(statistic.update(statistic.start(tensor), tensor))


def assert_equal_curves(one, other, tolerance=1e-6):
    assert one.sites == other.sites
    assert one.steps.tolist() == other.steps.tolist()
    for site in one.sites:
        assert one[site].names == other[site].names
        for name in one[site].names:
            np.testing.assert_allclose(
                getattr(one[site], name), getattr(other[site], name),
                rtol=tolerance, atol=1e-12, err_msg=f"{site} {name}",
            )  # fmt: skip


# -- what is measured ---------------------------------------------------------------------------


def test_values_at_each_port_are_those_that_a_recording_has():
    model = net()
    ports = ("input", "output", "grad_input", "grad_output")
    with hl.record(model, ports=ports) as run:
        model(batch(0).requires_grad_()).square().sum().backward()
    with hl.monitor(model, ports=ports) as seen:
        model(batch(0).requires_grad_()).square().sum().backward()
    assert set(seen.sites) == {str(site) for site in run.sites}
    for site in seen.sites:
        assert seen[site].results == [moments_of(run[site])]


def test_steps_are_measured_under_a_default_device():
    curves = []
    for device in ("cpu", "meta"):
        model = net()
        with torch.device(device), hl.monitor(model) as seen:
            optimizer = sgd(model)
            for _ in range(2):
                optimizer.zero_grad()
                model(X).square().sum().backward()
                optimizer.step()
        curves.append(seen)
    assert_equal_curves(*curves)


def test_weights_gradients_and_updates_are_those_of_the_step():
    model = net()
    optimizer = sgd(model)
    with hl.monitor(model, ports=("value", "grad", "update")) as seen:
        train(model, optimizer, 1)
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        train(model, optimizer, 1)
    for name, parameter in model.named_parameters():
        assert seen[f"{name}:value"].results[1] == moments_of(before[name])
        assert seen[f"{name}:grad"].results[1] == moments_of(parameter.grad)
        assert seen[f"{name}:update"].results[1] == moments_of(parameter - before[name])
        ratio = (parameter - before[name]).norm() / before[name].norm()
        assert seen[f"{name}:update"].ratio[1] == pytest.approx(ratio.item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_weight_that_an_optimizer_has_twice_is_measured_once():
    model = net()
    optimizer = sgd([*model.parameters(), model[0].weight])
    with hl.monitor(model, ports=("value", "grad", "update")) as seen:
        train(model, optimizer, 1)
        before = model[0].weight.detach().clone()
        train(model, optimizer, 1)
    assert seen["0.weight:update"].results[1] == moments_of(model[0].weight - before)
    for port in ("value", "grad", "update"):
        assert {result.count for result in seen[f"0.weight:{port}"].results} == {before.numel()}


@pytest.mark.parametrize("frozen", ["0", "2"])
def test_frozen_weights_have_values_at_each_step(frozen):
    model = net()
    model.get_submodule(frozen).requires_grad_(False)
    optimizer = sgd([one for one in model.parameters() if one.requires_grad])
    with hl.monitor(model, ports=("value", "grad", "update")) as seen:
        train(model, optimizer, 3)
    weight = model.get_submodule(frozen).weight
    assert seen[f"{frozen}.weight:value"].results == [moments_of(weight)] * 3
    assert not {f"{frozen}.weight:grad", f"{frozen}.weight:update"} & set(seen.sites)
    assert {f"{k}.{name}:value" for k in (0, 2) for name in ("weight", "bias")} <= set(seen.sites)


def test_frozen_weights_that_others_change_are_measured_anew():
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2].parameters())
    with hl.monitor(model, "0.weight:value") as seen:
        for k in range(3):
            train(model, optimizer, 1)
            model[0].weight.data.fill_(k)  # as the average of another model's weights
    assert seen["0.weight"].mean[1:].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_half_weights_are_differences_in_float32(dtype):
    model = nn.Linear(3, 1, bias=False).to(dtype)
    before = torch.tensor([[1.0, 1.0, 256.0]], dtype=dtype)
    after = torch.tensor([[-(2.0**-9), 0.5, 0.3]], dtype=dtype)
    optimizer = sgd(model)
    with hl.monitor(model, "weight:update") as seen:
        for weight in (before, after):
            model.weight.data.copy_(before)
            model.weight.grad = (before - weight).float().mul(0).to(dtype)
            handle = optimizer.register_step_post_hook(
                lambda *_, weight=weight: model.weight.data.copy_(weight)
            )
            optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
            optimizer.step()
            handle.remove()
    change = after.double() - before.double()
    assert not torch.equal(change, (after - before).double())  # in half precision it is rounded
    assert seen["weight:update"].results[1] == moments_of(change.float())


def test_a_model_alone_gives_all_kinds_of_sites():
    model = net()
    with hl.monitor(model) as seen:
        train(model, sgd(model), 1)
    for site in ("(root)", "1", "1:grad_output", "0.weight:value", "0.bias:grad", "2.bias:update"):
        assert site in seen
    assert seen["0.weight"].site == "0.weight:value"


@pytest.mark.parametrize(
    ("selector", "ports", "sites"),
    [
        ("0", "output", ["0"]),
        ("0", None, ["0", "0:grad_output", "0.weight:value", "0.weight:grad", "0.weight:update",
                     "0.bias:value", "0.bias:grad", "0.bias:update"]),
        ("0.weight:update", None, ["0.weight:update"]),
        ("1:grad_output", None, ["1:grad_output"]),
        (nn.ReLU, None, ["1", "1:grad_output"]),
        (["1", "2.bias:grad"], "output", ["1", "2.bias:grad"]),
        ("*.bias", ("value",), ["0.bias:value", "2.bias:value"]),
    ],
)  # fmt: skip
def test_selectors_choose_modules_and_parameters(selector, ports, sites):
    model = net()
    with hl.monitor(model, selector, ports=ports) as seen:
        train(model, sgd(model), 1)
    assert list(seen.sites) == sites


def test_a_parameter_itself_is_a_selector():
    model = net()
    with hl.monitor(model, model[0].weight) as seen:
        train(model, sgd(model), 1)
    assert list(seen.sites) == ["0.weight:value", "0.weight:grad", "0.weight:update"]


def test_each_tensor_of_a_nested_value_has_a_curve():
    model = nn.Sequential(nn.Linear(4, 4), Nested())
    with hl.monitor(model, "1", ports=("output", "grad_output")) as seen:
        out = model(batch(0))
        out["pair"].left.sum().backward()
    leaf = seen["1:output.pair.left"]
    assert leaf.count.tolist() == [64]
    assert seen["1:grad_output.pair.left"].mean.tolist() == [1.0]


def test_all_calls_of_a_module_are_one_value_and_a_call_is_one():
    model = Looped()
    with hl.monitor(model, ["block", "block#1"], ports="output") as seen:
        model(torch.randn(5, 2))
    assert seen["block"].count.tolist() == [30]
    assert seen["block#1"].count.tolist() == [10]


def test_nan_is_counted_and_stays_in_the_curve():
    model = net()
    with hl.monitor(model, "0", ports="output") as seen:
        model(batch(0))
        model(batch(0) * float("nan"))
    assert seen["0"].non_finite.tolist() == [0, 128]
    assert math.isnan(seen["0"].mean[1])
    assert "!" in str(seen)


class Range:
    def start(self, value):
        return torch.full((2,), -math.inf, dtype=torch.float64, device=value.device)

    def update(self, slots, value):
        low, high = value.aminmax()
        return torch.maximum(slots, torch.stack([-low, high]).double())

    def merge(self, slots, other):
        return torch.maximum(slots, other)

    def result(self, slots):
        return {"low": -slots[0].item(), "high": slots[1].item()}


def test_several_statistics_and_ones_own():
    model = net()
    with hl.monitor(model, "0", ports="output", stats=[hl.stats.moments(), Range()]) as seen:
        model(batch(0))
    value = model[0](batch(0))
    assert seen["0"].low.tolist() == [value.min().item()]
    assert seen["0"].std[0] == pytest.approx(value.std(correction=0).item())
    assert seen.at(0)["0/high"] == value.max().item()


# -- steps --------------------------------------------------------------------------------------


def test_only_every_nth_step_is_reported():
    model = net()
    with hl.monitor(model, every=3) as seen:
        train(model, sgd(model), 8)
    assert seen.steps.tolist() == [0, 3, 6]


def test_the_cadence_and_the_number_of_the_step_can_be_set():
    model = net()
    optimizer = sgd(model)
    line = hl.monitor(model, every=2)
    with line as seen:
        line.step = 100
        train(model, optimizer, 3)
        line.every = 10
        train(model, optimizer, 18)
    assert seen.steps.tolist() == [100, 102, 110, 120]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_new_interval_counts_for_the_step_that_begins(has_optimizer):
    model = net()
    optimizer = sgd(model)
    line = hl.monitor(model, "1", ports="output", every=2)
    with line as seen:
        for k in range(6):
            if k == 3:
                line.every = 3
            model(batch(k)).sum().backward()
            if has_optimizer:
                optimizer.step()
    assert seen.steps.tolist() == [0, 2, 3]
    assert seen["1"].count.tolist() == [128] * 3


def test_unreported_steps_measure_nothing():
    calls = []

    class Counting(Range):
        def update(self, slots, value):
            calls.append(1)
            return super().update(slots, value)

    model = net()
    with hl.monitor(model, ports=EVERYTHING, stats=Counting(), every=100):
        train(model, sgd(model), 1)
        calls.clear()
        train(model, sgd(model), 5)
    assert not calls


def test_accumulated_parts_equal_the_whole_batch():
    whole, parts = net(), net()
    ports = ("output", "grad_output", "value", "grad", "update")
    with hl.monitor(whole, ports=ports) as expected:
        train(whole, sgd(whole), 3)
    with hl.monitor(parts, ports=ports) as seen:
        train(parts, sgd(parts), 3, n_parts=4)
    assert_equal_curves(seen, expected, 1e-5)


def test_passes_are_steps_where_no_optimizer_steps():
    model = net()
    with hl.monitor(model, "1", ports="output", every=2) as seen:
        for k in range(5):
            model(batch(k))
    assert seen.steps.tolist() == [0, 2, 4]
    assert seen["1"].count.tolist() == [128, 128, 128]


def test_passes_without_gradients_are_no_part_of_a_training_step():
    model = net()
    optimizer = sgd(model)
    with hl.monitor(model, "1", ports="output") as seen:
        with torch.no_grad():
            model(batch(7))  # the sanity check of a trainer
        train(model, optimizer, 1)
        with torch.no_grad():
            model(batch(8))
        train(model, optimizer, 1)
    assert seen["1"].count.tolist() == [128, 128]


def test_two_optimizers_of_one_model_make_one_step():
    model = net()
    one, other = sgd(model[0]), sgd(model[2])
    with hl.monitor(model, ports=("output", "update")) as seen:
        for k in range(4):
            model(batch(k)).sum().backward()
            one.step()
            other.step()
    assert seen.steps.tolist() == [0, 1, 2, 3]
    last = seen["2.weight:update"].count
    assert last.tolist() == [16, 16, 16, 16]


def greatest(model, site, numbers):
    """The greatest output of a module for inputs of one number each."""
    return [site(model)(torch.full((2, 4), float(k))).max().item() for k in numbers]


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_that_steps_rarely_moves_no_number(every):
    model = net()
    often, rarely = (torch.optim.SGD(one.parameters(), lr=0.0) for one in (model[0], model[2]))
    with hl.monitor(model, ["0", "2.weight:update"], ports="output", every=every) as seen:
        for k in range(8):
            model(torch.full((2, 4), float(k))).sum().backward()
            often.step()
            if k % 4 == 2:
                rarely.step()
    steps = list(range(0, 8, every))
    assert seen.steps.tolist() == steps
    assert seen["0"].max.tolist() == greatest(model, lambda one: one[0], steps)
    assert seen["0"].count.tolist() == [16] * len(steps)
    had = (~np.isnan(seen["2.weight:update"].mean)).tolist()
    assert had == [k % 4 == 2 for k in steps]


@pytest.mark.parametrize("first", [0, 1])
def test_an_optimizer_that_steps_rarely_may_be_the_first_in_code(first):
    model = net()
    often, rarely = (torch.optim.SGD(one.parameters(), lr=0.0) for one in (model[0], model[2]))
    with hl.monitor(model, ["0", "2.weight:update"], ports="output") as seen:
        for k in range(8):
            model(torch.full((2, 4), float(k))).sum().backward()
            if k % 2 == first:
                rarely.step()
            often.step()
    # Where both first step at the second run, this first looks like a rare step at its end.
    assert seen.steps.tolist() == list(range(8))
    n_late = 2 * first
    expected = greatest(model, lambda one: one[0], range(n_late, 8))
    assert seen["0"].max.tolist()[n_late:] == expected
    had = (~np.isnan(seen["2.weight:update"].mean)).tolist()
    assert had[n_late:] == [k % 2 == first for k in range(n_late, 8)]


def test_optimizers_with_a_run_for_each_make_one_step():
    model = net()
    one, other = (torch.optim.SGD(part.parameters(), lr=0.0) for part in (model[0], model[2]))
    with hl.monitor(model, "0", ports="output") as seen:
        for k in range(4):
            for optimizer in (one, other):
                model(torch.full((2, 4), float(k))).sum().backward()
                optimizer.step()
    assert seen.steps.tolist() == [0, 1, 2, 3]
    assert seen["0"].count.tolist() == [32] * 4


def test_alternating_passes_and_optimizers_keep_their_steps():
    model = nn.ModuleDict({"one": net(), "other": net()})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.0) for name, part in model.items()}
    with hl.monitor(model, ["one.0", "other.0"], ports="output") as seen:
        for k in range(4):
            for name, part in model.items():
                part(torch.full((2, 4), float(k))).sum().backward()
                optimizers[name].step()
    assert seen.steps.tolist() == [0, 1, 2, 3]
    for name in model:
        expected = greatest(model, lambda one, name=name: one[name][0], range(4))
        assert seen[f"{name}.0"].max.tolist() == expected


def test_an_optimizer_made_anew_goes_on_where_the_old_one_ended():
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2)]
    with hl.monitor(model, "0", ports="output") as seen:
        for k in range(6):
            model(torch.full((2, 4), float(k))).sum().backward()
            optimizers[k > 2].step()
            assert len(seen) == k + 1  # each step is reported when it has ended
    assert seen["0"].max.tolist() == greatest(model, lambda one: one[0], range(6))


def test_an_optimizer_that_gets_the_model_later_tells_the_steps():
    model, other = net(), nn.Linear(1, 1)
    optimizer = sgd(other)
    with hl.monitor(model, "0", ports="output") as seen:
        for k in range(6):
            if k == 2:
                optimizer.add_param_group({"params": list(model.parameters())})
            model(batch(k)).sum().backward()
            optimizer.step()
    assert seen["0"].count.tolist() == [3 * 128, 128, 128, 128]


@pytest.mark.parametrize(("first", "step", "every"), [(99, 0, 100), (0, 1, 2), (7, 3, 5)])
def test_passes_are_counted_before_it_is_known_who_tells(first, step, every):
    model = net()
    line = hl.monitor(model, "0", ports="output", every=every)
    with line as seen:
        line.first, line.step = first, step
        for k in range(step, 300):
            model(torch.full((2, 4), float(k)))
    expected = [k for k in range(step, 300) if (k - first) % every == 0]
    assert seen.steps.tolist() == expected
    assert seen["0"].max.tolist() == greatest(model, lambda one: one[0], expected)


@pytest.mark.parametrize("n", [6, 300])
def test_passes_that_were_before_keep_their_number_and_turn(n):
    model = net()
    line = hl.monitor(model, "0", ports="output")
    with line as seen:
        for k in range(n):
            if k == n - 3:
                line.step = 1000
            elif k == n - 2:
                line.every = 2
            model(torch.full((2, 4), float(k)))
            seen.log(k=k)
    steps = [*range(n - 3), 1000, 1002]
    assert seen.steps.tolist() == steps
    assert seen.logged["k"].steps.tolist() == [*range(n - 3), 1000, 1001, 1002]
    assert seen["0"].max.tolist() == greatest(model, lambda one: one[0], [*range(n - 2), n - 1])


def test_a_number_given_inside_the_model_is_that_of_its_pass():
    model = net()
    line = hl.monitor(model, "1", ports="output")
    with line as seen:
        numbers = iter((5, 9))
        model[0].register_forward_hook(lambda *_: setattr(line, "step", next(numbers)))
        model(batch(0))
        model(batch(1))
    assert seen.steps.tolist() == [5, 9]
    assert seen["1"].count.tolist() == [128] * 2


def test_gradients_after_the_last_number_was_given_are_kept():
    model = net()
    line = hl.monitor(model, "1", ports=("output", "grad_output"))
    with line as seen:
        loss = model(batch(0)).sum()
        line.step = 7
        loss.backward()
    assert seen.steps.tolist() == [0, 7]
    counts = [seen[site].count for site in ("1", "1:grad_output")]
    np.testing.assert_array_equal(counts, [[128, np.nan], [np.nan, 128]])


def test_parts_of_training_without_gradients_are_measured():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    model = Frozen()
    optimizer = sgd(model.head)
    with hl.monitor(model, ["backbone", "head"], ports="output") as seen:
        for k in range(4):
            model(batch(k)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(batch(k))
    assert seen["backbone"].count.tolist() == [64, 64, 64, 64]
    assert seen["head"].count.tolist() == [32, 32, 32, 32]


@pytest.mark.slow
def test_values_of_many_threads_are_all_counted():
    model = net()
    optimizer = sgd(model)

    def work():
        for k in range(40):
            model(batch(k))

    with hl.monitor(model, "0", ports="output", every_thread=True) as seen:
        for _ in range(3):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            model(batch(0)).sum().backward()
            optimizer.step()
    assert seen["0"].count.tolist() == [161 * 128] * 3


def test_optimizers_of_other_models_are_not_heard():
    model, other = net(), net()
    with hl.monitor(model, "1", ports="output") as seen:
        for k in range(2):
            model(batch(k))
            train(other, sgd(other), 1)
    assert seen.steps.tolist() == [0, 1]


def test_a_step_with_a_closure_measures_the_closures_gradients():
    model = net()
    optimizer = sgd(model)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0)).square().sum()
        loss.backward()
        return loss

    with hl.monitor(model, ports=("output", "grad", "update")) as seen:
        for _ in range(2):
            optimizer.step(closure)
            expected = [moments_of(one.grad) for one in model.parameters()]
    assert [seen[f"{n}:grad"].results[1] for n, _ in model.named_parameters()] == expected
    assert seen["0"].count.tolist() == [128, 128]


def test_a_root_that_is_never_called_is_told_by_the_optimizer():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

    root = Module()
    optimizer = sgd(root)
    with hl.monitor(root, "net.1", ports="output") as seen:
        for k in range(3):
            root.net(batch(k)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                root.net(batch(9))
    assert seen["net.1"].count.tolist() == [128, 128, 128]


def test_a_root_that_is_never_called_and_never_trained_is_said():
    root = nn.ModuleDict({"net": net()})
    with pytest.warns(hl.HooklineWarning, match="were merged into one step"):
        with hl.monitor(root, "net.1", ports="output") as seen:
            for k in range(3):
                root["net"](batch(k))
    assert seen["net.1"].count.tolist() == [384]


# -- regimes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_counted(reentrant):
    class Part(nn.Module):
        def __init__(self, is_checkpointed):
            super().__init__()
            self.inner, self.head = net(), nn.Linear(2, 2)
            self.is_checkpointed = is_checkpointed

        def forward(self, x):
            x = x.requires_grad_()
            run = self.inner
            x = checkpoint(run, x, use_reentrant=reentrant) if self.is_checkpointed else run(x)
            return self.head(x)

    torch.manual_seed(0)
    plain = Part(False)
    again = copy.deepcopy(plain)
    again.is_checkpointed = True
    ports = ("output", "grad_output", "grad", "update")
    with hl.monitor(plain, ports=ports) as expected:
        train(plain, sgd(plain), 3)
    with hl.monitor(again, ports=ports) as seen:
        train(again, sgd(again), 3)
    assert_equal_curves(seen, expected)


def test_gradients_are_unscaled_with_a_scaler():
    plain, scaled = net(), net()
    with hl.monitor(plain) as expected:
        train(plain, sgd(plain), 3)
    optimizer, scaler = sgd(scaled), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.monitor(scaled, scaler=scaler) as seen:
        train_scaled(scaled, optimizer, scaler, 3)
    assert_equal_curves(seen, expected)


def train_scaled(model, optimizer, scaler, steps):
    for k in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(batch(k)).square().sum() / 16).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_scaler_is_found_and_its_scale_named():
    model = net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.warns(hl.HooklineWarning, match="step 0 are multiplied by GradScaler's 1024"):
        with hl.monitor(model, "1", ports="grad_output") as seen:
            train_scaled(model, optimizer, scaler, 2)
    plain = net()
    with hl.monitor(plain, "1", ports="grad_output") as expected:
        train(plain, sgd(plain), 2)
    ratio = seen["1:grad_output"].std / expected["1:grad_output"].std
    assert ratio.tolist() == pytest.approx([1024, 1])


@pytest.mark.parametrize("ports", [("grad", "update"), "output"])
def test_a_scaler_is_no_news_without_gradients_at_modules(ports, recwarn):
    model = net()
    with hl.monitor(model, ports=ports):
        train_scaled(model, sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0), 2)
    assert [str(warning.message) for warning in recwarn] == []


def test_a_scaler_is_found_after_steps_that_went_past_it():
    model = net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.warns(hl.HooklineWarning, match="step 1 are multiplied by GradScaler's 1024"):
        with hl.monitor(model, "1", ports="grad_output") as seen:
            train(model, optimizer, 1)
            train_scaled(model, optimizer, scaler, 2)
    plain = net()
    optimizer = sgd(plain)
    with hl.monitor(plain, "1", ports="grad_output") as expected:
        train(plain, optimizer, 1)
        train(plain, optimizer, 2)
    ratio = seen["1:grad_output"].std / expected["1:grad_output"].std
    assert ratio.tolist() == pytest.approx([1, 1024, 1])


def test_fused_optimizers_under_a_scaler_give_unscaled_gradients():
    plain, scaled = net(), net()
    with hl.monitor(plain, ports="grad") as expected:
        train(plain, torch.optim.AdamW(plain.parameters(), fused=True), 2)
    optimizer = torch.optim.AdamW(scaled.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.monitor(scaled, ports="grad", scaler=scaler) as seen:
        train_scaled(scaled, optimizer, scaler, 2)
    assert_equal_curves(seen, expected, 1e-5)


def test_statistics_under_autocast_are_of_the_values():
    model = net()
    with hl.record(model, "0") as run, torch.autocast("cpu", torch.bfloat16):
        model(batch(0))
    with hl.monitor(model, "0", ports="output") as seen, torch.autocast("cpu", torch.bfloat16):
        model(batch(0))
    assert seen["0"].results == [moments_of(run["0"])]


@pytest.mark.compiles
def test_compiled_counts_equal_the_plain_ones(fresh_dynamo):
    plain, model = net(), net()
    ports = ("output", "grad_output", "grad", "update")
    with hl.monitor(plain, ports=ports) as expected:
        train(plain, sgd(plain), 4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    line = hl.monitor(model, ports=ports)
    with line as seen:
        train(compiled, sgd(model), 4)
    assert_equal_curves(seen, expected, 1e-5)


@pytest.mark.compiles
def test_the_cadence_recompiles_nothing(fresh_dynamo):
    model = net()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = sgd(model)
    line = hl.monitor(model, ports=("output", "grad_output"), every=2)
    with line as seen:
        train(compiled, optimizer, 3)
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(compiled, optimizer, 3)
            line.every = 3
            train(compiled, optimizer, 4)
    assert seen.steps.tolist() == [0, 2, 4, 6, 9]
    assert seen["0"].count.tolist() == [128] * 5


# -- nothing changes ----------------------------------------------------------------------------


N_STEPS = tries(500, gate=150)


def train_digits(monitored, tmp_path):
    from hookline.models.demo.net import DigitsNet

    torch.manual_seed(0)
    model = DigitsNet().train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    line = None
    if monitored:
        line = hl.monitor(model, ports=EVERYTHING, every=3, to=tmp_path / "run")
    for k in range(N_STEPS):
        generator = torch.Generator().manual_seed(k)
        x = torch.rand(16, 1, 8, 8, generator=generator)
        y = torch.randint(0, 10, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if line is not None:
        line.remove()
        assert len(line.curves) == len(hl.open(tmp_path / "run")) == math.ceil(N_STEPS / 3)
    return model.state_dict(), torch.rand(3)


@pytest.mark.slow
def test_hundreds_of_steps_give_the_same_weights_bit_for_bit(tmp_path):
    weights, drawn = train_digits(False, tmp_path)
    monitored, drawn_monitored = train_digits(True, tmp_path)
    for name in weights:
        assert torch.equal(weights[name], monitored[name]), name
    assert torch.equal(drawn, drawn_monitored)


def test_no_hook_stays_after_the_line():
    model = net()
    before = str(hl.inventory(model))
    with hl.monitor(model, ports=EVERYTHING):
        train(model, sgd(model), 2)
    assert str(hl.inventory(model)) == before
    assert not OPTIMIZER._global_optimizer_pre_hooks
    assert not OPTIMIZER._global_optimizer_post_hooks


def test_the_curves_keep_no_model_and_no_tensor_alive():
    model = net()
    with hl.monitor(model) as seen:
        train(model, sgd(model), 2)
    known = [weakref.ref(model), *(weakref.ref(one) for one in model.parameters())]
    del model
    gc.collect()
    assert not any(one() is not None for one in known)
    assert seen["1"].count.tolist() == [128, 128]


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2", None])
def test_a_cadence_that_is_no_positive_integer_is_refused(every):
    with pytest.raises(hl.AttachError, match="every= must be a positive integer, got"):
        hl.monitor(net(), every=every)


@pytest.mark.parametrize("number", [-1, 1.5, True, "2", None, 2**63])
def test_a_step_that_is_no_number_is_refused(number):
    line = hl.monitor(net())
    for name in ("step", "first"):
        with pytest.raises(hl.AttachError, match=f"line.{name} must be an integer from 0 to"):
            setattr(line, name, number)
    line.step = np.int64(7)
    assert line.step == 7
    with pytest.warns(hl.HooklineWarning, match="reported no step: Sequential never ran"):
        line.remove()


def test_what_is_no_scaler_is_refused():
    with pytest.raises(hl.AttachError, match="scaler= must be a GradScaler, got 3"):
        hl.monitor(net(), scaler=3)


@pytest.mark.parametrize("to", [3, object(), {"a": 1}, 2.5, Exception])
def test_an_unknown_place_to_write_is_refused(to):
    with pytest.raises(hl.AttachError, match="to= must be a folder, a file, a logger"):
        hl.monitor(net(), to=to)


@pytest.mark.parametrize(
    ("to", "fix"), [("wandb", r"wandb\.init\(\)"), ("TensorBoard", "Summ"), (["mlflow"], "mlflow")]
)
def test_the_name_of_a_logger_is_no_folder(to, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hl.AttachError, match=f"(?s)must be the logger itself.*Give to={fix}"):
        hl.monitor(net(), to=to)
    assert list(tmp_path.iterdir()) == []
    with hl.monitor(model := net(), to="./wandb"):
        train(model, sgd(model), 1)
    assert hl.open("wandb").steps.tolist() == [0]


@pytest.mark.parametrize("stats", ["mean", torch.mean, Range, [], [Range(), 1]])
def test_what_is_no_statistic_is_refused(stats):
    with pytest.raises(hl.AttachError, match="stats= must"):
        hl.monitor(net(), stats=stats)


def test_unknown_ports_and_selectors_are_refused():
    with pytest.raises(hl.SelectionError, match="ports must be of input, output"):
        hl.monitor(net(), ports="weights")
    with pytest.raises(hl.SelectionError, match="fc"):
        hl.monitor(net(), "fc")
    with pytest.raises(hl.AttachError, match="must be given a model"):
        hl.monitor({"a": torch.zeros(1)})
    assert not OPTIMIZER._global_optimizer_pre_hooks


def test_integer_values_are_left_out_and_said_once():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    with pytest.warns(hl.HooklineWarning, match="input is left out: .* int64 .and 0:input") as told:
        with hl.monitor(model, ports=("input", "output")) as seen:
            for _ in range(3):
                model(torch.zeros(4, dtype=torch.long))
    assert len(told) == 1
    assert list(seen.sites) == ["(root)", "0", "1:input", "1"]


def test_integers_that_nobody_chose_are_left_out_without_a_word():
    class Ranks(nn.Module):
        def forward(self, x):
            return x.argsort()

    model = nn.Sequential(nn.Linear(3, 2), Ranks())
    with hl.monitor(model) as seen:
        model(torch.ones(4, 3))
    assert "0" in seen.sites
    assert "1" not in seen.sites


def test_sites_that_are_left_out_have_their_own_reasons():
    class Rows(nn.Module):
        def forward(self, x):
            return x[:0]

    model = nn.Sequential(nn.Embedding(5, 3), Rows())
    said = r"\(root\):input is left out: its values are int64 \(and 0:input\); 1 had an empty value"
    with pytest.warns(hl.HooklineWarning, match=said):
        with hl.monitor(model, ("(root):input", "0:input", "1")):
            model(torch.zeros(4, dtype=torch.long))


def test_an_empty_value_is_said_once_and_counts_as_none():
    model = net()
    with pytest.warns(hl.HooklineWarning, match="empty value") as told:
        with hl.monitor(model, "1", ports="output") as seen:
            model(batch(0, 0))
            model(batch(0))
            model(batch(0, 0))
    assert len(told) == 1
    assert seen["1"].count.tolist() == [0, 128, 0]
    assert math.isnan(seen["1"].mean[0])


def test_a_statistic_that_raises_is_said_and_training_goes_on():
    class Raises(Range):
        def update(self, slots, value):
            raise ValueError("no idea")

    model = net()
    with pytest.warns(hl.HooklineWarning) as told:
        with hl.monitor(model, stats=Raises()):
            train(model, sgd(model), 3)
    assert "raised ValueError: no idea" in str(told[0].message)
    plain = net()
    train(plain, sgd(plain), 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    ("slots", "found"),
    [
        (torch.zeros(3), r"Tensor\[3\]"),
        (torch.zeros(1, 2), r"Tensor\[1, 2\]"),
        (None, "NoneType"),
        (1.0, "float"),
    ],
)
def test_slots_of_another_shape_spoil_no_other_site(slots, found):
    class Odd(Range):
        def update(self, slots_before, value):
            return slots if value.shape[-1] == 2 else super().update(slots_before, value)

    model = net()
    wanted = f"2 is left out: Odd must keep a flat tensor of 2 slots, got {found}"
    with pytest.warns(hl.HooklineWarning, match=wanted) as told:
        with hl.monitor(model, ["0", "1", "2"], ports="output", stats=Odd()) as seen:
            train(model, sgd(model), 3)
    assert len(told) == 1
    assert seen.sites == ("0", "1")
    assert seen["0"].high[0] == net()[0](batch(0)).max().item()
    assert seen["1"].low.tolist() == [0, 0, 0]


def test_nan_in_slots_of_ones_own_is_a_value():
    class Sum(Range):
        def start(self, value):
            return torch.zeros(1, dtype=torch.float64)

        def update(self, slots, value):
            return slots + value.sum()

        def result(self, slots):
            return slots.item()

    model = net()
    with hl.monitor(model, "0", ports="output", stats=Sum()) as seen:
        model(batch(0))
        model(torch.full((2, 4), math.nan))
    assert [math.isnan(one) for one in seen["0"].results] == [False, True]
    assert math.isnan(seen.at(1)["0"])


def test_a_module_replaced_in_training_is_said_once():
    model = net()
    lost = "module 0 was replaced .* the curves of 0, 0:grad_output, 0.weight:value and 5 more end"
    with pytest.warns(hl.HooklineWarning, match=lost) as told:
        with hl.monitor(model) as seen:
            train(model, sgd(model), 2)
            model[0] = nn.Linear(4, 8)
            train(model, sgd(model), 2)
    assert len(told) == 1
    assert np.isnan(seen["0"].mean).tolist() == [False, False, True, True]
    assert not np.isnan(seen["2.weight:grad"].mean).any()


def test_a_warning_made_an_error_ends_the_training_when_asked():
    class Raises(Range):
        def update(self, slots, value):
            raise ValueError("no idea")

    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hl.HooklineWarning)
        with pytest.raises(hl.HooklineWarning, match="no idea"):
            with hl.monitor(model, stats=Raises()):
                train(model, sgd(model), 3)


def test_no_step_at_all_is_said():
    with pytest.warns(hl.HooklineWarning, match="reported no step: Sequential never ran"):
        with hl.monitor(net()):
            pass


def test_a_training_in_another_thread_alone_is_said():
    model = net()
    thread = threading.Thread(target=train, args=(model, sgd(model), 2))
    with pytest.warns(hl.HooklineWarning, match="saw nothing: the model ran in another thread"):
        with hl.monitor(model):
            thread.start()
            thread.join()


def test_gradients_of_weights_without_an_optimizer_are_said():
    model = net()
    with pytest.warns(hl.HooklineWarning, match="measured when an optimizer of the model steps"):
        with hl.monitor(model, ports="grad"):
            model(X).sum().backward()


def test_a_model_swapped_in_training_is_said_once():
    model, other = net(), net()
    optimizer = sgd(model)
    with pytest.warns(hl.HooklineWarning, match="no value came .* at step 1") as told:
        with hl.monitor(model, ports=("output", "grad")) as seen:
            train(model, optimizer, 1)
            for _ in range(3):
                other(batch(0)).sum().backward()
                optimizer.step()
    assert len(told) == 1
    assert np.isnan(seen["1"].mean).tolist() == [False, True, True, True]


def test_a_block_that_raises_keeps_what_was_reported():
    model = net()
    with pytest.raises(ZeroDivisionError):
        with hl.monitor(model) as seen:
            train(model, sgd(model), 2)
            raise ZeroDivisionError
    assert seen.steps.tolist() == [0, 1]


def test_a_first_step_is_reported_if_the_block_raises_after_it():
    model = net()
    with pytest.raises(ZeroDivisionError):
        with hl.monitor(model, "0") as seen:
            train(model, sgd(model[2]), 1)  # others may train the rest
            model(batch(1)).sum().backward()
            raise ZeroDivisionError
    assert seen.steps.tolist() == [0]
    assert seen["0"].count.tolist() == [128]


def test_values_that_are_overwritten_are_measured_before():
    torch.manual_seed(0)
    model = SmallNet()
    x = torch.randn(2, 3, 8, 8)
    with hl.record(model, "**.bn", copy=True) as run:
        model(x)
    with hl.monitor(model, "**.bn", ports="output") as seen:
        model(x)
    for site in seen.sites:
        np.testing.assert_allclose(seen[site].mean[0], moments_of(run[site]).mean)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_monitored_model_runs_and_is_not_measured(make):
    model = net()
    with hl.monitor(model, ports=EVERYTHING) as seen:
        other = make(model)
        for _ in range(2):
            other(batch(1).requires_grad_()).sum().backward()
        train(model, sgd(model), 1)
    assert seen["1"].count.tolist() == [16 * 8]
    assert seen["1:grad_output"].count.tolist() == [16 * 8]
    assert not len(hl.inventory(other))


def test_a_step_that_is_numbered_in_the_loop_keeps_its_number():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    line = hl.monitor(model, "1", ports="output")
    with line as seen:
        for number in (7, 8, 20):
            line.step = number
            model(batch(number)).sum().backward()
            optimizer.step()
    assert seen.steps.tolist() == [7, 8, 20]
    assert seen["1"].count.tolist() == [128] * 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_step_that_a_scaler_skips_belongs_to_the_next(fused, every, skipped):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with hl.monitor(model, scaler=scaler, every=every) as seen:
        for number in range(6):
            optimizer.zero_grad()
            scaler.scale(
                model(batch(number)).sum() * (math.nan if number == skipped else 1)
            ).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen.steps.tolist() == list(range(0, 5, every))
    assert not seen["0.weight:grad"].non_finite.any()
    assert (seen["0.weight:update"].norm > 0).all()
    expected = [256 if number == skipped else 128 for number in range(0, 5, every)]
    assert seen["1"].count.tolist() == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 3, 4, 5]), (2, [0, 4])])
def test_a_trainers_steps_that_a_scaler_skips_are_left_out(every, steps, fused):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    line = hl.monitor(model, "1", ports="output", scaler=scaler, every=every)
    with line as seen:
        for number in range(6):
            line.begin_step(number)
            optimizer.zero_grad()
            scaler.scale(model(batch(number)).sum() * (math.nan if number == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen.steps.tolist() == steps
    assert seen["1"].count.tolist() == [128] * len(steps)


def test_a_trainers_evaluation_before_the_first_step_is_left_out(monkeypatch):
    monkeypatch.setattr("hookline.verbs.monitor.training_steps._MOST_WAITING", 3)
    model = net()
    optimizer = sgd(model)
    line = hl.monitor(model, "1", ports="output")
    with line as seen:
        line.begin_step(1)
        with torch.no_grad():
            for k in range(8):
                model(batch(k))
        for k in range(5):  # accumulated
            model(batch(k)).sum().backward()
        optimizer.step()
    assert seen.steps.tolist() == [1]
    assert seen["1"].count.tolist() == [5 * 128]
