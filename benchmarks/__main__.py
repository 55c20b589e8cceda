"""`python -m benchmarks`: measure all rows, print them, and keep them in `benchmarks/results/`."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from time import monotonic

import torch

from benchmarks import history, report, tables
from benchmarks.models import Placement
from benchmarks.rows import ROWS, measure
from benchmarks.timing import CLOCKS, Plan


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write. The status is 0 also where a target is missed: a table is no test."""
    options = _parse(arguments)
    # Fixed, so that runs compare; one, so that a neighbour on the other cores disturbs least.
    torch.set_num_threads(options.threads)
    Placement.device = torch.device(options.device)
    clock = "device" if Placement.device.type == "cuda" else options.clock
    globs = options.only or ["*"]
    rows = [row for row in ROWS if any(fnmatch.fnmatchcase(row.name, glob) for glob in globs)]
    if not rows:
        print(f"no row is called {', '.join(globs)}; the rows are:", file=sys.stderr)
        print("\n".join(f"  {row.name}" for row in ROWS), file=sys.stderr)
        return 2
    about = report.machine(clock, Placement.device)
    print(
        f"{about['processor']}, {about['cores']} cores, torch on {about['threads']} threads,"
        f" models on {about['device']};"
        f" torch {about['torch']}, hookline {about['hookline']}, Python {about['python']}"
    )
    for row in rows:
        rounds = options.rounds or (row.quick_rounds if options.quick else row.rounds)
        start = monotonic()
        result = measure(row, Plan(rounds, CLOCKS[clock]))
        print(f"\n{report.as_text(result)}")
        print(f"  {rounds} rounds, {monotonic() - start:.0f} s", flush=True)
        if not options.quick:  # each at once: an interrupt loses no row that is measured
            path = history.save_result(result, about, str(options.rounds or "full"))
    if options.quick:  # few rounds say whether it runs, and are not kept
        return 0
    history.write()
    tables.write()
    print(f"\nwritten: {path.relative_to(history.HERE.parent)}, and the tables of the pages")
    kept = history.files()
    newest = next(file for file in kept if path.name.startswith(f"{file['hookline']}-"))
    for line in history.regressions(newest, kept):
        print(f"slower than before: {line}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this row alone; a glob; may be repeated"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="so many rounds of each row")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="for torch; default 1")
    parser.add_argument("--device", default="cpu", help="where models run: cpu (default) or cuda")
    parser.add_argument(
        "--clock",
        choices=[name for name in CLOCKS if name != "device"],
        default="wall",
        help="cpu: processor time, for a machine that others use too; default wall",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
