"""A file descriptor that forked children do not keep."""

from __future__ import annotations

import fcntl
import gc
import os

import pytest

from forked_children import child, forked
from hookline.util.fork_safe_handle import ForkSafeHandle


@pytest.mark.processes
def test_a_forked_child_has_no_copy(tmp_path):
    handle = ForkSafeHandle(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    number = handle.fileno()

    def look():
        handle.close()  # closes nothing more
        try:
            os.fstat(number)
        except OSError:
            return handle.is_open, handle.fileno()

    assert child(look) == (False, -1)
    assert handle.is_open
    handle.close()
    handle.close()
    assert not handle.is_open


@pytest.mark.processes
def test_a_descriptor_of_number_zero_is_closed_too(tmp_path):
    def look():
        os.close(0)  # a process without standard input
        handle = ForkSafeHandle(tmp_path / "x", os.O_RDWR | os.O_CREAT)
        number = handle.fileno()
        handle.close()
        try:
            os.fstat(number)
        except OSError:
            return number

    assert child(look) == 0


@pytest.mark.processes
def test_a_lock_ends_with_its_process_though_a_child_lives(tmp_path):
    (reading, writing), (from_here, to_child) = os.pipe(), os.pipe()
    handle = ForkSafeHandle(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)

    def wait():
        os.write(writing, b"here")
        return os.read(from_here, 1)

    answer = forked(wait)
    assert os.read(reading, 4) == b"here"
    handle.close()
    other = ForkSafeHandle(tmp_path / "x", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(to_child, b"e")
    assert answer() == b"e"
    other.close()


def test_a_handle_that_nobody_holds_is_closed(tmp_path):
    path = tmp_path / "x"
    fcntl.flock(ForkSafeHandle(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    gc.collect()
    again = ForkSafeHandle(path, os.O_RDWR)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    again.close()


def test_a_handle_that_was_never_opened_is_silent():
    ForkSafeHandle.__new__(ForkSafeHandle).__del__()  # Ctrl-C came before
