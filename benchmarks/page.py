"""`python -m benchmarks.page`: how soon the page of a recording of 2,000 sites and 50 GB is there.

In a real Chromium (Debian's), against the server in a process of its own: until the list has rows,
a site with its statistics, and the server's memory before and after many sites were seen.
The recording's files are sparse: they take no room on the disk, and reading them costs no seek.
Then the page as one file, of a recording of 2,001 small values: a site, a search, a sorted column.
At last how long it takes to write the page of 264 values of 101 MiB, beside reading them.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter, sleep

import torch
from playwright.sync_api import Page, sync_playwright
from torch import nn

import hookline as hl
from benchmarks.large_recording import write
from hookline.views.page import write_recording_page

_SITES, _BYTES = 2000, 25 * 1024**2
# The page's own time, in the frame after the one that shows rows.
_LISTED = """new Promise((done) => {
  const look = () => document.querySelector("[role=treegrid] [aria-rowindex]")
    ? requestAnimationFrame(() => done(performance.now())) : requestAnimationFrame(look);
  look();
})"""
# Paths have places at which they may be broken, at which Playwright's own search stops.
_SHOWS = "(site) => document.getElementById('pane-heading').textContent === site"
# When findings and strip are drawn, and when all is: the times of the frames after.
_NOTE_DRAWN = """const drawn = {};
window.drawn = drawn;
const look = () => {
  if (document.querySelector("#tally")?.textContent.trim()) drawn.first ??= performance.now();
  if (document.body?.dataset.ready) drawn.all = performance.now();
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);"""
_DRAWN = """new Promise((done) => {
  const look = () => drawn.all ? done([drawn.first, drawn.all]) : requestAnimationFrame(look);
  look();
})"""
# How long a step takes: until the frame after the one in which it shows.
_TIMED = """new Promise((done) => {{
  const start = performance.now();
  {step};
  const look = () => {shows}
    ? requestAnimationFrame(() => done(performance.now() - start)) : requestAnimationFrame(look);
  look();
}})"""
_OPENINGS = 11


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "large", _SITES, _BYTES)
        command = [sys.executable, "-m", "hookline", "view", str(folder), "--no-open"]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            text = ""
            while not (found := re.search(r"http://\S+", text)):
                text += server.stdout.readline()
            _measure(found[0], server.pid)
        finally:
            server.terminate()
            server.wait()
        _measure_file(Path(place) / "page.html")
        _measure_writing(Path(place))


def _measure(address: str, pid: int) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto("about:blank")
        print(f"{_SITES:,} sites of {_BYTES / 1024**2:.0f} MiB")
        print(f"  the list, first time:    rows after {_until(page, address, _LISTED):5.0f} ms")
        again = [_until(page, address, _LISTED) for _ in range(5)]
        print(f"  the list, again:         rows after {statistics.median(again):5.0f} ms")
        before = _memory(pid)
        full = []
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        for k in range(40):
            start = monotonic()
            site = f"layer{k % 20}.block{k % 10}.conv{k % 7}"
            page.evaluate(f"location.hash = 'at={site}'")
            page.wait_for_function(_SHOWS, arg=site)
            page.wait_for_selector("#pane .waiting", state="detached")
            full.append(1000 * (monotonic() - start))
        print(f"  a site, with statistics: {statistics.median(full):5.0f} ms")
        after = _memory(pid)
        print(f"  the server's memory:     {before:.0f} MiB, after 40 sites {after:.0f} MiB")
        browser.close()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 128)
        self.act, self.down = nn.ReLU(), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(self.act(self.up(self.norm(x))))
        return x + change


def _measure_file(target: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block() for _ in range(400)])
    with hl.record(model, "**") as run:
        model(torch.randn(8, 16, 64))
    write_recording_page(run, target, title="blocks")
    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(_OPENINGS):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.add_init_script(_NOTE_DRAWN)
            page.goto(target.as_uri())
            page.wait_for_selector("body[data-ready]")
            times.append(page.evaluate(_DRAWN))
            page.close()
        steps = _steps(browser.new_page(viewport={"width": 1440, "height": 900}), target)
        browser.close()
    first, every = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"as one file of {target.stat().st_size / 1e6:.1f} MB, {len(run):,} values")
    print(f"  findings and strip:      {first:5.0f} ms")
    print(f"  all:                     {every:5.0f} ms")
    for name, milliseconds in steps.items():
        print(f"  {name + ':':<25}{milliseconds:5.0f} ms")


def _steps(page: Page, target: Path) -> dict[str, float]:
    """Measure what a reader does on the page: the time of each step until it shows."""
    page.goto(target.as_uri())
    page.wait_for_selector("body[data-ready]")

    def timed(step: str, shows: str) -> float:
        milliseconds: float = page.evaluate(_TIMED.format(step=step, shows=shows))
        return milliseconds

    heading = "document.getElementById('pane-heading').textContent"
    is_there = "!document.querySelector('#pane .waiting')"
    sites = [f"{k}.{name}" for k in range(0, 400, 20) for name in ("norm", "act")]
    search = "const box = document.querySelector('[type=search]'); box.value = '{text}';"
    search += " box.dispatchEvent(new Event('input', {{bubbles: true}}))"
    status = "document.getElementById('status').textContent"
    head = "document.querySelector('[role=columnheader].std')"
    return {
        "a site": statistics.median(
            timed(f"location.hash = 'at={site}'", f"{heading} === '{site}' && {is_there}")
            for site in sites
        ),
        "a search": statistics.median(
            timed(search.format(text=text), f"{status}.startsWith('{n}')")
            for text, n in [("30.act", "4 of"), ("linear", "800 of"), ("", "2,001")] * 3
        ),
        "a sorted column": statistics.median(
            timed(f"{head}.querySelector('button').click()", f"{head}.ariaSort === '{order}'")
            for order in ("descending", "ascending", "none") * 3
        ),
    }


def _measure_writing(place: Path) -> None:
    """Measure how long the page of large values takes, beside reading them."""
    model = nn.Sequential(*[nn.Identity() for _ in range(264)])
    sizes = torch.logspace(3, 6, 264).long()
    sizes = (sizes * (101 * 2**20 / 4 / sizes.sum())).long()
    values = iter([torch.randn(1, 8, int(size) // 8) for size in sizes])
    with hl.record(model, "*", keep=lambda value: next(values)) as run:
        model(torch.zeros(1))
    folder = run.save(place / "large-values")

    def read() -> None:
        recording = _opened(folder)
        for site in recording.sites:
            recording[site].sum()

    def write_page() -> None:
        write_recording_page(_opened(folder), place / "values.html", title="values")

    times: dict[Callable[[], None], list[float]] = {read: [], write_page: []}
    for _ in range(_OPENINGS):
        for step, seconds in times.items():
            start = perf_counter()
            step()
            seconds.append(perf_counter() - start)
    reading, writing = (1000 * statistics.median(seconds) for seconds in times.values())
    n_bytes = sum(value.nbytes for value in map(run.__getitem__, run.sites))
    print(f"{len(run)} values of {n_bytes / 1024**2:.0f} MiB")
    print(f"  reading them:            {reading:5.0f} ms")
    print(f"  writing their page:      {writing:5.0f} ms")


def _opened(folder: Path) -> hl.Recording:
    recording = hl.open(folder)
    assert isinstance(recording, hl.Recording)
    return recording


def _until(page: Page, address: str, moment: str) -> float:
    page.goto(address, wait_until="commit")
    milliseconds: float = page.evaluate(moment)
    return milliseconds


def _memory(pid: int) -> float:
    sleep(0.5)
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
