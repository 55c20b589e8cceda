"""Numbers in equal bins are counted as numpy.histogram counts them."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hookline.statistics.value_statistics import BLOCK_NUMEL, count_in_equal_bins

N_BINS = st.sampled_from([1, 2, 3, 7, 24, 48, 100])
DTYPES = st.sampled_from(["float16", "float32", "float64", "int64"])


@given(numbers=st.lists(st.floats(-1e4, 1e4, width=16), min_size=2), n_bins=N_BINS, dtype=DTYPES)
@example(numbers=[0.0, *[k / 10 for k in range(11)]], n_bins=10, dtype="float64")
@example(numbers=[0.1, 0.3, 0.7], n_bins=3, dtype="float64")
@example(numbers=[-1.0, -1.0, -0.5, 0.0, 0.0, 1.0], n_bins=48, dtype="float32")
def test_counts_are_numpys(numbers, n_bins, dtype):
    array = np.array(numbers).astype(dtype)
    low, high = (np.float64(bound(array)) for bound in (np.min, np.max))
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, n_bins + 1)
    expected, _ = np.histogram(array.astype(np.float64), n_bins, (low, high))
    np.testing.assert_array_equal(count_in_equal_bins(array, edges), expected)


@given(scale=st.integers(-40, 12), offset=st.integers(-1000, 1000), n_bins=N_BINS)
def test_counts_of_numbers_on_edges_are_numpys(scale, offset, n_bins):
    low, high = offset + 0.0, offset + 2.0**scale
    edges = np.linspace(low, high, n_bins + 1)
    near = [np.nextafter(edges, end) for end in (-np.inf, np.inf)]
    array = np.concatenate([edges, *near]).clip(low, high)
    # By the edges: NumPy refuses more bins than there are numbers between the ends.
    expected, _ = np.histogram(array, edges)
    np.testing.assert_array_equal(count_in_equal_bins(array, edges), expected)


@pytest.mark.parametrize("kind", ["normal", "with zeros at the first edge", "all on an edge"])
def test_blocks_add_up(kind):
    array = np.random.default_rng(0).standard_normal(3 * BLOCK_NUMEL + 5).astype(np.float32)
    low, high = np.float64(array.min()), np.float64(array.max())
    if kind == "with zeros at the first edge":
        array, low = np.maximum(array, 0), np.float64(0)
    elif kind == "all on an edge":
        array, low, high = np.zeros_like(array), np.float64(-0.5), np.float64(0.5)
    expected, edges = np.histogram(array.astype(np.float64), 48, (low, high))
    np.testing.assert_array_equal(count_in_equal_bins(array, edges), expected)


@pytest.mark.parametrize("n_bins", [2, 48])
def test_more_bins_than_numbers_between_the_ends(n_bins):
    low = 1.0
    array = np.array([low, np.nextafter(low, 2), np.nextafter(low, 2)])
    counts = count_in_equal_bins(array, np.linspace(low, array[-1], n_bins + 1))
    assert counts.sum() == 3
    assert counts[0] <= 1 <= counts[-1]
