"""Stores are verified whole, and mended from what their shards say of themselves."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

import hookline as hl
from hookline.files.folder_or_url import as_place
from hookline.files.sealed_json import MANIFEST, seal_json
from hookline.stores import Damage, open_store, repair, verify
from hookline.stores.shard_file import shard_file_name
from small_stores import write_store

VALUES = torch.arange(96.0).reshape(24, 4)
MODEL = torch.nn.Linear(4, 2)


@pytest.fixture(params=["folder", "url"])
def place(request, tmp_path):
    """24 rows in shards of 8."""
    where = tmp_path / "s" if request.param == "folder" else f"memory://{tmp_path}"
    return write_store(where, {"a": VALUES, "b": -VALUES})


def flip(place, name, at=-1):
    data = bytearray(place.read(name))
    data[at] ^= 1
    place.write(name, [bytes(data)])


def test_a_whole_store_has_no_damage_and_stays_as_it_is(place):
    before = {name: place.read(name) for name in place.names()}
    assert verify(place) == []
    found = repair(place)
    assert not found.removed
    assert not found.manifest
    assert str(found) == "Nothing is damaged."
    assert {name: place.read(name) for name in place.names()} == before


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda place: flip(place, shard_file_name(1)), "it is damaged: its checksum must be"),
        (lambda place: flip(place, shard_file_name(1), 40), "it is damaged: "),
        (
            lambda place: place.write(shard_file_name(1), [place.read(shard_file_name(1))[:-3]]),
            "bytes long, got",
        ),
        (lambda place: place.write(shard_file_name(1), [b""]), "it is damaged: "),
        (
            lambda place: place.write(shard_file_name(1), [place.read(shard_file_name(0))]),
            "its seal must be",
        ),
        (lambda place: place.remove(shard_file_name(1)), "it is gone"),
    ],
)
def test_a_damaged_shard_is_listed_and_removed(place, damage, what):
    damage(place)
    (found,) = verify(place)
    assert found.name == shard_file_name(1)
    assert what in found.what
    done = repair(place)
    assert [one.name for one in done.removed] == [shard_file_name(1)]
    assert "1 damaged shard removed or gone. Start the same hl.extract again" in str(done)
    assert shard_file_name(1) not in place.names()
    with pytest.raises(hl.FolderError, match="is not finished: it holds 2 shards so far"):
        open_store(place)
    assert verify(place) == []


UNREADABLE = [
    *(
        OSError(number, os.strerror(number))
        for number in (errno.EMFILE, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOMEM)
    ),
    RuntimeError("unable to mmap 102400 bytes from file <x>: Cannot allocate memory (12)"),
    MemoryError(),
    TimeoutError("the network is down"),
]


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: f"{type(error).__name__}{error}")
@pytest.mark.parametrize("method", ["size", "read", "view"])
def test_a_shard_that_cannot_be_read_is_not_removed(place, monkeypatch, method, error):
    flip(place, shard_file_name(0))  # what is damaged stays, too, until all could be read
    before = {name: place.read(name) for name in place.names()}
    real = getattr(type(place), method)

    def fails(self, name, *range):
        if name == shard_file_name(1):
            raise error
        return real(self, name, *range)

    monkeypatch.setattr(type(place), method, fails)
    for check in (verify, repair):
        with pytest.raises(hl.FolderError, match=r"shard-00000001\.safetensors cannot be read: "):
            check(place)
    monkeypatch.undo()
    assert {name: place.read(name) for name in place.names()} == before


def test_a_network_that_fails_is_not_damage(tmp_path, monkeypatch):
    place = write_store(f"memory://{tmp_path}", {"a": VALUES})
    before = {name: place.read(name) for name in place.names()}
    files = type(place._fs)
    for error in (PermissionError("no"), TimeoutError("late"), RuntimeError("lost"), b""):

        def cat(self, path, start=None, end=None, *, answer=error, **_):
            if isinstance(answer, bytes):
                return answer  # the connection ended early
            raise answer

        with monkeypatch.context() as patch:
            patch.setattr(files, "cat_file", cat)
            with pytest.raises(hl.FolderError, match=r"cannot be read.*\nCheck the address, the"):
                repair(place)
    assert {name: place.read(name) for name in place.names()} == before


def test_a_shard_that_is_gone_for_a_moment_is_not_removed(place, monkeypatch):
    real, asked = type(place).size, []

    def gone_once(self, name):
        if name == shard_file_name(1) and not asked:
            asked.append(name)
            raise FileNotFoundError(name)
        return real(self, name)

    monkeypatch.setattr(type(place), "size", gone_once)
    (removed,) = repair(place).removed
    assert str(removed) == f"{shard_file_name(1)}: it is gone"
    assert shard_file_name(1) in place.names()


def test_what_is_removed_is_made_again_by_the_same_extract(tmp_path):
    def start():
        return hl.extract(MODEL, VALUES, "", tmp_path / "s", batch_size=4, shard_bytes=64)

    start()
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").glob("shard*")}
    assert len(before) > 2
    for name in (shard_file_name(0), shard_file_name(2)):
        flip(as_place(tmp_path / "s"), name)
    assert len(repair(tmp_path / "s").removed) == 2
    assert len(start()) == 24
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").glob("shard*")} == before


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_a_lost_manifest_is_made_again_from_the_shards(place, damage):
    data = place.read(MANIFEST)
    before = open_store(place)
    if damage == "missing":
        place.remove(MANIFEST)
    elif damage == "cut":
        place.write(MANIFEST, [data[:300]])
    else:
        place.write(MANIFEST, [data.replace(b'"batch_size": 4', b'"batch_size": 5')])
    (found,) = verify(place)
    assert found.name == MANIFEST
    assert str(repair(place)) == (
        "The manifest was made again from the shards. The store is whole."
    )
    store = open_store(place, verify=True)
    assert store.sites == ("a", "b")
    assert torch.equal(store["a"][:], VALUES)
    assert store.statistics == before.statistics
    assert verify(place) == []


def test_a_manifest_made_again_knows_tokens_from_items(tmp_path):
    place = write_store(
        tmp_path / "s", {"h": VALUES, "pooled": VALUES[:5], "half": VALUES.half()},
        lengths=[7, 0, 8, 4, 5], tokens=torch.arange(24), per_token=["h", "half"], batch_size=1,
    )  # fmt: skip
    place.remove(MANIFEST)
    repair(place)
    store = open_store(place)
    assert [store[site].is_ragged for site in ("h", "half", "pooled")] == [True, True, False]
    assert torch.equal(store["h"].of_item(2), VALUES[7:15])
    assert torch.equal(store.tokens[:], torch.arange(24))


def test_a_store_made_again_is_not_gone_on_with(tmp_path):
    hl.extract(MODEL, VALUES, "", tmp_path / "s", batch_size=4)
    (tmp_path / "s" / MANIFEST).unlink()
    repair(tmp_path / "s")
    with pytest.raises(hl.FolderError, match="holds a store of another job"):
        hl.extract(MODEL, VALUES, "", tmp_path / "s", batch_size=4)
    assert len(hl.open(tmp_path / "s")) == 24


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_lost_manifest_and_a_lost_shard_change_nothing(place, damaged):
    place.remove(MANIFEST)
    for damage in (
        lambda: flip(place, shard_file_name(damaged)),
        lambda: place.remove(shard_file_name(damaged)),
    ):
        damage()
        before = place.names()
        with pytest.raises(hl.FolderError, match=r"cannot be mended: its manifest\.json is gone"):
            repair(place)
        assert place.names() == before


def test_a_recorded_loop_keeps_what_is_whole(tmp_path):
    with hl.record(MODEL, to=tmp_path / "s") as line:
        for rows in VALUES.split(4):
            MODEL(rows)
    assert len(line.store) == 24
    flip(as_place(tmp_path / "s"), shard_file_name(0))
    before = sorted(os.listdir(tmp_path / "s"))
    with pytest.raises(hl.FolderError, match="in a loop that cannot be run again, and is damaged"):
        repair(tmp_path / "s")
    assert sorted(os.listdir(tmp_path / "s")) == before


def test_a_loop_whose_process_was_killed_keeps_its_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("hookline.verbs.record.to_store.SHARD_BYTES", 100)
    with hl.record(MODEL, to=tmp_path / "s"):
        for rows in VALUES.split(4):
            MODEL(rows)
        # What a kill leaves: whole shards, and a manifest without them.
        before = (tmp_path / "s" / MANIFEST).read_bytes()
    place, whole = as_place(tmp_path / "s"), hl.open(tmp_path / "s")
    place.write(MANIFEST, [before])
    with pytest.raises(hl.FolderError, match=r"process was killed, keep .* hookline store repair"):
        hl.open(tmp_path / "s")
    assert verify(place) == []
    assert "made again from the shards" in str(repair(place))
    store = hl.open(tmp_path / "s")
    assert torch.equal(store[""][:], whole[""][:])
    assert store.job == whole.job
    assert str(repair(place)) == "Nothing is damaged."
    for name in [name for name in place.names() if name != MANIFEST]:
        place.remove(name)
    place.write(MANIFEST, [before])
    with pytest.raises(hl.FolderError, match=r"0 shards so far.*\n.*killed, record again"):
        hl.open(tmp_path / "s")


def test_an_unfinished_store_is_not_damaged_for_that(tmp_path):
    place = write_store(tmp_path / "s", {"a": VALUES}, is_finished=False)
    place.remove(shard_file_name(1))
    assert verify(place) == []
    flip(place, shard_file_name(2))
    assert [one.name for one in verify(place)] == [shard_file_name(2)]
    assert len(repair(place).removed) == 1
    assert [name for name in place.names() if name != MANIFEST] == [shard_file_name(0)]


def test_a_shard_that_the_manifest_does_not_list_is_damage(place):
    place.write(shard_file_name(7), [place.read(shard_file_name(1))])
    assert verify(place) == [
        Damage(shard_file_name(7), "it is damaged: the manifest does not list it")
    ]
    repair(place)
    assert shard_file_name(7) not in place.names()


def test_damaged_names_are_listed(place):
    for text in (b"[", b"{}"):
        place.write("names.json", [text])
        (found,) = verify(place)
        assert str(found).startswith("names.json: it is damaged")


def test_what_is_not_a_store_is_refused(tmp_path):
    for check in (verify, repair):
        with pytest.raises(hl.FolderError, match="is not a store"):
            check(tmp_path)
        (tmp_path / MANIFEST).write_bytes(seal_json({"format": "x", "checksum": "0" * 16}))
        with pytest.raises(hl.FolderError, match="was written by something else"):
            check(tmp_path)
        (tmp_path / MANIFEST).unlink()
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(hl.FolderError, match="is not a store"):
        repair(tmp_path)
    assert not (tmp_path / ".lock").exists()
    write_store(tmp_path / "s", {"a": VALUES})
    data = json.loads((tmp_path / "s" / MANIFEST).read_text())
    (tmp_path / "s" / MANIFEST).write_bytes(seal_json({**data, "version": 99}))
    with pytest.raises(hl.FolderError, match="is a store of version 99"):
        repair(tmp_path / "s")
