"""Change the source in one place, run the tests that should notice, and count how often they do.

    python tests/mutants.py                  # 60 changes, drawn by the day's number
    python tests/mutants.py --seed 7 --n 20  # others, or fewer
    python tests/mutants.py --only engine/passes/passes.py --all
    python tests/mutants.py --since main~20  # only changes of lines that differ from a commit
    python tests/mutants.py --reach          # record anew which test runs which line

Each change is made in a copy of the source. Only tests that run the changed line can notice it:
`reached_lines.py` records which ones do, once, which takes longer than the tests themselves. Tests
named for the changed file come first, then the others for SPENT_S seconds: each file has the same
time, and its quickest tests run first. Work in processes that tests start is not recorded, nor is
code that dynamo traces or a profiling function; the tests of these are listed in TESTS_OF and run
last. A test notices a change if it fails with it and passes without it. A change that no test
notices is printed: a test is missing, the change makes no difference, or a test beyond the first
SPENT_S seconds would notice.

With --since, nothing needs to be recorded: a change is tried on the tests named for its file or
listed in TESTS_OF, on the tests of its folder that differ from the commit (a change of the engine
on the regimes', too), and then on all that `make quick` runs, which takes minutes. Tests try as
much as they do in `make test`.

Left out are changes that cannot make a difference: those of annotations, messages, `zip(strict=)`
and asserts, `return None` for `return False`, and a negated `if` that equals a changed comparison.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import reached_lines

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "hookline"
ROOMS = ("engine", "verbs", "recordings")
REACHED = ROOT / ".venv" / "reached.json"
QUICK = "not compiles and not processes and not slow"
SPENT_S = 40  # on tests of other files, in the seconds that they took when their lines were noted
HANGS_S = 60  # longer than its own time, and a test is taken to hang

_DISTRIBUTED = ("test_distributed.py", "test_distributed_training.py")
_RANKS = (
    "test_distributed_folder.py", "test_distributed_bad_input.py", "test_distributed_values.py",
)  # fmt: skip
_EXTRACT = "verbs/extract/test_distributed.py"
_OTHERS = ("test_distributed_alone.py", _EXTRACT)
_COMPILED = ("test_compile_edits.py", "engine/line/test_compile_support.py")

# The files whose code runs in processes of the tests, is traced into graphs or is a profiling
# function, and these tests. Tests without a folder are in tests/regimes.
TESTS_OF = {
    "engine/torch_private/distributed": (*_DISTRIBUTED, *_RANKS, *_OTHERS),
    "engine/compile/compiled_modules": _COMPILED,
    "engine/compile/graph_capture": _COMPILED,
    "engine/gradients/compiled_tap": _COMPILED,
    "engine/gradients/port_taps": _DISTRIBUTED,
    "engine/operations/call_list": ("verbs/test_operations.py",),
    "curves/findings": ("findings/test_trainings.py",),
    "util/fork_safe_lock": ("test_processes.py",),
    "engine/distributed/rendezvous": ("test_distributed.py", *_RANKS),
    "engine/memory/unversioned_memory": ("test_distributed_values.py",),
    "recordings/atomic_replace": ("test_processes.py", "test_distributed_folder.py"),
    "recordings/match_rank_values": ("test_distributed_folder.py",),
    "recordings/gather_and_reduce": ("test_distributed.py", *_RANKS),
    "verbs/clip/clip": _DISTRIBUTED,
    "verbs/clip/limit": _DISTRIBUTED,
    "verbs/clip/parameter_gradients": _DISTRIBUTED,
    "verbs/doctor/observe": ("verbs/doctor/test_doctor.py", "verbs/doctor/test_notes.py"),
    "verbs/extract/collective_steps": (_EXTRACT,),
    "verbs/extract/sharded_ranks_engine": (_EXTRACT,),
    "verbs/record/keep": ("test_distributed_values.py",),
    "verbs/record/gradient_keepers": _DISTRIBUTED,
}

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: where it is, and what the line is and becomes."""

    path: Path
    line: int
    last_line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        where = self.path.relative_to(SRC)
        return f"{where}:{self.line}\n    - {self.before}\n    + {self.after}"


def mutants_of(path: Path, wanted: set[int] | None = None) -> Iterator[Callable[[], Mutant]]:
    """Every change of one file that this script knows how to make, to be made when it is drawn."""
    source = path.read_text()
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        for holder in ast.iter_child_nodes(node):
            holder.parent = node  # type: ignore[attr-defined]
    for node in list(ast.walk(tree)):
        is_left_out = wanted is not None and getattr(node, "lineno", 0) not in wanted
        if hasattr(node, "lineno") and not is_left_out and not _is_not_run(node):
            for changed in _changes(node):
                yield partial(_mutant, path, lines, node, changed)


