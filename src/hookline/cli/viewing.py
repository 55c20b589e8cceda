"""view: recordings as pages, served until Ctrl-C."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from hookline.cli.terminal import out, say
from hookline.errors import FolderError
from hookline.views.page import FolderSource, OpenRecordings, Serving


def serving_of(folder: Path, other: Path | None, host: str, port: int, wait: bool) -> Serving:
    """A server for one folder or two, bound to its port.

    Raises:
        HooklineError: a folder holds no recording that can be read (unless it is waited for), no
            port is free, or an extra is missing.
    """
    folders = [folder] if other is None else [folder, other]
    shelf = OpenRecordings(*(FolderSource(one) for one in folders))
    if not wait or shelf.state():
        try:
            shelf.shown()  # so that what is wrong is said here, and the first page is there at once
        except FolderError as error:
            if wait or all(os.path.exists(one) for one in folders):
                raise
            raise FolderError(
                f"{error}\nTo wait for one that is still to be written: --wait."
            ) from None
    return Serving(shelf, host, port)


def serve(serving: Serving, folders: list[Path], open_browser: bool) -> None:
    """Say where the page is, open it, and answer until Ctrl-C."""
    if serving.moved:
        say(f"port {serving.wanted_port} is taken; using {serving.port}.")
    names = " and ".join(str(folder) for folder in folders)
    out.print(f"{names} at", markup=False, soft_wrap=True)
    out.print(f"  {serving.address}", markup=False, soft_wrap=True)
    if "token=" in serving.address:
        out.print("Others on the network can read it with this address, and only with it.")
    out.print("Ctrl-C ends it.")
    if open_browser:
        open_page(serving.address)
    serving.run()


def open_page(address: str) -> None:
    """Open an address in the browser, where there is a screen."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return  # there, only a text browser could be found, and it would take the terminal
    webbrowser.open(address)
