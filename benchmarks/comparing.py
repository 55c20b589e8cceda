"""Comparing two recordings where every value differs, beside reading both.

"bare" looks all values of both up, which checks their bytes, and sums each. The folders are read
from the page cache, or from the disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

import hookline as hl
from benchmarks.timing import Clock, Contender, Plan, Result, run_rounds


def comparing_row(
    n_values: int, shape: tuple[int, int], title: str, target: float, *, is_cold: bool
) -> Callable[..., Result]:
    """A row: compare two recordings of `n_values` float32 tensors each; seconds a comparison."""

    def measure(name: str, plan: Plan) -> Result:
        with tempfile.TemporaryDirectory(prefix="hookline-comparing-") as base:
            folders = [
                _recording_of_random_values(n_values, shape, size).save(Path(base) / f"run-{size}")
                for size in (0.0, 1e-6)
            ]
            sites = [str(number) for number in range(n_values)]

            def read() -> None:
                for folder in folders:
                    run = hl.open(folder)
                    for site in sites:
                        run[site].sum()
                    run.release()

            def read_by_hand() -> None:
                for folder in folders:
                    for path in sorted(folder.glob("*.safetensors")):
                        with safe_open(path, framework="pt") as file:
                            for key in file.keys():  # noqa: SIM118
                                file.get_tensor(key).sum()

            def compare() -> None:
                comparison = hl.compare(*folders, tokens=None)
                assert comparison.counts["identical"] == 0
                assert len(comparison.rows) == n_values

            def timed(step: Callable[[], None]) -> Callable[[int, Clock], float]:
                def measure(calls: int, clock: Clock) -> float:
                    if is_cold:
                        _drop_from_page_cache(folders)
                    start = clock()
                    step()
                    return clock() - start

                return measure

            result = Result(name, title, "bare", target)
            contenders = [
                Contender("bare", "hl.open(folder)[site].sum() of both", timed(read)),
                Contender("hand-written", "safetensors.safe_open, sum", timed(read_by_hand)),
                Contender("hookline", "hl.compare(a, b)", timed(compare)),
            ]
            return run_rounds(result, contenders, plan)

    return measure


def _recording_of_random_values(
    n_values: int, shape: tuple[int, int], noise: float
) -> hl.Recording:
    model = nn.Sequential(*(nn.Identity() for _ in range(n_values)))
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]

    def made(value: object) -> torch.Tensor:
        number, other = (torch.randn(shape, generator=generator) for generator in generators)
        noisy: torch.Tensor = number + noise * other
        return noisy

    with hl.record(model, "*", keep=made) as run:
        model(torch.zeros(1))
    return run


def _drop_from_page_cache(folders: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in (path for folder in folders for path in folder.iterdir()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)  # what is not written yet stays
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
