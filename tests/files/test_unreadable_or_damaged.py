"""Reading: a file that cannot be read now is told from one whose bytes are wrong."""

from __future__ import annotations

import errno

import pytest
import torch

import hookline as hl
from hookline.files import unreadable_or_damaged as reading_module
from hookline.files.unreadable_or_damaged import UnreadableError, convert_read_errors


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Close files, or raise `ulimit -n`, and"),
        (OSError(errno.EACCES, "Permission denied"), "Give this user the permission to read it,"),
        (OSError(errno.EIO, "Input/output error"), "Start again when it can be read."),
        (OSError(errno.ESTALE, "Stale file handle"), "Start again when it can be read."),
        (RuntimeError("unable to mmap 9 bytes: x (12)"), "Free memory, or raise `ulimit -v`, and"),
        (RuntimeError("unable to open file <x>: y (24)"), "Close files, or raise `ulimit -n`, and"),
        (RuntimeError("unable to mmap"), "Start again when it can be read."),
        (MemoryError(), "Free memory, or raise `ulimit -v`, and start again."),
    ],
)
def test_what_reading_raises_says_what_to_do(error, remedy):
    with pytest.raises(UnreadableError) as caught, convert_read_errors("s/x"):
        raise error
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("s/x cannot be read: ")
    assert lines[1].startswith(remedy)
    assert lines[1].endswith("The file was not removed.")
    assert isinstance(caught.value, hl.FolderError)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "x"), ValueError("x"), hl.FolderError("x")])
def test_what_is_gone_or_wrong_stays_as_it_is(error):
    with pytest.raises(type(error)) as caught, convert_read_errors("s/x"):
        raise error
    assert caught.value is error


def test_a_mapping_that_fails_in_torch_has_its_number(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        torch.UntypedStorage.from_file(str(tmp_path / "x"), False, 8)
    assert reading_module._NUMBER.search(str(caught.value).splitlines()[0])[1] == str(errno.ENOENT)
