"""The command `view`: serve recordings as pages until Ctrl-C."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from hookline.cli.terminal import out, say
from hookline.errors import FolderError, InputError
from hookline.views.page import FolderSource, OpenRecordings, Serving

_MOST_ITEMS = 64  # of a store, on one page


def items_of(text: str | None) -> list[int] | None:
    """Read the numbers of items, such as `5,17` or `1000:1008`.

    Raises:
        InputError: the text is neither.
    """
    if text is None:
        return None
    try:
        first, colon, last = text.partition(":")
        found = list(range(int(first), int(last))) if colon else [int(n) for n in text.split(",")]
    except ValueError:
        found = []
    if not 0 < len(found) <= _MOST_ITEMS:
        raise InputError(
            f"--items must name 1 to {_MOST_ITEMS} items, got {text}."
            "\nGive numbers such as 5,17 or a range such as 1000:1008."
        )
    return found


def serving_of(
    folders: list[Path], items: list[int] | None, host: str, port: int, wait: bool
) -> Serving:
    """Create a server for one folder or two, bound to its port.

    Raises:
        HooklineError: a folder holds no readable recording (unless `wait`), no port is free, or an
            extra is missing.
    """
    shelf = OpenRecordings(*(FolderSource(one, items) for one in folders))
    if not wait or shelf.state():
        try:
            shelf.shown()  # report a bad folder before serving, and make the first page fast
        except FolderError as error:
            if wait or all(os.path.exists(one) for one in folders):
                raise
            raise FolderError(
                f"{error}\nUse --wait to wait for a folder that is not written yet."
            ) from None
    return Serving(shelf, host, port)


def serve(serving: Serving, folders: list[Path], open_browser: bool) -> None:
    """Print the page's address, open it, and serve until Ctrl-C."""
    if serving.moved:
        say(f"port {serving.wanted_port} is taken; using {serving.port}.")
    names = " and ".join(str(folder) for folder in folders)
    out.print(f"{names} at", markup=False, soft_wrap=True)
    out.print(f"  {serving.address}", markup=False, soft_wrap=True)
    if "token=" in serving.address:
        out.print("Other machines can read the page only with this address.")
    out.print("Ctrl-C ends it.")
    if open_browser:
        open_page(serving.address)
    serving.run()


def open_page(address: str) -> None:
    """Open an address in the browser, if there is a display."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return  # webbrowser would find a text browser, which takes over the terminal
    webbrowser.open(address)
