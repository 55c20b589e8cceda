"""Folders that lie: with right checksums, any field may hold anything."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from xxhash import xxh3_64_intdigest

import hookline as hl
from forked_children import child
from hookline.files.sealed_json import seal_json
from hookline.stores import merge
from thoroughness import examples

ODD = [2**33, 2**62, 2**63, 2**70, -(2**70), 1e308, "F32", "item", "a:b[", "#1"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(ODD),
    lambda part: st.lists(part, max_size=3)
    | st.dictionaries(st.text(max_size=4), part, max_size=3),
    max_leaves=5,
)  # fmt: skip
HEAD = ("format", "version", "checksum")  # these say what the folder is


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, with everything that a manifest may hold."""
    base = tmp_path_factory.mktemp("folders")
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    torch.manual_seed(0)
    x = torch.randn(12, 4)
    hl.extract(model, x, ["0", "1"], base / "store", batch_size=4, shard_bytes=64, progress=False)
    ids = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    hl.extract(nn.Embedding(9, 2), ids, "", base / "tokens", mask=lambda ids: ids != 0)
    with hl.record(model, ["0", "1"], ports=("output", "grad_output")) as run:
        for rows in x.split(6):
            model(rows).sum().backward()
    run.save(base / "recording")
    with hl.monitor(model, ports=("output", "grad_output"), to=base / "run"):
        for rows in x.split(6):
            model(rows).sum().backward()
    return base


def paths_of(data, at=()):
    """The path of each field of JSON data."""
    parts = data.items() if isinstance(data, dict) else enumerate(data)
    for key, part in parts:
        yield (*at, key)
        if isinstance(part, dict | list):
            yield from paths_of(part, (*at, key))


def replaced(data, path, value):
    data = copy.deepcopy(data)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return data


def read_all(folder):
    """What a user does first with a folder."""
    opened = hl.open(folder)
    repr(opened)
    for site in list(opened)[:3]:
        if isinstance(opened, hl.Store):
            column = opened[site]
            for index in (0, [0, 1], slice(None), slice(None, None, -2)):
                _ = column[index] if len(column) > 1 else None
            if column.is_ragged:
                column.of_item(0), column.padded([0, 1]), column.lengths[:]
        elif isinstance(opened, hl.Curves):
            curve = opened[site]
            _ = curve.results, [getattr(curve, name) for name in curve.names]
        else:
            _ = opened[site]
    if isinstance(opened, hl.Recording):
        _ = list(opened.items()), opened.report(), opened.lost
        for one in opened.passes:
            repr(one), list(one)


def reads_or_is_refused(folder):
    # What is not there, or is there several times, has an error of its own.
    refusals = hl.FolderError, hl.NotRecordedError, hl.AmbiguousError
    with warnings.catch_warnings(), suppress(*refusals):
        warnings.simplefilter("ignore", hl.HooklineWarning)
        read_all(folder)


def with_manifest(folder, data):
    """A copy of a folder with another manifest."""
    target = Path(tempfile.mkdtemp(dir=folder.parent))
    for file in folder.iterdir():
        if not file.name.startswith("."):
            os.link(file, target / file.name)
    (target / "manifest.json").unlink()
    (target / "manifest.json").write_bytes(seal_json(data))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["store", "tokens", "recording"])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_field_may_hold_anything(folders, kind, data):
    manifest = json.loads((folders / kind / "manifest.json").read_text())
    paths = [path for path in paths_of(manifest) if path[0] not in HEAD]
    path = data.draw(st.sampled_from(paths))
    absurd = replaced(manifest, path, data.draw(JSON))
    folder = with_manifest(folders / kind, absurd)
    reads_or_is_refused(folder)
    shutil.rmtree(folder)


def frames_of(content):
    at = 8
    while at < len(content):
        kind, _, length, _ = struct.unpack_from("<4sIQQ", content, at)
        yield kind, content[at + 24 : at + 24 + length]
        at += 24 + length


