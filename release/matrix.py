"""Run a selection of the tests on other versions, and keep what came of it: `make matrix`.

    python release/matrix.py                 run each environment that this machine can make
    python release/matrix.py --only "py313*" run those whose names match; may be repeated
    python release/matrix.py --short         run a tenth of the tests: for a busy machine
    python release/matrix.py --table         write the table in docs/where-it-works.md anew

The environments stay in `.venv-matrix/`, each in a folder of its name: one that is there is used as
it is. A build of torch for CUDA brings 4 GB of libraries; where an index of CPU builds is reached,
name it in PIP_EXTRA_INDEX_URL. An environment whose Python this machine lacks is left out, and its
last result stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv-matrix"
RESULTS = ROOT / "release" / "tested.json"
PAGE = ROOT / "docs" / "where-it-works.md"
BEGIN, END = "<!-- the table: made by release/matrix.py -->\n", "<!-- end -->\n"

# What hangs on versions most: hooks, regimes, recordings, edits; then compiled code.
Selections = tuple[tuple[str, ...], ...]
QUICK = "not compiles and not processes and not slow"
COMPILED = "compiles and not processes and not slow"
SELECTIONS = (
    (QUICK, "tests/engine", "tests/regimes", "tests/recordings", "tests/verbs/record",
     "tests/verbs/edit", "tests/verbs/attach", "tests/verbs/check", "tests/test_kept_folders.py"),
    (COMPILED, "tests/engine/operations", "tests/engine/torch_private", "tests/engine/report",
     "tests/engine/pytree", "tests/engine/line/test_compile_support.py",
     "tests/regimes/test_compile_structures.py",
     "tests/verbs/edit/test_compiled_edits.py", "tests/verbs/check/test_planted.py"),
)  # fmt: skip
# The part of it that breaks first: private names of torch, operations, caches of transformers.
SHORT = (
    (QUICK, "tests/engine/torch_private", "tests/engine/operations",
     "tests/regimes/test_transformers.py", "tests/verbs/edit/test_steps_and_tokens.py",
     "tests/test_kept_folders.py"),
)  # fmt: skip
PACKAGES = (
    "pytest", "hypothesis", "torchvision", "timm", "torchao", "matplotlib", "pillow", "jinja2",
    "pandas", "pyarrow",
)  # fmt: skip
TOLD = ("torch", "numpy", "transformers")


@dataclasses.dataclass(frozen=True)
class Environment:
    """Versions that are tested together."""

    python: str
    torch: str
    numpy: str
    transformers: str

    @property
    def name(self) -> str:
        """Return the name of the folder, as in "py313-torch2.14.1"."""
        return f"py{self.python.replace('.', '')}-torch{self.torch}"

    @property
    def executable(self) -> Path:
        """Return the environment's Python."""
        return PLACE / self.name / "bin" / "python"

    def make(self) -> None:
        """Make the environment, unless it is there.

        Raises:
            MatrixError: this machine has no such Python, or pip cannot install a version.
        """
        if self.executable.exists():
            return
        base = next(interpreters(self.python), None)
        if base is None:
            raise MatrixError(f"this machine has no Python {self.python}")
        pins = [f"{name}=={getattr(self, name)}" for name in TOLD]
        pip = [str(self.executable), "-m", "pip", "install", "--quiet", "--editable", str(ROOT)]
        for command in ([base, "-m", "venv", str(PLACE / self.name)], [*pip, *pins, *PACKAGES]):
            if subprocess.run(command, check=False).returncode:
                shutil.rmtree(PLACE / self.name, ignore_errors=True)
                raise MatrixError(f"{' '.join(command[:3])} … failed")

    def versions(self) -> dict[str, str]:
        """Return the versions that are installed.

        Raises:
            MatrixError: they are others than those of the environment.
        """
        program = (
            "import json, platform, importlib.metadata as m\n"
            f"versions = {{name: m.version(name) for name in {TOLD}}}\n"
            "print(json.dumps({'python': platform.python_version(), **versions}))"
        )
        done = subprocess.run([self.executable, "-c", program], capture_output=True, check=True)
        versions: dict[str, str] = json.loads(done.stdout)
        for name in ("python", *TOLD):
            wanted = getattr(self, name)
            if not re.match(rf"{re.escape(wanted)}(?!\d)", versions[name]):
                raise MatrixError(
                    f"{PLACE / self.name} must have {name} {wanted}, got {versions[name]}"
                    f"\nRemove the folder: it is made anew."
                )
        return versions

    def run(self, selections: Selections) -> dict[str, Any]:
        """Run tests; return what came of it, as it is kept."""
        versions = self.versions()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as place:
            reports = []
            for number, (marks, *paths) in enumerate(selections):
                reports.append(Path(place, f"{number}.xml"))
                command = [self.executable, "-m", "pytest", "-m", marks, "--show-capture=no"]
                command += ["--tb=short", f"--junitxml={reports[-1]}", "-p", "no:cacheprovider"]
                done = subprocess.run([*command, *paths], cwd=ROOT, env=environment, check=False)
                if done.returncode not in (0, 1) or not reports[-1].exists():  # 1: a test failed
                    raise MatrixError(f"pytest ended with {done.returncode}, and ran no tests")
            outcome = read_reports(reports)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "name": self.name,
            "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hookline": re.search(r'VERSION = "(.*)"', _version_text())[1],
            "system": f"{platform.system()} {platform.machine()}",
            "versions": versions,
            "selection": [f'pytest -m "{m}" {" ".join(paths)}' for m, *paths in selections],
            "cpu_seconds": round(seconds),
            **outcome,
        }


