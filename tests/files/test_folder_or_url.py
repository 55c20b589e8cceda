"""Places: a file is written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import hookline as hl
from hookline.files import folder_or_url as place_module
from hookline.files.folder_or_url import LocalPlace, as_local_path, as_place, locked
from hookline.views.page.recording_page import page_path


def test_many_buffers_of_all_sizes_are_written_in_order(tmp_path):
    chunks = [np.full(k % 5, k % 251, np.uint8) for k in range(3000)]
    LocalPlace(tmp_path).write("x", chunks)
    assert (tmp_path / "x").read_bytes() == b"".join(chunk.tobytes() for chunk in chunks)
    assert os.listdir(tmp_path) == ["x"]


def test_buffers_are_taken_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(place_module, "_WRITE_BYTES", 10)
    path, written = tmp_path / "x", []

    def buffers():
        for number in range(5):
            yield bytes([number]) * 6
            written.append(path.stat().st_size)

    LocalPlace(tmp_path).write_new("x", buffers())
    assert written == [0, 12, 12, 24, 24]
    assert path.read_bytes() == b"".join(bytes([number]) * 6 for number in range(5))


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_write_that_takes_only_a_part_goes_on(tmp_path, monkeypatch, most):
    def writes_few(handle, chunks):
        return os.write(handle, chunks[0][:most])

    monkeypatch.setattr(place_module, "_write", writes_few)
    LocalPlace(tmp_path).write("x", [b"head", b"", np.arange(40), memoryview(b"tail")])
    assert (tmp_path / "x").read_bytes() == b"head" + np.arange(40).tobytes() + b"tail"


def test_without_vectored_writes_the_same_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(place_module, "_write", place_module._write_first_chunk)
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


def test_a_url_of_a_file_is_a_folder_here(tmp_path):
    place = as_place(f"file://{tmp_path}/store")
    assert isinstance(place, LocalPlace)
    assert place.folder == tmp_path / "store"


def test_a_place_is_a_folder_or_a_url(tmp_path):
    assert str(as_place(str(tmp_path))) == str(tmp_path)
    assert str(as_place("memory://a/b/")) == "memory://a/b"
    with pytest.raises(hl.FolderError, match="must be a folder or a URL, got int"):
        as_place(3)


@pytest.mark.parametrize(
    "to",
    [Path("s3://bucket/features"), "gs:/bucket", "a\0b", "", "s3://", "memory:///", "file://"],
)
def test_a_url_that_lost_a_slash_or_names_nothing_is_refused(tmp_path, monkeypatch, to):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hl.FolderError, match="must be a folder or a URL, got '") as caught:
        as_place(to)
    assert str(caught.value).count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_url_whose_protocol_fails_is_refused(tmp_path):
    with pytest.raises(hl.FolderError, match=r"none\.zip cannot be used: .*\nCheck the address"):
        as_place(f"zip://a::{tmp_path}/none.zip")


@pytest.mark.parametrize("to", ["s3://bucket/x", Path("s3://bucket/x"), "memory://x"])
def test_what_is_written_here_alone_refuses_a_url(tmp_path, monkeypatch, to):
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Linear(2, 2)
    store = hl.extract(net, torch.ones(3, 2), "", tmp_path / "store")
    for write in (
        lambda: store.export(to, "npy"),
        lambda: hl.monitor(net, to=to),
        lambda: hl.monitor(net, to=f"{to}.jsonl"),
        lambda: hl.check(net, keep=to),
        lambda: page_path(to),
    ):
        with pytest.raises(hl.FolderError, match="must be a path on this machine"):
            write()
    assert os.listdir() == ["store"]


@pytest.mark.parametrize(("to", "got"), [("", "''"), ("a\0b", "'a.*b'"), (3, "int")])
def test_a_path_here_is_advised_where_urls_are_refused(to, got):
    with pytest.raises(hl.FolderError, match=f"path on this machine, got {got}") as caught:
        as_local_path(to)
    assert "://" not in str(caught.value)


def test_a_page_goes_into_a_folder_that_is_given_as_a_url(tmp_path):
    assert page_path(f"file://{tmp_path}") == page_path(tmp_path) == tmp_path / "report.html"


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes that are no UTF-8")
def test_a_store_is_read_in_a_folder_of_any_name(tmp_path):
    folder = tmp_path / os.fsdecode(b"a\xff:\n")
    store = hl.extract(torch.nn.ReLU(), torch.ones(3, 2), "", folder)
    assert torch.equal(store[""][:], torch.ones(3, 2))
    assert torch.equal(hl.Store.cat([store, store])[""][[5, 0]], torch.ones(2, 2))


def test_a_run_is_opened_by_the_url_of_its_folder(tmp_path):
    net = torch.nn.Linear(2, 2)
    with hl.monitor(net, to=f"file://{tmp_path / 'run'}"):
        net(torch.ones(1, 2))
    assert len(hl.open(f"file://{tmp_path / 'run'}").steps) == 1


def test_a_place_stays_where_it_is_when_the_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = as_place("store")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    place.write("x", [b"a"])
    assert (tmp_path / "store" / "x").read_bytes() == b"a"
    assert str(place) == "store"


@pytest.mark.parametrize("place_of", [as_place, as_local_path])
def test_a_path_in_a_deleted_directory_is_refused(tmp_path, monkeypatch, place_of):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(hl.FolderError, match=r"was deleted\.\nGive an absolute path"):
        place_of("run")
    place_of(tmp_path / "run")


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_folder_that_is_replaced_while_it_is_locked_is_noticed(tmp_path, is_made_anew):
    place = LocalPlace(tmp_path / "store")
    with locked(place):
        place.write("x", [b"a"])
        (tmp_path / "store").rename(tmp_path / "moved")
        other = LocalPlace(tmp_path / "store")
        if is_made_anew:
            with locked(other):
                other.write("y", [b"b"])
        with pytest.raises(hl.FolderError, match=r"must stay where it is.*\nPut it back"):
            place.write("z", [b"c"])
    assert other.names() == (["y"] if is_made_anew else [])
    place.write("z", [b"c"])


def test_a_lock_removes_only_what_a_writer_left(tmp_path):
    left = ".shard-00000003.safetensors.912.b522084d.part"
    others = [".film.mkv.part", ".shard-00000003.safetensors", "x.part"]
    for name in [left, *others]:
        (tmp_path / name).write_bytes(b"a")
    with locked(LocalPlace(tmp_path)):
        assert sorted(os.listdir(tmp_path)) == sorted([".lock", *others])


def test_the_state_of_a_file_changes_with_it(tmp_path):
    place = LocalPlace(tmp_path)
    place.write("x", [b"a"])
    before = place.state("x")
    assert place.state("x") == before
    place.write("x", [b"b"])
    assert place.state("x") != before


def test_files_are_written_where_folders_cannot_be_opened(tmp_path, monkeypatch):
    open_file = os.open

    def open_as_on_windows(path, *args, **kwargs):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_as_on_windows)
    LocalPlace(tmp_path).write("x", [b"new"])
    assert (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("number", "is_written"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)]
)
def test_a_share_that_syncs_no_folders_can_be_written(tmp_path, monkeypatch, number, is_written):
    sync = os.fsync

    def sync_files_alone(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", sync_files_alone)
    with nullcontext() if is_written else pytest.raises(hl.FolderError, match="cannot write"):
        LocalPlace(tmp_path).write("x", [b"new"])


def test_a_locked_folder_that_nfs_lost_is_noticed(tmp_path, monkeypatch):
    status = os.stat

    def stat_as_nfs(path, **kwargs):
        if str(path).endswith(".lock"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return status(path, **kwargs)

    place = LocalPlace(tmp_path / "store")
    with locked(place), monkeypatch.context() as context:
        context.setattr(os, "stat", stat_as_nfs)
        with pytest.raises(hl.FolderError, match="must stay where it is"):
            place.write("x", [b"a"])
