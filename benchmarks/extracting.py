"""Extracting a data set to disk: how many rows a second, against the bare forward loop?

Wall time: values are written in a thread while the model runs on, and the last ones are waited for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from benchmarks.models import Case
from benchmarks.timing import (
    Clock,
    Contender,
    Measure,
    Plan,
    Result,
    device_clock,
    run_rounds,
)


def extracting_row(
    make_case: Callable[[], Case], sites: list[str], n_batches: int, title: str, target: float
) -> Callable[[str, Plan], Result]:
    """A row: run a model over a data set and store some sites; seconds for all of it."""

    def measure(name: str, plan: Plan) -> Result:
        case = make_case()
        n_items = n_batches * len(case.inputs)
        loader = DataLoader(
            TensorDataset(case.inputs.repeat(n_batches, *[1] * (case.inputs.ndim - 1))),
            batch_size=len(case.inputs),
        )
        result = Result(name, title, "bare", target)
        result.notes.append(f"{n_items} items in {n_batches} batches; wall time, drained to disk")
        contenders = [
            Contender("bare", "for batch in loader: model(batch)", _bare(case.model, loader)),
            Contender("hookline", "hl.extract", _extract(case.model, loader, sites, result)),
        ]
        clock = plan.clock if plan.clock is device_clock else perf_counter
        run_rounds(result, contenders, Plan(plan.rounds, clock))
        result.notes.append(_disk_speed_note())
        return result

    return measure


def _bare(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        start = clock()
        with torch.no_grad():
            for batch in loader:
                model(batch[0])
        return clock() - start

    return measure


def _extract(
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], sites: list[str], result: Result
) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        base = Path(tempfile.mkdtemp(prefix="hookline-extract-"))
        try:
            start = clock()
            store = hl.extract(
                model, loader, sites, base / "store", inputs=lambda batch: batch[0], progress=False
            )
            taken = clock() - start
            n_bytes = sum(path.stat().st_size for path in (base / "store").iterdir())
            result.notes[1:] = [f"{len(store)} items, {n_bytes / 2**20:.1f} MiB in the store"]
        finally:
            shutil.rmtree(base)
        return taken

    return measure


def _disk_speed_note() -> str:
    """Write and sync 256 MiB, as a shard is: what the disk takes by itself."""
    data = torch.zeros(2**26)
    with tempfile.NamedTemporaryFile() as file:
        start = perf_counter()
        file.write(data.numpy().data)
        file.flush()
        os.fsync(file.fileno())
        taken = perf_counter() - start
    return f"the disk: {data.nbytes / taken / 1e6:.0f} MB/s, written and synced"