# The oldest torch with the older numpy, then each version of torch, on other Pythons.
ENVIRONMENTS = (
    Environment("3.11", "2.11.0", "1.26.4", "5.24.0"),
    Environment("3.12", "2.12.1", "2.5.5", "5.24.0"),
    Environment("3.11", "2.13.0", "2.4.6", "5.3.0"),  # the oldest transformers of the extra
    Environment("3.13", "2.14.1", "2.5.5", "5.24.0"),
    Environment("3.14", "2.14.1", "2.5.5", "5.24.0"),
)


class MatrixError(Exception):
    """An environment cannot be made or run here."""


def interpreters(version: str) -> Iterator[str]:
    """Yield the Pythons of a version on this machine that start."""
    candidates = [shutil.which(f"python{version}")]
    candidates += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in filter(None, candidates):
        # A shim of pyenv is there also where its Python is not chosen.
        if not subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
            yield candidate


def read_reports(paths: list[Path]) -> dict[str, Any]:
    """Count reports of pytest in JUnit's format; name what failed, and why tests were skipped."""
    cases = [case for path in paths for case in ElementTree.parse(path).iter("testcase")]
    failed: set[str] = set()
    skipped: Counter[str] = Counter()
    n_passed = 0
    for case in cases:
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif skip is not None:
            skipped[skip.get("message", "").splitlines()[0]] += 1
        else:
            n_passed += 1
    return {"passed": n_passed, "failed": sorted(failed), "skipped": dict(sorted(skipped.items()))}


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of results, with what failed, what was skipped, and what was not run."""
    columns = (
        "torch",
        "Python",
        "transformers",
        "numpy",
        "day",
        "tests",
        "passed",
        "failed",
        "skipped",
    )
    chosen = _chosen(results)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in results:
        versions = result["versions"]
        cells = [versions[name] for name in ("torch", "python", "transformers", "numpy")]
        cells += [result["day"], f"selection {chosen.index(result['selection']) + 1}"]
        cells += [f"{result['passed']:,}", str(len(result["failed"]))]
        lines.append(f"| {' | '.join([*cells, str(sum(result['skipped'].values()))])} |")
    lines += ["", *_notes(results)]
    return "\n".join(lines) + "\n"


def _chosen(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the different selections, those of most commands first."""
    chosen = [result["selection"] for result in results]
    different = [commands for n, commands in enumerate(chosen) if commands not in chosen[:n]]
    return sorted(different, key=lambda commands: -len(commands))


def _notes(results: list[dict[str, Any]]) -> Iterator[str]:
    for number, commands in enumerate(_chosen(results), 1):
        yield f"- Selection {number}: {' and '.join(f'`{command}`' for command in commands)}."
    systems = dict.fromkeys(f"{one['system']}, hookline {one['hookline']}" for one in results)
    seconds = [result["cpu_seconds"] for result in results]
    if seconds:
        yield f"- On {'; '.join(systems)}; {min(seconds)} to {max(seconds)} s of CPU time each."
    for result in results:
        for test in result["failed"]:
            yield f"- Failed on torch {result['versions']['torch']}: `{test}`."
    reasons = Counter[str]()
    for result in results:
        reasons.update(result["skipped"])
    for reason, count in sorted(reasons.items()):
        yield f"- Skipped, {count} in all: {reason}."
    there = {result["name"] for result in results}
    for environment in ENVIRONMENTS:
        if environment.name not in there:
            yield f"- Not run yet: torch {environment.torch} on Python {environment.python}."


def page(text: str, results: list[dict[str, Any]]) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table(results) + "\n" + END + rest.partition(END)[2]


def kept() -> list[dict[str, Any]]:
    """Return the results that are kept, in the order of the environments."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []


def keep(result: dict[str, Any]) -> None:
    """Keep a result in place of the last one of such tests there, and write the page."""
    # Of a selection whose files have changed, the last result counts.
    results = {(row["name"], len(row["selection"])): row for row in [*kept(), result]}
    order = [environment.name for environment in ENVIRONMENTS]
    ordered = sorted(results.values(), key=lambda row: order.index(row["name"]))
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8"), ordered), "utf-8")


def _version_text() -> str:
    return (ROOT / "src" / "hookline" / "util" / "version.py").read_text("utf-8")


def main() -> int:
    """Run the environments; the status is 1 if a test failed, or none ran."""
    parser = argparse.ArgumentParser(description="Run the tests on other versions.")
    parser.add_argument("--only", action="append", metavar="GLOB", help="environments by name")
    parser.add_argument("--short", action="store_true", help="run the short selection")
    parser.add_argument("--table", action="store_true", help="only write the page anew")
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(page(PAGE.read_text("utf-8"), kept()), "utf-8")
        return 0
    globs = options.only or ["*"]
    counts = []
    for environment in ENVIRONMENTS:
        if not any(fnmatch.fnmatchcase(environment.name, glob) for glob in globs):
            continue
        try:
            environment.make()
            result = environment.run(SHORT if options.short else SELECTIONS)
        except MatrixError as error:
            print(f"{environment.name}: left out: {error}", flush=True)
            continue
        keep(result)
        counts.append(len(result["failed"]))
        print(f"{environment.name}: {result['passed']} passed, {counts[-1]} failed", flush=True)
    return 0 if counts and not any(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
