"""The tensor files of a folder: shapes without data, files that are closed again."""

from __future__ import annotations

import json
import os
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.pytree import describe
from hookline.files import safetensors_file


def test_an_outline_tells_shapes_and_dtypes_without_the_data(holder, tmp_path):
    with hl.record(holder, "inner") as run:
        holder(torch.ones(2, dtype=torch.bfloat16))
    opened = hl.open(run.save(tmp_path / "run"))
    outline, value = opened.passes[0].outline("inner"), opened.passes[0]["inner"]
    assert outline["pair"].left.device.type == "meta"
    assert (outline["pair"].left.shape, outline["pair"].left.dtype) == ((2,), torch.bfloat16)
    assert describe.in_words(outline) == describe.in_words(value)


def test_a_released_recording_holds_no_file_and_is_still_read(net, image, tmp_path):
    with hl.record(net, copy=True) as run:
        net(image)
    opened = hl.open(run.save(tmp_path / "run"))
    value = opened["fc"]
    maps = Path("/proc/self/maps")
    assert str(tmp_path) in maps.read_text()
    opened.release()
    del value
    assert str(tmp_path) not in maps.read_text()
    assert torch.equal(opened["fc"], run["fc"])


def test_a_pipe_in_place_of_a_file_is_damage_and_does_not_hang(net, image, tmp_path):
    with hl.record(net, "fc") as run:
        net(image)
    folder = run.save(tmp_path / "run")
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(hl.FolderError, match="must be a regular file, got a pipe"):
        hl.open(folder)["fc"]


def opened_of(values, folder):
    """Record values at the sites v0, v1, …, save them and open the folder."""
    model = nn.ModuleDict({f"v{k}": nn.Identity() for k in range(len(values))})
    with hl.record(model, "v*", copy=True) as run:
        for module, value in zip(model.values(), values, strict=True):
            module(value)
    return hl.open(run.save(folder))


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_value_changed_in_place_is_noticed_as_in_memory(tmp_path, is_inference):
    value = {"a": torch.ones(2), "b": torch.ones(2)}
    opened = opened_of([value, torch.zeros(2)], tmp_path / "run")
    with torch.inference_mode(is_inference):
        opened["v0"]["b"].mul_(100)
        for key in ("v0", "v0:output.b"):
            with pytest.raises(hl.OverwrittenError) as caught:
                opened[key]
        assert str(caught.value).startswith("v0 was changed in place after it was looked up.")
        assert "run['v0'].clone()" in str(caught.value)
        assert opened["v1"].tolist() == [0, 0]
    with pytest.raises(hl.OverwrittenError):
        opened.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()
    opened.release()
    assert opened["v0"]["b"].tolist() == [1, 1]
    assert hl.open(tmp_path / "run")["v0"]["b"].tolist() == [1, 1]


def test_a_value_is_the_same_tensor_every_time_as_in_memory(tmp_path):
    opened = opened_of([torch.ones(2)], tmp_path / "run")
    assert opened["v0"] is opened["v0"]
    kept = opened["v0"]
    opened.release()
    assert opened["v0"] is not kept
    assert kept.tolist() == [1, 1]


def test_a_tensor_that_two_sites_share_is_noticed_at_both(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.record(model, ["0", "1"]) as run:
        model(torch.ones(2))
    opened = hl.open(run.save(tmp_path / "run"))
    opened["0"].zero_()
    for key in "01":
        with pytest.raises(hl.OverwrittenError, match=f"^{key} was changed in place"):
            opened[key]


@pytest.mark.parametrize("way", ["cut off", "written to", "replaced"])
def test_a_file_changed_after_a_look_up_is_noticed_at_the_next(tmp_path, way):
    opened = opened_of([torch.ones(4096), torch.ones(4096)], tmp_path / "run")
    (file,) = (tmp_path / "run").glob("*.safetensors")
    first, data = opened["v1"], file.read_bytes()
    assert first.sum() == 4096
    if way == "cut off":
        os.truncate(file, len(data) - 100)
    elif way == "written to":
        with file.open("r+b") as handle:
            handle.seek(len(data) - 4)
            handle.write(b"abcd")
    else:
        (tmp_path / "other").write_bytes(data[:-4] + b"abcd")
        (tmp_path / "other").replace(file)
    os.utime(file, ns=(0, 0))  # whatever the disk's clock can tell apart
    with pytest.raises(hl.FolderError, match=r"'v1' cannot be read: .*values-.*safetensors"):
        opened["v1"]
    assert opened["v0"].sum() == 4096


def test_a_file_that_was_copied_back_whole_is_read_on(tmp_path):
    opened = opened_of([torch.ones(8)], tmp_path / "run")
    (file,) = (tmp_path / "run").glob("*.safetensors")
    assert opened["v0"].sum() == 8
    (tmp_path / "copy").write_bytes(file.read_bytes())
    (tmp_path / "copy").replace(file)
    assert opened["v0"].sum() == 8


def test_a_folder_that_was_moved_is_read_on_where_it_was_opened(tmp_path):
    opened = opened_of([torch.ones(8), torch.zeros(8)], tmp_path / "run")
    assert opened["v0"].sum() == 8
    (tmp_path / "run").rename(tmp_path / "moved")
    assert opened["v1"].sum() == 0
    (file,) = (tmp_path / "moved").glob("*.safetensors")
    os.truncate(file, 8)
    with pytest.raises(hl.FolderError, match="gone, or replaced since it was opened"):
        opened["v0"]


def test_bytes_are_compared_again_only_when_the_file_has_changed(tmp_path, monkeypatch):
    opened = opened_of([torch.ones(64)], tmp_path / "run")
    seen = []
    count = safetensors_file.checksum
    monkeypatch.setattr(
        safetensors_file, "checksum", lambda data: (seen.append(len(data)), count(data))[1]
    )
    for _ in range(3):
        assert opened["v0"].sum() == 64
        opened.release()
    assert seen.count(256) == 1
    (file,) = (tmp_path / "run").glob("*.safetensors")
    os.utime(file, ns=(0, 0))
    assert opened["v0"].sum() == 64
    assert seen.count(256) == 2


def test_a_value_that_is_saved_again_is_as_it_was(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            pair = namedtuple("Pair", ["left", "right"])(x, x * 1j)
            return {"pair": pair, (1, 2.5): [x.half(), float("nan")], "cache": object(), "x": x}

    model = Odd()
    with hl.record(model) as run:
        model(torch.randn(3))
    opened = hl.open(run.save(tmp_path / "run"))
    again = hl.open(opened.save(tmp_path / "again"))
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in
                 ("run", "again")]  # fmt: skip
    texts = [re.sub(r"values-\w+", "values", json.dumps(each["passes"])) for each in manifests]
    assert texts[0] == texts[1]
    assert again.lost == opened.lost == run.lost
    assert torch.equal(again["(root)"]["pair"].right, run["(root)"]["pair"].right)


def test_what_was_changed_after_a_look_up_is_not_saved_again(net, image, tmp_path):
    with hl.record(net, "fc") as run:
        net(image)
    opened = hl.open(run.save(tmp_path / "run"))
    opened["fc"].zero_()
    with pytest.raises(hl.OverwrittenError, match="changed in place after it was looked up"):
        opened.save(tmp_path / "again")
