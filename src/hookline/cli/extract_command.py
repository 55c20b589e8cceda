"""The command `extract`: run a model over a data set, into a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hookline as hl
from hookline.data.array_files import OF_NUMPY, open_and_cast_arrays
from hookline.display.text import first_line
from hookline.errors import InputError, warn
from hookline.models import LoadedModel, load_demo_digits
from hookline.stores import Store
from hookline.util.local_paths import is_file


def extract_from_options(
    loaded: LoadedModel, data: str, at: list[str], to: str, options: dict[str, Any]
) -> Store:
    """Extract from a model and a data set that are given by name.

    Args:
        loaded: the model.
        data: a path as `hl.extract` takes it; for `demo:digits`: `demo`, its eight digits.
        at: the sites.
        to: the folder or URL of the store.
        options: options of `hl.extract`; `dtype` by its name.

    Raises:
        HooklineError: as `hl.extract` raises it.
    """
    if options["engine"] not in (None, "ray"):
        raise InputError(
            f"--engine must be ray, got {options['engine']}."
            "\nLeave it out to run here, or on the ranks of torchrun."
        )
    for name, least, usual in (("batch_size", 1, 32), ("workers", 0, 4)):
        if options[name] < least:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} must be at least {least}, got {options[name]}.\nGive {option} {usual}."
            )
    if options["dtype"] is not None:
        options = {**options, "dtype": _parse_dtype(options["dtype"])}
    return hl.extract(
        loaded.model,
        _open_data(loaded, data),
        at,
        to,
        preprocess=loaded.preprocess,
        tokenize=loaded.tokenize,
        **options,
    )


@contextmanager
def join_torchrun_group() -> Iterator[bool]:
    """Join the process group of `torchrun` for a while; yield whether this rank may print.

    A process that torchrun did not start has no group, and prints.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def move_to_device(loaded: LoadedModel, device: str | None) -> LoadedModel:
    """Move a model to a device; None is the GPU, if torch has one here.

    Raises:
        InputError: torch has no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded.model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device must be a device that torch has here, got {device!r}: {first_line(error)}."
            "\nGive cpu."
        ) from error
    return loaded


def _open_data(loaded: LoadedModel, data: str) -> Any:
    """Return what `hl.extract` takes; float64 of a file of NumPy as the model's float32."""
    if data == "demo" and loaded.name == "demo:digits":
        return load_demo_digits()[0]
    path = Path(os.path.expanduser(data)).absolute()
    if path.suffix.lower() in OF_NUMPY and is_file(path):
        content, is_converted = open_and_cast_arrays(path, loaded.model)
        if is_converted:
            if not (dist.is_initialized() and dist.get_rank()):
                warn(f"{path.name} holds float64: it is converted to the float32 of the model.")
            return content
    return Path(data)


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(
            f"--dtype must be a floating dtype of torch, got {name}."
            "\nGive float32, float16 or bfloat16."
        )
    return dtype
