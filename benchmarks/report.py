"""What was measured, as a table to read, a table for the README, and a file for programs."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import hookline
from benchmarks.timing import Result, Spread

RESULTS = Path(__file__).resolve().parent / "results"

_LIBRARIES = ("torchvision", "transformers", "nnsight", "captum", "tdhook", "numpy")
_OURS = ("bare", "hand-written", "hookline")


def machine(clock: str, device: torch.device) -> dict[str, Any]:
    """What the numbers depend on: processor, device, threads, versions."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "clock": clock,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hookline": hookline.__version__,
        "libraries": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def verdict(result: Result) -> str:
    """Whether the target was met, as far as the spread allows to say."""
    held = result.held()
    if held is None:
        return "not measured"
    low, high = held.interval
    if high <= result.target:
        return "met"
    if low > result.target:
        return "missed"
    return "met, narrowly" if held.median <= result.target else "missed, narrowly"


def as_text(result: Result) -> str:
    """One row in full: every contender with its ratios and their spread."""
    width = max((len(name) for name in (*result.seconds, *result.skipped)), default=0)
    lines = [f"{result.name}: {result.title}"]
    for name in _sorted(result):
        spread = result.spread(name)
        line = f"  {name:{width}}  {_amount(result, spread.median):>12}"
        for base in dict.fromkeys(("bare", result.base)):
            ratio = result.ratio(name, base) if base is not None else None
            if ratio is not None and name != base:
                line += f"  {_ratio_text(ratio)} x {base}"
        lines.append(line)
    lines += [f"  {name:{width}}  skipped: {why}" for name, why in result.skipped.items()]
    target = f"{result.target} x {result.base}" if result.base else _amount(result, result.target)
    lines.append(f"  target: {target}: {verdict(result)}")
    return "\n".join([*lines, *(f"  note: {note}" for note in result.notes)])


def _ratio_text(ratio: Spread) -> str:
    return f"{ratio.median:7.3f} [{ratio.interval[0]:.3f}, {ratio.interval[1]:.3f}]"


def _amount(result: Result, value: float) -> str:
    if result.unit == "s":
        return f"{1000 * value:.3f} ms"
    return f"{1e6 * value:.2f} µs"


def _sorted(result: Result) -> list[str]:
    """Ours first, then the others by name."""
    others = sorted(name for name in result.seconds if name not in _OURS)
    return [name for name in _OURS if name in result.seconds] + others


def as_markdown(results: list[Result], about: dict[str, Any]) -> str:
    """The README's table: ratios to the bare model, medians of interleaved rounds."""
    lines = [
        "| work | bare | hand-written | hookline | target | others |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [
            result.title,
            _amount(result, result.spread("bare").median) if "bare" in result.seconds else "-",
            _cell(result, "hand-written"),
            _cell(result, "hookline"),
            _target_cell(result),
            _others_cell(result),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    libraries = ", ".join(f"{name} {v}" for name, v in about["libraries"].items() if v)
    lines += [
        "",
        "Ratios to the bare model (x bare), medians over interleaved rounds of the ratio within a"
        f" round; eager mode, gradients only where a row says so; {about['clock']} time."
        f" {about['processor']}, {about['cores']} cores, torch on {about['threads']}"
        f" thread{'s' * (about['threads'] != 1)}, models on {about['device']};"
        f" Python {about['python']}, torch {about['torch']}, hookline {about['hookline']};"
        f" {libraries}. {about['date'][:10]}.",
    ]
    return "\n".join(lines) + "\n"


def _cell(result: Result, name: str) -> str:
    if name not in result.seconds:
        return "-"
    ratio = result.ratio(name, "bare")
    if ratio is None:
        return _amount(result, result.spread(name).median)
    text = f"{ratio.median:.2f}"
    if result.base is None:
        return f"{_amount(result, result.spread(name).median)} ({text} x bare)"
    against = result.ratio(name, result.base) if result.base else None
    if name == "hookline" and against is not None and result.base != "bare":
        low, high = against.quartiles
        text += (
            f" ({against.median:.3f} x {result.base}; half of the rounds {low:.2f} to {high:.2f})"
        )
    return text


def _target_cell(result: Result) -> str:
    limit = f"{result.target} x {result.base}" if result.base else _amount(result, result.target)
    return f"≤ {limit}: {verdict(result)}"


def _others_cell(result: Result) -> str:
    parts = []
    for name in _sorted(result):
        if not name.startswith(_OURS):
            ratio = result.ratio(name, "bare")
            value = f"{ratio.median:.2f}" if ratio else _amount(result, result.spread(name).median)
            parts.append(f"{name} {value}")
    parts += [f"{name} ({why})" for name, why in result.skipped.items()]
    return ", ".join(parts) or "-"


def as_data(results: list[Result], about: dict[str, Any], rounds: str) -> dict[str, Any]:
    """Everything, every round's time included."""
    return {
        "command": " ".join([Path(sys.executable).name, "-m", "benchmarks", *sys.argv[1:]]),
        "rounds": rounds,
        "machine": about,
        "rows": [_row_data(result) for result in results],
    }


def _row_data(result: Result) -> dict[str, Any]:
    data = dataclasses.asdict(result)
    data["verdict"] = verdict(result)
    data["summary"] = {
        name: {
            "measured": dataclasses.asdict(result.spread(name)),
            "ratios": {
                base: dataclasses.asdict(ratio)
                for base in ("bare", "hand-written")
                if (ratio := result.ratio(name, base)) is not None
            },
        }
        for name in result.seconds
    }
    return data


def write(results: list[Result], about: dict[str, Any], stem: str, rounds: str) -> list[Path]:
    """Write `STEM.json` and the Markdown table beside it; gives their paths."""
    RESULTS.mkdir(exist_ok=True)
    table = RESULTS / ("table.md" if stem == "latest" else f"{stem}.md")
    data = RESULTS / f"{stem}.json"
    table.write_text(as_markdown(results, about), encoding="utf-8")
    data.write_text(
        json.dumps(as_data(results, about, rounds), indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    return [data, table]
