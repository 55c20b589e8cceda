"""The command `view`: serve recordings and runs as pages until Ctrl-C, or write one as a file."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from hookline.cli.terminal import out, print_to_stderr
from hookline.curves import is_run, open_run
from hookline.errors import FolderError, InputError
from hookline.findings import Findings
from hookline.verbs.compare.compare import compare
from hookline.views.page import (
    FolderSource,
    LimitedServer,
    OpenRecordings,
    write_comparison_page,
    write_curves_page,
    write_folder_contents_page,
    write_page,
)
from hookline.views.page.served_folders import may_hold_finding, read_finding
from hookline.views.page.url_parameters import parse_items


def local_folder(name: str) -> Path:
    """Return the path of a folder that is watched while it is shown.

    Raises:
        FolderError: it is a URL.
    """
    path = name.removeprefix("file://")
    if "://" in path:
        raise FolderError(
            f"hookline view must show a folder on this machine, got {name}."
            "\nCopy it here; hookline findings and hookline compare read URLs."
        )
    return Path(path)


def parse_items_option(text: str | None, folders: list[Path]) -> tuple[int, ...] | None:
    """Parse the option `--items`.

    Raises:
        InputError: it is malformed, or a folder holds a run or a finding of `hl.check`.
    """
    if text is None:
        return None
    kinds = {"a run": is_run, "a finding of hl.check": may_hold_finding}
    pairs = [(kind, folder) for folder in folders for kind, is_of in kinds.items() if is_of(folder)]
    for kind, folder in pairs:
        raise InputError(
            f"--items chooses items of a store, got {kind}: {folder}.\nLeave out --items."
        )
    return parse_items(text, "--items")


def make_server(
    folders: list[Path], items: tuple[int, ...] | None, host: str, port: int, wait: bool
) -> LimitedServer:
    """Create a server for one folder or two, bound to its port.

    Raises:
        HooklineError: a folder holds no readable recording or run (unless `wait`), no port is free,
            or an extra is missing.
    """
    recordings = OpenRecordings(*(FolderSource(folder, items) for folder in folders))
    if not wait or recordings.version():
        try:
            if recordings.read_run() is None and recordings.read_finding() is None:
                # Report a bad folder before serving; make the first page fast.
                recordings.current_page_and_version()
        except FolderError as error:
            if wait or not any(map(_is_missing_or_empty, folders)):
                raise
            raise FolderError(
                f"{error}\nUse --wait to wait for a folder that is not written yet."
            ) from None
    return LimitedServer(recordings, host, port)


def _is_missing_or_empty(folder: Path) -> bool:
    """Tell whether a folder is missing or empty, as that of a run before its first step."""
    return not os.path.exists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def write_folder_page(
    folders: list[Path], items: tuple[int, ...] | None, out_path: Path
) -> tuple[Path, Findings | None]:
    """Write the page of a folder as one file.

    Args:
        folders: the folder, or two to compare; or a file that `hl.check(keep=)` wrote.
        items: of a store, the items that are shown.
        out_path: a file that ends in `.html`, or a folder.

    Returns:
        The file, and what was found in the folder; None for a comparison and a finding of
        `hl.check`, whose pages have findings of their own.

    Raises:
        HooklineError: the folder holds nothing readable, or the file cannot be written.
        InputError: items are chosen for a comparison.
    """
    if len(folders) > 1:
        if items is not None:
            raise InputError(
                "--items chooses items for a page that is served, got a comparison to be written,"
                " which is of all items.\nLeave out --items, or --out."
            )
        names = [str(folder) for folder in folders]
        return write_comparison_page(compare(*folders), out_path, names), None
    folder = folders[0]
    if is_run(folder):
        title, where = folder.resolve().name, os.fspath(folder)
        run = open_run(folder)
        page = write_curves_page(run, out_path, title=title, where=where)
        return page, run.findings()
    if may_hold_finding(folder):
        return write_page(read_finding(folder), out_path), None
    contents = FolderSource(folder, items).read()
    return write_folder_contents_page(contents, out_path, title=folder.resolve().name)


def serve_until_interrupt(server: LimitedServer, folders: list[Path], open_browser: bool) -> None:
    """Print the page's address, open it, and serve until Ctrl-C."""
    if server.is_on_other_port:
        print_to_stderr(f"port {server.wanted_port} is taken; using {server.port}.")
    names = " and ".join(str(folder) for folder in folders)
    out.print(f"{names} at", markup=False, soft_wrap=True)
    out.print(f"  {server.address}", markup=False, soft_wrap=True)
    if "token=" in server.address:
        out.print("Other machines can read the page only with this address.")
    out.print("Ctrl-C ends it.")
    if open_browser:
        open_in_browser(server.address)
    server.serve()


def open_in_browser(address: str) -> None:
    """Open an address in the browser, if there is a display."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return  # webbrowser would find a text browser, which takes over the terminal
    webbrowser.open(address)
