"""The command line: parse, call a verb, print a view."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command `hookline`; what pip installs under that name."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit('hookline: the command line needs typer: pip install "hookline[cli]"')
    from hookline.cli.app import app

    # A name that the output's code page lacks is written as \\u65e5, as Python does on stderr.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
