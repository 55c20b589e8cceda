"""Recordings in folders, a server on each, and a browser."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, build_opener

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from hookline.views.page import FolderSource, LimitedServer, OpenRecordings

# Nothing is to be there within this time; it ends a test that waits for what never comes.
expect.set_options(timeout=60_000)
SIZE = {"width": 1280, "height": 720}


# A page that waits a second before it asks again would have its test wait.
HURRY = """
const later = window.setTimeout;
window.setTimeout = (then, ms, ...rest) => later(then, ms >= 1000 ? ms / 8 : ms, ...rest);
"""


class Windows:
    """Windows of a browser, each used by one test at a time: to open one takes half a second."""

    def __init__(self, browser):
        self._browser = browser
        self._free = []

    def take(self, viewport, color_scheme):
        """Give a window that shows nothing, and has this size and scheme."""
        page = self._free.pop() if self._free else self._new()
        page.set_default_timeout(60_000)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme)
        return page

    def _new(self):
        page = self._browser.new_page()
        page.add_init_script(HURRY)
        return page

    def give_back(self, page):
        """Empty a window and what it has stored."""
        if page.url.startswith(("http", "file")):
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.goto("about:blank")
        page.context.clear_cookies()
        page.mouse.move(0, 0)
        self._free.append(page)


@pytest.fixture(scope="module")
def windows(browser):
    return Windows(browser)


@pytest.fixture
def new_page(windows):
    """Open an address in an empty window, and wait until its page is drawn.

    What it logs or asks for elsewhere is an error.
    """
    complaints, taken = [], []

    def new_page(address, base, viewport=SIZE, color_scheme="light"):
        page = windows.take(viewport, color_scheme)
        listeners = {
            "console": lambda message: complaints.append(message.text),
            "pageerror": lambda error: complaints.append(str(error)),
            "dialog": lambda dialog: complaints.append("a dialog opened"),
            "request": lambda request: (
                request.url.startswith(("data:", base)) or complaints.append(request.url)
            ),
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        taken.append((page, listeners))
        page.goto(address)
        page.wait_for_selector("body[data-ready], main.message")  # its script has drawn
        return page

    yield new_page
    for page, listeners in taken:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        windows.give_back(page)
    assert complaints == []


@pytest.fixture(scope="module")
def closing():
    """`closing(serving)`: close a server aside, which looks ten times a second if it is to end."""
    ends = []
    with ThreadPoolExecutor(8) as threads:
        yield lambda serving: ends.append(threads.submit(serving.close))
    for end in ends:
        end.result()


@pytest.fixture
def served(closing):
    """`served(folder, ...)`: a server for one folder or two; `get(path)` asks it."""
    with ExitStack() as ends:

        def serve(*folders, host="127.0.0.1", waiting=None):
            serving = LimitedServer(OpenRecordings(*map(FolderSource, folders)), host, 0, waiting)
            serving.start_in_thread()
            ends.callback(closing, serving)
            base = f"http://127.0.0.1:{serving.port}/"
            opener = build_opener()

            def get(path="", **headers):
                """Status, text and headers of an answer; redirects are followed."""
                method = headers.pop("method", "GET")
                request = Request(base + path, headers=headers, method=method)
                try:
                    answer = opener.open(request, timeout=30)
                except HTTPError as error:
                    answer = error
                with answer:
                    text = answer.read().decode("utf-8", "replace")
                    return SimpleNamespace(status=answer.status, text=text, headers=answer.headers)

            return SimpleNamespace(get=get, base=base, serving=serving)

        yield serve


class Convs(nn.Module):
    """Two convolutions, of which one runs twice, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 40, 3, padding=1)
        self.again = nn.Conv2d(40, 40, 3, padding=1)
        self.head = nn.Linear(40, 4)

    def forward(self, x):
        x = self.again(self.again(self.first(x).relu()))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders: "a" and "b" differ from `again` on; "passes" has three, with gradients."""
    torch.manual_seed(0)
    model, place = Convs(), tmp_path_factory.mktemp("runs")
    x = torch.rand(2, 3, 8, 8)
    with torch.no_grad(), hl.record(model, copy=True) as run:
        model(x)
    run.save(place / "a")
    with torch.no_grad(), hl.edit(model, "again", hl.edits.scale(0.5)):
        with hl.record(model, copy=True) as run:
            model(x)
    run.save(place / "b")
    ports = ("input", "output", "grad_output")
    with hl.record(model, ["", "first", "again", "head"], ports=ports, copy=True) as run:
        for step in range(3):
            model(x + step)[:, 0].sum().backward()
    run.save(place / "passes")
    return place
