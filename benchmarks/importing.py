"""`import hookline` on top of `import torch`, in a fresh Python; and the package's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from benchmarks.timing import Clock, Contender, Plan, Result, run_rounds

# Compiled modules in a folder of our own, filled by the warm-up: where Python may not write beside
# the sources, hookline would be compiled anew each time, and torch, long compiled, would not.
_COMPILED = tempfile.TemporaryDirectory(prefix="benchmarks-")

_ROOT = Path(__file__).resolve().parent.parent

# torchvision is imported the way the benchmarks do, because beside some builds of torch it must be.
_LINES = {
    "bare": "pass",
    "hookline": "import hookline",
    "with hl.record": "import hookline; hookline.record",  # a verb is imported on first use
    "torchvision": "from benchmarks.torchvision_import import import_torchvision as i; i()",
    "nnsight": "import nnsight",
    "captum": "import captum",
    "tdhook": "import tdhook",
}

_PROGRAM = """
import json, sys, time
clock = time.{clock}
start = clock()
import torch
middle, before = clock(), set(sys.modules)
{line}
end = clock()
added = sorted(set(sys.modules) - before)
print(json.dumps({{"torch": middle - start, "both": end - start, "added": added}}))
"""


def import_row(name: str, plan: Plan) -> Result:
    """The row of the table. What hookline's import adds is noted, so that a change shows why."""
    title = "`import hookline` on top of `import torch`"
    result = Result(name, title, "bare", 1.05)
    contenders = [
        Contender(
            who,
            "import torch" if who == "bare" else f"import torch; {line}",
            lambda _, clock, line=line: _import(line, clock)["both"],
            every=1 if who in ("bare", "hookline", "with hl.record") else 4,
        )
        for who, line in _LINES.items()
    ]
    run_rounds(result, contenders, plan)
    result.notes += _explain(plan.clock)
    return result


def size_row(name: str, plan: Plan) -> Result:
    """The size of the package's files, packed as in a wheel."""
    result = Result(name, "the package, packed", None, 1.6e6, unit="B")
    folder = _ROOT / "src" / "hookline"
    paths = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    ]
    texts = [path.read_bytes() for path in paths]
    packed = float(sum(len(zlib.compress(text)) for text in texts))
    result.notes.append(f"{len(texts)} files, unpacked {sum(map(len, texts)) / 1e6:.2f} MB")
    hookline = Contender("hookline", "all files but compiled ones", lambda _, __: packed)
    return run_rounds(result, [hookline], plan)


def _explain(clock: Clock) -> list[str]:
    """What the import of hookline brings with it, apart from hookline."""
    found = _import(_LINES["with hl.record"], clock)
    added = [name for name in found["added"] if name.partition(".")[0] != "hookline"]
    by_package: dict[str, list[str]] = {}
    for name in added:
        by_package.setdefault(name.partition(".")[0], []).append(name)
    from_torch = by_package.pop("torch", [])
    others = ", ".join(f"{top} ({len(names)})" for top, names in sorted(by_package.items()))
    own = len(found["added"]) - len(added)
    seconds = found["both"] - found["torch"]
    return [
        f"one import of hookline and hl.record: {1000 * seconds:.1f} ms after"
        f" {found['torch']:.2f} s of torch; {own} modules of its own",
        f"modules of torch that it adds: {', '.join(from_torch) or 'none'}",
        f"other packages that it adds (modules): {others or 'none'}",
    ]


def _import(line: str, clock: Clock) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": _COMPILED.name}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(line=line, clock=clock.__name__)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise ImportError(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found