def _mutant(path: Path, lines: list[str], node: ast.AST, changed: ast.AST) -> Mutant:
    statement = _statement(node)
    whole = copy.deepcopy(statement)
    _replace(whole, _same_place(whole, statement, node), changed)
    before, after = ast.unparse(statement), ast.unparse(ast.fix_missing_locations(whole))
    indent = " " * statement.col_offset
    new = [indent + line for line in after.splitlines()]
    mutated = [*lines[: statement.lineno - 1], *new, *lines[statement.end_lineno :]]
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    short = next(((one, other) for one, other in pairs if one != other), (before, after))
    last = node.test.end_lineno if isinstance(node, ast.If | ast.While) else node.end_lineno
    return Mutant(path, node.lineno, last or 0, *short, "\n".join(mutated) + "\n")


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OPPOSITE:
            yield _with(node, ops=[OPPOSITE[type(operator)]()])
        case ast.BoolOp():
            yield _with(node, op=OPPOSITE[type(node.op)]())
        case ast.BinOp() if type(node.op) in OPPOSITE and not _is_text(node):
            yield _with(node, op=OPPOSITE[type(node.op)]())
        case ast.AugAssign() if type(node.op) in OPPOSITE:
            yield _with(node, op=OPPOSITE[type(node.op)]())
        case ast.If() | ast.While() | ast.IfExp() if not _has_opposite(node.test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if not _is_none_or_false(value):
            yield _with(node, value=ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_none_or_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _has_opposite(test: ast.expr) -> bool:
    """Whether the comparison is changed to its own negation: a negated `if` is the same."""
    exact = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], exact)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _is_not_run(node: ast.AST) -> bool:
    """Whether a node is an annotation, a message, or outside of all functions."""
    inside, child = False, node
    while (parent := getattr(child, "parent", None)) is not None:
        if (
            isinstance(parent, ast.arg | ast.AnnAssign)
            and getattr(parent, "annotation", None) is child
        ):
            return True
        if isinstance(parent, ast.FunctionDef) and parent.returns is child:
            return True
        if isinstance(
            parent, ast.Raise | ast.JoinedStr | ast.Assert
        ) or "TYPE_CHECKING" in ast.dump(getattr(parent, "test", ast.Pass())):
            return True
        if isinstance(parent, ast.FunctionDef) and child in parent.decorator_list:
            return True
        if isinstance(parent, ast.keyword) and parent.arg == "strict":
            return True
        inside = inside or isinstance(parent, ast.FunctionDef)
        child = parent
    return not inside or isinstance(_statement(node), ast.FunctionDef | ast.ClassDef)


def _statement(node: ast.AST) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = node.parent  # type: ignore[attr-defined]
    return node


def _same_place(whole: ast.AST, original: ast.AST, node: ast.AST) -> ast.AST:
    pairs = zip(ast.walk(original), ast.walk(whole), strict=True)
    return next(other for one, other in pairs if one is node)


def _replace(whole: ast.AST, target: ast.AST, changed: ast.AST) -> None:
    if whole is target:
        if isinstance(changed, ast.Pass):
            whole.value = ast.Constant(None)  # type: ignore[attr-defined]
            return
        for name, value in ast.iter_fields(changed):
            setattr(whole, name, value)
        return
    for parent in ast.walk(whole):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, changed)
            elif isinstance(value, list) and any(one is target for one in value):
                setattr(parent, name, [changed if one is target else one for one in value])


