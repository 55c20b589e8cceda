"""The numbers of a run by site and column: those of the library, and no peak is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import RunReader, downsampled_table
from hookline.curves.downsampled_table import DownsampledTable
from monitor_runs import layout_of, report_of

NAN = float("nan")


def table_of(reports, most=512):
    table = DownsampledTable(most)
    table.add(reports)
    return table


def assert_as_reported(reports, table, rank=None):
    """Every number of the table is the report's own."""
    for at, report in enumerate(reports):
        expected = report.numbers(rank)
        found = {}
        for name in table.names:
            for site, number in zip(table.sites, table.last_min_max(name)[0][at], strict=True):
                found[f"{site}/{name}"] = number
        for key, number in expected.items():
            np.testing.assert_allclose(found.pop(key), np.float32(number), rtol=1e-6, err_msg=key)
        assert all(np.isnan(one) for one in found.values())


def test_the_numbers_are_those_of_the_reports(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, to=str(tmp_path / "run")):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    reports = RunReader(tmp_path / "run").read()
    table = table_of(reports)
    assert {"mean", "std", "min", "max", "norm", "zero_share", "non_finite", "ratio"} == set(
        table.names
    )
    assert_as_reported(reports, table)


@pytest.mark.parametrize("ranks", [None, (0,), (1, 2)])
def test_ranks_are_merged_as_the_layout_says(ranks):
    layout = layout_of(["a", "w:value", "w:update"], ranks=ranks)
    values = ([[1, 2], [3], [0.5]], [[5, NAN], [4], [0.1]], [None, [9], [0.2]])
    reports = [report_of(0, layout, values), report_of(1, layout, values[::-1])]
    assert_as_reported(reports, table_of(reports))


def test_values_that_are_missing_or_not_finite_are_so():
    layout = layout_of(["a", "b"])
    reports = [
        report_of(0, layout, [[1.0], None]),
        report_of(1, layout, [[NAN, float("inf")], [2.0]]),
        report_of(2, layout, [[NAN, 3.0], None]),
    ]
    table = table_of(reports)
    assert_as_reported(reports, table)
    assert table.have_non_finite().tolist() == [[False, False], [True, False], [True, False]]
    assert table.non_finite_since.tolist() == [1, -1]
    now = dict(zip(table.names, table.now.tolist(), strict=True))
    assert now["mean"] == [3.0, 2.0]  # of the last step that has a value
    assert now["non_finite"] == [1.0, 0.0]


def test_sites_that_appear_later_are_appended():
    early, late = layout_of(["a"]), layout_of(["new", "a"])
    reports = [report_of(0, early, [[1.0]]), report_of(1, late, [[7.0], [2.0]])]
    table = table_of(reports)
    assert table.sites == ["a", "new"]
    np.testing.assert_array_equal(table.last_min_max("mean")[0], [[1.0, NAN], [2.0, 7.0]])


class Extent:
    """A statistic of a user's own, with a mean of its own, too."""

    def start(self, value):
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + (value.max() - value.min())

    def merge(self, slots, other):
        return slots + other

    def result(self, slots):
        return {"extent": slots.item(), "mean": -1.0}


@pytest.mark.parametrize("with_moments", [False, True])
def test_statistics_of_ones_own_are_named_as_in_reports(with_moments):
    statistics = [Extent(), *[hl.stats.moments()] * with_moments]
    model = nn.Linear(2, 2)
    with hl.monitor(model, "", ports="output", stats=statistics) as seen:
        for _ in range(2):
            model(torch.randn(3, 2))
    reports = seen._source.read()
    table = table_of(reports)
    assert {"extent", "mean"} <= set(table.names)
    assert_as_reported(reports, table)


@pytest.mark.parametrize("n_steps", [7, 8, 9, 16, 17, 100])
def test_more_steps_than_columns_keep_every_extreme(n_steps):
    layout = layout_of(["a"])
    numbers = np.random.default_rng(0).normal(size=n_steps)
    reports = [report_of(k, layout, [[one]], 0.0) for k, one in enumerate(numbers)]
    table = DownsampledTable(8)
    for one in reports:  # as they come, one by one
        table.add([one])
    assert len(table.columns) <= 8
    assert table.columns[0].first == 0
    assert table.columns[-1].last == n_steps - 1
    last, least, greatest = table.last_min_max("mean")[..., 0]
    for at, column in enumerate(table.columns):
        inside = numbers[column.first : column.last + 1].astype(np.float32)
        assert (last[at], least[at], greatest[at]) == (inside[-1], inside.min(), inside.max())
        assert column.index == column.last
    assert [one.n_reports for one in table.columns[:-1]] == [table.stride] * (
        len(table.columns) - 1
    )
    whole = table_of(reports, 8)
    np.testing.assert_array_equal(whole.last_min_max("mean"), table.last_min_max("mean"))


@pytest.mark.parametrize("n_sites", [1, 3])
def test_of_more_sites_there_are_fewer_columns(monkeypatch, n_sites):
    monkeypatch.setattr(downsampled_table, "_LEAST_COLUMNS", 2)
    monkeypatch.setattr(downsampled_table, "_MOST_CELLS", 9)
    early, late = layout_of(["a"]), layout_of(["a", "b", "c"][:n_sites])
    numbers = np.arange(20.0)
    reports = [report_of(k, early, [[number]], 0.0) for k, number in enumerate(numbers[:13])]
    table = table_of(reports)
    assert [span.n_reports for span in table.columns] == [2, 2, 2, 2, 2, 2, 1]
    later = [report_of(k, late, [[float(k)]] * n_sites, 0.0) for k in range(13, 20)]
    table.add(later)
    spans = [(span.first, span.last, span.index, span.n_reports) for span in table.columns]
    assert len(spans) <= 9 // n_sites
    assert [first for first, *_ in spans] == [*range(0, 20, table.stride)]
    assert spans[-1][1:3] == (19, 19)
    assert table.last_min_max("mean")[1, :, 0].tolist() == [first for first, *_ in spans]
    assert table.last_min_max("mean")[2, :, 0].tolist() == [last for _, last, *_ in spans]
