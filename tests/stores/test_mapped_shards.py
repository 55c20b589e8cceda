"""Shards of an opened store: verified on first use, mapped without an open file, damage named."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline.files.folder_or_url import LocalPlace, as_place
from hookline.stores import mapped_shards as shards_module
from hookline.stores import open_store
from hookline.stores.mapped_shards import MISSING, RowAddresses, RowGatherer
from hookline.stores.shard_file import shard_file_name
from small_stores import write_store

VALUES = torch.arange(96.0).reshape(24, 4)


@pytest.fixture
def folder(tmp_path):
    """24 rows in shards of 8, at two sites."""
    write_store(tmp_path / "s", {"a": VALUES, "b": -VALUES})
    return tmp_path / "s"


def flip(path, column):
    """Flip one bit in the last byte of a column's values."""
    shard = open_store(path.parent)._shards.read_description(int(path.name[6:14]))
    with path.open("r+b") as file:
        file.seek(shard.spans[column].stop - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_when_its_column_is_first_read(folder):
    flip(folder / shard_file_name(1), "a")
    store = hl.open(folder)
    assert torch.equal(store["b"][:], -VALUES)
    assert torch.equal(store["a"][:8], VALUES[:8])
    assert torch.equal(store["a"][16:], VALUES[16:])
    for read in (lambda: store["a"][8], lambda: store["a"][[0, 9]], lambda: store["a"][5:9]):
        with pytest.raises(hl.FolderError) as caught:
            read()
        lines = str(caught.value).splitlines()
        assert lines[0].startswith(f"{folder}/shard-00000001.safetensors is damaged: 'a': its")
        assert lines[1] == (
            f"Remove what is damaged with `hookline store repair {folder}`, then start the same"
            " hl.extract again."
        )


@pytest.mark.parametrize("column", ["a", "b", "@item"])
def test_verify_reads_all_values_at_once(folder, column):
    hl.open(folder, verify=True)
    flip(folder / shard_file_name(2), column)
    hl.open(folder)
    with pytest.raises(hl.FolderError, match=rf"shard-00000002.safetensors is damaged: '{column}'"):
        hl.open(folder, verify=True)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


def other_head(path):
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"x")


def lying_length(path):
    with path.open("r+b") as file:
        file.write((2**40).to_bytes(8, "little"))


def of_another_store(path):
    write_store(path.parent.parent / "other", {"a": VALUES + 1, "b": VALUES})
    (path.parent.parent / "other" / path.name).rename(path)


def of_another_number(path):
    path.write_bytes((path.parent / shard_file_name(0)).read_bytes())


@pytest.mark.parametrize(
    "damage", [cut, empty, other_head, lying_length, of_another_store, of_another_number, os.remove]
)
def test_a_damaged_shard_is_named_and_the_others_are_read(folder, damage):
    damage(folder / shard_file_name(1))
    store = hl.open(folder)
    assert torch.equal(store["a"][:8], VALUES[:8])
    what = "is gone" if damage is os.remove else "is damaged: "
    with pytest.raises(hl.FolderError, match=f"shard-00000001.safetensors {what}"):
        store["a"][8]
    with pytest.raises(hl.FolderError, match=f"shard-00000001.safetensors {what}"):
        hl.open(folder, verify=True)


def test_a_file_is_verified_once_until_it_changes(folder, monkeypatch):
    checked = []
    check = shards_module.verify_checksum
    monkeypatch.setattr(
        shards_module, "verify_checksum", lambda s, d: checked.append(s) or check(s, d)
    )
    store = hl.open(folder)
    for _ in range(3):
        assert torch.equal(store["a"][:8], VALUES[:8])
        store.release()
    assert len(checked) == 1
    os.utime(folder / shard_file_name(0), ns=(1, 1))
    store["a"][0]
    assert len(checked) == 2


def test_a_released_store_reads_again(folder):
    store = hl.open(folder)
    kept = store["a"][:8]
    store.release()
    assert not store._shards._open_shards
    assert torch.equal(store["a"][:8], kept)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_no_file_stays_open(folder):
    before = len(os.listdir("/proc/self/fd"))
    store = hl.open(folder, verify=True)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(store._shards._open_shards) == 3


def test_columns_share_one_mapping_of_a_file(folder):
    store = hl.open(folder)
    addresses = [store._shards.mapped_rows(0, store[name]._form).address for name in ("a", "b")]
    data = store._shards._open_shards[0].data
    start = data.__array_interface__["data"][0]
    assert all(start <= address < start + data.nbytes for address in addresses)


def test_mappings_that_others_have_used_up_are_given_back(folder, monkeypatch):
    store = hl.open(folder)
    store["a"][0]
    view, failed = LocalPlace.view, []

    def fails_once(self, name, start, stop):
        if not failed:
            failed.append(name)
            raise RuntimeError(
                "unable to mmap 512 bytes from file <x>: Cannot allocate memory (12)"
            )
        return view(self, name, start, stop)

    monkeypatch.setattr(LocalPlace, "view", fails_once)
    assert torch.equal(store["a"][:], VALUES)
    assert failed == [shard_file_name(1)]


