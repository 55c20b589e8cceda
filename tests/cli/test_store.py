"""`hookline store`: look at a store, verify, repair, merge and export it; exit codes."""

from __future__ import annotations

from contextlib import chdir
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app

ROWS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
NET = nn.Linear(3, 2)


def extracted(folder, rows=ROWS):
    return hl.extract(NET, rows, "", folder, batch_size=4, shard_bytes=1)


@pytest.fixture
def folder(tmp_path):
    extracted(tmp_path / "s")
    return tmp_path


def run(*args: object, cwd) -> SimpleNamespace:
    with chdir(cwd):
        result = CliRunner().invoke(app, ["store", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def damage(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_info_says_what_is_in_it_and_how_it_was_made(folder):
    done = run("info", "s", cwd=folder)
    assert done.code == 0
    assert "Store of 1 site, 20 items in 5 shards" in done.out
    assert "torch.nn.modules.linear.Linear, weights " in done.out
    assert "of 4, 1 in a shard" in done.out


def test_info_is_wrapped_and_escapes_what_does_not_print(tmp_path):
    odd = type("Net\x1b[2J", (nn.Linear,), {})
    hl.extract(odd(3, 2), ROWS, "", tmp_path / "s")
    text = run("info", "s", cwd=tmp_path).out
    assert "Net\\x1b[2J" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_damaged_store_is_verified_repaired_and_made_whole(folder):
    assert run("verify", "s", cwd=folder).out == "s is whole.\n"
    before = {path.name: path.read_bytes() for path in folder.glob("s/shard-*")}
    damage(folder / "s/shard-00000002.safetensors")
    done = run("verify", "s", cwd=folder)
    assert done.code == 1
    assert "shard-00000002.safetensors: it is damaged" in done.out
    assert "Run hookline store repair s" in done.err
    done = run("repair", "s", cwd=folder)
    assert done.code == 0
    assert "1 damaged shard removed or gone" in done.out
    extracted(folder / "s")
    assert {path.name: path.read_bytes() for path in folder.glob("s/shard-*")} == before
    assert run("verify", "s", cwd=folder).code == 0


def test_stores_are_merged_in_order(folder):
    extracted(folder / "t", ROWS[:6] * 2)
    done = run("merge", "t", "s", "--to", "both", cwd=folder)
    assert done.code == 0, done.err
    both = hl.open(folder / "both")
    assert len(both) == 26
    with torch.no_grad():
        assert torch.equal(both["(root)"][6:10], NET(ROWS[:4]))


def test_an_export_is_read_by_numpy(folder):
    done = run("export", "s", "--to", "arrays", "--format", "npy", cwd=folder)
    assert done.code == 0, done.err
    assert done.out == "written: arrays\n"
    store = hl.open(folder / "s")
    found = [np.load(path) for path in folder.glob("arrays/*root*.npy")]
    assert len(found) == 1
    assert np.array_equal(found[0], store["(root)"].numpy())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["info", "missing"], "missing"),
        (
            ["info", "file.txt"],
            "file.txt must be a folder, got a file.\nGive the name of a folder.",
        ),
        (["info", "file.txt/s"], "file.txt/s must be a folder, got a path through a file."),
        (["repair", "file.txt"], "file.txt must be a folder, got a file."),
        (["verify", "."], "is not a store"),
        (["repair", "missing"], "is not a store"),
        (["merge", "s", "--to", "s"], "must be empty to merge into"),
        (["export", "s", "--to", "x", "--format", "csv"], "--format must be one of parquet"),
        (["export", "s", "--to", "x", "--format", "npy", "--at", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_exit_code_2_and_a_few_lines(folder, args, said):
    (folder / "file.txt").touch()
    done = run(*args, cwd=folder)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) <= 3
