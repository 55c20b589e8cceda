"""The command line: parse, call a verb, print a view."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `hookline`; what pip installs under that name."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit('hookline: the command line needs typer: pip install "hookline[cli]"')
    from hookline.cli.app import app

    app()