class Batch(NamedTuple):
    """Tests that run in one process: of some files those named, in this order, and new ones."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    profile: str = "ci"  # hypothesis's for servers: the same examples each time, nothing kept
    marks: str = ""  # pytest's expression of marks, for all of the files


@cache
def _reach() -> tuple[dict[str, reached_lines.Reach], dict[str, str]]:
    """What each test runs, and the source as it was then."""
    if not REACHED.exists():
        return {}, {}
    found = json.loads(REACHED.read_text())
    tests = {
        name: reached_lines.Reach(*reach)
        for name, reach in found["tests"].items()
        if (ROOT / name.partition("::")[0]).exists()  # else it has moved since
    }
    return tests, found["sources"]


@cache
def _lines_then(name: str) -> dict[int, int]:
    """Of each line of a file, which one it was when the lines were recorded, or the one before."""
    then, now = (
        text.splitlines() for text in (_reach()[1].get(name, ""), (SRC / name).read_text())
    )
    found = {}
    for block in difflib.SequenceMatcher(None, then, now, autojunk=False).get_matching_blocks():
        found |= {block.b + k + 1: block.a + k + 1 for k in range(block.size)}
    latest = 0
    for number in range(1, len(now) + 1):
        latest = found.setdefault(number, latest)
    return found


def batches(mutant: Mutant, spent_s: float, since: str | None = None) -> Iterator[Batch]:
    """The tests that can notice a change, the likeliest first."""
    if since is not None:
        near = (*_named_for(mutant.path), *_listed_for(mutant.path))
        yield Batch(near, (), "gate")
        changed = _changed_tests(mutant.path, since, near)
        yield Batch(changed, (), "gate")
        yield Batch(_others(mutant.path, {*near, *changed}), (), "gate", QUICK)
        return
    tests, _ = _reach()
    name = mutant.path.relative_to(SRC).as_posix()
    lines = {_lines_then(name)[k] for k in range(mutant.line, mutant.last_line + 1)}
    reach = [test for test, (_, of) in tests.items() if not lines.isdisjoint(of.get(name, ()))]
    reach.sort(key=lambda test: tests[test].seconds)
    own = _named_for(mutant.path)
    near = [test for test in reach if test.partition("::")[0] in own]
    # Tests that trace lines themselves are recorded with none: so the rest of these files, too.
    near += [test for test in tests if test.partition("::")[0] in own and test not in near]
    yield Batch(own, tuple(near))
    spent: dict[str, float] = {}  # by file
    others = []
    for test in reach:
        file = test.partition("::")[0]
        spent[file] = spent.get(file, 0.0) + tests[test].seconds
        if file not in own:
            others.append((spent[file], test))
    chosen = []
    for _, test in sorted(others):
        spent_s -= tests[test].seconds
        if spent_s > 0:
            chosen.append(test)
    if chosen:
        yield Batch(tuple({test.partition("::")[0]: None for test in chosen}), tuple(chosen))
    for path in _listed_for(mutant.path):
        yield Batch((path,), tuple(test for test in tests if test.startswith(f"{path}::")))


def _others(path: Path, known: set[str]) -> tuple[str, ...]:
    """The other files of tests, those of the file's room first."""
    room = path.relative_to(SRC).parts[0]
    files = [test.relative_to(ROOT) for test in sorted((ROOT / "tests").rglob("test_*.py"))]
    files.sort(key=lambda file: room not in file.parts)
    return tuple(file.as_posix() for file in files if file.as_posix() not in known)


def _listed_for(path: Path) -> Iterator[str]:
    """The files of tests that TESTS_OF names for a file."""
    name = path.relative_to(SRC).as_posix().removesuffix(".py")
    for file in TESTS_OF.get(name, ()):
        yield f"tests/{file}" if "/" in file else f"tests/regimes/{file}"


def _named_for(path: Path) -> tuple[str, ...]:
    """The files of tests that are named for a file, or for the first word of its name."""
    stem = path.stem.strip("_")
    tests = ROOT / "tests" / path.parent.relative_to(SRC)
    words = (stem, stem.rstrip("s"), stem.partition("_")[0])
    found = [test for word in words if word for test in sorted(tests.glob(f"test_{word}*.py"))]
    return tuple(dict.fromkeys(test.relative_to(ROOT).as_posix() for test in found))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _changed_tests(path: Path, since: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The tests of a file's folder that differ from a commit; of the engine, the regimes' too."""
    parts = [Path("tests") / part for part in path.relative_to(SRC).parents]
    folders = [next(str(part) for part in parts if (ROOT / part).is_dir())]
    if path.is_relative_to(SRC / "engine"):
        folders.append("tests/regimes")
    names = _git("diff", "--name-only", "--diff-filter=d", since, "--", *folders).split()
    tests = [name for name in names if Path(name).name.startswith("test_")]
    return tuple(name for name in tests if name not in known)


@cache
def _changed_lines(since: str) -> dict[Path, set[int]]:
    """The lines of each source file that differ from a commit."""
    changed: dict[Path, set[int]] = {}
    path = SRC
    for line in _git("diff", "-U0", since, "--", str(SRC)).splitlines():
        if line.startswith("+++ b/"):
            path = ROOT / line.removeprefix("+++ b/")
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            changed.setdefault(path, set()).update(range(first, first + count))
    return changed


_running: set[Any] = set()  # the processes that run tests


def noticed_by(mutant: Mutant, spent_s: float = SPENT_S, since: str | None = None) -> str | None:
    """The test that fails with the change and passes without it, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copied)
        (copied / mutant.path.relative_to(ROOT / "src")).write_text(mutant.source)
        for batch in batches(mutant, spent_s, since):
            for test in failures(copied, batch):
                if passes_unchanged(test):
                    return test
    return None


@cache
def passes_unchanged(test: str) -> bool:
    """Whether a test passes on the source as it is, or the files that it names can be collected."""
    passed = not any(True for _ in failures(ROOT / "src", Batch((test,), (test,))))
    if not passed:
        print(f"fails on the source as it is: {test}", flush=True)
        if "::" not in test:
            raise RuntimeError(f"{test} cannot be collected")
    return passed


