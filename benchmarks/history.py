"""Results of each version on each machine, kept in `results/`, and the table made of them.

`python -m benchmarks` keeps what it has measured; `python -m benchmarks.history` writes the table
of README.md anew. A row that was measured again takes the place of its older result.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import verdict
from benchmarks.timing import Result, Spread

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE / "README.md"
BEGIN, END = "<!-- the table: made by benchmarks/history.py -->\n", "<!-- end -->\n"

File = dict[str, Any]  # of one version on one machine: hookline, machine, rows by name


def save_result(result: Result, about: dict[str, Any], rounds: str) -> Path:
    """Keep a result in the file of this version and machine; return the file."""
    RESULTS.mkdir(exist_ok=True)
    machine = {name: about[name] for name in ("processor", "cores", "threads", "device")}
    words = f"{machine['processor']} {machine['device']}".lower()
    path = RESULTS / f"{about['hookline']}-{re.sub('[^a-z0-9]+', '-', words).strip('-')}.json"
    file = {"hookline": about["hookline"], "machine": machine, "rows": {}}
    if path.exists():
        file = json.loads(path.read_text("utf-8"))
    told = {name: about[name] for name in ("date", "clock", "load", "python", "torch")}
    file["rows"][result.name] = {**_row(result), **told, "rounds": rounds}
    # A line for each row, so that a change of one shows as one.
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in file["rows"].items()]
    head = json.dumps({**file, "rows": {}}).removesuffix("}}")
    path.write_text(head + "\n" + ",\n".join(lines) + "\n}}\n", "utf-8")
    return path


def _row(result: Result) -> dict[str, Any]:
    held = result.number_against_target()
    alone = "bare" if "bare" in result.seconds else result.base
    ratios = {name: result.ratio(name, alone) for name in result.seconds if alone is not None}
    return {
        "title": result.title,
        "base": result.base,
        "unit": "" if result.base else result.unit,
        "alone": alone,
        "measured_in": result.unit,
        "target": result.target,
        "verdict": verdict(result),
        "held": None if held is None else _numbers(held),
        "measured": {name: _numbers(result.spread(name)) for name in result.seconds},
        "ratios": {name: _numbers(ratio) for name, ratio in ratios.items() if ratio is not None},
        "notes": result.notes,
        "skipped": result.skipped,
    }


def _numbers(spread: Spread) -> list[float]:
    """Return the median and its interval, to four digits."""
    return [float(f"{number:.4g}") for number in (spread.median, *spread.interval)]


def files() -> list[File]:
    """Return all files, older versions first."""
    read = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(read, key=lambda file: [int(n) for n in file["hookline"].split(".")])


def regressions(file: File, all_files: Iterable[File]) -> list[str]:
    """Name the rows whose interval lies above that of the last version on the machine."""
    version = file["hookline"]
    before = [
        other
        for other in all_files
        if other["machine"] == file["machine"] and other["hookline"] != version
    ]
    lines = []
    for name, row in file["rows"].items():
        older = next((other for other in reversed(before) if name in other["rows"]), None)
        was = None if older is None else older["rows"][name]
        if was is None or not (was["held"] and row["held"]) or was["base"] != row["base"]:
            continue
        if row["held"][1] > was["held"][2] and row["clock"] == was["clock"]:
            lines.append(f"{name}: {_cell(was)} in {older['hookline']}, {_cell(row)} in {version}")
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None or row["held"] is None else median_text(row["held"], row["unit"])


def median_text(numbers: list[float], unit: str) -> str:
    """Return a median and its interval, or a number alone, to three digits."""
    of_seconds = (1, " s") if numbers[0] >= 1 else (1e-3, " ms")
    scale, sign = {"": (1, ""), "s": of_seconds, "B": (1e6, " MB")}.get(unit, (1e-6, " µs"))
    first, *interval = (f"{number / scale:.3g}" for number in numbers)
    return f"{first}{sign}" + (f" ({' to '.join(interval)})" if len({*interval}) > 1 else "")


def table(all_files: list[File]) -> str:
    """Return a table for each machine: a row that several versions have, a column a version."""
    parts = []
    machines = [file["machine"] for file in all_files]
    for machine in [m for number, m in enumerate(machines) if m not in machines[:number]]:
        here = [file for file in all_files if file["machine"] == machine]
        counts = Counter(name for file in here for name in file["rows"])
        names = [name for name, count in counts.items() if count > 1]
        if not names:
            continue
        lines = [
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} thread,"
            f" models on {machine['device']}:",
            "",
            f"| work | held against | {' | '.join(file['hookline'] for file in here)} | target |",
            "|---" * (len(here) + 3) + "|",
        ]
        for name in names:
            rows = [file["rows"].get(name) for file in here]
            last = next(row for row in reversed(rows) if row is not None)
            target = median_text([last["target"]], last["unit"])
            cells = [last["title"], last["base"] or "a limit", *map(_cell, rows)]
            lines.append(f"| {' | '.join(cells)} | ≤ {target}: {last['verdict']} |")
        measured = [row for file in here for name, row in file["rows"].items() if name in names]
        days = sorted({row["date"][:10] for row in measured})
        loads = [row["load"] for row in measured]
        clocks = sorted({row["clock"] for row in measured})
        lines += [
            "",
            f"Measured from {days[0]} to {days[-1]} (clock: {', '.join(clocks)}), at a load of"
            f" {min(loads)} to {max(loads)} by all programs.",
        ]
        slower = "; ".join(regressions(here[-1], here))
        lines += [
            "",
            f"Slower than before beyond both intervals, of {len(names)}: {slower or 'none'}.",
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def page(text: str, all_files: list[File]) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table(all_files) + "\n" + END + rest.partition(END)[2]


def write() -> None:
    """Write the table of README.md anew."""
    PAGE.write_text(page(PAGE.read_text("utf-8"), files()), "utf-8")


if __name__ == "__main__":
    write()
