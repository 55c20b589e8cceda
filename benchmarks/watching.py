"""`python -m benchmarks.watching`: are the times that `hl.watch` prints those of the model alone?

ResNet-50, one image of 224 x 224. Bare is its forward written out by hand, with the clock read
around each part and no hook anywhere; runs of both alternate. What a part took is compared within a
round, and the median over the rounds is what counts.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks.timing import CLOCKS, Clock
from benchmarks.torchvision_import import import_torchvision
from hookline.util import stopwatch

_ROOT = "(root)"
_BOUND = 0.1  # of a time that is printed without a `~`
_STAGES = ("layer1", "layer2", "layer3", "layer4")
_LINE = re.compile(r"^ *(\S+) .*  (~?)([\d.]+) ms$")

Times = dict[str, float]


class Bare:
    """The forward of a ResNet-50, each part of it timed once, at its first call."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self.model = model
        self.clock = clock
        self.times: Times = {}

    def run(self, x: Tensor) -> Times:
        """Run it, and return the seconds of each part."""
        self.times = {}
        model, start = self.model, self.clock()
        for name in ("conv1", "bn1", "relu", "maxpool"):
            x = self._part(name, getattr(model, name), x)
        for stage in _STAGES:
            began = self.clock()
            for number, block in enumerate(getattr(model, stage)):
                x = self._block(f"{stage}.{number}", block, x)
            self.times[stage] = self.clock() - began
        x = torch.flatten(self._part("avgpool", model.avgpool, x), 1)
        self._part("fc", model.fc, x)
        self.times[_ROOT] = self.clock() - start
        return self.times

    def _block(self, path: str, block: Any, x: Tensor) -> Tensor:
        began = self.clock()
        y = x
        for name in ("conv1", "bn1", "relu", "conv2", "bn2", "", "conv3", "bn3"):
            y = self._part(f"{path}.{name}", getattr(block, name), y) if name else block.relu(y)
        if block.downsample is not None:
            x = self._part(f"{path}.downsample", block.downsample, x)
        y += x
        y = block.relu(y)
        self.times[path] = self.clock() - began
        return y

    def _part(self, path: str, module: nn.Module, x: Tensor) -> Tensor:
        began = self.clock()
        y: Tensor = module(x)
        self.times[path] = self.clock() - began
        return y


def watched(model: nn.Module, x: Tensor) -> tuple[Times, set[str], float]:
    """Run a model under `hl.watch`, and read what was printed.

    Returns:
        The seconds of the first call of each module, the modules whose time is printed as exact,
        and the seconds of all leaves together.
    """
    printed = io.StringIO()
    with hl.watch(model, file=printed):
        model(x)
    leaves = {name for name, module in model.named_modules() if not any(module.children())}
    times: Times = {}
    exact: set[str] = set()
    total = 0.0
    for found in filter(None, map(_LINE.match, printed.getvalue().splitlines())):
        path, about, ms = found.groups()
        if path not in times:
            times[path] = float(ms) / 1e3
            if not about:
                exact.add(path)
        total += float(ms) / 1e3 if path in leaves else 0.0
    return times, exact, total


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. The status is 1 if a time without a `~` is further off than a tenth."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--grad", action="store_true", help="with gradients on")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a busy machine")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = CLOCKS[options.clock]
    stopwatch.STOPWATCH._clock = clock  # a process of its own: nothing else is timed in it
    model = import_torchvision().models.resnet50().eval()
    bare, x = Bare(model, clock), torch.randn(1, 3, 224, 224)
    rounds: list[tuple[Times, Times, set[str], float]] = []
    with torch.set_grad_enabled(options.grad):
        for _ in range(options.rounds + 2):
            rounds.append((dict(bare.run(x)), *watched(model, x)))
    del rounds[:2]  # warm-up
    return _report(rounds)


def _report(rounds: list[tuple[Times, Times, set[str], float]]) -> int:
    paths = [path for path in rounds[0][0] if path in rounds[0][1]]
    ratios = {
        path: statistics.median(seen[path] / bare[path] for bare, seen, _, _ in rounds)
        for path in paths
    }
    # Printed without a `~` in most of the rounds.
    exact = {p for p in paths if 2 * sum(p in named for _, _, named, _ in rounds) > len(rounds)}
    print(f"ResNet-50, {len(rounds)} rounds: the time that hl.watch prints, by that of a bare run")
    root = statistics.median(bare[_ROOT] for bare, _, _, _ in rounds)
    leaves = statistics.median(total / bare[_ROOT] for bare, _, _, total in rounds)
    print(f"  {_ROOT} {ratios[_ROOT]:.3f} (bare {root * 1e3:.1f} ms); sum of leaves {leaves:.3f}")
    print("  " + "  ".join(f"{stage} {ratios[stage]:.3f}" for stage in _STAGES))
    groups = {
        "blocks": [path for path in paths if re.fullmatch(r"layer\d\.\d", path)],
        "leaves": [path for path in paths if path not in (_ROOT, *_STAGES)
                   and not re.fullmatch(r"layer\d\.\d", path)],
    }  # fmt: skip
    for name, members in groups.items():
        for what, chosen in (
            ("exact", [path for path in members if path in exact]),
            ("with a ~", [path for path in members if path not in exact]),
        ):
            if chosen:
                found = sorted(ratios[path] for path in chosen)
                print(
                    f"  {name}, {what}: {len(chosen)}, median {statistics.median(found):.3f},"
                    f" from {found[0]:.3f} to {found[-1]:.3f}"
                )
    wrong = [path for path in paths if path in exact and abs(ratios[path] - 1) > _BOUND]
    for path in wrong:
        print(f"  further off than {_BOUND:.0%}: {path} {ratios[path]:.3f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
