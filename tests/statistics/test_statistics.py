"""Every statistic adds up: over batches, in compiled code, and over two ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hookline as hl
from hookline.statistics import flat_numbers, histogram
from processes import on_ranks
from thoroughness import examples

MAKERS = {
    "moments": lambda: hl.stats.moments(compile=False),
    "histogram": lambda: hl.stats.histogram(per_octave=4),
    "quantiles": hl.stats.quantiles,
    "covariance": hl.stats.covariance,
}
each = pytest.mark.parametrize("statistic", [make() for make in MAKERS.values()], ids=MAKERS)
ROWS = st.lists(
    st.lists(st.one_of(st.floats(-1e3, 1e3, width=32), st.just(math.nan)), min_size=3, max_size=3),
    max_size=6,
)


def slots_of(statistic, *values):
    slots = statistic.start(values[0])
    for value in values:
        slots = statistic.update(slots, value)
    return slots


def rows_of(numbers):
    return torch.tensor(numbers).reshape(-1, 3)


def assert_same_slots(one, other):
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=False)


@each
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_batches_give_the_slots_of_the_whole(statistic, batches):
    values = [rows_of(batch) for batch in batches]
    whole = slots_of(statistic, torch.cat(values))
    assert_same_slots(slots_of(statistic, *values), whole)


@each
@settings(max_examples=examples(40), deadline=None)
@given(ROWS, ROWS, ROWS)
def test_merging_is_associative_and_commutes(statistic, a, b, c):
    a, b, c = (slots_of(statistic, rows_of(rows)) for rows in (a, b, c))
    left = statistic.merge(statistic.merge(a, b), c)
    assert_same_slots(left, statistic.merge(a, statistic.merge(b, c)))
    assert_same_slots(left, statistic.merge(statistic.merge(c, b), a))
    assert torch.equal(statistic.merge(a, statistic.start(torch.ones(1, 3))), a)


@each
def test_slots_are_flat_float64_and_never_written_to(statistic):
    value = torch.randn(4, 3, requires_grad=True)
    slots = statistic.start(value)
    assert (slots.dim(), slots.dtype, slots.device) == (1, torch.float64, value.device)
    before = slots.clone()
    after = statistic.update(slots, value)
    assert (after.shape, after.dtype, after.requires_grad) == (slots.shape, slots.dtype, False)
    assert torch.equal(slots, before)
    assert isinstance(statistic, hl.stats.Statistic)


@each
def test_a_value_without_data_is_refused(statistic):
    slots = statistic.start(torch.ones(2, 3))
    with pytest.raises(hl.StructureError, match=r"must have data, got .*meta.*\n.*to_empty"):
        statistic.update(slots, torch.ones(2, 3, device="meta"))


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_every_dtype_gives_the_same_slots(statistic, dtype):
    x = torch.tensor([[0.0, 1, -2], [4, 8, -16]])
    assert torch.equal(slots_of(statistic, x.to(dtype)), slots_of(statistic, x))


@each
def test_the_result_prints_on_a_line_or_two(statistic):
    lines = str(statistic.result(slots_of(statistic, torch.randn(50, 3)))).splitlines()
    assert len(lines) <= 2
    assert all(len(line) < 120 for line in lines)
    assert any(number in lines[0] for number in ("150", "50 rows"))


@each
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_update_is_traced_without_a_graph_break(statistic):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(slots, x):
        y = x * 2
        return statistic.update(slots, y), y

    slots, values = statistic.start(torch.ones(1, 3)), []
    for rows in (4, 7, 0):
        x = torch.randn(rows, 3)
        x[: rows // 4, 0] = math.nan
        slots, y = step(slots, x)
        values.append(y)
    assert_same_slots(slots, slots_of(statistic, *values))


@pytest.mark.processes
@on_ranks
def test_two_ranks_and_four_steps_give_the_whole(rank, folder):
    steps = torch.randn(4, 2, 10, 3, generator=torch.Generator().manual_seed(0)) * 100
    steps[1, 0, 2, 1] = math.inf
    for make in MAKERS.values():
        statistic = make()
        mine = slots_of(statistic, *steps[:, rank])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert_same_slots(statistic.merge(*both), slots_of(statistic, steps.reshape(-1, 3)))


@pytest.mark.parametrize("name", ["moments", "histogram"])
def test_a_tensor_in_chunks_gives_the_slots_of_the_whole(name, monkeypatch):
    x = torch.randn(4, 6, 5, 7)
    views = (x, x.to(memory_format=torch.channels_last), x[:, ::2], x.expand(3, 4, 6, 5, 7))
    whole = [slots_of(MAKERS[name](), value) for value in views]
    monkeypatch.setattr(flat_numbers, "CHUNK_NUMEL", 50)
    monkeypatch.setattr(histogram, "_CHUNK_NUMEL", 50)
    for value, expected in zip(views, whole, strict=True):
        assert_same_slots(slots_of(MAKERS[name](), value), expected)


@pytest.mark.parametrize(
    ("values", "counts", "edges"),
    [
        ([0.0, 0.0], [2], [-1.0, 0.0]),
        ([-3.0, 0.5, 1.5, 3.0], [1, 0, 0, 1, 1, 1], [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0]),
        ([1.5, 100.0], [1, 0, 1], [1.0, 2.0, 4.0, 100.0]),
        ([-100.0], [1], [-100.0, -4.0]),
        ([math.nan], [], []),
    ],
)
def test_a_histogram_has_bins_with_finite_edges(values, counts, edges):
    statistic = hl.stats.histogram(low=1, high=4)
    value = torch.tensor(values)
    found = statistic.result(statistic.update(statistic.start(value), value))
    assert found.finite_bins() == (counts, edges)


@each
@pytest.mark.parametrize("value", [[1.0, 2.0], 2.0, None, torch.ones(2).numpy(), (torch.ones(2),)])
def test_a_value_that_is_no_tensor_is_refused(statistic, value):
    slots = statistic.start(torch.ones(2, 2))
    with pytest.raises(hl.StructureError, match="value of a statistic must be a tensor, got"):
        statistic.start(value)
    with pytest.raises(hl.StructureError, match="value of a statistic must be a tensor, got"):
        statistic.update(slots, value)


@each
@pytest.mark.parametrize(
    "change",
    [Tensor.float, lambda t: t[:3], lambda t: torch.cat([t, t[:7]]), lambda t: t[None],
     Tensor.tolist, Tensor.numpy],
)  # fmt: skip
def test_slots_that_are_not_the_statistics_are_refused(statistic, change):
    value = torch.ones(3, 2)
    slots = slots_of(statistic, value)
    for refused in [
        lambda: statistic.update(change(slots), value),
        lambda: statistic.merge(slots, change(slots)),
        lambda: statistic.merge(change(slots), slots),
        lambda: statistic.result(change(slots)),
    ]:
        with pytest.raises(hl.StructureError, match=r"^(slots must be|a value of hl.stats.cov)"):
            refused()
