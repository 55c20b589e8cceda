"""`hookline extract`: output, the store, exit codes."""

from __future__ import annotations

import os
from contextlib import chdir
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from hookline.models import load_demo_digits, load_model
from warm import run_python


def run(*args: object, cwd) -> SimpleNamespace:
    with chdir(cwd):
        result = CliRunner().invoke(app, ["extract", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def test_the_demos_digits_are_stored(tmp_path):
    done = run(
        "demo:digits", "demo", "--at", "block1", "--at", "block3", "--to", "s", "--batch-size", 3,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "Store of 2 sites, 8 items in 1 shard" in done.out
    assert "hl.open('s')" in done.out
    images, _ = load_demo_digits()
    feats = hl.features(load_model("demo:digits").model, iter(images.split(3)), "block3")
    assert torch.equal(hl.open(tmp_path / "s")["block3"][:], feats.cat("block3"))


def test_a_file_is_extracted_in_another_dtype(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((20, 1, 8, 8), np.float32))
    done = run(
        "demo:digits", "rows.npy", "--at", "stem", "--to", "s", "--dtype", "bfloat16", cwd=tmp_path
    )
    assert done.code == 0, done.err
    store = hl.open(tmp_path / "s")
    assert store["stem"].dtype is torch.bfloat16
    assert len(store) == 20


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_float64_of_numpy_becomes_the_models_float32(tmp_path, suffix):
    rows = np.random.default_rng(0).random((5, 1, 8, 8))
    {".npy": np.save, ".npz": np.savez}[suffix](tmp_path / f"rows{suffix}", rows)
    done = run(
        "demo:digits", f"rows{suffix}", "--at", "stem", "--to", "s", "--batch-size", 2, cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert f"hookline: rows{suffix} holds float64: it is converted to the float32" in done.err
    hl.extract(
        load_model("demo:digits").model, rows.astype(np.float32), "stem", tmp_path / "t",
        batch_size=2,
    )  # fmt: skip
    assert torch.equal(hl.open(tmp_path / "s")["stem"][:], hl.open(tmp_path / "t")["stem"][:])


def test_warnings_are_said_without_code(tmp_path):
    rows = np.zeros((4, 1, 8, 8), np.float32)
    rows[2] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    done = run("demo:digits", "rows.npy", "--at", "stem", "--to", "s", cwd=tmp_path)
    assert done.code == 0
    assert "hookline: 1,280 numbers at stem are NaN or infinite" in done.err
    assert ".py" not in done.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo", "--at", "nowhere", "--to", "s"], "matches no module"),
        (["missing.npy", "--at", "stem", "--to", "s"], "missing.npy"),
        (["demo", "--at", "stem", "--to", "."], "must be empty or hold a store"),
        (["demo", "--at", "stem", "--to", "s", "--dtype", "int8"], "--dtype must be a floating"),
        (["demo", "--at", "stem", "--to", "s", "--device", "cuda:9"], "--device must be a device"),
        (
            ["demo", "--at", "stem", "--to", "s", "--batch-size", "0"],
            "must be at least 1, got 0",
        ),
    ],
)
def test_a_mistake_is_exit_code_2_and_a_few_lines(tmp_path, args, said):
    (tmp_path / "mine.txt").write_text("")
    done = run("demo:digits", *args, cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert "Traceback" not in done.err


def test_another_job_in_the_folder_is_refused(tmp_path):
    assert run("demo:digits", "demo", "--at", "stem", "--to", "s", cwd=tmp_path).code == 0
    done = run("demo:digits", "demo", "--at", "block1", "--to", "s", cwd=tmp_path)
    assert done.code == 2
    assert "sites: ['stem'] in the store, now ['block1']" in done.err


@pytest.mark.processes
def test_ranks_of_torchrun_make_one_store_and_one_speaks(tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    arguments = ["hookline", "extract", "demo:digits", "demo", "--at", "stem", "--to", "ranks"]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = run_python(*command, *arguments, "--batch-size", "2", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Store of 1 site, 8 items") == 1
    assert run(
        "demo:digits", "demo", "--at", "stem", "--to", "one", "--batch-size", 2, cwd=tmp_path
    ).code == 0  # fmt: skip
    for path in (tmp_path / "one").glob("shard-*"):
        assert path.read_bytes() == (tmp_path / "ranks" / path.name).read_bytes()


def test_an_unknown_engine_is_refused(tmp_path):
    done = run(
        "demo:digits", "demo", "--at", "stem", "--to", "s", "--engine", "spark", cwd=tmp_path
    )
    assert done.code == 2
    assert "--engine must be ray, got spark" in done.err