def failures(source: Path, batch: Batch) -> Iterator[str]:
    """The tests that fail on a source, crash or hang, as they do; a file that cannot be collected.

    They run in a process that has torch already, for as long as the caller asks for more.
    """
    if not batch.files:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    ours, theirs = context.Pipe(duplex=False)
    times = {
        test: reach.seconds
        for test, reach in _reach()[0].items()
        if test.partition("::")[0] in batch.files
    }
    reporter = _Reporter(theirs, batch.tests, frozenset(times))
    process = context.Process(target=_in_process, args=(str(source), batch, reporter))
    process.start()
    _running.add(process)
    theirs.close()
    running = batch.files[0]
    try:
        while ours.poll(HANGS_S + 5 * times.get(running, HANGS_S)):
            name, outcome = ours.recv()
            if name is None:
                if outcome in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
                    yield running  # the source cannot be imported
                return
            if outcome == "failed":
                yield name
            running = name
        yield running  # it hangs
    except EOFError:  # it crashed
        yield running
    finally:
        _kill_group(process)
        process.join()
        _running.discard(process)


def _kill_group(process: Any) -> None:
    """End what tests may have started and left, and the process itself if it hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _in_process(source: str, batch: Batch, reporter: _Reporter) -> None:
    os.setpgrp()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    os.chdir(ROOT)
    sys.path[:0] = [source, str(ROOT)]
    os.environ.update(PYTHONPATH=source, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", f"--hypothesis-profile={batch.profile}"]
    code = pytest.main([*options, "-m", batch.marks, *batch.files], plugins=[reporter])
    reporter.pipe.send((None, int(code)))


class _Reporter:
    """Runs some tests in their order, and tells the process that waits how each test went."""

    def __init__(self, pipe: Connection, tests: Sequence[str], known: frozenset[str]) -> None:
        self.pipe = pipe
        self.order = {test: number for number, test in enumerate(tests)}
        self.known = known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            one for one in items if one.nodeid in self.order or one.nodeid not in self.known
        ]
        items.sort(key=lambda one: self.order.get(one.nodeid, -1))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pipe.send((report.nodeid, "failed"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.pipe.send((nodeid, "begun"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pipe.send((report.nodeid, report.outcome))


def main(arguments: list[str] | None = None) -> int:
    """Draw changes, try them, print those that no test noticed, and the score of each room."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=date.today().toordinal())
    parser.add_argument("--only", action="append", help="this file or folder below src/hookline")
    parser.add_argument("--all", action="store_true", help="every change of the files, no draw")
    parser.add_argument(
        "--verbose", action="store_true", help="also print what was noticed, by what"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--since", help="only lines that differ from this commit")
    parser.add_argument("--reach", action="store_true", help="record anew what each test runs")
    options = parser.parse_args(arguments)
    if options.reach or not (REACHED.exists() or options.since):
        reached_lines.record(REACHED, options.jobs)
    if options.since:
        changed = _changed_lines(options.since)
        files = sorted(path for path in changed if path.suffix == ".py" and path.exists())
        drawn = [make for path in files for make in mutants_of(path, changed[path])]
    else:
        files = [path for name in options.only or ROOMS for path in _files(SRC / name)]
        drawn = [make for path in files for make in mutants_of(path)]
    if not options.all:
        drawn = random.Random(options.seed).sample(drawn, min(options.n, len(drawn)))
    found = [make() for make in drawn]
    noticed: dict[str, list[bool]] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            waiting = {
                pool.submit(noticed_by, mutant, SPENT_S, options.since): mutant for mutant in found
            }
            for one in as_completed(waiting):
                mutant, test = waiting[one], one.result()
                room = mutant.path.relative_to(SRC).parts[0]
                noticed.setdefault(room, []).append(test is not None)
                if test is None:
                    print(f"survived: {mutant}", flush=True)
                elif options.verbose:
                    print(f"noticed: {mutant}\n    by {test}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                _kill_group(process)
    every = [one for ones in noticed.values() for one in ones]
    for name, ones in (*sorted(noticed.items()), (f"all, seed {options.seed}", every)):
        low, high = interval(sum(ones), len(ones))
        print(f"{name}: {sum(ones)} of {len(ones)} changes were noticed ({low:.0%} to {high:.0%})")
    return 0 if sum(every) >= 0.9 * len(every) else 1


def interval(hits: int, n: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share of which `hits` of `n` were drawn."""
    z = 1.96
    share, spread = hits / n, z * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return (share * n + z * z / 2 - spread) / (n + z * z), (share * n + z * z / 2 + spread) / (
        n + z * z
    )


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
