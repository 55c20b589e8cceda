"""Findings of single steps: the order within a step, weak gradients, dead units."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves.downsampled_table import DownsampledTable
from hookline.curves.findings import judge_steps
from monitor_runs import layout_of, report_of

NAN = float("nan")


def findings(sites, steps, order=None):
    """The findings of steps, each a list of the numbers of each site, by kind."""
    layout = layout_of(sites)
    order = None if order is None else np.array(order, np.int32)
    reports = [report_of(k, layout, values, 0.0) for k, values in enumerate(steps)]
    reports = [dataclasses.replace(report, order=order) for report in reports]
    return {finding.kind: finding for finding in judge_steps(reports)}


def test_the_first_nan_is_at_the_site_that_fired_first():
    sites = ["(root)", "head", "body", "head:input", "body:grad_output", "head:grad_output"]
    finding = findings(sites, [[[NAN]] * 6], [3, 2, 0, 1, 5, 4])["non-finite"]
    assert [finding.site, *finding.follows] == [
        "body", "head:input", "head", "(root)", "head:grad_output", "body:grad_output",
    ]  # fmt: skip


def test_a_weight_comes_before_the_forward_that_uses_it():
    sites = ["h", "h.weight:value", "h.weight:update"]
    finding = findings(sites, [[[NAN]] * 3], [0, 1, 1])["non-finite"]
    assert [finding.site, *finding.follows] == ["h.weight:value", "h", "h.weight:update"]


def test_an_update_or_a_weight_may_be_the_first_with_a_nan():
    sites, fine = ["w:grad", "w:update", "w:value"], [[1.0]] * 3
    update = findings(sites, [fine, [[1.0], [NAN], [1.0]]])["non-finite"]
    assert update.advice.startswith("Its gradient is finite: look at the optimizer's eps")
    weight = findings(sites, [fine, [[1.0], [1.0], [NAN]]])["non-finite"]
    assert weight.advice == "No update made it: look at what else writes to w."


@pytest.mark.parametrize(
    ("every", "advice"),
    [(1, "No update jumps before: look at what else"), (5, "An update that was not measured may")],
)
def test_an_update_that_was_not_measured_may_make_a_jump(every, advice):
    layout = layout_of(["w:value", "w:update"])
    steps = [[[1.0], [0.01]]] * 14 + [[[1e3], [10.0]]] * 6
    reports = [report_of(k * every, layout, row, 0.0) for k, row in enumerate(steps)]
    jump = next(finding for finding in judge_steps(reports) if finding.kind == "jump")
    assert (jump.site, jump.step) == ("w:value", 14 * every)
    assert jump.advice.startswith(advice)


def test_an_update_as_large_as_the_jump_made_it():
    sites = ["w:value", "w:update"]
    calm, growing = [[[1.0], [0.01]]], [[[1.0], [2.0]], [[3.0], [100.0]]]
    finding = findings(sites, calm * 4 + growing + [[[103.0], [5.0]]] * 8)["jump"]
    assert (finding.site, finding.step) == ("w:value", 6)
    assert finding.advice.startswith("The update of step 5 made it: lower the learning rate")


def test_a_jump_that_grows_over_steps_is_no_single_batch():
    finding = findings(["a"], [[[k]] for k in [1.0] * 14 + [4.0, 20.0] + [1.0] * 8])["jump"]
    assert "It is over after a few steps. " in f"{finding.why} "
    assert finding.advice.startswith("It grows over several steps")


def test_many_sites_that_jump_are_judged_from_one_table(monkeypatch):
    layout = layout_of([f"m{k}" for k in range(8)])
    steps = [[[1.0]] * 8] * 50 + [[[1e3]] * 8] * 14
    reports = [report_of(k, layout, row, 0.0) for k, row in enumerate(steps)]
    table = DownsampledTable(32)  # each column stands for two steps
    table.add(reports)
    monkeypatch.setattr(DownsampledTable, "add", None)
    jump = next(finding for finding in judge_steps(reports, table=table))
    assert (jump.kind, jump.site, jump.step, len(jump.follows)) == ("jump", "m0", 50, 7)


@pytest.mark.parametrize(("name", "level"), [("experts", "note"), ("blocks", "warning")])
def test_an_expert_may_rest_while_its_siblings_train(name, level):
    paths = [f"{name}.{k}.weight" for k in range(3)]
    sites = [f"{path}:{port}" for path in paths for port in ("value", "update")]
    steps = [[[1.0], [0.0], *[[1.0 + k / 100], [0.01]] * 2] for k in range(12)]
    finding = findings(sites, steps)["frozen"]
    assert (finding.site, finding.level) == (f"{paths[0]}:value", level)


@pytest.mark.parametrize(("still", "level"), [((0, 1), "note"), ((2,), "warning")])
def test_first_blocks_without_an_optimizer_are_meant_to_be(still, level):
    moving = [k for k in range(12) if k not in still]
    sites = [f"h.{k}.weight:value" for k in range(12)] + [f"h.{k}.weight:update" for k in moving]
    steps = [
        [*([1.0 if k in still else 1.0 + step / 100] for k in range(12)), *[[0.01]] * len(moving)]
        for step in range(12)
    ]
    finding = findings(sites, steps)["frozen"]
    assert (finding.site, finding.level) == (f"h.{still[0]}.weight:value", level)


MASKED = [1.0, float("-inf")]
TRAINED = ["out", "out:grad_output", "w:grad", "w:update"]


def test_a_mask_of_infinities_that_trains_is_a_note():
    steps = [[MASKED, [1.0], [1.0], [1.0]]] * 3
    mask = findings(TRAINED, steps)["non-finite"]
    assert (mask.site, mask.level, mask.step) == ("out", "note", 0)
    later = findings(TRAINED, [*steps, [[NAN], [NAN], [NAN], [NAN]]])["non-finite"]
    assert (later.level, later.step, later.follows) == ("note", 0, ())


def test_outputs_alone_tell_a_mask_that_no_model_output_gets():
    sites, steps = ["(root)", "mask"], [[[1.0], MASKED]] * 3
    mask = findings(sites, steps)["non-finite"]
    assert (mask.site, mask.level, mask.step) == ("mask", "note", 0)
    assert "and no output of the model gets it" in mask.text
    of_parts = findings(["fc", "mask"], steps)["non-finite"]
    assert of_parts.level == "error"  # what the model returns is not known
    layout, later = layout_of(sites), [*steps, [[NAN], MASKED]]
    error, note = judge_steps([report_of(k, layout, row, 0.0) for k, row in enumerate(later)])
    assert (error.site, error.step, note.site) == ("(root)", 3, "mask")


def test_a_nan_after_a_mask_begins_where_it_is():
    steps = [[MASKED, [1.0], [1.0], [1.0]]] * 3 + [[[NAN]] * 4]
    layout = layout_of(TRAINED)
    first, *_ = judge_steps([report_of(k, layout, row, 0.0) for k, row in enumerate(steps)])
    assert (first.site, first.level, first.step) == ("out:grad_output", "error", 3)


@pytest.mark.parametrize(
    ("step", "level"),
    [
        ([[1.0], [NAN], [1.0], [1.0]], "note"),  # a `GradScaler` skipped a run of this step
        ([[1.0], [NAN], None, None], "error"),  # no optimizer has stepped
        ([[1.0], [NAN], [NAN], [1.0]], "error"),
        ([[NAN], [1.0], [1.0], [1.0]], "error"),  # the whole output
        ([[NAN, 1.0], [NAN], [1.0], [1.0]], "error"),
    ],
)
def test_nan_that_reaches_no_weight_is_a_note(step, level):
    steps = [[[1.0]] * 4, step]
    layout = layout_of(TRAINED)
    (finding,) = judge_steps([report_of(k, layout, row, 0.0) for k, row in enumerate(steps)])
    assert (finding.kind, finding.level, finding.step) == ("non-finite", level, 1)


def test_a_gradient_far_below_others_of_its_kind_vanishes():
    sites = ["a:grad_output", "b:grad_output", "w:grad", "out"]
    finding = findings(sites, [[[1.0], [1e-7], [1e-7], [1e-9]]])["vanishing"]
    assert (finding.site, finding.number, finding.level) == ("b:grad_output", "1.0e-07", "note")
    assert finding.follows == ()


def test_a_site_is_dead_after_ten_steps_of_zeros():
    zeros, alive = [[0.0, 0.0], [1.0]], [[0.0, 1.0], [1.0]]
    assert "dead" not in findings(["a", "b"], [alive, *[zeros] * 9])
    dead = findings(["a", "b"], [alive, *[zeros] * 10])["dead"]
    assert (dead.site, dead.step) == ("a", 1)
    assert "dead" not in findings(["a", "b"], [*[zeros] * 12, alive])


@pytest.mark.parametrize(
    ("grad", "update", "why"),
    [
        ([1.0], None, "No optimizer that steps has w."),
        (None, [0.0], "No gradient reaches w."),
        ([0.0], [0.0], "The gradient of w is 0."),
        ([1.0], [0.0], "The gradient of w is not 0."),
    ],
)
def test_the_gradient_tells_why_a_weight_stands_still(grad, update, why):
    parts = {"w:grad": grad, "w:update": update}
    numbers = {site: numbers for site, numbers in parts.items() if numbers is not None}
    sites = ["v:value", "w:value", "v:grad", "v:update", *numbers]
    steps = [[[1.0 + k], [1.0], [1.0], [1.0], *numbers.values()] for k in range(12)]
    assert findings(sites, steps)["frozen"].why == f"1 weight so. {why}"


def test_still_weights_of_the_optimizer_come_before_frozen_ones():
    # A LoRA in a reentrant checkpoint behind a frozen embedding gets no gradient.
    sites = ["embedding:value", "lora:value", "lora:update", "head:value", "head:grad"]
    sites += ["head:update"]
    steps = [[[1.0], [1.0], [0.0], [1.0 + k], [1.0], [0.1]] for k in range(12)]
    frozen = findings(sites, steps)["frozen"]
    assert (frozen.site, frozen.follows) == ("lora:value", ())
    assert frozen.advice.endswith("checkpoints with use_reentrant=True.")


def test_a_weight_that_other_code_writes_does_change():
    sites = ["w:value", "w:update", "teacher:value"]
    assert findings(sites, [[[1.0 + k], [0.01], [2.0 + k]] for k in range(12)]) == {}
    assert "frozen" in findings(sites, [[[1.0 + k], [1.0], [2.0]] for k in range(12)])


def test_zeros_that_follow_a_nan_are_not_told():
    steps = [[[1.0], [1.0]]] * 2 + [[[NAN], [1.0]]] + [[[NAN], [0.0]]] * 12
    assert [*findings(["w:grad", "out"], steps)] == ["non-finite"]


def test_weights_without_a_change_may_have_gradients_of_zero():
    sites = ["w:value", "w:grad", "w:update"]
    for grad, advice in (([0.0], "Look at what uses"), ([1.0], "Look at the learning rate")):
        finding = findings(sites, [[[1.0], grad, [0.0]]] * 12)["frozen"]
        assert finding.text == "No weight changes since step 0."
        assert finding.advice.startswith(advice)


def test_a_weight_that_leaves_zero_late_does_not_drift():
    steps = [[[0.0, 1.0], [0.0]]] * 16 + [[[0.0, 1.0], [0.01 * k]] for k in range(1, 15)]
    assert findings(["out", "bias:value"], steps) == {}
    assert "drift" in findings(["out"], [[[1.0 * 1.5**k]] for k in range(60)])


@pytest.fixture
def with_dead_units():
    """The curves of 12 steps: unit 6 lives again in the last."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid())
    with torch.no_grad():
        for unit in (1, 2, 4, 5, 6):
            model[0].weight[unit], model[0].bias[unit] = 0.0, 0.0
    statistics = (hl.stats.moments(), hl.stats.covariance())
    with hl.monitor(model, ports="output", stats=statistics) as seen:
        for step in range(12):
            if step == 11:
                model[0].bias.data[6] = 1.0
            model(torch.randn(3, 4))
    return seen


