"""Places: a file is written whole or not at all."""

from __future__ import annotations

import os

import numpy as np
import pytest

import hookline as hl
from hookline.stores import place as place_module
from hookline.stores.place import LocalPlace, place_of


def test_many_buffers_of_all_sizes_are_written_in_order(tmp_path):
    chunks = [np.full(k % 5, k % 251, np.uint8) for k in range(3000)]
    LocalPlace(tmp_path).write("x", chunks)
    assert (tmp_path / "x").read_bytes() == b"".join(chunk.tobytes() for chunk in chunks)
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_write_that_takes_only_a_part_goes_on(tmp_path, monkeypatch, most):
    def writes_few(handle, chunks):
        return os.write(handle, chunks[0][:most])

    monkeypatch.setattr(place_module, "_write", writes_few)
    LocalPlace(tmp_path).write("x", [b"head", b"", np.arange(40), memoryview(b"tail")])
    assert (tmp_path / "x").read_bytes() == b"head" + np.arange(40).tobytes() + b"tail"


def test_without_vectored_writes_the_same_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(place_module, "_write", place_module._write_first)
    LocalPlace(tmp_path).write("x", [b"a", b"bc", b"d"])
    assert (tmp_path / "x").read_bytes() == b"abcd"


def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    place = LocalPlace(tmp_path)
    place.write("x", [b"old"])

    def fails(handle, chunks):
        os.write(handle, b"ne")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place_module, "_write", fails)
    with pytest.raises(hl.FolderError, match=r"No space left on device\.\nFree space on the disk"):
        place.write("x", [b"new"])
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_place_is_a_folder_or_a_url(tmp_path):
    assert str(place_of(str(tmp_path))) == str(tmp_path)
    assert str(place_of("memory://a/b/")) == "memory://a/b"
    with pytest.raises(hl.FolderError, match="must be a folder or a URL, got int"):
        place_of(3)


def test_the_state_of_a_file_changes_with_it(tmp_path):
    place = LocalPlace(tmp_path)
    place.write("x", [b"a"])
    before = place.state("x")
    assert place.state("x") == before
    place.write("x", [b"b"])
    assert place.state("x") != before