@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_field_of_a_layout_may_hold_anything(folders, data):
    content = (folders / "run" / "curves.bin").read_bytes()
    found = content[:8]
    for kind, written in frames_of(content):
        payload = written
        if kind == b"layo":
            layout = json.loads(written)
            path = data.draw(st.sampled_from(list(paths_of(layout))))
            changed = json.dumps(replaced(layout, path, data.draw(JSON))).encode()
            payload = changed + b" " * (-len(changed) % 8)
        found += struct.pack("<4sIQQ", kind, 0, len(payload), xxh3_64_intdigest(payload)) + payload
    folder = Path(tempfile.mkdtemp(dir=folders))
    (folder / "curves.bin").write_bytes(found)
    reads_or_is_refused(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("job", "columns", 0, "name"), 0, r"job\.columns\[0\]\.name must be a text, got 0"),
        (("job", "columns", 0, "dtype"), "F99", r"job\.columns\[0\]\.dtype must be a dtype"),
        (("job", "columns", 0, "shape"), [-1], r"job\.columns\[0\]\.shape must be a number from"),
        (("job", "columns", 0, "shape"), [2**40, 2**40], r"job\.columns\[0\]\.shape must be the"),
        (("job", "columns", 0, "per"), "row", r"job\.columns\[0\]\.per must be 'item' or 'token'"),
        (("job", "columns", 0), 3, r"job\.columns\[0\] must be an object, got 3"),
        (("job", "batch_size"), True, r"job\.batch_size must be a number from 0 up, got True"),
        (("job", "shard_batches"), 0, r"job\.shard_batches must be a number from 1 up, got 0"),
        (("job", "sites"), [1], r"job\.sites must be a list of texts, got 1"),
        (("shards", "rows", 0), float("inf"), r"shards\.rows must be a list of numbers from 0 up"),
        (("shards", "items", 0), 2**70, r"shards\.items must be numbers of things that can exist"),
        (("shards", "items", 0), 5, r"shards\.rows must be shards\.items where rows are items"),
        (("shards", "sizes"), [], r"shards must be lists with an entry for each shard"),
        (("shards", "sizes", 0), 0, r"shards\.sizes must add up to [\d,]+ bytes"),
        (("statistics", "0", 0), -1, r"counts and squares must be from 0 up, got \[-1, "),
        (("statistics", "0", 4), -0.5, r"counts and squares must be from 0 up"),
        (("environment",), None, r"environment must be an object, got None"),
        (("environment", "origin", "flags"), [], r"environment\.origin\.flags must be an object"),
        (("environment", "origin", "versions", "torch"), 2, r"origin\.versions must be a list of"),
    ],
)
def test_a_field_of_a_store_that_lies_is_named(folders, path, value, field):
    manifest = json.loads((folders / "store" / "manifest.json").read_text())
    if path[1:] == ("sizes", 0):
        manifest["shards"]["sizes"] = [0] * len(manifest["shards"]["sizes"])
    folder = with_manifest(folders / "store", replaced(manifest, path, value))
    with pytest.raises(hl.FolderError, match=rf"is damaged: its manifest\.json: .*{field}"):
        hl.open(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("manifest.json", "Remove that. Make it again from the shards"),
        ("shard-00000000.safetensors", "Remove what is damaged with"),
    ],
)
def test_a_folder_in_the_place_of_a_file_says_what_to_do(folders, tmp_path, name, fix):
    shutil.copytree(folders / "store", tmp_path / "store")
    path = tmp_path / "store" / name
    path.unlink()
    path.mkdir()
    with pytest.raises(hl.FolderError, match=rf"must be a regular file, got a folder\.\n{fix}"):
        hl.open(tmp_path / "store", verify=True)


def test_tokens_of_no_item_are_refused(folders):
    manifest = json.loads((folders / "tokens" / "manifest.json").read_text())
    folder = with_manifest(folders / "tokens", replaced(manifest, ("shards", "items", 0), 0))
    with pytest.raises(
        hl.FolderError, match=r"shards\.items must not be 0 where shards\.rows is not"
    ):
        hl.open(folder)


@pytest.mark.parametrize("field", ["batch_size", "shard_batches"])
def test_a_job_of_empty_shards_is_neither_merged_nor_resumed(folders, field):
    manifest = json.loads((folders / "store" / "manifest.json").read_text())
    if field == "batch_size":  # a finished store of an iterator may have none
        manifest = replaced(manifest, ("shards",), None)
    folder = with_manifest(folders / "store", replaced(manifest, ("job", field), 0))
    named = rf"is damaged: its manifest\.json: job\.{field} must be a number from 1 up, got 0"
    with pytest.raises(hl.FolderError, match=named):
        merge([folder, folders / "store"], folder / "merged")
    with pytest.raises(hl.FolderError, match=named):
        hl.extract(nn.Linear(4, 3), torch.zeros(12, 4), "", folder, progress=False)
    shutil.rmtree(folder)


def test_rows_that_cannot_exist_are_not_a_lack_of_memory(folders):
    manifest = json.loads((folders / "store" / "manifest.json").read_text())
    for name in ("items", "rows", "sizes"):
        manifest["shards"][name][-1] = 2**60 if name == "sizes" else 2**50
    folder = with_manifest(folders / "store", manifest)
    store = hl.open(folder)
    for index in (slice(None), slice(None, None, 2)):
        with pytest.raises(hl.FolderError, match=r"must be 1,152,921,504,606,846,976 bytes long"):
            store["0"][index]
    shutil.rmtree(folder)


# -- no permission --------------------------------------------------------------------------------


def opened_by_nobody(folder):
    def look():
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            read_all(folder)
        except Exception as error:
            return isinstance(error, hl.FolderError), str(error)
        return False, "nothing was raised"

    return child(look)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["store", "recording", "run"])
@pytest.mark.parametrize("closed", ["folder", "listing", "files"])
def test_a_folder_without_permission_is_named(folders, kind, closed):
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        shutil.copytree(folders / kind, base / kind)
        (base / kind).chmod({"folder": 0, "listing": 0o444, "files": 0o755}[closed])
        for file in (base / kind).iterdir():
            file.chmod(0 if closed == "files" else 0o644)
        is_folder_error, text = opened_by_nobody(base / kind)
        assert is_folder_error, text
        assert str(base / kind) in text
        assert "Permission denied" in text
    finally:
        (base / kind).chmod(0o755)
        shutil.rmtree(base)
