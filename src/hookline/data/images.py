"""Pictures as items: one file, or those of a folder, sorted by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from xxhash import xxh3_128

from hookline.data.indexed_source import DataSetError, SingleItems
from hookline.display.text import plural
from hookline.errors import InputError
from hookline.models.loaded_model import Preprocess, describe_value
from hookline.models.packages import error_in_short, import_package
from hookline.util.local_paths import is_folder, is_special

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip


@final
class ImageItems(SingleItems):
    """A picture, or the pictures of a folder and its subfolders, sorted by their relative path.

    Hidden files and folders are left out, and so are files that are not pictures. Links to folders
    are followed, except to a folder that the link is in.

    Args:
        path: the file or the folder.
        preprocess: converts a picture to a tensor; the model's own.

    Attributes:
        names: the path of each picture from the folder.
        n_others: the number of files that are not pictures.

    Raises:
        InputError: the folder cannot be read or has no picture, or there is no preprocessing.
    """

    fix = "Resize pictures to one size in preprocess=, or give one at a time."

    def __init__(self, path: Path, preprocess: Preprocess | None) -> None:
        self.n_others: int
        self._folder = path if is_folder(path) else path.parent
        sizes, self.n_others = (
            _list_images_and_count_others(path)
            if is_folder(path)
            else ({path.name: _file_size(path)}, 0)
        )
        self.names: list[str] = sorted(sizes)
        self._fingerprint = _fingerprint([(name, sizes[name]) for name in self.names])
        self.root: str = f"{self._folder}{os.sep}"
        if not callable(preprocess):
            raise InputError(
                f"preprocess must convert the pictures of {path} to tensors, got"
                f" {'None' if preprocess is None else type(preprocess).__name__}."
                "\nGive the model's own, such as weights.transforms() of torchvision. A model"
                " without one takes tensors."
            )
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self.names)

    def identity(self) -> dict[str, Any]:
        """Return a fingerprint of all names and sizes."""
        return {"kind": "images", "fingerprint": self._fingerprint}

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Open pictures, and convert each to a tensor."""
        pictures = (open_picture(self._folder / self.names[index]) for index in indices)
        return [apply_preprocess(picture, self._preprocess) for picture in pictures]

    def collate(self, values: list[Any], indices: list[int]) -> Any:
        """Stack pictures."""
        for value, index in zip(values, indices, strict=True):
            if value.shape != values[0].shape:
                raise InputError(
                    f"{self.names[index]} and {self.names[indices[0]]} differ in shape once"
                    f" preprocessed ({describe_value(value)} and {describe_value(values[0])})."
                    f"\n{self.fix}"
                )
        return torch.stack(values)


def open_picture(path: Path) -> Image:
    """Open a picture, fully loaded and rotated by its EXIF orientation.

        >>> open_picture(Path("chelsea.png")).size
        (451, 300)

    Args:
        path: the file.

    Returns:
        The picture in its own mode and size; the first frame of an animation.

    Raises:
        InputError: pillow is not installed, or the file is broken or not a picture.
    """
    image_module = import_package("PIL.Image", str(path), InputError)
    ops = import_package("PIL.ImageOps", str(path), InputError)
    try:
        with image_module.open(path) as picture:
            picture.load()
            upright: Image = ops.exif_transpose(picture)
            return upright
    except Exception as error:  # pillow's errors for broken files have no common base
        raise InputError(
            f"{path} cannot be read as a picture: {error_in_short(error)}.\n"
            "Open it in a viewer and save it again, as .png for instance."
        ) from error


def apply_preprocess(picture: Image, preprocess: Preprocess) -> Tensor:
    """Convert a picture to a tensor."""
    tensor: Any = preprocess(picture)
    if not isinstance(tensor, Tensor):
        raise DataSetError(
            f"preprocess must return a tensor, got {type(tensor).__name__}."
            "\nEnd it with a conversion such as torchvision.transforms.functional.to_tensor."
        )
    return tensor


def _list_images_and_count_others(folder: Path) -> tuple[dict[str, int], int]:
    """Return the pictures below a folder with their sizes, and the number of other files."""
    sizes: dict[str, int] = {}
    n_others = 0
    prefix = os.path.join(folder, "")
    try:
        for path in _visible_files(folder):
            if path.lower().endswith(SUFFIXES) and not is_special(path):
                sizes[path[len(prefix) :].replace(os.sep, "/")] = _file_size(path)
            else:
                n_others += 1
    except OSError as error:
        raise InputError(
            f"{folder} must be readable, got {error_in_short(error)}."
            "\nGive a folder that you may read."
        ) from error
    if not sizes:
        raise InputError(
            f"{folder} must hold pictures, got {plural(n_others, 'other file')}."
            f"\nGive a folder of {', '.join(SUFFIXES[:6])}, or a folder that save_to_disk of the"
            " package datasets wrote."
        )
    return sizes, n_others


def _file_size(path: str | Path) -> int:
    # A broken link is an item like others: it fails to load.
    return os.stat(path).st_size if os.path.exists(path) else -1


def _fingerprint(sizes: list[tuple[str, int]]) -> str:
    digest = xxh3_128()
    for name, size in sizes:
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _visible_files(folder: Path) -> Iterator[str]:
    """List the files below a folder; hidden ones, and those in hidden folders, are left out."""
    around = {os.fspath(folder): {_device_and_inode(folder)}}
    for parent, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        outer = around.pop(parent)
        for name in folders[:]:
            path = os.path.join(parent, name)
            inner = _device_and_inode(path)
            if name.startswith(".") or inner in outer:  # a link back would never end
                folders.remove(name)
            else:
                around[path] = outer | {inner}
        yield from (os.path.join(parent, name) for name in files if not name.startswith("."))


def _device_and_inode(folder: str | Path) -> tuple[int, int]:
    facts = os.stat(folder)
    return facts.st_dev, facts.st_ino


def _raise(error: OSError) -> None:
    raise error  # os.walk would leave out a folder that it cannot read
