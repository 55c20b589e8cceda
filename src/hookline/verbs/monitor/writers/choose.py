"""Choose the writers for the argument `to=` of `hl.monitor`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hookline.engine.pytree import describe
from hookline.errors import AttachError
from hookline.files.folder_or_url import as_local_path
from hookline.verbs.monitor.writers.files import FunctionWriter, JsonLinesWriter, RunWriter
from hookline.verbs.monitor.writers.lightning import make_lightning_writer
from hookline.verbs.monitor.writers.mlflow import MlflowWriter
from hookline.verbs.monitor.writers.parquet import ParquetWriter
from hookline.verbs.monitor.writers.protocol import ReportWriter
from hookline.verbs.monitor.writers.tensorboard import TensorBoardWriter
from hookline.verbs.monitor.writers.wandb import WandbWriter

# What makes the writer for objects of a class, by the class's package and name. No logger is
# imported for this.
_BY_CLASS: dict[tuple[str, str], Callable[[Any], ReportWriter]] = {
    ("torch", "SummaryWriter"): TensorBoardWriter,
    ("wandb", "Run"): WandbWriter,
    ("mlflow", "Run"): MlflowWriter.of_run,
    ("lightning", "Logger"): make_lightning_writer,
    ("pytorch_lightning", "Logger"): make_lightning_writer,
}
_BY_MODULE: dict[str, Callable[[Any], ReportWriter]] = {
    "wandb": WandbWriter.of_module,
    "mlflow": lambda _: MlflowWriter(None),
}

# Names of loggers that another argument, such as transformers' `report_to=`, takes as text.
_BY_NAME = {"wandb": "wandb.init()", "tensorboard": "SummaryWriter('tb')", "mlflow": "mlflow"}

# Endings of files that hookline does not write. Others may be those of a folder: "runs/v1.5".
_OTHER_FILES = frozenset(
    {
        ".bin", ".csv", ".db", ".feather", ".gz", ".h5", ".html", ".json", ".log", ".npy", ".npz",
        ".pkl", ".pt", ".pth", ".safetensors", ".sqlite", ".tsv", ".txt", ".xlsx", ".yaml", ".yml",
        ".zip",
    }
)  # fmt: skip


def writers_for(to: Any) -> list[ReportWriter]:
    """Return the writers for `to=`; none for None.

    Raises:
        AttachError: nothing can be written to an object of this kind, or to a file of this ending.
        FolderError: a folder cannot be used.
    """
    if to is None:
        return []
    if isinstance(to, list | tuple):
        return [writer for part in to for writer in writers_for(part)]
    return [_make_writer(to)]


def _make_writer(to: Any) -> ReportWriter:
    if isinstance(to, str) and to.lower() in _BY_NAME:
        raise AttachError(
            f"to= must be the logger itself, got its name {to!r}, which would be a folder."
            f"\nGive to={_BY_NAME[to.lower()]}, or for a folder of this name to={'./' + to!r}."
        )
    if isinstance(to, str | os.PathLike):
        return _make_file_writer(as_local_path(to).absolute())  # the working directory may change
    make = _find_maker(to)
    if make is not None:
        return make(to)
    if isinstance(to, ReportWriter) and not isinstance(to, type):
        return to
    if callable(to) and not isinstance(to, type):
        return FunctionWriter(to)
    raise AttachError(
        f"to= must be a folder, a file, a logger, a function or a list, got"
        f" {describe.in_words(to)}."
        "\nGive to='runs/1', to=SummaryWriter('tb'), to=wandb.run, or a function of"
        " (step, numbers)."
    )


def _make_file_writer(path: Path) -> ReportWriter:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return JsonLinesWriter(path)
    if suffix == ".parquet":
        return ParquetWriter(path)
    if suffix in _OTHER_FILES and not path.is_dir():
        raise AttachError(
            "to= must be a folder, or a file that ends in .jsonl or .parquet, got"
            f" {str(path)!r}.\nGive to={str(path.with_suffix('.jsonl'))!r}, or a folder:"
            f" to={str(path.with_suffix(''))!r}."
        )
    return RunWriter(path)


def _find_maker(to: Any) -> Callable[[Any], ReportWriter] | None:
    if isinstance(to, ModuleType):
        return _BY_MODULE.get(to.__name__)
    for kind in type(to).__mro__:
        make = _BY_CLASS.get((kind.__module__.partition(".")[0], kind.__name__))
        if make is not None:
            return make
    return None
