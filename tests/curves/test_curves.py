"""Curves: look-ups, messages and how they print."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import ABSENT, Curves, Entry, Layout, Reports, StepReport, numbers_of
from hookline.statistics.quantiles import Quantiles


def curves(n_ranks=1, ranks=None, steps=3):
    statistic = hl.stats.moments()
    layout = Layout((statistic,), (Entry("fc", 0, 8, ranks), Entry("fc.weight:value", 0, 8)))
    reports = Reports()
    for step in range(steps):
        rows = []
        for rank in range(n_ranks):
            values = torch.arange(4.0) + 10 * rank + step
            slots = statistic.update(statistic.start(values), values)
            rows.append(torch.cat([slots, slots]).numpy())
        reports.add(StepReport(step, 0.0, layout, np.stack(rows)))
    return Curves(reports)


def test_numbers_are_arrays_over_the_steps():
    seen = curves()
    assert seen["fc"].mean.tolist() == [1.5, 2.5, 3.5]
    assert seen["fc"].steps.tolist() == [0, 1, 2]
    assert seen["fc.weight"].site == "fc.weight:value"
    assert "mean" in dir(seen["fc"])
    assert "fc" in seen
    assert "conv" not in seen


def test_several_statistics_give_a_tuple_of_results():
    model = nn.Linear(2, 3)
    several = [hl.stats.moments(), hl.stats.histogram()]
    with hl.monitor(model, ports="output", stats=several) as seen:
        model(torch.ones(4, 2))
    (moments, histogram), = seen["(root)"].results  # fmt: skip
    assert moments.count == histogram.count == 12
    assert histogram.counts


def test_ranks_are_merged_and_kept():
    seen = curves(n_ranks=2)
    assert seen.n_ranks == 2
    assert seen["fc"].mean.tolist() == [6.5, 7.5, 8.5]
    assert seen["fc"].count.tolist() == [8, 8, 8]
    assert seen.rank(1)["fc"].mean.tolist() == [11.5, 12.5, 13.5]


def test_copies_of_ranks_count_once():
    seen = curves(n_ranks=2, ranks=(0,))
    assert seen["fc"].count.tolist() == [4, 4, 4]
    assert seen.rank(1)["fc"].mean.tolist() == [11.5, 12.5, 13.5]


def test_a_rank_that_never_had_a_value_has_nans():
    seen = curves(n_ranks=2)
    for report in seen._source.read():
        report.slots[0] = ABSENT
    curve = seen.rank(0)["fc"]
    assert curve.names == seen["fc"].names
    assert np.isnan(curve.norm).tolist() == [True] * 3
    assert curve.results == [None] * 3
    assert np.isnan(seen.rank(0)["fc.weight"].mean).all()
    assert seen["fc"].count.tolist() == [4, 4, 4]
    with pytest.raises(AttributeError, match=r"the curve of fc has no 'avg'.\nUse one of count"):
        _ = curve.avg


def test_mistakes_say_what_is_there():
    seen = curves()
    with pytest.raises(hl.NotRecordedError, match=r"'fd' has no curve among 2 sites.\nUse .*'fc'"):
        seen["fd"]
    with pytest.raises(AttributeError, match=r"the curve of fc has no 'avg'.\nUse one of"):
        _ = seen["fc"].avg
    with pytest.raises(hl.RanksError, match="must be below 1, got 2"):
        seen.rank(2)
    with pytest.raises(hl.NotRecordedError, match="step 7 was not reported"):
        seen.at(7)
    with pytest.raises(hl.NotRecordedError, match="no step was reported yet"):
        Curves(Reports())["fc"]


@pytest.mark.parametrize("name", ["step", "every", "first"])
def test_curves_send_settings_to_the_line(name):
    with pytest.raises(AttributeError, match=f"no '{name}' to set, got 5[\\s\\S]*on the line"):
        setattr(curves(), name, 5)


def test_the_table_shows_the_last_step_and_the_trend():
    text = str(curves())
    assert text.splitlines()[0] == "Curves of 2 sites: 3 steps, 0 to 2; the last:"
    row = next(line for line in text.splitlines() if line.startswith("fc "))
    assert " 3.5 " in row
    assert "<table" in curves()._repr_html_()
    assert str(Curves(Reports())) == "Curves: no step was reported yet"


def test_a_long_table_is_cut_and_says_so():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(60)])
    with hl.monitor(model, "*", ports="output") as seen:
        model(torch.ones(1, 2))
    assert "and 20 more sites" in str(seen)


@pytest.mark.parametrize(
    ("result", "numbers"),
    [
        (2, {"": 2.0}),
        ((1, "a", 2.5), {"0": 1.0, "2": 2.5}),
        ({"low": 1, "what": None}, {"low": 1.0}),
        ([1, 2], {}),
        ("text", {}),
        (
            Quantiles((0.01, 0.5, 0.999), (1.0, 2.0, 3.0), 0.01, 5, 1, 0.5, 4.0),
            {"p1": 1.0, "p50": 2.0, "p99_9": 3.0, "min": 0.5, "max": 4.0, "non_finite": 1.0},
        ),
    ],
)
def test_single_numbers_of_any_result(result, numbers):
    assert numbers_of(result) == numbers


@pytest.mark.parametrize("steps", [[0, 2], [1], [3], [0, 1, 2, 3]])
def test_a_ratio_is_nan_where_a_weight_was_not_stepped(steps, tmp_path):
    model = nn.ModuleDict({"rare": nn.Linear(2, 2), "often": nn.Linear(2, 2)})
    rare, often = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values())
    with hl.monitor(model, to=tmp_path / "run") as seen:
        for k in range(4):
            model["often"](model["rare"](torch.ones(1, 2))).sum().backward()
            often.step()
            if k in steps:
                rare.step()
    for curves in (seen, hl.open(tmp_path / "run")):
        curve = curves["rare.weight:update"]
        norms = curve.norm / curves["rare.weight"].norm
        assert (~np.isnan(norms)).nonzero()[0].tolist() == steps
        np.testing.assert_array_equal(curve.ratio, norms)
        assert "ratio" in curve.names
        assert "ratio" not in curves["rare.weight"].names


def all_counts(seen, written):
    """A number by each way that leads to it."""
    return [seen["(root)"].count[0], seen.at(0).get("(root)/count"), written.get("(root)/count")]


class RowCount:
    def start(self, value):
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + len(value)

    def merge(self, slots, other):
        return slots + other

    def result(self, slots):
        return {"count": slots.item()}


@pytest.mark.parametrize("make", [hl.stats.covariance, RowCount])
@pytest.mark.parametrize("first", [True, False])
def test_a_name_has_one_number_whatever_statistics_share_it(make, first, tmp_path):
    model, written = nn.Linear(4, 2), {}
    stats = [hl.stats.moments(), make()][:: 1 if first else -1]
    to = [tmp_path / "run", lambda step, numbers: written.update(numbers)]
    with hl.monitor(model, ports="output", stats=stats, to=to) as seen:
        model(torch.randn(5, 4))
    # Moments count elements, and give the count to curves alone.
    assert set(all_counts(seen, written)) == ({10.0, None} if first else {5.0})
    assert written["(root)/mean"] == seen["(root)"].mean[0]
    if make is hl.stats.covariance:
        opened = hl.open(tmp_path / "run")
        assert opened.at(0) == seen.at(0)


@pytest.mark.parametrize("other", [hl.stats.histogram, hl.stats.quantiles])
def test_the_ratio_is_of_the_statistic_that_has_a_norm(other, tmp_path):
    model, rows = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    to = [tmp_path / "run", lambda step, numbers: rows.append(numbers)]
    with hl.monitor(model, stats=[other(), hl.stats.moments()], to=to) as seen:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    name, ratio = "weight:update/ratio", seen["weight:update"].ratio[0]
    assert ratio > 0
    assert seen.at(0)[name] == rows[0][name] == hl.open(tmp_path / "run").at(0)[name] == ratio


def test_an_update_without_its_weight_has_no_ratio():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, ports="update") as seen:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "ratio" not in seen["weight:update"].names


def test_a_module_that_is_named_like_a_port_has_its_curve():
    model = nn.Sequential()
    model.add_module("a:output", nn.Linear(2, 3))
    with hl.monitor(model, ports="output") as seen:
        model(torch.ones(4, 2))
    assert seen["a:output"].count.tolist() == [12]
