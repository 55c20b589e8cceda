"""Streams that fail: a reader that has gone, a disk that is full, a stream that is closed."""

from __future__ import annotations

import pytest

from warm import run_python

MAIN = """
import os, sys
{before}
sys.argv = ["hookline", *{arguments!r}]
from hookline.cli import main
main()
"""
GONE = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)"
FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
CLOSED = "os.close(1); sys.stdout = None"
MANY = ["summary", "demo:digits", "demo"]
JSON = [*MANY, "--json"]


def run(before, arguments):
    return run_python("-c", MAIN.format(before=before, arguments=arguments))


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [MANY, JSON, ["--help"]])
def test_a_reader_that_has_gone_is_141(arguments):
    done = run(GONE, arguments)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [MANY, JSON, ["--help"]])
def test_a_full_disk_is_2_and_says_what_to_do(arguments):
    done = run(FULL, arguments)
    assert (done.returncode, done.stderr) == (
        2,
        "hookline: stdout must be a file that can be written, got No space left on device."
        "\nWrite to another disk, or free space on this one.\n",
    )


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [MANY, ["summary", "demo:digits", "nope.npy"]])
def test_a_closed_stdout_changes_no_exit_code(arguments):
    done = run(CLOSED, arguments)
    assert done.returncode == (0 if arguments == MANY else 2)
    assert "Traceback" not in done.stderr
