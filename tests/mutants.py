"""Change the source in one place, run the tests that should notice, and count how often they do.

    python tests/mutants.py                  # 60 changes, drawn by the day's number
    python tests/mutants.py --seed 7 --n 20  # others, or fewer
    python tests/mutants.py --only engine/passes.py --all

Each change is made in a copy of the source. The tests of the changed file run first: those that
TESTS_OF lists, and those whose name begins as the file's does. If they all pass, a second set of
broad and quick ones runs. A test notices a change if it fails with it and passes without it. A
change that no test notices is printed; either a test is missing, or the change makes no difference.

Left out are changes that cannot make a difference: those of annotations, messages, `zip(strict=)`
and asserts, `return None` for `return False`, and a negated `if` that equals a changed comparison.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "hookline"
ROOMS = ("engine", "verbs", "recordings")
_COMPILE = (
    "engine/test_compiled.py", "regimes/test_compile.py", "regimes/test_compile_edits.py",
    "traps/test_compile.py", "regimes/test_compile_pieces.py",
)  # fmt: skip
_CHECKPOINT = (
    "regimes/test_checkpoint.py", "regimes/test_checkpoint_training.py",
    "regimes/test_checkpoint_nested.py", "regimes/test_checkpoint_times.py",
    "regimes/test_checkpoint_compiled.py",
)  # fmt: skip
_BACKWARD = (
    "engine/test_gradient_taps.py", "engine/test_backward_taps.py",
    "verbs/test_record_gradients.py", "verbs/test_edit_gradients.py",
    "traps/test_gradients_and_memory.py",
)  # fmt: skip
_FSDP = ("regimes/test_distributed.py", "regimes/test_distributed_training.py")
_SELECT = ("engine/test_select.py", "test_messages.py", "engine/test_modules.py")

# The tests of files whose tests are named for what the file does, and not for the file.
TESTS_OF = {
    "engine/backward_taps": (*_BACKWARD, "engine/test_flow.py"),
    "engine/calls": ("engine/test_passes.py", "regimes/test_threads.py"),
    "engine/checkpoint_internals": (*_CHECKPOINT, "engine/test_torch_internals.py"),
    "engine/compile_internals": _COMPILE,
    "engine/compile_marks": _COMPILE,
    "engine/compile_notes": _COMPILE,
    "engine/compiled": _COMPILE,
    "engine/distributed_internals": ("regimes/test_distributed.py",),
    "engine/ending": ("engine/test_line.py", "engine/test_placing.py"),
    "errors": ("test_messages.py", "engine/test_site.py"),
    "engine/flow": _BACKWARD,
    "engine/globs": _SELECT,
    "engine/gradient_tap": (*_BACKWARD, "regimes/test_compile.py"),
    "engine/gradient_taps": (*_BACKWARD, "regimes/test_compile.py", *_FSDP),
    "engine/graph_gradients": _COMPILE,
    "engine/local": (
        "regimes/test_distributed_training.py", "engine/test_distributed_internals.py",
    ),
    "util/locks": ("regimes/test_processes.py",),
    "engine/meeting": (
        "regimes/test_distributed_bad_input.py", "regimes/test_distributed.py",
        "regimes/test_distributed_folder.py",
    ),
    "engine/modules": ("engine/test_select.py", "regimes/test_wrappers.py"),
    "engine/no_match": _SELECT,
    "engine/passes": (
        "regimes/test_threads.py", "engine/test_line.py", "regimes/test_compile.py",
    ),
    "engine/raw_taps": (
        "engine/test_hooks_on_modules.py", "engine/test_returns.py", "engine/test_attach.py",
    ),
    "engine/recompute": _CHECKPOINT,
    "engine/regime": (
        "regimes/test_tracing.py", "regimes/test_func.py", "regimes/test_lazy.py",
        "regimes/test_modes.py",
    ),
    "engine/regime_internals": ("regimes/test_tracing.py", "regimes/test_func.py"),
    "engine/report": (
        "engine/test_line.py", "views/test_tables.py", "regimes/test_quantised.py",
        "regimes/test_wrappers.py", "regimes/test_tracing.py",
    ),
    "engine/site": ("engine/test_select.py",),
    "engine/taps": (
        "engine/test_hooks_on_modules.py", "verbs/test_edit.py", "engine/test_placing.py",
        "engine/test_arguments.py", *_COMPILE,
    ),
    "engine/traced": _COMPILE,
    "engine/tree": ("engine/test_arguments.py", "verbs/test_edit.py", "verbs/test_record.py"),
    "recordings/rank_folder": ("regimes/test_distributed_folder.py",),
    "recordings/ranks": ("regimes/test_distributed.py",),
    "engine/values": (
        "traps/test_in_place.py", "verbs/test_record_gradients.py", "engine/test_gradient_taps.py",
    ),
}  # fmt: skip
SECOND_SET = (
    "engine/test_line.py", "engine/test_passes.py", "engine/test_gradient_taps.py",
    "engine/test_backward_taps.py", "verbs/test_record.py", "verbs/test_record_gradients.py",
    "verbs/test_edit.py", "verbs/test_edit_gradients.py", "verbs/test_clip.py",
    "recordings/test_recording.py", "recordings/test_folder.py", "test_random_models.py",
    "regimes/test_checkpoint.py", "regimes/test_threads.py", "regimes/test_modes.py",
)  # fmt: skip
LIMIT_S = 240  # for one test; a change that hangs is noticed, too

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: where it is, and what the line is and becomes."""

    path: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        where = self.path.relative_to(SRC)
        return f"{where}:{self.line}\n    - {self.before}\n    + {self.after}"


