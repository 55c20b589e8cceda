"""places: what lies at a path, whatever the path is."""

from __future__ import annotations

import os

import pytest

from hookline.util.local_paths import (
    is_file,
    is_folder,
    is_special,
    names_in,
    printable,
    why_no_file,
)

NEVER = ["x" * 300, "x" * 5000 + "/y", "a\0b", "\udcff", "", "no/such", "/dev/null/x"]


@pytest.mark.parametrize("name", NEVER)
def test_a_name_that_nothing_can_have_is_the_name_of_nothing(tmp_path, name):
    path = f"{tmp_path}/{name}" if name else ""
    assert not is_file(path)
    assert not is_folder(path)
    assert not is_special(path)
    assert why_no_file(path) == "is not there"


def test_files_folders_and_pipes_are_told_apart(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    kinds = {name: (is_file(p), is_folder(p), is_special(p)) for name, p in (
        ("file", tmp_path / "file"), ("folder", tmp_path), ("pipe", tmp_path / "pipe"),
        ("device", "/dev/zero"), ("loop", tmp_path / "loop"),
    )}  # fmt: skip
    assert kinds == {
        "file": (True, False, False),
        "folder": (False, True, False),
        "pipe": (False, False, True),
        "device": (False, False, True),
        "loop": (False, False, False),
    }
    assert why_no_file(tmp_path) == "is a folder, not a file"
    assert why_no_file("/dev/zero") == "is a pipe, a socket or a device, not a file"


def test_names_are_listed_where_that_can_be_done(tmp_path):
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    assert names_in(tmp_path) == ["a", "b"]
    assert names_in(tmp_path / "a") == names_in(tmp_path / "never") == []


@pytest.mark.parametrize("name", NEVER)
def test_whatever_is_shown_is_one_short_line_of_text(name):
    shown = printable(name)
    assert len(shown) <= 103
    assert shown.encode() == shown.encode("utf-8", "strict")
    assert "\0" not in shown
