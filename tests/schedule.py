"""What makes a test slow, which come first, what they draw, and when garbage is collected."""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache, wraps
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings

import hookline as hl
import hookline.data
import hookline.models
from warm import Running

# A collection of all objects takes a tenth of a second beside torch, and dynamo makes objects fast
# enough for one each second: a tenth of the gate. What a test says of memory it collects itself.
gc.disable()  # until all tests are imported
gc.set_threshold(5_000, 20, 100)


# The fixtures that a test marks itself with, for `make quick` to leave out.
MARK_OF_FIXTURE = {"fresh_dynamo": "compiles", "ranks": "processes", "browser": "processes"}
SLOW = {"compiles", "processes", "slow"}
# What takes a worker longest, and the rest of the workers would wait for.
LONGEST = {
    "test_ray_engine.py", "test_typing.py", "test_readme.py", "test_docs_site.py",
    "test_same_numbers.py", "test_compiled_gradients.py",
}  # fmt: skip
_processes: list[str] = []


def _note_starts(owner: object, name: str) -> None:
    """Note each call of a function that starts a process.

    An audit hook would be called for each `id()` as well: a million times in a file of dynamo's.
    """
    start = getattr(owner, name)

    @wraps(start)
    def start_and_note(*args: object, **options: object) -> object:
        _processes.append(name)
        return start(*args, **options)

    setattr(owner, name, start_and_note)


_note_starts(subprocess.Popen, "__init__")
_note_starts(Running, "__init__")
_note_starts(os, "posix_spawn")
os.register_at_fork(before=lambda: _processes.append("fork"))


def _compiled_frames() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["total"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file of which `-m` leaves out every test: what it imports takes seconds."""
    left_out = set(re.findall(r"not (\w+)", config.option.markexpr))
    if not left_out or collection_path.suffix != ".py":
        return None
    of_file = re.search(r"^pytestmark = (.*?)\n\n", collection_path.read_text(), re.M | re.S)
    words = re.findall(r"\w+", of_file[1]) if of_file else []
    return bool(left_out.intersection(MARK_OF_FIXTURE.get(word, word) for word in words)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples only where some are: pytest looks at each object of a file for them."""
    found = yield
    if file_path.suffix == ".py" and ">>>" not in file_path.read_text():
        return [collector for collector in found if not isinstance(collector, DoctestModule)]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have every other worker import the files from the last to the first.

    In a fresh clone pytest rewrites the asserts of each file, which takes longer than all imports:
    workers that meet in the middle each read what the other has rewritten.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {}).get("workerid", "gw0")
    is_of_tests = collector.path.is_relative_to(Path(__file__).parent)
    if isinstance(collector, pytest.Directory) and is_of_tests and int(worker[2:]) % 2:
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and put the slow files first for the workers of `make test`."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.fixturenames.append("names_in_docstrings")
        for fixture, mark in MARK_OF_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
    if settings.get_current_profile_name() == "gate":
        inner = [item for item in items if _is_inner_example(item)]
        items[:] = [item for item in items if not _is_inner_example(item)]
        config.hook.pytest_deselected(items=inner)
    if hasattr(config, "workerinput"):
        # Long files first, so that no worker begins one when the others are about to end.
        size = Counter(item.path for item in items)
        slow = Counter(item.path for item in items if SLOW & {m.name for m in item.iter_markers()})
        items.sort(
            key=lambda item: (
                item.path.name not in LONGEST, -slow[item.path], -size[item.path], str(item.path)
            )
        )  # fmt: skip


@cache
def _public_definitions() -> tuple[str, ...]:
    """Find where each public name is defined: the dotted names of its module and itself."""
    public = [getattr(hl, name) for name in hl.__all__]
    packages = [value for value in public if isinstance(value, ModuleType)]
    packages += [hookline.data, hookline.models]
    public += [getattr(package, name) for package in packages for name in package.__all__]
    public = [value for value in public if hasattr(value, "__qualname__")]
    return tuple(f"{value.__module__}.{value.__qualname__}" for value in public)


def _is_inner_example(item: pytest.Item) -> bool:
    """Whether an item is the example of a function that users do not call."""
    if not isinstance(item, pytest.DoctestItem) or item.name == "hookline":
        return False
    return not any(f"{item.name}.".startswith(f"{own}.") for own in _public_definitions())


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what was imported out of the garbage collections that tests ask for."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "torch._dynamo.guards" in sys.modules:
        # After each compilation dynamo collects, and flushes the processor's caches for its log.
        config = sys.modules["torch._dynamo.config"]
        config.run_gc_after_compile = False
        if hasattr(config, "side_effect_replay_policy"):  # not in every version of torch
            # It formats a stack for each change of an object, for its log.
            config.side_effect_replay_policy = "silent"
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Draw the same numbers in a test whatever ran before it, so that a failure comes again."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At the end of a file, leave out what it has imported as well."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that compiles or starts a process and does not bear the mark for it."""
    frames, processes = _compiled_frames(), len(_processes)
    yield
    is_done = {"compiles": _compiled_frames() > frames, "processes": len(_processes) > processes}
    for mark in [mark for mark, is_needed in is_done.items() if is_needed]:
        # Inductor starts its workers once, whichever test comes first: `compiles` says enough.
        marked = item.get_closest_marker(mark) or item.get_closest_marker("compiles")
        if isinstance(item, pytest.Function) and not marked:
            pytest.fail(f"mark this test with @pytest.mark.{mark}: `make quick` is to leave it out")
