"""Change the source in one place, run the tests that should notice, and count how often they do.

    python tests/mutants.py                  # 60 changes, drawn by the day's number
    python tests/mutants.py --seed 7 --n 20  # others, or fewer
    python tests/mutants.py --only engine/passes.py --all

Each change is made in a copy of the source. The tests of the changed file run first: those whose
name begins as the file's does. If they all pass, a second set of broad and quick ones runs. A
change that no test notices is printed; either a test is missing, or the change makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "hookline"
ROOMS = ("engine", "verbs", "recordings")
SECOND_SET = (
    "engine/test_line.py", "engine/test_passes.py", "engine/test_gradient_taps.py",
    "engine/test_backward_taps.py", "verbs/test_record.py", "verbs/test_record_gradients.py",
    "verbs/test_edit.py", "verbs/test_edit_gradients.py", "verbs/test_clip.py",
    "recordings/test_recording.py", "recordings/test_folder.py", "test_random_models.py",
    "regimes/test_compile.py", "regimes/test_checkpoint.py", "regimes/test_threads.py",
    "regimes/test_modes.py", "regimes/test_distributed.py",
)  # fmt: skip
LIMIT_S = 240  # a change that hangs is noticed, too

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


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change of one file that this script knows how to make."""
    source = path.read_text()
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        for holder in ast.iter_child_nodes(node):
            holder.parent = node  # type: ignore[attr-defined]
    for node in list(ast.walk(tree)):
        if not hasattr(node, "lineno") or _is_not_run(node):
            continue
        for changed in _changes(node):
            statement = _statement(node)
            whole = copy.deepcopy(statement)
            target = _same_place(whole, statement, node)
            _replace(whole, target, changed)
            text = ast.unparse(ast.fix_missing_locations(whole))
            indent = " " * statement.col_offset
            new = [indent + line for line in text.splitlines()]
            mutated = [*lines[: statement.lineno - 1], *new, *lines[statement.end_lineno :]]
            before, after = ast.unparse(statement), text
            short = next(
                (
                    (a, b)
                    for a, b in zip(before.splitlines(), after.splitlines(), strict=False)
                    if a != b
                ),
                (before, after),
            )
            yield Mutant(path, node.lineno, *short, "\n".join(mutated) + "\n")


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
        case ast.If() | ast.While() | ast.IfExp():
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield _with(node, value=ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


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


def tests_of(path: Path) -> tuple[list[str], list[str]]:
    """The tests of a file, and the second set, as paths from the root."""
    stem = path.stem.strip("_").rstrip("s")
    own = sorted(
        str(test.relative_to(ROOT))
        for test in (ROOT / "tests").rglob("test_*.py")
        if stem and test.stem.removeprefix("test_").startswith(stem)
    )
    second = [f"tests/{name}" for name in SECOND_SET if (ROOT / "tests" / name).exists()]
    return own, [name for name in second if name not in own]


def is_killed(mutant: Mutant) -> bool:
    """Whether some test fails with the change in place."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copied)
        (copied / mutant.path.relative_to(ROOT / "src")).write_text(mutant.source)
        environment = {
            **os.environ, "PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        for tests in tests_of(mutant.path):
            if not tests:
                continue
            options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
            try:
                ran = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    timeout=LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return True
            if ran.returncode:
                return True
    return False


def main(arguments: list[str] | None = None) -> int:
    """Draw changes, try them, print those that no test noticed, and the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=date.today().toordinal())
    parser.add_argument("--only", action="append", help="this file or folder below src/hookline")
    parser.add_argument("--all", action="store_true", help="every change of the files, no draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    files = [path for name in options.only or ROOMS for path in _files(SRC / name)]
    found = [mutant for path in files for mutant in mutants_of(path)]
    if not options.all:
        found = random.Random(options.seed).sample(found, min(options.n, len(found)))
    with ThreadPoolExecutor(options.jobs) as pool:
        killed = []
        for mutant, was_killed in zip(found, pool.map(is_killed, found), strict=True):
            killed.append(was_killed)
            if not was_killed:
                print(f"survived: {mutant}", flush=True)
    print(f"seed {options.seed}: {sum(killed)} of {len(killed)} changes were noticed")
    return 0 if sum(killed) >= 0.9 * len(killed) else 1


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
