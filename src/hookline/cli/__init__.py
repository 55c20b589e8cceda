"""The command line: parse arguments, call a verb, print the result."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hookline.util.optional_imports import how_to_install, require


def main() -> None:
    """Run the command `hookline`, the entry point that pip installs."""
    require("typer", "hookline: the command line needs typer", how_to_install("cli"), SystemExit)
    with _exit_at_ctrl_c():
        from hookline.cli.app import app
        from hookline.cli.standard_streams import exit_on_stream_errors

    with exit_on_stream_errors():
        app()


@contextmanager
def _exit_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while modules are imported.

    Libraries that are interrupted in their import raise errors of any kind. A process that ignores
    Ctrl-C, as under `nohup`, goes on to do so.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