def test_a_store_behind_a_url_is_read_in_bounded_memory(monkeypatch):
    where = f"memory://test-shards-{os.getpid()}"
    place = write_store(where, {"a": VALUES, "b": -VALUES})
    monkeypatch.setattr(shards_module, "MOST_DOWNLOADED", 2 * 8 * 16)
    store = hl.open(where)
    for _ in range(2):
        assert torch.equal(store["a"][:], VALUES)
        assert torch.equal(store["b"][::-5], -VALUES.flip(0)[::5])
        assert sum(store._shards._downloaded.values()) <= 2 * 8 * 16
    place.remove(shard_file_name(2))
    store.release()
    with pytest.raises(hl.FolderError, match=r"shard-00000002.safetensors is gone"):
        store["a"][23]
    data = bytearray(place.read(shard_file_name(1)))
    data[-1] ^= 1
    place.write(shard_file_name(1), [bytes(data)])
    with pytest.raises(hl.FolderError, match=r"shard-00000001.safetensors is damaged"):
        as_place(where), hl.open(where, verify=True)


@pytest.mark.slow
def test_threads_read_the_same(folder, monkeypatch):
    monkeypatch.setattr(shards_module, "MOST_MAPPED", 1)
    store = pickle.loads(pickle.dumps(hl.open(folder)))
    wrong = []

    def read(seed):
        rows = torch.randint(24, (200,), generator=torch.Generator().manual_seed(seed))
        for row in rows.tolist():
            if not torch.equal(store["a"][row], VALUES[row]):
                wrong.append(row)
        if not torch.equal(store["b"][rows], -VALUES[rows]):
            wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_threads_gather_from_what_others_drop(folder, monkeypatch):
    monkeypatch.setattr(shards_module, "MOST_MAPPED", 2)
    store = pickle.loads(pickle.dumps(hl.open(folder)))
    wrong, done = [], threading.Event()

    def drop():
        while not done.is_set():
            store.release()

    def gather(seed):
        numbers = torch.Generator().manual_seed(seed)
        for _ in range(100):
            rows = torch.randint(24, (16,), generator=numbers)
            if not torch.equal(store["a"][rows], VALUES[rows]):
                wrong.append(rows)

    dropping = threading.Thread(target=drop)
    threads = [threading.Thread(target=gather, args=(seed,)) for seed in range(3)]
    for thread in (dropping, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    dropping.join()
    assert not wrong


@pytest.mark.parametrize("where", ["folder", "url"])
def test_an_open_reader_reads_again_what_was_mended(where, tmp_path):
    place = write_store(
        tmp_path / "s" if where == "folder" else f"memory://{tmp_path}", {"a": VALUES}
    )
    whole = place.read(shard_file_name(1))
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    place.write(shard_file_name(1), [bytes(damaged)])
    store = hl.open(str(place))
    errors = []
    for _ in range(2):
        with pytest.raises(
            hl.FolderError, match=r"shard-00000001\.safetensors is damaged"
        ) as caught:
            store["a"][:]
        errors.append(caught.value)  # holds the frames, and with them the damaged bytes
    place.remove(shard_file_name(1))
    with pytest.raises(hl.FolderError, match=r"shard-00000001\.safetensors is gone"):
        store["a"][:]
    place.write(shard_file_name(1), [whole])
    assert torch.equal(store["a"][:], VALUES)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("mmap (12)")])
def test_what_cannot_be_read_now_is_not_called_damaged(folder, monkeypatch, error):
    def fails(*_):
        raise error

    store = hl.open(folder)
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "view", fails)
        with pytest.raises(
            hl.FolderError, match=r"0\.safetensors cannot be read: .*\n(Close|Free)"
        ):
            store["a"][0]
    assert torch.equal(store["a"][:], VALUES)


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
    found = RowGatherer(shape, np.dtype(dtype))(np.array(addresses, np.int64))
    assert found.dtype == dtype
    assert found.shape == (len(asked), *shape)
    for row, (k, number) in zip(found, asked, strict=True):
        assert np.array_equal(row, arrays[k][number])
    assert not any(np.shares_memory(found, array) for array in arrays)


@pytest.mark.parametrize(
    ("shape", "can"), [((), True), ((2**14,), True), ((2**14 + 1,), False), ((3, 0), False)]
)
def test_rows_that_are_too_large_or_empty_are_not_gathered(shape, can):
    assert RowGatherer.can_gather(shape) is can
    if can:
        RowGatherer(shape, np.dtype("f8"))


def test_origins_hold_the_arrays_that_they_lead_to():
    origins = RowAddresses(3)
    array = np.ones(4)
    origins.add_shard(1, array, 5)
    assert origins.of_shard.tolist() == [MISSING, 5, MISSING]
    assert origins._arrays[0] is array
