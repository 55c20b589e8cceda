"""Paths as data: those that are not data are refused with the fix."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from data_source_checks import said, source_of


def test_a_path_that_does_not_exist_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "sentences.txt").write_text("one\n")
    assert said(lambda: source_of(tmp_path / "sentence.txt")) == (
        f"data must be a path that exists, got {str(tmp_path / 'sentence.txt')!r}."
        f"\nDid you mean {str(tmp_path / 'sentences.txt')!r}?"
    )


@pytest.mark.parametrize("given", ["a text of its own", "", "a\0b", "x" * 5000, "~nobody/x.npy"])
def test_a_text_is_not_taken_for_a_path(given):
    assert said(lambda: source_of(given)).startswith("data must be a")


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("1")
    assert said(lambda: source_of(tmp_path / "rows.csv")) == (
        "data must be a folder or a file of .png, .jpg, .jpeg, .bmp, .gif, .webp, .tif, .tiff,"
        " .ppm, .pgm, .npy, .npz, .pt, .safetensors, .txt, .jsonl, .parquet, got rows.csv."
        "\nConvert it to one of these."
    )


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    assert "a pipe, a socket or a device" in said(lambda: source_of(tmp_path / "pipe.txt"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    assert "must have at least one text, got none" in said(
        lambda: source_of(tmp_path / name, tokenize=dict)
    )


@pytest.fixture
def locked():
    """A folder of files that nobody may read, seen by a user other than root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for name in ("a.txt", "a.jsonl", "a.npy", "a.npz", "a.parquet"):
        (folder / name).write_text("1\n")
        (folder / name).chmod(0)
    (folder / "photos").mkdir(mode=0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)  # root may read anything
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        (folder / "photos").chmod(0o700)
        shutil.rmtree(folder)


def test_paths_that_may_not_be_read_are_refused(locked):
    pytest.importorskip("pyarrow.parquet")
    paths = sorted(locked.iterdir())
    assert len(paths) == 6
    for path in paths:
        message = said(lambda path=path: source_of(path, tokenize=dict, preprocess=dict))
        assert message.startswith(f"{path} must be")
        assert "got PermissionError" in message
