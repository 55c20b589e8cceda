"""Columns: read like a NumPy array of the same rows, whatever the index."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

import hookline as hl
from hookline.stores import column as column_module
from hookline.stores import mapped_shards as shards_module
from hookline.stores import open_store
from small_stores import write_store

N_ROWS = 23
PLAIN = np.arange(N_ROWS * 3 * 2, dtype=np.float32).reshape(N_ROWS, 3, 2)
IDS = np.arange(N_ROWS) * 7
LENGTHS = [3, 0, 5, 1, 2, 4, 0, 0, 6, 2]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """23 rows in shards of 8, 8 and 7."""
    where = tmp_path_factory.mktemp("store")
    return open_store(write_store(where, {"fc": torch.tensor(PLAIN), "ids": torch.tensor(IDS)}))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """10 items of 0 to 6 tokens in shards of 4, 4 and 2 items."""
    n_tokens = sum(LENGTHS)
    place = write_store(
        tmp_path_factory.mktemp("ragged"),
        {"h": torch.arange(n_tokens * 2.0).reshape(-1, 2), "pooled": torch.arange(10.0)[:, None]},
        lengths=LENGTHS, per_token=["h"], tokens=torch.arange(n_tokens), batch_size=2,
    )  # fmt: skip
    return open_store(place)


def item_rows(item):
    start = sum(LENGTHS[:item])
    return torch.arange(sum(LENGTHS) * 2.0).reshape(-1, 2)[start : start + LENGTHS[item]]


numbers = st.integers(-N_ROWS, N_ROWS - 1)
row_indices = st.one_of(
    numbers,
    st.slices(N_ROWS),
    st.lists(numbers, max_size=40),
    of_numpy.arrays(np.int64, st.tuples(st.integers(0, 3), st.integers(0, 4)), elements=numbers),
    of_numpy.arrays(np.bool_, N_ROWS),
)
few = st.lists(st.integers(0, 1), max_size=3)
further = st.one_of(st.just(...), st.none(), st.integers(-2, 1), st.slices(2), few)


@given(index=row_indices)
def test_an_index_reads_what_it_reads_of_an_array(store, index):
    found, expected = store["fc"][index], PLAIN[index]
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(found.numpy(), expected)
    assert np.array_equal(store["fc"].numpy(index), expected)


@given(rows=row_indices, rest=st.lists(further, min_size=1, max_size=3))
def test_further_indices_read_what_they_read_of_an_array(store, rows, rest):
    try:
        expected = PLAIN[(rows, *rest)]
    except IndexError:
        with pytest.raises(IndexError):
            store["fc"][(rows, *rest)]
        return
    found = store["fc"][(rows, *rest)]
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(found.numpy(), expected)


@given(index=row_indices)
def test_rows_that_are_single_numbers_are_read_alike(store, index):
    assert np.array_equal(store["ids"][index].numpy(), IDS[index])


def test_many_rows_of_few_shards_come_in_their_order(store):
    rows = np.random.default_rng(0).integers(0, N_ROWS, 500)
    assert np.array_equal(store["fc"].numpy(rows), PLAIN[rows])
    assert np.array_equal(store["ids"].numpy(rows), IDS[rows])


def test_tensors_of_indices_and_masks_are_taken(store):
    chosen = torch.tensor([4, -1])
    mask = torch.arange(N_ROWS) % 2 == 0
    assert np.array_equal(store["fc"][chosen], PLAIN[[4, -1]])
    assert np.array_equal(store["fc"][mask], PLAIN[::2])
    assert np.array_equal(store["fc"][mask, 1], PLAIN[::2, 1])
    assert np.array_equal(store["fc"][chosen, torch.tensor([0, 1])], PLAIN[[4, -1], [0, 1]])
    assert np.array_equal(store["fc"][np.uint8(200) % 23], PLAIN[200 % 23])


@pytest.mark.parametrize("index", [..., None, (), (..., 0), (None, 2), slice(None)], ids=str)
def test_the_whole_column_is_read(store, index):
    assert np.array_equal(store["fc"][index], PLAIN[index])


@pytest.mark.parametrize(
    "index", [23, -24, [0, 23], np.array([-24]), np.uint64(2**64 - 1)], ids=str
)
def test_a_row_out_of_range_is_named_with_the_length(store, index):
    with pytest.raises(IndexError, match="23, the number of rows, got"):
        store["fc"][index]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("fc", "must be of integers"),
        ([0.5], "must be of integers"),
        ([True] * 22, "must have 23 values, got 22"),
        (np.ones((23, 3), bool), "must be of integers"),
    ],
)
def test_an_index_of_another_kind_is_refused(store, index, message):
    with pytest.raises(IndexError, match=message):
        store["fc"][index]


def test_what_is_read_is_a_copy_of_its_own(store):
    for index in (3, slice(3, 4), [3], (slice(3, 4), 0)):
        store["fc"][index].zero_()
    assert np.array_equal(store["fc"][3], PLAIN[3])
    assert store["fc"][3].untyped_storage().nbytes() == PLAIN[3].nbytes


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16],
)
def test_all_dtypes_are_read_as_they_were(tmp_path, dtype):
    values = torch.arange(40).reshape(10, 4).to(dtype)
    column = open_store(write_store(tmp_path / "s", {"x": values}))["x"]
    assert column.dtype is dtype
    for index in (9, -1, slice(None, None, -2), [1, 9, 1]):
        found = column[index]
        rows = np.arange(10)[index].copy()
        assert found.dtype is dtype
        assert torch.equal(found.view(torch.uint8), values[rows].contiguous().view(torch.uint8))


def test_a_dtype_that_numpy_lacks_names_the_conversion(tmp_path):
    column = open_store(write_store(tmp_path / "s", {"x": torch.ones(4, 2).bfloat16()}))["x"]
    with pytest.raises(hl.StructureError, match="must have a dtype that NumPy has, got"):
        column.numpy()
    assert column[:2, 0].dtype is torch.bfloat16


def test_a_column_is_an_array_for_numpy_and_an_iterable_of_rows(store):
    column = store["fc"]
    assert np.array_equal(np.asarray(column), PLAIN)
    assert np.asarray(column, np.float64).dtype == np.float64
    assert np.array_equal(torch.stack(list(column)), PLAIN)
    assert (column.shape, column.ndim, column.nbytes, len(column)) == ((23, 3, 2), 3, 23 * 24, 23)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, asarray had no copy=
        with pytest.raises(ValueError, match="leave out copy=False"):
            np.asarray(column, copy=False)


def test_a_copy_in_another_process_reads_the_same(store):
    store["fc"][0]
    copied = pickle.loads(pickle.dumps(store["fc"]))
    assert np.array_equal(copied.numpy(), PLAIN)


@pytest.mark.parametrize("most_mapped", [1, 2])
def test_few_files_are_mapped_at_once(store, most_mapped, monkeypatch):
    monkeypatch.setattr(shards_module, "MOST_MAPPED", most_mapped)
    copied = pickle.loads(pickle.dumps(store))
    rows = np.random.default_rng(1).integers(0, N_ROWS, 60)
    for row in rows:
        assert np.array_equal(copied["fc"][int(row)], PLAIN[row])
        assert copied["ids"][int(row)] == IDS[row]
        assert len(copied._shards._open_shards) <= most_mapped
        assert all(len(one) <= most_mapped for one in copied._shards._mapped.values())
    assert np.array_equal(copied["fc"].numpy(rows), PLAIN[rows])


# -- items of several rows ------------------------------------------------------------------------


def test_the_rows_of_an_item_come_without_padding(ragged):
    column = ragged["h"]
    assert column.is_ragged
    assert not ragged["pooled"].is_ragged
    assert column.lengths[:].tolist() == LENGTHS
    for item in range(-10, 10):
        assert torch.equal(column.of_item(item), item_rows(item % 10))
    found = column.of_items([8, 1, -1])
    assert [len(one) for one in found] == [6, 0, 2]
    assert torch.equal(found[0], item_rows(8))
    assert [len(one) for one in column.of_items(slice(2, 5))] == LENGTHS[2:5]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.integers(-10, 9), max_size=8))
def test_padded_items_are_zero_behind_their_ends(ragged, items):
    values, mask = ragged["h"].padded(items)
    longest = max((LENGTHS[item] for item in items), default=0)
    assert values.shape == (len(items), longest, 2)
    assert mask.sum(1).tolist() == [LENGTHS[item] for item in items]
    for one, is_token, item in zip(values, mask, items, strict=True):
        assert torch.equal(one[: LENGTHS[item]], item_rows(item % 10))
        assert is_token[: LENGTHS[item]].all()
        assert not one[LENGTHS[item] :].any()


def test_an_item_out_of_range_or_of_one_row_is_an_error(ragged):
    with pytest.raises(IndexError, match="below 10, the number of items, got 10"):
        ragged["h"].of_item(10)
    with pytest.raises(TypeError, match=r"an item must be a number, got '0'\.\nGive column"):
        ragged["h"].of_item("0")
    with pytest.raises(IndexError, match="below 10, the number of items, got -11"):
        ragged["h"].padded([-11])
    for read in ("of_item", "of_items", "padded"):
        with pytest.raises(hl.StructureError, match=r"Write store\['pooled'\]\[item\]"):
            getattr(ragged["pooled"], read)([0] if read != "of_item" else 0)
    with pytest.raises(hl.StructureError, match="lengths"):
        _ = ragged["pooled"].lengths


# -- how rows are copied --------------------------------------------------------------------------


def test_rows_too_large_to_be_gathered_at_once_are_read_alike(tmp_path):
    values = torch.arange(10 * 17_000.0).reshape(10, 17_000)
    column = open_store(write_store(tmp_path / "s", {"x": values}))["x"]
    for index in ([9, 0, 9, 3], [7], (slice(None, None, -3), slice(5)), ([9, 2], [1, -1])):
        assert np.array_equal(column[index], values.numpy()[index])


def test_many_rows_are_gathered_part_by_part(store, monkeypatch):
    monkeypatch.setattr(column_module, "_MOST_AT_ONCE", 7)
    rows = np.random.default_rng(0).integers(-N_ROWS, N_ROWS, 60)
    assert np.array_equal(store["fc"][rows], PLAIN[rows])
    assert np.array_equal(store["fc"][rows, ::-1, 1], PLAIN[rows, ::-1, 1])


def test_rows_behind_a_url_are_read_alike():
    where = f"memory://test-column-{os.getpid()}"
    remote = open_store(write_store(where, {"fc": torch.tensor(PLAIN)}))
    for index in (4, -1, [22, 0, 9], slice(20, 3, -4), ([3, 12], 1)):
        assert np.array_equal(remote["fc"][index], PLAIN[index])
