"""Streams that fail: a reader that has gone, a disk that is full, a stream that is closed."""

from __future__ import annotations

import pytest

from warm import DYNAMO, run_python

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
IN_MEMORY = "import io; sys.stdout = io.TextIOWrapper(io.BytesIO(), 'ascii')"
TABLE = ["summary", "demo:digits", "demo"]
JSON = [*TABLE, "--json"]


def run(before, arguments):
    return run_python("-c", MAIN.format(before=before, arguments=arguments), of=DYNAMO)


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [TABLE, JSON])
def test_a_reader_that_has_gone_is_141(arguments):
    done = run(GONE, arguments)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.processes
def test_a_full_disk_is_2_and_says_what_to_do():
    done = run(FULL, ["--help"])
    assert (done.returncode, done.stderr) == (
        2,
        "hookline: stdout must be a file that can be written, got No space left on device."
        "\nFree space on its disk, or write to another file.\n",
    )


@pytest.mark.processes
@pytest.mark.parametrize("before", [CLOSED, IN_MEMORY])
def test_a_stdout_that_is_no_file_changes_nothing_else(before):
    done = run(before, TABLE)
    assert (done.returncode, done.stderr) == (0, "")
