"""Local files: a rename waits while another program has a file open."""

from __future__ import annotations

import errno
import os

import pytest

from hookline.files import local_files
from hookline.files.local_files import replace_file


@pytest.mark.parametrize(("n_refused", "is_replaced"), [(0, True), (3, True), (4, False)])
def test_a_file_that_is_open_elsewhere_is_renamed_later(
    tmp_path, monkeypatch, n_refused, is_replaced
):
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("new")
    old.write_text("old")
    refusals, rename = [PermissionError(errno.EACCES, "open")] * n_refused, os.replace

    def rename_as_windows(source, target):
        if refusals:
            raise refusals.pop()
        rename(source, target)

    monkeypatch.setattr(local_files, "_PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(os, "replace", rename_as_windows)
    if is_replaced:
        replace_file(new, old)
    else:
        with pytest.raises(PermissionError):
            replace_file(new, old)
    assert old.read_text() == ("new" if is_replaced else "old")