def mutants_of(path: Path) -> Iterator[Callable[[], Mutant]]:
    """Every change of one file that this script knows how to make, to be made when it is drawn."""
    source = path.read_text()
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        for holder in ast.iter_child_nodes(node):
            holder.parent = node  # type: ignore[attr-defined]
    for node in list(ast.walk(tree)):
        if hasattr(node, "lineno") and not _is_not_run(node):
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
    return Mutant(path, node.lineno, *short, "\n".join(mutated) + "\n")


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


@cache
def tests_of(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests of a file, and the second set, as paths from the root."""
    stem = path.stem.strip("_").rstrip("s")
    listed = TESTS_OF.get(str(path.relative_to(SRC).with_suffix("")), ())
    named = sorted(
        test
        for test in (ROOT / "tests").rglob("test_*.py")
        if stem and test.stem.removeprefix("test_").startswith(stem)
    )
    own = [str(test.relative_to(ROOT)) for test in named if test.parent.name == path.parent.name]
    own += [f"tests/{name}" for name in listed]
    own += [str(test.relative_to(ROOT)) for test in named]
    second = [f"tests/{name}" for name in SECOND_SET]
    return tuple(dict.fromkeys(own)), tuple(name for name in second if name not in own)


_running: set[Any] = set()  # the processes that run tests


def noticed_by(mutant: Mutant) -> str | None:
    """The test that fails with the change and passes without it, or what else it leads to."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copied)
        (copied / mutant.path.relative_to(ROOT / "src")).write_text(mutant.source)
        for tests in tests_of(mutant.path):
            for test in failures(copied, tests):
                if test is None:
                    return "a crash, or a test that hangs"
                if passes_unchanged(test):
                    return test
    return None


@cache
def passes_unchanged(test: str) -> bool:
    """Whether a test passes on the source as it is."""
    passed = not any(True for _ in failures(ROOT / "src", (test,)))
    if not passed:
        print(f"fails on the source as it is: {test}", flush=True)
    return passed


def failures(source: Path, tests: Sequence[str]) -> Iterator[str | None]:
    """The tests that fail on a source, as they do, and None if they do not come to an end.

    They run in a process that has torch already, for as long as the caller asks for more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(str(source), tuple(tests), theirs))
    process.start()
    _running.add(process)
    theirs.close()
    try:
        while ours.poll(LIMIT_S):
            name, outcome = ours.recv()
            if name is None:
                if outcome not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                    yield None
                return
            if outcome == "failed":
                yield name
        yield None
    except EOFError:  # it crashed
        yield None
    finally:
        _kill_group(process)
        process.join()
        _running.discard(process)


def _kill_group(process: Any) -> None:
    """End what tests may have started and left, and the process itself if it hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _in_process(source: str, arguments: tuple[str, ...], pipe: Connection) -> None:
    os.setpgrp()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    os.chdir(ROOT)
    sys.path.insert(0, source)
    os.environ.update(PYTHONPATH=source, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    # Hypothesis's profile for servers: the same examples each time, no deadline, nothing kept.
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=ci"]
    code = pytest.main([*options, *arguments], plugins=[_Reporter(pipe)])
    pipe.send((None, int(code)))


class _Reporter:
    """Tells the process that waits how each test went."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pipe.send((report.nodeid, report.outcome))


def main(arguments: list[str] | None = None) -> int:
    """Draw changes, try them, print those that no test noticed, and the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=date.today().toordinal())
    parser.add_argument("--only", action="append", help="this file or folder below src/hookline")
    parser.add_argument("--all", action="store_true", help="every change of the files, no draw")
    parser.add_argument(
        "--verbose", action="store_true", help="also print what was noticed, by what"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    files = [path for name in options.only or ROOMS for path in _files(SRC / name)]
    drawn = [make for path in files for make in mutants_of(path)]
    if not options.all:
        drawn = random.Random(options.seed).sample(drawn, min(options.n, len(drawn)))
    found = [make() for make in drawn]
    n_noticed = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for mutant, test in zip(found, pool.map(noticed_by, found), strict=True):
                n_noticed += test is not None
                if test is None:
                    print(f"survived: {mutant}", flush=True)
                elif options.verbose:
                    print(f"noticed: {mutant}\n    by {test}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                _kill_group(process)
    print(f"seed {options.seed}: {n_noticed} of {len(found)} changes were noticed")
    return 0 if n_noticed >= 0.9 * len(found) else 1


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
