"""Read files of arrays as arguments of a model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.errors import InputError
from hookline.models.checkpoints import read_tensors
from hookline.models.loaded import Batch, describe
from hookline.models.packages import in_short

SUFFIXES = (".npy", ".npz", ".pt", ".safetensors")


def read_arrays(path: Path, model: nn.Module) -> Batch:
    """Read a file of arrays: one array is the argument, several are keyword arguments.

        >>> np.save("x.npy", np.zeros((1, 3, 224, 224), np.float32))
        >>> read_arrays(Path("x.npy"), model).description
        'x.npy, 1x3x224x224 float32'

    Args:
        path: `.npy`, `.npz`, `.pt` (a tensor, a tuple or list of arguments, or a dict of keyword
            arguments) or `.safetensors`.
        model: the model. If its parameters are float32, numpy's float64 becomes float32, and the
            description says so. Nothing else is changed.

    Raises:
        InputError: the file is broken, needs unpickling, or holds a dtype that torch lacks.
    """
    suffix = path.suffix.lower()
    content = _read_numpy(path) if suffix in (".npy", ".npz") else read_tensors(path, InputError)
    if suffix in (".npz", ".safetensors"):
        content = next(iter(content.values())) if len(content) == 1 else content
    wants_float32 = _first_float_dtype(model) is torch.float32
    notes: list[str] = []

    def convert(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype == np.float64 and wants_float32:
            notes.append("float64 in the file")
            value = value.astype(np.float32)
        return _as_tensor(value, path)

    if isinstance(content, dict):
        kwargs = {str(key): convert(value) for key, value in content.items()}
        parts = [f"{key} {describe(value)}" for key, value in kwargs.items()]
        args: tuple[Any, ...] = ()
    else:
        values = content if isinstance(content, (tuple, list)) else (content,)
        args = tuple(convert(value) for value in values)
        kwargs, parts = {}, [describe(value) for value in args]
    if not parts or not any(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
        raise InputError(
            f"{path} must hold a tensor, got {parts[0] if parts else 'none'}.\n"
            "Save a tensor, a tuple of arguments, or a dict of keyword arguments."
        )
    note = f" ({notes[0]})" if notes else ""
    return Batch(args, kwargs, f"{path.name}, {', '.join(parts)}{note}")


def _read_numpy(path: Path) -> Any:
    try:
        # Opened here, because numpy leaves a broken file open.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of old headers, but reads them
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.lib.npyio.NpzFile):
                return {key: content[key] for key in content.files}
            return content
    except Exception as error:  # readers of broken files raise errors without a common base
        if "Object arrays" in str(error):
            raise InputError(
                f"{path} must hold arrays of numbers, got Python objects, which need unpickling:"
                " hookline never unpickles.\n"
                "Save arrays of numbers: np.save(FILE, array.astype(np.float32))."
            ) from error
        # numpy takes any unknown file for a pickle and says so, which would mislead.
        reason = "np.save did not write it" if "pickled" in str(error) else in_short(error)
        raise InputError(
            f"{path} cannot be read as a {path.suffix} file: {reason}.\n"
            "Write it with np.save or np.savez."
        ) from error


def _as_tensor(array: NDArray[Any], path: Path) -> Tensor:
    try:
        # torch accepts neither foreign byte orders nor negative strides.
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return torch.from_numpy(native).reshape(array.shape)
    except TypeError as error:
        raise InputError(
            f"{path} must hold values of a dtype that torch has, got {array.dtype}.\n"
            "Save numbers or truth values."
        ) from error


def _first_float_dtype(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
