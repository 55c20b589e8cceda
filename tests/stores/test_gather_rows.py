"""Rows are gathered from wherever they lie in the process, each as it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.stores.gather_rows import MISSING, Gatherer, Origins


@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["u1", "?", "f2", "i4", "f8", "c8"]),
    n_rows=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    data=st.data(),
)
def test_rows_of_several_arrays_come_in_the_order_asked(shape, dtype, n_rows, data):
    numbers = np.random.default_rng(0)
    arrays = [numbers.integers(0, 2, (n, *shape)).astype(dtype) for n in n_rows]
    place = st.integers(0, len(arrays) - 1).flatmap(
        lambda k: st.tuples(st.just(k), st.integers(0, n_rows[k] - 1))
    )
    asked = data.draw(st.lists(place, max_size=12))
    row_bytes = arrays[0][0].nbytes
    addresses = [arrays[k].__array_interface__["data"][0] + row * row_bytes for k, row in asked]
    found = Gatherer(shape, np.dtype(dtype))(np.array(addresses, np.int64))
    assert found.dtype == dtype
    assert found.shape == (len(asked), *shape)
    for row, (k, number) in zip(found, asked, strict=True):
        assert np.array_equal(row, arrays[k][number])
    assert not any(np.shares_memory(found, array) for array in arrays)


@pytest.mark.parametrize(
    ("shape", "can"), [((), True), ((2**14,), True), ((2**14 + 1,), False), ((3, 0), False)]
)
def test_rows_that_are_too_large_or_empty_are_not_gathered(shape, can):
    assert Gatherer.can(shape) is can
    if can:
        Gatherer(shape, np.dtype("f8"))


def test_origins_hold_the_arrays_that_they_lead_to():
    origins = Origins(3)
    array = np.ones(4)
    origins.add(1, array, 5)
    assert origins.of_shard.tolist() == [MISSING, 5, MISSING]
    assert origins._held[0] is array
