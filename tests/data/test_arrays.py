"""Arrays as data: rows are copied, mapped files stay where they are."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from data_source_checks import run, said, source_of
from hookline.data import arrays
from hookline.data.arrays import array_items


def test_a_batch_is_a_copy_of_the_users_rows():
    rows = torch.zeros(4, 2)
    for data in (rows, rows.numpy()):
        (batch,) = run(source_of(data), [0])
        batch.data.add_(1)
    assert rows.sum() == 0


def test_a_read_only_array_of_a_foreign_byte_order():
    rows = np.arange(6, dtype=">f4").reshape(3, 2)[::-1]
    rows.flags.writeable = False
    (batch,) = run(source_of(rows), [0])
    assert batch.data.tolist() == [[4, 5], [2, 3], [0, 1]]
    assert source_of(rows).identity() == source_of(rows.astype("<f4")).identity()


class Sliced:
    """An array of another library, such as h5py: slices give arrays."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        assert isinstance(index, slice)
        return self.array[index]


def test_whatever_slices_as_an_array_is_read_by_slices():
    rows = np.arange(6.0).reshape(3, 2)
    source = source_of(Sliced(rows), batch_size=2)
    assert run(source, [1])[0].data.tolist() == [[4, 5]]
    assert source.identity() == source_of(rows).identity()


def test_a_column_that_slices_as_a_tensor_keeps_its_dtype():
    rows = torch.arange(6).reshape(3, 2).bfloat16()
    source = source_of(Sliced(rows), batch_size=2)
    (batch,) = run(source, [0])
    assert (batch.data.dtype, batch.data.tolist()) == (torch.bfloat16, [[0, 1], [2, 3]])
    batch.data.zero_()
    assert rows.sum() == 15
    assert source.identity() == source_of(rows).identity()


@pytest.mark.parametrize("rows", [torch.ones(6, 2), np.arange(6, dtype=">f4")[::-1, None]])
def test_rows_are_copied_to_pinned_memory_at_once(rows, monkeypatch):
    empty_like, pinned = torch.empty_like, []
    items = array_items(rows)

    def in_pinned(tensor, *, pin_memory):  # this machine has nothing to pin for
        assert pin_memory
        pinned.append(empty_like(tensor))
        return pinned[-1]

    monkeypatch.setattr(torch, "empty_like", in_pinned)
    batch = items.load_batch(0, range(1, 3), pinned=True)
    assert batch.data is pinned[-1]
    assert batch.data.tolist() == rows[1:3].tolist()


@pytest.mark.parametrize("cut", [slice(None), slice(3, 9), slice(None, None, -2)])
def test_a_mapped_array_pickles_as_its_place_in_the_file(tmp_path, cut):
    rows = np.arange(4096 * 5, dtype=np.float32).reshape(4096, 5)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")[cut]
    source = source_of(mapped, batch_size=3)
    data = pickle.dumps(source)
    assert len(data) < 2000
    there = pickle.loads(data)
    assert torch.equal(run(there, [1])[0].data, torch.tensor(rows[cut][3:6].copy()))
    assert there.identity() == source.identity() == source_of(rows[cut].copy()).identity()


def test_a_private_mapping_pickles_with_its_changes(tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((4, 2)))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="c")
    mapped[1] = 7
    there = pickle.loads(pickle.dumps(source_of(mapped)))
    assert run(there, [0])[0].data.sum() == 14


def test_a_mapped_file_that_was_cut_is_said(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((4, 2)))
    data = pickle.dumps(source_of(np.load(path, mmap_mode="r")))
    path.write_bytes(path.read_bytes()[:-1])
    message = said(lambda: run(pickle.loads(data), [0]))
    assert message == (
        f"{path} must have at least 192 bytes, got 191."
        "\nPut the file back that the job was started with."
    )
    path.unlink()
    assert "must be readable, got FileNotFoundError" in said(lambda: run(pickle.loads(data), [0]))


def test_arrays_that_do_not_fit_are_refused():
    assert said(lambda: source_of({"a": torch.zeros(3), "b": torch.zeros(4)})) == (
        "data must hold arrays of one length, got 3 in data['a'], 4 in data['b']."
        "\nCut them to one length, or leave out those that the model does not take."
    )
    assert "data[1] must be an array or a tensor, got str" in said(
        lambda: source_of((torch.zeros(3), "cat"))
    )
    assert "Make it a tensor: a tokenizer does with return_tensors='pt'" in said(
        lambda: source_of({"input_ids": [[1, 2], [3]]})
    )
    assert "data must hold numbers" in said(lambda: source_of(np.array(["a", "b"])))


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (torch.Tensor.to_sparse, "got a sparse_coo one.\nGive what its to_dense()"),
        (torch.Tensor.to_sparse_csr, "got a sparse_csr one.\nGive what its to_dense()"),
        (
            lambda x: torch.nested.nested_tensor([x, x[:2]]),
            "got a nested one.\nGive what its to_padded",
        ),
        (
            lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
            "got a nested one.\nGive what its to_padded",
        ),
    ],
    ids=["sparse", "sparse rows", "nested", "jagged"],
)
def test_a_tensor_without_rows_to_cut_out_is_refused(make, remedy):
    tensor = make(torch.eye(3))
    assert f"data must be a dense tensor, whose rows can be cut out, {remedy}" in said(
        lambda: source_of(tensor)
    )
    assert "data['x'] must be a dense tensor" in said(lambda: source_of({"x": tensor}))
    assert "data[0] must be a dense tensor" in said(lambda: source_of((tensor,)))


def test_a_large_array_is_known_by_rows_that_are_spread(monkeypatch):
    monkeypatch.setattr(arrays, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(arrays, "N_SAMPLES", 8)
    rows = torch.zeros(1000, 8)
    before = source_of(rows).identity()
    rows[1] = 1  # between two samples: not seen, as documented
    assert source_of(rows).identity() == before
    rows[999] = 1
    assert source_of(rows).identity() != before


@pytest.mark.parametrize("row", [0, 1, 7, 9])
def test_a_small_array_is_known_by_all_of_its_rows(monkeypatch, row):
    monkeypatch.setattr(arrays, "_PIECE_BYTES", 32)
    rows = np.zeros((10, 2), np.float32)
    before = source_of(rows, batch_size=2).identity()
    rows[row] = 1
    assert source_of(rows, batch_size=2).identity() != before
