"""Alerts of a run: each rule finds what it says, and nothing in a healthy training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import RunReader
from hookline.curves.alerts import alerts_of, path_and_port
from hookline.curves.table import CurveTable
from runs import layout_of, report_of

NAN = float("nan")


def table_of(sites, steps, order=None):
    """The table of steps, each a list of the numbers of each site."""
    layout, table = layout_of(sites), CurveTable()
    order = None if order is None else np.array(order, np.int32)
    reports = [report_of(k, layout, values, 0.0) for k, values in enumerate(steps)]
    table.add([dataclasses.replace(one, order=order) for one in reports])
    return table


def alerts(sites, steps, order=None):
    """The alerts of steps, each a list of the numbers of each site: title to (site, note)."""
    table = table_of(sites, steps, order)
    return {
        one.title: [(table.sites[k], note) for k, note in one.sites] for one in alerts_of(table)
    }


def test_a_healthy_training_raises_none(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hl.monitor(model, to=str(tmp_path / "run")):
        for _ in range(30):
            optimizer.zero_grad()
            (model(torch.randn(16, 4)) - 1).square().mean().backward()
            optimizer.step()
    table = CurveTable()
    table.add(RunReader(tmp_path / "run").read())
    assert alerts_of(table) == []


def test_the_first_nan_is_at_the_inner_module():
    sites = ["(root)", "h", "h.0", "h.1", "h.1:grad_output", "w:value"]
    fine, bad = [[1.0]] * 6, [NAN]
    later = [bad, bad, [1.0], bad, bad, [1.0]]
    found = alerts(sites, [fine, later, [bad] * 6])["NaN or infinity"]
    assert found[0] == ("h.1", "step 1")
    assert found[1:4] == [("(root)", "step 1"), ("h", "step 1"), ("h.1:grad_output", "step 1")]
    assert found[4:] == [("w:value", "step 2"), ("h.0", "step 2")]


def test_a_gradient_that_is_nan_came_from_the_last_module():
    sites = ["a:grad_output", "b:grad_output", "b.c:grad_output"]
    found = alerts(sites, [[[NAN]] * 3])["NaN or infinity"]
    assert [site for site, _ in found] == ["b:grad_output", "a:grad_output", "b.c:grad_output"]


def non_finite(sites, order=None, steps=None):
    """The sites of the alert on NaN in order, and its text."""
    table = table_of(sites, steps or [[[NAN]] * len(sites)], order)
    (alert,) = [one for one in alerts_of(table) if one.title == "NaN or infinity"]
    return [table.sites[k] for k, _ in alert.sites], alert.text


def test_the_first_nan_is_at_the_site_that_fired_first():
    sites = ["(root)", "head", "body", "head:input", "body:grad_output", "head:grad_output"]
    ordered, text = non_finite(sites, [3, 2, 0, 1, 5, 4])
    assert ordered == [
        "body", "head:input", "head", "(root)", "head:grad_output", "body:grad_output",
    ]  # fmt: skip
    assert text == "first at step 0, at 6 sites so far; body is the probable source"


def test_a_weight_comes_before_the_forward_that_uses_it():
    ordered, text = non_finite(["h", "h.weight:value", "h.weight:update"], [0, 1, 1])
    assert ordered == ["h.weight:value", "h", "h.weight:update"]
    assert text.endswith("; h.weight:value is the probable source")


def test_no_source_is_named_where_two_may_have_been_first():
    ordered, text = non_finite(["a", "b", "c"], [1, 0, 0])
    assert ordered == ["b", "c", "a"]
    assert text == "first at step 0, at 3 sites so far"


def test_no_source_is_named_of_a_run_without_an_order():
    ordered, text = non_finite(["(root)", "a"])
    assert ordered == ["a", "(root)"]
    assert text == "first at step 0, at 2 sites so far"


def test_a_trained_model_names_the_module_that_made_the_nan(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(4, 2), nn.Linear(4, 4)
            self.log = nn.Identity()

        def forward(self, x):
            return self.head(self.log(self.body(x).log()))

    torch.manual_seed(0)
    model = Net()
    with hl.monitor(model, ports="output", to=tmp_path / "run"):
        model(torch.randn(8, 4))
    table = CurveTable()
    table.add(RunReader(tmp_path / "run").read())
    (alert,) = alerts_of(table)
    assert alert.text == "first at step 0, at 3 sites so far; log is the probable source"
    assert [table.sites[k] for k, _ in alert.sites] == ["log", "head", "(root)"]


def test_a_norm_of_100_times_its_median_explodes():
    quiet = [[[1.0], [1.0]]] * 12
    assert "Exploding" not in alerts(["a", "b"], [*quiet, [[99.0], [1.0]]])
    assert alerts(["a", "b"], [*quiet, [[101.0], [1.0]]])["Exploding"] == [("a", "101 times")]
    assert "Exploding" not in alerts(["a", "b"], [[[1.0], [1.0]], [[101.0], [1.0]]])  # too early


def test_a_gradient_far_below_others_of_its_kind_vanishes():
    sites = ["a:grad_output", "b:grad_output", "w:grad", "out"]
    found = alerts(sites, [[[1.0], [1e-7], [1e-7], [1e-9]]])
    assert found == {"Vanishing": [("b:grad_output", "1.0e-07")]}


def test_a_site_is_dead_after_ten_steps_of_zeros():
    zeros, alive = [[0.0, 0.0], [1.0]], [[0.0, 1.0], [1.0]]
    assert "Dead" not in alerts(["a", "b"], [alive, *[zeros] * 9])
    assert alerts(["a", "b"], [alive, *[zeros] * 10]) == {"Dead": [("a", "since step 1")]}
    assert "Dead" not in alerts(["a", "b"], [*[zeros] * 12, alive])


@pytest.mark.parametrize(("update", "is_far"), [(1e-6, True), (1e-3, False), (0.2, True)])
def test_an_update_far_off_a_thousandth_is_said(update, is_far):
    sites = ["w:value", "w:update", "bias:value", "bias:update"]
    found = alerts(sites, [[[1.0], [update], [1.0], [0.9]]] * 10)
    assert found.get("Update ratio", []) == [("w:update", f"{update:.1e}")] * is_far


@pytest.mark.parametrize(
    ("site", "parts"),
    [
        ("(root)", ("(root)", "output")),
        ("a:b:grad_output", ("a:b", "grad_output")),
        ("h.0:output[0]", ("h.0", "output")),
        ("h:output.logits", ("h", "output")),
        ("x\ny.weight:update", ("x\ny.weight", "update")),
    ],
)
def test_a_site_is_split_into_path_and_port(site, parts):
    assert path_and_port(site) == parts


def test_dead_units_are_named_where_features_are_measured(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid())
    with torch.no_grad():
        for unit in (1, 2, 4, 5, 6):
            model[0].weight[unit], model[0].bias[unit] = 0.0, 0.0
    statistics = (hl.stats.moments(), hl.stats.covariance())
    with hl.monitor(model, ports="output", stats=statistics, to=str(tmp_path / "run")):
        for step in range(12):
            if step == 11:
                model[0].bias.data[6] = 1.0  # alive again
            model(torch.randn(3, 4))
    table, reports = CurveTable(), RunReader(tmp_path / "run").read()
    table.add(reports)
    (alert,) = alerts_of(table, reports)
    assert (alert.title, alert.text) == ("Dead units", "4 units at 1 site")
    assert [(table.sites[k], note) for k, note in alert.sites] == [("0", "1, 2, 4, 5")]
    assert alerts_of(table, reports[:9]) == []
    (alert,) = alerts_of(table, reports[:11])
    assert [note for _, note in alert.sites] == ["1, 2, 4, 5, …"]


def test_units_of_a_step_without_a_finite_row_are_not_dead(tmp_path):
    model = nn.Identity()
    with hl.monitor(
        model, "", ports="output", stats=hl.stats.covariance(), to=str(tmp_path / "run")
    ):
        for step in range(12):
            model(torch.full((3, 2), 0.0 if step else NAN))
    table, reports = CurveTable(), RunReader(tmp_path / "run").read()
    table.add(reports)
    texts = {one.title: one.text for one in alerts_of(table, reports)}
    assert texts["Dead units"] == "2 units at 1 site"
    assert "Dead units" not in {one.title for one in alerts_of(table, reports[:10])}
