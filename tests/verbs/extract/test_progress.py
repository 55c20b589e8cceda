"""The progress bar: bytes, a forecast, items a second; in a terminal only."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hookline as hl

ROWS = torch.zeros(400, 256)
SMALL = {"batch_size": 20, "shard_bytes": 20_000}


@pytest.fixture
def shown(monkeypatch, capsys):
    """What a terminal would show."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "160")

    def shown():
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)

    return shown


def test_it_tells_bytes_a_forecast_and_the_speed(tmp_path, shown):
    hl.extract(nn.Identity(), ROWS, "", tmp_path / "s", **SMALL)
    text = shown()
    assert re.search(r"0 B of about 400 KiB", text)  # from the first batch: 400 rows of 1 KiB
    assert re.search(r"100% 4\d\d KiB of about 4\d\d KiB, .* items/s", text)


@pytest.mark.slow
def test_it_begins_where_an_earlier_start_has_ended(tmp_path, shown):
    hl.extract(nn.Identity(), ROWS, "", tmp_path / "s", **SMALL)
    for number in range(10, 20):
        (tmp_path / f"s/shard-{number:08d}.safetensors").unlink()
    shown()
    hl.extract(nn.Identity(), ROWS, "", tmp_path / "s", **SMALL)
    assert re.search(r"50% 2\d\d KiB of about 4\d\d KiB", shown())


def test_it_can_be_left_out_and_is_where_nobody_watches(tmp_path, shown, monkeypatch):
    hl.extract(nn.Identity(), ROWS, "", tmp_path / "s", progress=False, **SMALL)
    assert shown() == ""
    monkeypatch.delenv("FORCE_COLOR")
    hl.extract(nn.Identity(), ROWS, "", tmp_path / "t", **SMALL)
    assert shown() == ""
