"""Findings of trainings: what broke, when, and what moved first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from planted_trainings import FAULTS, HEALTHY, WHEN
from thoroughness import tries

FEW = ["a bad batch", "a NaN in a batch", "the loss explodes", "learning rate x1000, SGD"]
BY_NAME = {training.name: training for training in (*HEALTHY, *FAULTS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", tries([t.name for t in HEALTHY], gate=["plain, SGD"]))
def test_a_healthy_training_raises_no_alarm(name):
    findings = BY_NAME[name].run()
    assert findings.ok, str(findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", tries([t.name for t in FAULTS], gate=FEW))
def test_the_first_finding_names_the_planted_fault(name):
    training = BY_NAME[name]
    findings = training.run()
    assert training.is_named(findings), str(findings)


@pytest.fixture(scope="module")
def layers():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    for parameter in model.parameters():  # so that all outputs grow as the input
        nn.init.ones_(parameter)
    return model


def monitored(model, scales, **options):
    with hl.monitor(model, ports="output", **options) as seen:
        for scale in scales:
            seen.log(loss=model(torch.ones(2, 4) * scale).square().mean())
    return seen


def test_a_jump_names_its_step_and_what_follows(layers):
    finding = monitored(layers, [1.0] * 30 + [1e4] + [1.0] * 10).findings()[0]
    assert (finding.kind, finding.site, finding.step) == ("jump", "0", 30)
    assert set(finding.follows) == {"1", "2", "(root)"}
    assert "a single batch" in finding.why


def trained_by_hand(rate):
    """Train without an optimizer of the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with hl.monitor(model) as seen:
        for _ in range(12):
            model.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(rate * parameter.grad)
    return seen


def test_weights_that_no_optimizer_changes_are_told():
    (finding,) = trained_by_hand(0.0).findings()
    assert (finding.kind, finding.level, finding.site) == ("frozen", "warning", "0.weight:value")
    assert "No optimizer of the model has stepped" in str(finding.why)
    assert trained_by_hand(0.01).findings().ok


def test_norms_that_grow_over_steps_blame_the_learning_rate(layers):
    finding = monitored(layers, [1.0] * 30 + [2.0**k for k in range(1, 12)]).findings()[0]
    assert (finding.kind, finding.site, finding.step) == ("jump", "0", 31)
    assert finding.advice.startswith("It grows over several steps: lower the learning rate")


def test_gradients_that_grow_together_blame_no_hook():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scales = {"0.weight": 1e4, "1.weight": 5.0}  # only the first jumps, and the second grows
    with hl.monitor(model, ports="grad") as seen:
        for step in range(40):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            for name, scale in scales.items():
                model.get_parameter(name).grad *= scale if step > 29 else 1.0
            optimizer.step()
            optimizer.zero_grad()
    finding = seen.findings()[0]
    assert (finding.site, finding.step) == ("0.weight:grad", 30)
    assert "hooks" not in finding.advice


def test_steps_that_a_scaler_skips_blame_no_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.999)
    with hl.monitor(model, scaler=scaler) as seen:
        for _ in range(12):
            scaler.scale(model(torch.ones(2, 4)).square().mean() * 1e3).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [finding.kind for finding in seen.findings()] == ["non-finite"]


def test_a_batch_that_is_larger_is_no_jump(layers):
    with hl.monitor(layers, ports=("input", "output")) as seen:
        for step in range(40):
            layers(torch.ones(2 if step < 30 else 2000, 4))
    assert len(seen.findings()) == 0


@pytest.mark.parametrize("seed", [0, 1])  # of 0 the updates are large too, after the jump
def test_a_weight_that_jumps_without_an_update_says_so(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with hl.monitor(model) as seen, torch.no_grad():
        for step in range(30):
            if step == 20:
                model[1].bias.fill_(1e3)
            with torch.enable_grad():
                model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finding = seen.findings()[0]
    assert (finding.kind, finding.site, finding.step) == ("jump", "1.bias:value", 20)
    assert finding.advice == "No update jumps before: look at what else writes to 1.bias."


def test_a_jump_of_one_gradient_alone_says_so():
    model, scale = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), [1.0]
    model[1].weight.register_hook(lambda grad: grad * scale[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.monitor(model, ports=("output", "grad")) as seen:
        for step in range(40):
            scale[0] = 1e4 if step > 29 else 1.0
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finding = seen.findings()[0]
    assert finding.site == "1.weight:grad"
    assert finding.text.endswith("jumps \N{MULTIPLICATION SIGN}10,000 at step 30.")
    assert "Nothing else moves." in finding.why
    assert "look at hooks on 1.weight" in finding.advice
    assert "labels" not in finding.advice


def test_the_norm_before_a_jump_explains_its_factor(layers):
    scales = [1.0] * 30 + [1e4] * 10
    finding = monitored(layers, scales).findings()[0]
    norm = float(layers[0](torch.ones(2, 4)).detach().norm())
    assert f"Its norm was at most {norm:.3g} before." in finding.why


def test_the_loss_is_told_beside_a_jump(layers):
    finding = monitored(layers, [1.0] * 30 + [1e4] * 20).findings()[0]
    with torch.no_grad():
        low, high = (float(layers(torch.ones(2, 4) * k).square().mean()) for k in (1.0, 1e4))
    told = f"The median of loss is {low:.3g} over the 10 values before, and {high:.3g} over the 10"
    assert told in finding.why


def test_a_run_in_a_folder_has_the_same_findings(layers, tmp_path):
    seen = monitored(layers, [1.0] * 20 + [1e4] * 5, to=tmp_path / "run")
    assert hl.open(tmp_path / "run").findings().to_dict() == seen.findings().to_dict()


@pytest.mark.slow
def test_the_step_is_exact_where_columns_hold_several(layers):
    finding = monitored(layers, [1.0] * 1301 + [1e4] * 5).findings()[0]
    assert finding.step == 1301


def test_no_step_is_said_to_be_unjudged(layers):
    with pytest.warns(hl.HooklineWarning), hl.monitor(layers) as seen:
        pass
    assert "No step" in seen.findings().notes[0]


def test_without_norms_it_is_said_that_jumps_were_not_judged(layers):
    seen = monitored(layers, [1.0] * 12, stats=hl.stats.histogram())
    assert "hl.stats.moments()" in seen.findings().notes[0]


def test_a_loss_that_rises_alone_is_a_warning():
    model = nn.Linear(4, 4)
    with hl.monitor(model, ports="output") as seen:
        for step in range(60):
            model(torch.ones(2, 4))
            seen.log(loss=1.0 + step)
    assert [finding.kind for finding in seen.findings()] == ["loss"]
    assert WHEN < 60


def test_a_new_head_of_zeros_raises_no_alarm():
    findings = BY_NAME["a new head of zeros"].run()
    assert findings.ok, str(findings)
    assert [finding.kind for finding in findings] == ["frozen"]
