"""Stores of one job become the store of one machine; others are put one behind the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import hookline as hl
from hookline.files.folder_or_url import as_place
from hookline.files.sealed_json import MANIFEST, seal_json
from hookline.stores import merge, open_store, repair, verify
from hookline.stores import merging as merging_module
from hookline.stores.shard_file import shard_file_name
from small_stores import write_store

VALUES = torch.arange(96.0).reshape(24, 4)


def part(where, numbers, *, is_finished=False):
    """A store of which only some shards have been made."""
    place = write_store(where, {"x": VALUES}, is_finished=is_finished)
    for number in {0, 1, 2} - set(numbers):
        place.remove(shard_file_name(number))
    return place


def files(where):
    return {path.name: path.read_bytes() for path in where.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("parts", [([0], [1, 2]), ([2], [0], [1]), ([0, 1], [1, 2])])
def test_parts_of_one_job_become_the_store_of_one_machine(tmp_path, parts):
    write_store(tmp_path / "one", {"x": VALUES}).write("names.json", [b'["a"]'])
    places = [part(tmp_path / str(k), numbers) for k, numbers in enumerate(parts)]
    places[-1].write("names.json", [b'["a"]'])
    store = merge([places[0], *(str(one) for one in places[1:])], tmp_path / "all")
    assert files(tmp_path / "all") == files(tmp_path / "one")
    assert torch.equal(store["x"][:], VALUES)
    assert verify(tmp_path / "all") == []


def test_shards_on_the_same_disk_are_links(tmp_path):
    part(tmp_path / "a", [0, 1, 2], is_finished=True)
    merge([tmp_path / "a"], tmp_path / "all")
    assert os.path.samefile(
        tmp_path / "a" / shard_file_name(1), tmp_path / "all" / shard_file_name(1)
    )
    assert not os.path.samefile(tmp_path / "a" / MANIFEST, tmp_path / "all" / MANIFEST)


def test_between_disks_and_from_a_url_shards_are_copied(tmp_path, monkeypatch):
    where = f"memory://test-merging-{os.getpid()}"
    part(where, [0, 1])
    part(tmp_path / "a", [2])

    def refuses(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(merging_module.os, "link", refuses)
    store = merge([where, tmp_path / "a"], tmp_path / "all")
    assert torch.equal(store["x"][:], VALUES)
    again = merge([tmp_path / "all"], where + "-all")
    assert torch.equal(again["x"][::-1], VALUES.flip(0))


def loop(where, value):
    """The store of a loop over three batches of two rows."""
    model = torch.nn.Identity()
    with hl.record(model, to=where):
        for _ in range(3):
            model(torch.full((2, 4), value))
    return where


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_loops_are_never_one_job(tmp_path, value):
    places = [loop(tmp_path / "a", 0.0), loop(tmp_path / "b", value)]
    store = merge(places, tmp_path / "ab")
    assert torch.equal(store["(root)"][:], hl.Store.cat(list(map(hl.open, places)))["(root)"][:])
    assert len(store) == 12
    assert verify(tmp_path / "ab") == []
    assert len(merge([tmp_path / "ab", tmp_path / "ab"], tmp_path / "twice")) == 24
    assert files(merge(places[:1], tmp_path / "alone").place.folder) == files(places[0])


def test_stores_without_their_manifest_are_never_one_job(tmp_path):
    places = [part(tmp_path / name, [0, 1, 2], is_finished=True) for name in "ab"]
    for place in places:
        place.remove(MANIFEST)
        repair(place)
    assert len(merge(places, tmp_path / "all")) == 48


@pytest.mark.slow
@pytest.mark.parametrize("urls", [False, True])
def test_stores_of_other_data_come_one_behind_the_other(tmp_path, urls):
    model = torch.nn.Linear(4, 2)
    places = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    if urls:
        places = [f"memory://{place}" for place in places]
    rows = [VALUES[:9], VALUES[9:12], VALUES[12:]]
    stores = [
        hl.extract(model, one, "", place, batch_size=3, shard_bytes=1)
        for one, place in zip(rows, places, strict=True)
    ]
    joined = hl.Store.cat(stores)
    store = merge(places, tmp_path / "all")
    assert torch.equal(store["(root)"][:], joined["(root)"][:])
    assert torch.equal(store.items[:], joined.items[:])
    found, expected = store.statistics["(root)"], joined.statistics["(root)"]
    assert (found.count, found.min, found.mean) == (48, expected.min, pytest.approx(expected.mean))
    assert len(store) == store.job["n_items"] == 24
    assert len(store.job["data"]["parts"]) == 3
    assert verify(tmp_path / "all") == []
    (tmp_path / "all" / MANIFEST).unlink()
    repair(tmp_path / "all")
    assert torch.equal(open_store(tmp_path / "all")["(root)"][:], joined["(root)"][:])


def test_stores_with_shards_of_other_sizes_are_merged(tmp_path):
    model = torch.nn.Linear(4, 2)
    hl.extract(model, VALUES[:9], "", tmp_path / "a")
    hl.extract(model, VALUES[9:], "", tmp_path / "b", batch_size=3, shard_bytes=1)
    store = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    torch.testing.assert_close(store[""][:], model(VALUES).detach())
    assert verify(tmp_path / "all") == []


def test_a_missing_shard_is_named(tmp_path):
    places = [part(tmp_path / "a", [0]), part(tmp_path / "b", [2])]
    with pytest.raises(hl.FolderError, match=r"got 1 shard in none of them: \[1\]"):
        merge(places, tmp_path / "all")
    assert not (tmp_path / "all").exists() or as_place(tmp_path / "all").names() == []


def test_a_damaged_shard_is_named(tmp_path):
    place = part(tmp_path / "a", [0, 1, 2])
    data = bytearray(place.read(shard_file_name(1)))
    data[-1] ^= 1
    place.write(shard_file_name(1), [bytes(data)])
    with pytest.raises(hl.FolderError, match=r"shard-00000001\.safetensors is gone or damaged"):
        merge([place], tmp_path / "all")


def test_what_cannot_be_merged_is_refused(tmp_path):
    one, model = tmp_path / "one", torch.nn.Linear(4, 2)
    hl.extract(model, VALUES, "", one)
    hl.extract(torch.nn.Linear(4, 2), VALUES, "", tmp_path / "other")
    hl.extract(model, VALUES, ":input", tmp_path / "site")
    hl.extract(model, VALUES, "", tmp_path / "mode", eval=False)
    different = {"other": "model", "site": "columns", "mode": "eval=, got True in .*one and False"}
    for where, what in ((tmp_path / name, what) for name, what in different.items()):
        with pytest.raises(hl.StructureError, match=f"must have the same {what}"):
            merge([one, where], tmp_path / "all")
    with pytest.raises(hl.FolderError, match="must be empty to merge into"):
        merge([one], tmp_path / "other")
    with pytest.raises(hl.StructureError, match="one or more stores, got none"):
        merge([], tmp_path / "all")
    with pytest.raises(hl.FolderError, match="missing is not a store"):
        merge([tmp_path / "missing"], tmp_path / "all")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_single_place_is_no_list_of_stores(tmp_path, kind):
    with pytest.raises(hl.InputError, match=r"places must be a list of stores, got .*'q/e'"):
        merge(kind("q/e"), tmp_path)


def test_opened_stores_are_merged_like_their_folders(tmp_path):
    for name, rows in (("a", VALUES), ("b", VALUES + 1)):
        write_store(tmp_path / name, {"x": rows}, batch_size=4 if name == "a" else 5)
    merged = merge([open_store(tmp_path / "a"), tmp_path / "b"], tmp_path / "all")
    assert torch.equal(merged["x"][:], torch.cat([VALUES, VALUES + 1]))
    joined = hl.Store.cat([open_store(tmp_path / name) for name in "ab"])
    assert merge([joined, tmp_path / "b"], tmp_path / "both").n_items == 3 * len(VALUES)
    with pytest.raises(hl.InputError, match=r"got '[^\n]*'.\nGive .*/b', \.\.\.\]"):
        merge(joined, tmp_path / "more")
    with pytest.raises(hl.InputError, match=r"places must be folders, URLs or stores, got int"):
        merge([3], tmp_path / "more")


def test_an_unfinished_store_is_not_put_behind_another(tmp_path):
    place = part(tmp_path / "a", [0, 1, 2])
    other = write_store(tmp_path / "b", {"x": VALUES[:8]})
    with pytest.raises(hl.FolderError, match="must be finished to be merged with stores of other"):
        merge([place, other], tmp_path / "all")


def test_two_values_of_one_shard_are_refused(tmp_path):
    one = part(tmp_path / "a", [0, 1, 2])
    other = write_store(tmp_path / "b", {"x": VALUES + 1})
    with pytest.raises(
        hl.FolderError, match=r"must hold the same shard-00000000\.safetensors, got"
    ):
        merge([one, other], tmp_path / "all")


def rewritten(where, change):
    """A store whose manifest was changed."""
    path = where / MANIFEST
    manifest = json.loads(path.read_bytes())
    change(manifest["job"])
    path.write_bytes(seal_json({**manifest, "checksum": "0" * 16}))
    return where


def halves(tmp_path):
    """Two stores, each with half of the shards of one job."""
    model = torch.nn.Linear(4, 2)
    for name, missing in (("a", [2, 3]), ("b", [0, 1])):
        hl.extract(model, VALUES, "", tmp_path / name, batch_size=6, shard_bytes=1)
        for number in missing:
            (tmp_path / name / shard_file_name(number)).unlink()
    return tmp_path / "a", tmp_path / "b"


def test_parts_whose_first_values_differ_by_rounding_are_one_job(tmp_path):
    def rounded(job):
        column = job["first_batch"]["columns"]["(root)"]
        column["digest"] = "0" * 32
        column["sums"] = [number * (1 + 1e-6) for number in column["sums"]]
        job["model"]["code"] = {"Net": "other"}

    one, other = halves(tmp_path)
    assert len(merge([one, rewritten(other, rounded)], tmp_path / "all")) == 24


def test_parts_of_models_with_other_values_are_refused(tmp_path):
    def changed(job):
        column = job["first_batch"]["columns"]["(root)"]
        column["digest"] = "0" * 32
        column["sums"] = [number * 2 for number in column["sums"]]

    one, other = halves(tmp_path)
    with pytest.raises(hl.StructureError, match=r"must be of one model.*\(root\): values differ"):
        merge([one, rewritten(other, changed)], tmp_path / "all")
    assert not list((tmp_path / "all").glob("shard-*"))
