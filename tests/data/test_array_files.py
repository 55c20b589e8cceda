"""Arrays on disk: the same batches and identity as in memory, at any place."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from data_source_checks import alike, run, said, source_of, whole
from thoroughness import examples

ROWS = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
ONCE = settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@ONCE
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    dtype=st.sampled_from(["<f4", ">f8", "u1", "bool", "<c8", "<i8", "f2"]),
    is_fortran=st.booleans(),
    how=st.sampled_from(["npy", "npz", "compressed"]),
)
def test_a_file_is_read_as_the_array_in_memory(tmp_path, shape, dtype, is_fortran, how):
    rows = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    rows = np.asfortranarray(rows) if is_fortran else rows
    path = tmp_path / ("rows.npy" if how == "npy" else "rows.npz")
    if how == "npy":
        np.save(path, rows)
    else:
        (np.savez if how == "npz" else np.savez_compressed)(path, rows)
    there, here = source_of(path, batch_size=2), source_of(rows, batch_size=2)
    assert there.identity() == here.identity()
    assert all(map(alike, whole(there), whole(here)))


def test_a_damaged_compressed_array_is_no_matter_of_its_dtype(tmp_path):
    path = tmp_path / "rows.npz"
    np.savez_compressed(path, np.random.default_rng(0).random((5000, 2)))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 16] ^= 255  # of the checksum in the archive's directory
    path.write_bytes(data)
    assert "np.savez wrote, got BadZipFile: Bad CRC-32" in said(lambda: source_of(path))


def test_several_arrays_of_a_file_are_keyword_arguments(tmp_path):
    np.savez(tmp_path / "rows.npz", ids=ROWS, mask=ROWS[:, 0])
    batch = whole(source_of(str(tmp_path / "rows.npz"), batch_size=8))[1]
    assert list(batch.data) == ["ids", "mask"]
    assert torch.equal(batch.data["mask"], torch.from_numpy(ROWS[8:, 0]))


def test_files_of_torch_are_read_as_arrays_are(tmp_path):
    tensors = {"ids": torch.arange(6).reshape(3, 2), "mask": torch.ones(3, 2)}
    torch.save(tensors, tmp_path / "rows.pt")
    save_file(tensors, tmp_path / "rows.safetensors")
    here = whole(source_of(tensors, batch_size=2))
    for name in ("rows.pt", "rows.safetensors"):
        assert all(map(alike, whole(source_of(tmp_path / name, batch_size=2)), here))
    torch.save({"epoch": 3}, tmp_path / "rows.pt")
    assert "rows.pt['epoch'] must be an array or a tensor, got 3." in said(
        lambda: source_of(tmp_path / "rows.pt")
    )


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz", "small.npz"])
def test_a_source_of_a_file_pickles_as_its_path(tmp_path, name, monkeypatch):
    np.save(tmp_path / "rows.npy", np.zeros((1000, 10)))
    np.savez(tmp_path / "rows.npz", np.zeros((1000, 10)))
    np.savez_compressed(tmp_path / "small.npz", np.zeros((1000, 10)))
    monkeypatch.chdir(tmp_path)
    source = source_of(name)
    run(source, [0])
    data = pickle.dumps(source)
    assert len(data) < 2000
    monkeypatch.chdir("/")
    assert len(run(pickle.loads(data), [31])[0].items) == 8


@pytest.mark.processes
def test_workers_read_mapped_rows(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    here, there = (source_of(tmp_path / "rows.npy", batch_size=4, workers=n) for n in (0, 2))
    assert all(map(alike, run(here, [2, 0]), run(there, [2, 0])))


@pytest.mark.processes
def test_a_worker_tells_that_a_file_has_gone(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    source = source_of(tmp_path / "rows.npy", workers=1)
    there = pickle.loads(pickle.dumps(source))
    (tmp_path / "rows.npy").unlink()
    assert said(lambda: run(there, [0])).startswith(f"{tmp_path / 'rows.npy'} must be readable")


def broken(path, kind):
    np.save(path, ROWS if kind != "objects" else np.array([object()]), allow_pickle=True)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "header":
        path.write_bytes(path.read_bytes()[:20])
    elif kind == "noise":
        path.write_bytes(b"noise")
    elif kind == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("kind", ["cut", "header", "noise", "empty", "objects"])
def test_a_broken_file_is_refused(tmp_path, kind, suffix):
    path = tmp_path / f"rows{suffix}"
    broken(tmp_path / "one.npy", kind)
    (tmp_path / "one.npy").rename(path)
    message = said(lambda: run(source_of(path), [0]))
    assert message.startswith(f"{path} must ")


def test_arrays_without_rows_are_refused(tmp_path):
    np.save(tmp_path / "none.npy", np.zeros((0, 3)))
    np.save(tmp_path / "scalar.npy", np.zeros(()))
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "uneven.npz", a=np.zeros(3), b=np.zeros(4))
    assert "must have at least one row, got shape [0, 3]" in said(
        lambda: source_of(tmp_path / "none.npy")
    )
    assert "got shape []" in said(lambda: source_of(tmp_path / "scalar.npy"))
    assert "must hold at least one array" in said(lambda: source_of(tmp_path / "empty.npz"))
    assert "must hold arrays of one length, got 3 in" in said(
        lambda: source_of(tmp_path / "uneven.npz")
    )
