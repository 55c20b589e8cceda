"""Record which lines of the source each test runs, and how long it takes. For `mutants.py`.

The tests run once, in processes beside one another, under a trace function. What runs in processes
that tests start is not seen. Of functions that torch.compile inlines, which run no line, every line
counts as run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SRC = str(ROOT / "src" / "hookline") + os.sep
ROOMS = ("engine", "verbs", "recordings", "regimes", "traps", "views", "cli")
LOOSE = ("test_messages.py", "test_random_models.py", "test_public_names.py")
SOURCES = ("engine", "verbs", "recordings")
# Their work is done in processes of their own.
OUTSIDE = ("test_distributed", "test_processes")


class Reach(NamedTuple):
    """What one test runs: its seconds, and of each file below src/hookline its lines."""

    seconds: float
    lines: dict[str, list[int]]


class _Tracer:
    """A pytest plugin that notes the lines of each test."""

    def __init__(self) -> None:
        self.found: dict[str, Reach] = {}
        self._lines: defaultdict[str, set[int]] = defaultdict(set)
        self._names: dict[CodeType, str | None] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines.clear()
        begun = time.perf_counter()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            lines = {name: sorted(numbers) for name, numbers in self._lines.items()}
            self.found[item.nodeid] = Reach(time.perf_counter() - begun, lines)

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            path = code.co_filename
            self._names[code] = path.removeprefix(SRC) if path.startswith(SRC) else None
        return self._names[code]

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        name = self._name(code)
        if name is None:
            if code.co_name == "inline_call_" and "func" in frame.f_locals:
                self._inlined(frame.f_locals["func"])
            return None
        seen = self._lines[name]

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            seen.add(frame.f_lineno)
            return line

        return line

    def _inlined(self, func: Any) -> None:
        try:
            code = func.get_code()
        except Exception:  # not a function with code
            return
        name = self._name(code)
        if name is not None:
            self._lines[name].update(number for _, _, number in code.co_lines() if number)


def _record(files: Sequence[str], to: Path) -> None:
    os.nice(5)
    os.chdir(ROOT)
    os.environ.update(OMP_NUM_THREADS="1")
    sys.path.insert(0, str(ROOT))  # as `python -m pytest` does: tests of the page use `benchmarks`
    tracer = _Tracer()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=ci", *files],
        plugins=[tracer],
    )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"the tests were not run to their end: {status!r}")
    to.write_text(json.dumps(tracer.found))


def files() -> list[str]:
    """The files of tests that run in the process itself."""
    tests = ROOT / "tests"
    found = [path for room in ROOMS for path in sorted((tests / room).rglob("test_*.py"))]
    found += [tests / name for name in LOOSE]
    return [str(one.relative_to(ROOT)) for one in found if not one.name.startswith(OUTSIDE)]


def record(to: Path, jobs: int) -> None:
    """Run the tests, and write what each of them reaches as JSON."""
    context = multiprocessing.get_context("spawn")
    parts = [to.with_suffix(f".{number}") for number in range(jobs)]
    every = files()
    paths = (Path(SRC) / room for room in SOURCES)
    sources = {
        str(path.relative_to(SRC)): path.read_text() for at in paths for path in at.rglob("*.py")
    }
    processes = [
        context.Process(target=_record, args=(every[number::jobs], part))
        for number, part in enumerate(parts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    tests: dict[str, Any] = {}
    for part in parts:
        tests |= json.loads(part.read_text())
        part.unlink()
    to.write_text(json.dumps({"tests": tests, "sources": sources}))
