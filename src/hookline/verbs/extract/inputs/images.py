"""A folder of pictures as items, sorted by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from xxhash import xxh3_128

from hookline.display.text import plural
from hookline.errors import InputError
from hookline.models.loaded import Preprocess
from hookline.models.packages import in_short
from hookline.models.pictures import SUFFIXES, open_picture
from hookline.verbs.extract.inputs.loading import Loaded, Refusal, load_each

if TYPE_CHECKING:
    from PIL.Image import Image


@final
class ImageItems:
    """The pictures of a folder and of those in it, sorted by their path from the folder.

    Hidden files and folders are left out, and so are files that are not pictures.

    Args:
        folder: the folder.
        preprocess: converts a picture to a tensor; the model's own.

    Raises:
        InputError: the folder cannot be read or has no picture, or there is no preprocessing.
    """

    may_draw = True
    fix = "Resize pictures to one size in preprocess=."

    def __init__(self, folder: Path, preprocess: Preprocess | None) -> None:
        self._folder = folder
        self.names, self._sum = _find(folder)
        if not callable(preprocess):
            raise InputError(
                f"preprocess must convert the pictures of {folder} to tensors, got"
                f" {'None' if preprocess is None else type(preprocess).__name__}."
                "\nGive the model's own, such as weights.transforms() of torchvision."
            )
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self.names)

    def identity(self) -> dict[str, Any]:
        """Return a fingerprint of all names and sizes."""
        return {"kind": "images", "fingerprint": self._sum}

    def load(self, number: int, wanted: range) -> Loaded:
        """Load a batch; errors are in the result."""
        return load_each(number, wanted, self._get, torch.stack, f"{self._folder}{os.sep}")

    def _get(self, indices: Sequence[int]) -> list[Any]:
        pictures = (open_picture(self._folder / self.names[index]) for index in indices)
        return [prepared(picture, self._preprocess) for picture in pictures]


def prepared(picture: Image, preprocess: Preprocess) -> Tensor:
    """Convert a picture to a tensor.

    Raises:
        Refusal: the preprocessing returns something else.
    """
    found: Any = preprocess(picture)
    if not isinstance(found, Tensor):
        raise Refusal(
            f"preprocess must return a tensor, got {type(found).__name__}."
            "\nEnd it with a conversion such as torchvision.transforms.functional.to_tensor."
        )
    return found


def _find(folder: Path) -> tuple[list[str], str]:
    """List the pictures below a folder, and make a fingerprint of their names and sizes.

    Raises:
        InputError: the folder cannot be read, or has no picture.
    """
    sizes: dict[str, int] = {}
    n_others = 0
    prefix = os.path.join(folder, "")
    try:
        for path in _files(folder):
            if path.lower().endswith(SUFFIXES):
                name = path[len(prefix) :].replace(os.sep, "/")
                # A broken link is an item like others: it fails to load.
                sizes[name] = os.stat(path).st_size if os.path.exists(path) else -1
            else:
                n_others += 1
    except OSError as error:
        raise InputError(
            f"{folder} must be readable, got {in_short(error)}.\nGive a folder that you may read."
        ) from error
    if not sizes:
        raise InputError(
            f"{folder} must have pictures, got {plural(n_others, 'other file')}."
            f"\nGive a folder of {', '.join(SUFFIXES[:6])}, or a folder that save_to_disk of the"
            " package datasets wrote."
        )
    names = sorted(sizes)
    digest = xxh3_128()
    for name in names:
        digest.update(f"{name}\0{sizes[name]}\0".encode("utf-8", "surrogateescape"))
    return names, digest.hexdigest()


def _files(folder: Path) -> Iterator[str]:
    """List the files below a folder; hidden ones, and those in hidden folders, are left out."""
    for parent, folders, files in os.walk(folder, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in files if not name.startswith("."))


def _fail(error: OSError) -> None:
    raise error  # os.walk would leave out a folder that it cannot read
