"""The tensor files of a folder: shapes without data, files that are closed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hookline as hl
from hookline.engine import tree


def test_an_outline_tells_shapes_and_dtypes_without_the_data(holder, tmp_path):
    with hl.record(holder, "inner") as run:
        holder(torch.ones(2, dtype=torch.bfloat16))
    opened = hl.open(run.save(tmp_path / "run"))
    outline, value = opened.passes[0].outline("inner"), opened.passes[0]["inner"]
    assert outline["pair"].left.device.type == "meta"
    assert (outline["pair"].left.shape, outline["pair"].left.dtype) == ((2,), torch.bfloat16)
    assert tree.describe(outline) == tree.describe(value)


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
    with pytest.raises(hl.FolderError, match="is no file"):
        hl.open(folder)["fc"]
