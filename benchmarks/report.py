"""What was measured, as a table to read; and the machine on which it was."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch

import hookline
from benchmarks.timing import Result, Spread

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
        "load": round(os.getloadavg()[0], 1),  # of the minute before
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
    held = result.number_against_target()
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
    for name in _ours_first(result):
        spread = result.spread(name)
        line = f"  {name:{width}}  {amount(result, spread.median):>12}"
        for base in dict.fromkeys(("bare", result.base)):
            ratio = result.ratio(name, base) if base is not None else None
            if ratio is not None and name != base:
                line += f"  {_ratio_text(ratio)} x {base}"
        lines.append(line)
    lines += [f"  {name:{width}}  skipped: {why}" for name, why in result.skipped.items()]
    target = f"{result.target} x {result.base}" if result.base else amount(result, result.target)
    lines.append(f"  target: {target}: {verdict(result)}")
    return "\n".join([*lines, *(f"  note: {note}" for note in result.notes)])


def _ratio_text(ratio: Spread) -> str:
    return f"{ratio.median:7.3f} [{ratio.interval[0]:.3f}, {ratio.interval[1]:.3f}]"


def amount(result: Result, value: float) -> str:
    if result.unit == "B":
        return f"{value / 1e6:.3f} MB"
    if result.unit == "s":
        return f"{1000 * value:.3f} ms"
    return f"{1e6 * value:.2f} µs"


def _ours_first(result: Result) -> list[str]:
    """Ours first, then the others by name."""
    others = sorted(name for name in result.seconds if name not in _OURS)
    return [name for name in _OURS if name in result.seconds] + others
