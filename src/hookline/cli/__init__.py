"""The command line: parse, call a verb, print a view."""

from __future__ import annotations

import io
import sys

from hookline.util.install import how_to_install


def main() -> None:
    """Run the command `hookline`; what pip installs under that name."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit(f"hookline: the command line needs typer.\n{how_to_install('cli')}")
    from hookline.cli.app import app

    # A name that the output's code page lacks is written as \\u65e5, as Python does on stderr.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
