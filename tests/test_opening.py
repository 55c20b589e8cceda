"""`hl.open`: a recording or a store, by what its folder holds."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.files.folder_or_url import LocalPlace, as_place
from hookline.files.sealed_json import MANIFEST
from small_stores import write_store

VALUES = torch.arange(12.0).reshape(6, 2)


def test_a_recording_and_a_store_are_told_apart(tmp_path):
    model = nn.Linear(2, 2)
    with hl.record(model) as run:
        model(VALUES)
    run.save(tmp_path / "run")
    write_store(tmp_path / "store", {"x": VALUES})
    for verify in (False, True):
        assert isinstance(hl.open(tmp_path / "run", verify=verify), hl.Recording)
        assert isinstance(hl.open(str(tmp_path / "store"), verify=verify), hl.Store)


def test_a_store_that_begins_meanwhile_is_a_store(tmp_path, monkeypatch):
    def size(place, name):
        monkeypatch.undo()
        hl.extract(nn.ReLU(), VALUES, "", place.folder)
        raise FileNotFoundError(name)

    monkeypatch.setattr(LocalPlace, "size", size)
    assert isinstance(hl.open(tmp_path / "s"), hl.Store)


def test_a_run_that_begins_meanwhile_is_a_run(tmp_path, monkeypatch):
    def size(place, name):
        monkeypatch.undo()
        model = nn.ReLU()
        with hl.monitor(model, to=place.folder):
            model(VALUES)
        raise FileNotFoundError(name)

    monkeypatch.setattr(LocalPlace, "size", size)
    assert isinstance(hl.open(tmp_path / "run"), hl.Curves)


def test_a_url_is_a_store():
    where = f"memory://test-opening-{os.getpid()}"
    write_store(where, {"x": VALUES})
    store = hl.open(where)
    assert torch.equal(store["x"][:], VALUES)
    assert where in repr(store)


def test_shards_without_a_manifest_are_a_damaged_store(tmp_path):
    write_store(tmp_path / "s", {"x": VALUES})
    (tmp_path / "s" / MANIFEST).unlink()
    with pytest.raises(hl.FolderError, match=r"manifest.json is gone; 1 shard left"):
        hl.open(tmp_path / "s")
    (tmp_path / "s" / MANIFEST).touch()
    with pytest.raises(hl.FolderError, match=r"damaged: its manifest.json: .*\n.*store repair"):
        hl.open(tmp_path / "s")


@pytest.mark.parametrize("where", ["missing", 3, None, "a\0b"])
def test_what_is_neither_is_refused_as_before(where):
    with pytest.raises(hl.FolderError):
        hl.open(where)


def test_a_protocol_that_is_unknown_is_named():
    with pytest.raises(hl.FolderError, match="nothing://x cannot be used"):
        hl.open("nothing://x")


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000000.safetensors"])
def test_a_pipe_in_the_folder_blocks_nobody(tmp_path, name):
    folder = write_store(tmp_path / "s", {"fc": torch.zeros(3, 2)}).folder
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(hl.FolderError):
        hl.open(folder)["fc"][:]


def test_a_folder_of_other_files_says_what_can_be_opened(tmp_path):
    for folder, reason in (
        (tmp_path, "it has no manifest.json"),
        (tmp_path / "none", "it does not exist"),
    ):
        with pytest.raises(hl.FolderError) as caught:
            hl.open(folder)
        assert str(caught.value) == (
            f"{folder} is not a recording, a store or a run: {reason}."
            "\nGive the folder that run.save, hl.extract or hl.monitor wrote."
        )


def test_a_run_that_cannot_be_opened_says_why(tmp_path):
    (tmp_path / "curves.bin").write_bytes(b"hlcurvf1")
    with pytest.raises(hl.FolderError, match=r"is damaged: its curves\.bin must .*\nCopy"):
        hl.open(tmp_path)
    where = f"memory://test-opening-a-run-{os.getpid()}"
    as_place(where).write("curves.bin", [b"hlcurve1"])
    with pytest.raises(hl.FolderError, match=r"a folder on a disk, .*, got a URL\.\nCopy"):
        hl.open(where)
