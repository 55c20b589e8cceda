"""Saving a recording and looking its values up: what do the checksums and the checks cost?

"bare" is hookline without them: the same folder, written and read without looking at the bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import hookline as hl
from benchmarks.timing import Clock, Contender, Plan, Result, run_rounds
from hookline.files.safetensors_file import TensorFile

_WITHOUT = "hookline, without checksums"
_Guard = Callable[[], AbstractContextManager[object]]


def saving_row(n_values: int, size: int, title: str, target: float) -> Callable[..., Result]:
    """A row: save `n_values` tensors of so many float32, down to the disk; seconds a value."""

    def measure(name: str, plan: Plan) -> Result:
        run = _recorded(n_values, size)
        tensors = {str(one.number): one["0"] for one in run.passes}

        def by_hand(folder: Path) -> None:
            folder.mkdir()
            save_file(tensors, folder / "x")
            handle = os.open(folder / "x", os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

        result = Result(name, title, "bare", target, unit="s a value")
        contenders = [
            Contender("bare", _WITHOUT, _save(run.save, n_values, _unguarded)),
            Contender("hand-written", "safetensors.torch.save_file", _save(by_hand, n_values)),
            Contender("hookline", "run.save(folder)", _save(run.save, n_values)),
        ]
        return run_rounds(result, contenders, plan)

    return measure


def look_up_row(n_values: int, size: int, title: str, target: float) -> Callable[..., Result]:
    """A row: look all values up for the first time and sum each; seconds a value."""

    def measure(name: str, plan: Plan) -> Result:
        with tempfile.TemporaryDirectory() as base:
            folder = _recorded(n_values, size).save(Path(base) / "run")
            result = Result(name, title, "bare", target, unit="s a value")
            contenders = [
                Contender("bare", _WITHOUT, _look_up(folder, n_values, _unguarded)),
                Contender(
                    "hand-written", "safetensors.safe_open, get_tensor", _by_hand(folder, n_values)
                ),
                Contender("hookline", "hl.open(folder)[site]", _look_up(folder, n_values)),
            ]
            return run_rounds(result, contenders, plan)

    return measure


def stack_row(n_passes: int, size: int, title: str, target: float) -> Callable[..., Result]:
    """A row: stack the values that a site has in so many passes; seconds a value."""

    def measure(name: str, plan: Plan) -> Result:
        run = _recorded(n_passes, size)
        values = [one["0"] for one in run.passes]
        result = Result(name, title, None, target, unit="s a value")
        contenders = [
            Contender("hand-written", "torch.stack", _stack(lambda: torch.stack(values), n_passes)),
            Contender("hookline", "run.stack(site)", _stack(lambda: run.stack("0"), n_passes)),
        ]
        return run_rounds(result, contenders, plan)

    return measure


def _recorded(n_values: int, size: int) -> hl.Recording:
    model = nn.Sequential(nn.Identity())
    with hl.record(model, "0") as run:
        for number in range(n_values):
            model(torch.full((size,), float(number)))
    return run


@contextlib.contextmanager
def _unguarded() -> Iterator[None]:
    with (
        mock.patch("hookline.files.safetensors_file.checksum", _constant),
        mock.patch.object(TensorFile, "_verify_checksum", _constant),
    ):
        yield


def _constant(*_: object) -> str:
    return "0" * 16


def _save(
    save: Callable[[Path], object], n_values: int, guard: _Guard = contextlib.nullcontext
) -> Callable[[int, Clock], float]:
    def measure(calls: int, clock: Clock) -> float:
        folder = Path(tempfile.mkdtemp())
        try:
            with guard():
                start = clock()
                save(folder / "run")
                return (clock() - start) / n_values
        finally:
            shutil.rmtree(folder)

    return measure


def _look_up(
    folder: Path, n_values: int, guard: _Guard = contextlib.nullcontext
) -> Callable[[int, Clock], float]:
    def measure(calls: int, clock: Clock) -> float:
        with guard():
            passes = list(hl.open(folder).passes)
            start = clock()
            for one in passes:
                one["0"].sum()
            return (clock() - start) / n_values

    return measure


def _stack(stack: Callable[[], object], n_passes: int) -> Callable[[int, Clock], float]:
    def measure(calls: int, clock: Clock) -> float:
        start = clock()
        stack()
        return (clock() - start) / n_passes

    return measure


def _by_hand(folder: Path, n_values: int) -> Callable[[int, Clock], float]:
    def measure(calls: int, clock: Clock) -> float:
        (path,) = folder.glob("*.safetensors")
        with safe_open(path, framework="pt") as file:
            start = clock()
            for number in range(n_values):
                file.get_tensor(str(number)).sum()
            return (clock() - start) / n_values

    return measure
