"""The command line: parse arguments, call a verb, print the result."""

from __future__ import annotations

import io
import sys

from hookline.util.optional import how_to_install, load


def main() -> None:
    """Run the command `hookline`, the entry point that pip installs."""
    load("typer", "hookline: the command line needs typer", how_to_install("cli"), SystemExit)
    from hookline.cli.app import app

    # Characters that stdout's encoding lacks are written as \\u65e5, as Python does on stderr.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