def test_dead_units_are_named_where_features_are_measured(with_dead_units):
    finding = next(f for f in with_dead_units.findings() if f.kind == "dead units")
    assert finding.text == "4 units of 0 pass nothing: 1, 2, 4, 5."
    reports = with_dead_units._source.read()
    kinds = [finding.kind for finding in judge_steps(reports[:9])]
    assert "dead units" not in kinds
    texts = [finding.text for finding in judge_steps(reports[:11])]
    assert "5 units of 0 pass nothing: 1, 2, 4, 5, …." in texts


def test_units_of_a_step_without_a_finite_row_are_not_dead():
    model = nn.Identity()
    with hl.monitor(model, "", ports="output", stats=hl.stats.covariance()) as seen:
        for step in range(12):
            model(torch.full((3, 2), 0.0 if step else NAN))
    reports = seen._source.read()
    assert "dead units" in [finding.kind for finding in judge_steps(reports)]
    assert "dead units" not in [finding.kind for finding in judge_steps(reports[:10])]


def test_dead_units_are_those_of_outputs_not_of_gradients():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    nn.init.constant_(model[0].bias, -100.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.monitor(model, stats=(hl.stats.moments(), hl.stats.covariance())) as seen:
        for _ in range(12):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
    finding = next(f for f in seen.findings() if f.kind == "dead units")
    assert (finding.site, finding.number, finding.follows) == ("1", "3 units", ())
