"""The numbers of many steps in arrays are those of each step's results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline.curves import ABSENT, Curves, Entry, Layout, Reports, StepReport, numbers_of
from hookline.curves.numbers_over_steps import numeric_attributes

STATISTICS = {
    "moments": hl.stats.moments(),
    "histogram": hl.stats.histogram(),
    "quantiles": hl.stats.quantiles((0.0, 0.01, 0.5, 0.999, 1.0)),
}
numbers = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1e-12, 1e12, 3e38]),
        st.floats(-1e6, 1e6, width=32),
    ),
    min_size=1,
    max_size=8,
)
# Of each step, the values of two ranks; None where no value came.
runs = st.lists(st.tuples(st.none() | numbers, st.none() | numbers), min_size=1, max_size=6)


def slots_of(statistic, values):
    start = statistic.start(torch.empty(0))
    if values is None:
        return np.full(len(start), ABSENT)
    return statistic.update(start, torch.tensor(values)).numpy()


def curves_of(statistics, steps, ranks=None):
    reports = Reports()
    entries = [
        Entry("a", k, len(one.start(torch.empty(0))), ranks) for k, one in enumerate(statistics)
    ]
    layout = Layout(tuple(statistics), tuple(entries))
    for step, values in enumerate(steps):
        rows = [np.concatenate([slots_of(one, rank) for one in statistics]) for rank in values]
        reports.add(StepReport(step, 0.0, layout, np.stack(rows)))
    return Curves(reports)


def expected(curve, name):
    """The number of each step's results, one by one."""
    found = []
    for report in curve._reports:
        number = np.nan
        for result in report.results("a", curve._rank):
            single = numbers_of(result)
            if name in single or name in numeric_attributes(result):
                number = single[name] if name in single else getattr(result, name)
                break
        found.append(float(number))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [["moments"], ["histogram"], ["quantiles"], [*STATISTICS]])
@pytest.mark.parametrize("rank", [None, 1])
@given(steps=runs)
def test_arrays_have_the_numbers_of_the_results(names, rank, steps):
    curves = curves_of([STATISTICS[name] for name in names], steps)
    if not curves["a"].names:
        return
    curve = curves["a"] if rank is None else curves.rank(rank)["a"]
    for name in curve.names:
        assert getattr(curve, name).tolist() == pytest.approx(
            expected(curve, name), rel=1e-15, nan_ok=True
        ), name


def test_ranks_that_hold_a_copy_count_once():
    curves = curves_of([STATISTICS["moments"]], [([1.0, 2.0], [5.0])] * 2, ranks=(0,))
    assert curves["a"].count.tolist() == [2, 2]


class Counted:
    """A statistic of a user's own that counts how often its result is asked for."""

    def __init__(self):
        self.n_results = 0

    def start(self, value):
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + value.sum()

    def merge(self, slots, other):
        return slots + other

    def result(self, slots):
        self.n_results += 1
        return {"total": slots[0].item(), "double": 2 * slots[0].item()}


def test_a_result_is_computed_once_for_all_of_its_numbers():
    counted = Counted()
    curves = curves_of([counted], [([float(k)],) for k in range(5)])
    for _ in range(3):
        assert curves["a"].total.tolist() == [0, 1, 2, 3, 4]
        assert curves["a"].double.tolist() == [0, 2, 4, 6, 8]
    assert counted.n_results == 5


def test_a_curve_that_was_read_grows_with_the_run():
    model = torch.nn.Linear(2, 3)
    with hl.monitor(model, ports="output", stats=hl.stats.quantiles()) as seen:
        for _ in range(3):
            model(torch.ones(4, 2))
            assert len(seen) == 0  # until it is known that no optimizer steps
    curve = seen["(root)"]
    assert len(curve.p50) == 3
    layout = curve._reports[-1].layout
    seen._source.add(StepReport(3, 0.0, layout, curve._reports[-1].slots))
    assert len(curve.p50) == len(seen["(root)"].p50) == 4


def test_a_quantile_close_to_1_has_a_name_beside_that_of_1():
    statistic = hl.stats.quantiles((0.9999999, 1.0))
    curves = curves_of([statistic], [([1.0, 2.0, 3.0],)])
    assert curves["a"].p99_99999 == pytest.approx(2, rel=0.01)
    assert curves["a"].p100 == 3
    x = torch.tensor([1.0, 2.0, 3.0])
    result = statistic.result(statistic.update(statistic.start(x), x))
    assert str(result).endswith("99.99999 % 2.016, 100 % 3")


def test_numbers_that_a_reader_changes_stay_as_they_were():
    curves = curves_of([STATISTICS["moments"]], [([1.0, 3.0],)])
    curves["a"].mean[:] = 7
    assert curves["a"].mean.tolist() == [2]
