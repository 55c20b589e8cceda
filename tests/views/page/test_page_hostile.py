"""Folders that nobody should trust: damaged, of another version, with names that are markup."""

from __future__ import annotations

import json
import os
import shutil
import struct
from urllib.parse import quote

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.files.sealed_json import checksum, seal_json
from page_data import core_of


def manifest_of(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(seal_json(manifest))


def test_a_recording_of_another_version_says_what_to_do(served, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    manifest_of(folder, lambda m: m.update(version=99))
    answer = served(folder).get()
    assert answer.status == 503
    assert "a recording of version 99" in answer.text
    assert "Open it with the hookline that wrote it" in answer.text


@pytest.mark.parametrize("damage", ["truncated", "deleted", "pipe", "random", "outside", "pickle"])
def test_a_damaged_file_is_a_line_that_says_so_and_not_a_crash(served, runs, tmp_path, damage):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    (file,) = folder.glob("*.safetensors")
    if damage == "truncated":
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        os.truncate(file, 8 + length + 4)  # in the first value: what lies before a cut is whole
    elif damage == "random":
        file.write_bytes(os.urandom(4096))
    elif damage == "pickle":
        torch.save({"x": torch.ones(2)}, file)
    elif damage == "outside":
        (tmp_path / "run2").mkdir()
        shutil.copy(file, tmp_path / "run2" / "x.safetensors")

        def point_outside(manifest):
            for _, value in manifest["passes"][0]["values"]:
                value["tensor"] = "../run2/x.safetensors/0"

        manifest_of(folder, point_outside)
    else:
        file.unlink()
        if damage == "pipe":
            os.mkfifo(file)
    server = served(folder)
    answer = server.get()
    assert answer.status == 200
    measured = json.loads(server.get("measure?from=0").text)
    assert measured["next"] > 0
    problems = core_of(answer.text)["values"]["problem"] | measured["values"]["problem"]
    assert problems
    maps = server.get("maps?at=first")
    assert maps.status == 503 or "problem" in json.loads(maps.text)["own"]
    assert json.loads(server.get("findings").text)["findings"] is not None


def test_a_file_with_a_dtype_torch_cannot_read_does_not_crash(served, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    heads = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        for name, one in header.items():
            if name != "__metadata__":
                one.update(dtype="F4", shape=[*one["shape"][:-1], one["shape"][-1] * 8])
        text = json.dumps(header).encode()
        head = struct.pack("<Q", len(text)) + text
        file.write_bytes(head + raw[8 + length :])
        heads[file.name] = checksum(head)
    manifest_of(folder, lambda m: [m["checksums"][k].__setitem__(0, v) for k, v in heads.items()])
    server = served(folder)
    maps = server.get("maps?at=first")
    assert maps.status == 503 or "problem" in json.loads(maps.text)["own"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "hookline-recording", "version": 2}'])
def test_a_damaged_manifest_gives_a_page_that_says_so(served, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(text)
    server = served(tmp_path / "run")
    for path in ("", "measure", "findings", "maps?at=x"):
        assert server.get(path).status == 503
    assert server.get("state").status == 200


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def hostile(tmp_path):
    """Names that are markup, in every place that holds one; odd values."""

    class Odd(nn.Module):
        def forward(self, x):
            return {
                HOSTILE: x * float("nan"), "empty": x[:0], "none": None, "number": 3,
            }  # fmt: skip

    model = nn.Sequential()
    model.add_module("<img src=x onerror=alert(2)>", Odd())
    with hl.record(model, ports=("input", "output")) as run:
        model(torch.ones(1, 3, 8, 8))
    folder = run.save(tmp_path / "<b>folder")

    def mark(manifest):
        manifest["model"] = HOSTILE
        for site in manifest["sites"]:
            site.update(type=HOSTILE, aliases=['"><script>alert(3)</script>', "\udcff"])

    manifest_of(folder, mark)
    return folder


def test_no_name_becomes_markup(served, hostile):
    server = served(hostile)
    at = quote("<img src=x onerror=alert(2)>")
    for path in ("", f"maps?at={at}", f"maps?at={HOSTILE}", "measure?from=0"):
        answer = server.get(path)
        assert answer.status in (200, 404)
        if answer.headers["content-type"].startswith("text/html"):
            assert "<script>alert" not in answer.text
            assert "<img src=x" not in answer.text
            assert "<b>folder" not in answer.text


def test_no_name_turns_round_what_stands_beside_it(served, tmp_path):
    name = "layer\u202egnp\x1b[31m"
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    model.add_module("again", nn.Sequential(model[0]))
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    texts = [
        run._repr_html_(), run.report()._repr_html_(), str(run.report()),
        str(hl.summary(model, torch.ones(1, 2))), str(hl.doctor(model, torch.ones(1, 2))),
    ]  # fmt: skip
    server = served(run.save(tmp_path / "run"))
    pages = [server.get(path) for path in ("", f"maps?at={quote(chr(0x202E))}")]
    assert [page.status for page in pages] == [200, 404]
    names = core_of(pages[0].text)["rows"]["name"]
    for text in (*texts, *(page.text for page in pages), " ".join(names)):
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert r"\u202e" in (text if 'id="core"' not in text else " ".join(names))


@pytest.mark.slow
def test_every_value_of_an_odd_recording_has_a_page(served, tmp_path):
    values = {
        "nan": torch.full((2, 3, 4, 4), float("nan")),
        "inf": torch.tensor([[1.0, float("inf")], [0.0, -1.0]]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "bool": torch.tensor([True, False]),
        "tokens": torch.arange(12).reshape(1, 12),
        "half": torch.ones(1, 5, 7, dtype=torch.bfloat16),
        "complex": torch.ones(2, 2, dtype=torch.complex64),
        "six": torch.ones(1, 1, 1, 1, 2, 2),
        "wide": torch.ones(2, 1, 1, 500),
        "fp8": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "huge": torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64),
        "none": None,
        "text": "hello",
    }

    class Odd(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, _):
            return self.value

    model = nn.Sequential()
    for name, value in values.items():
        model.add_module(f"the {name}", Odd(value))
    with hl.record(model, "the *") as run:
        model(0)
    server = served(run.save(tmp_path / "run"))
    assert json.loads(server.get("measure?from=0").text)["at"]
    assert json.loads(server.get("findings").text)["judged"]
    for name in values:
        maps = json.loads(server.get(f"maps?at=the+{name}").text)["own"]
        assert ("maps" in maps) != ("problem" in maps), name
    assert server.get().status == 200
