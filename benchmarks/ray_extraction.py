"""Extracting in several processes: what does Ray cost, against processes that know of no other?"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch
from torch import nn

import hookline as hl
from benchmarks.models import Case
from benchmarks.timing import Clock, Contender, Measure, Plan, Result, run_rounds

_SPAWN = multiprocessing.get_context("spawn")
_N = 2  # processes


def ray_row(
    make_case: Callable[[], Case],
    site: str,
    size: tuple[int, int],
    title: str,
    target: float,
) -> Callable[[str, Plan], Result]:
    """A row: two processes make shards; the seconds from the first shard to the last.

    Args:
        make_case: makes the model and a batch, in each process.
        site: what is stored.
        size: the number of shards, a multiple of two, and the batches of a shard.
        title: the row in words.
        target: at most this ratio.
    """

    def measure(name: str, plan: Plan) -> Result:
        result = Result(name, title, "hand-written", target)
        result.notes.append(
            f"{size[0]} shards of {size[1]} batches; from the first shard on disk to the last"
        )
        job = (make_case, site, size)
        contenders = [
            Contender(
                "hand-written",
                "two processes, half the data each",
                _time_in_processes(_plain, job, result, _N),
            )
        ]
        if importlib.util.find_spec("ray") is None:
            result.skipped["hookline"] = "ray is not installed"
        else:
            how = 'hl.extract(engine="ray"), two actors'
            contenders.append(
                Contender("hookline", how, _time_in_processes(_on_ray, job, result, 1))
            )
        # Other processes do the work: their time is wall time.
        return run_rounds(result, contenders, Plan(plan.rounds, perf_counter))

    return measure


def _time_in_processes(work: Callable[..., None], job: Any, result: Result, n: int) -> Measure:
    """Run a function in so many fresh processes at once. The first time warms up: 4 shards."""
    warmed = False

    def measure(calls: int, clock: Clock) -> float:
        nonlocal warmed
        make_case, site, (n_shards, n_batches) = job
        size, warmed = (n_shards if warmed else 4, n_batches), True
        with tempfile.TemporaryDirectory(prefix="hookline-engines-") as base:
            barrier = _SPAWN.Barrier(n)
            processes = [
                _SPAWN.Process(target=work, args=(rank, barrier, Path(base), make_case, site, size))
                for rank in range(n)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise RuntimeError(f"{work.__name__} failed")
            begun = float((Path(base) / "begun").read_text())
            written = sorted(path.stat().st_mtime for path in Path(base).glob("*/shard-*"))
            assert len(written) == size[0]
        what = "two actors of Ray" if work is _on_ray else "two processes"
        note = f"start-up, to the first shard: {what}"
        result.notes[1:] = [one for one in result.notes[1:] if not one.startswith(note)]
        result.notes.append(f"{note} {written[0] - begun:.1f} s")
        return written[-1] - written[0]

    return measure


def _data(make_case: Callable[[], Case], n_batches: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.set_num_threads(1)
    case = make_case()
    data = case.inputs.repeat(n_batches, *[1] * (case.inputs.ndim - 1))
    return case.model, {"data": data, "batch_size": len(case.inputs), "progress": False}


def _shard_bytes(model: nn.Module, given: dict[str, Any], site: str, n_batches: int) -> int:
    batch = given["data"][: given["batch_size"]]
    value = hl.features(model, batch, site)[site]
    first = value[0] if isinstance(value, tuple) else value
    return first.nbytes * n_batches


def _plain(
    rank: int,
    barrier: Any,
    base: Path,
    make_case: Callable[[], Case],
    site: str,
    size: tuple[int, int],
) -> None:
    model, given = _data(make_case, size[0] * size[1] // _N)
    n_bytes = _shard_bytes(model, given, site, size[1])
    barrier.wait()
    if rank == 0:
        (base / "begun").write_text(repr(time()))
    hl.extract(model, selector=site, to=base / str(rank), shard_bytes=n_bytes, **given)


def _on_ray(
    rank: int,
    barrier: Any,
    base: Path,
    make_case: Callable[[], Case],
    site: str,
    size: tuple[int, int],
) -> None:
    import ray

    model, given = _data(make_case, size[0] * size[1])
    n_bytes = _shard_bytes(model, given, site, size[1])
    (base / "begun").write_text(repr(time()))
    with contextlib.redirect_stderr(io.StringIO()):
        # Two actors of a thread each, and the CPU that hookline leaves free.
        ray.init("local", num_cpus=_N + 1, include_dashboard=False, log_to_driver=False)
    hl.extract(model, selector=site, to=base / "ray", shard_bytes=n_bytes, engine="ray", **given)
    ray.shutdown()
