"""Standard output and error of the command: a write that fails ends it as a shell expects."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from hookline.cli.terminal import BAD_INPUT, CLOSED_PIPE, print_to_stderr
from hookline.errors import InputError


@contextmanager
def exit_on_stream_errors() -> Iterator[None]:
    """Run a command whose streams may fail, as the main function of its process.

    A reader of stdout that has gone ends the command with 141, a disk that is full with 2, and
    Ctrl-C with 130.

        $ hookline summary demo:digits demo | head -1
    """
    _reopen_and_wrap_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except InputError as error:
        print_to_stderr(str(error))
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:  # before a command runs: typer builds its parser
        sys.exit(130)


def _reopen_and_wrap_streams() -> None:
    """Open what the shell has closed, and have stdout tell what a write that fails means.

    Characters that the encoding of stdout lacks are written as \\u65e5, as Python does on stderr.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        # What is no plain file, as the console of Windows, writes in a way of its own.
        if type(getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            sys.stdout = _exit_on_write_errors(stream)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nothing = open(os.devnull, "w")  # noqa: SIM115 it lasts as long as the process
            setattr(sys, name, nothing)


def _exit_on_write_errors(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream to the same file, which tells what a write that fails means."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_ExitOnErrorFile(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@final
class _ExitOnErrorFile(io.FileIO):
    """Write to stdout, whose reader may have gone, or whose disk may be full."""

    def write(self, data: Any, /) -> int:
        """Write bytes.

        Raises:
            SystemExit: the reader has gone, as in `hookline compare a b | head -1`.
            InputError: the file cannot be written.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            self._discard_further_writes()
            raise SystemExit(CLOSED_PIPE) from None
        except OSError as error:
            self._discard_further_writes()
            raise InputError(
                f"stdout must be a file that can be written, got {error.strerror}."
                "\nFree space on its disk, or write to another file."
            ) from error

    def _discard_further_writes(self) -> None:
        """Write nothing more: what is left in buffers is written when the process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
