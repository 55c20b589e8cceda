"""A path as items: the kind of data is known by the file's ending or the folder's content."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from hookline.errors import InputError
from hookline.models.places import is_file, is_folder, is_special, names_in, printable
from hookline.verbs.extract.inputs.array_files import array_file_items
from hookline.verbs.extract.inputs.batches import Loading
from hookline.verbs.extract.inputs.images import ImageItems
from hookline.verbs.extract.inputs.loading import Items
from hookline.verbs.extract.inputs.tables import (
    HuggingFaceItems,
    ParquetTexts,
    is_huggingface_folder,
)
from hookline.verbs.extract.inputs.texts import Lines, TextItems, Texts, tokenizer_of

_ARRAYS = (".npy", ".npz")
_TEXTS = (".txt", ".jsonl", ".parquet")


def items_of_path(given: str | os.PathLike[str], loading: Loading) -> Items:
    """Return the items of a file or folder.

    Args:
        given: the path.
        loading: its preprocessing is for pictures, its tokenizer for texts.

    Raises:
        InputError: the path does not exist, cannot be read or is of an unknown kind, or pictures
            lack a preprocessing or texts a tokenizer.
    """
    if not os.fspath(given):  # it would be the current folder
        raise InputError("data must be a path, got an empty text.\nGive a file or a folder.")
    # Absolute, so that it holds in other processes and after a change of directory.
    path = Path(os.path.abspath(os.path.expanduser(os.fsdecode(given))))
    if is_folder(path):
        if not is_huggingface_folder(path):
            return ImageItems(path, loading.preprocess)
        return HuggingFaceItems(path, loading.preprocess, loading.tokenize)
    if not is_file(path):
        raise _absent(os.fsdecode(given), path)
    suffix = path.suffix.lower()
    if suffix in _ARRAYS:
        return array_file_items(path)
    if suffix not in _TEXTS:
        raise InputError(
            f"data must be a folder or a file of {', '.join((*_ARRAYS, *_TEXTS))}, got"
            f" {printable(path.name)}.\nConvert the file, or give its content as a Dataset."
        )
    tokenize = tokenizer_of(loading.tokenize, path.name)
    texts: Texts = ParquetTexts(path) if suffix == ".parquet" else Lines(path)
    if not len(texts):
        raise InputError(f"{path} must have at least one text, got none.\nWrite one text a line.")
    return TextItems(texts, tokenize)


def _absent(given: str, path: Path) -> InputError:
    shown = repr(printable(given))
    if is_special(path):
        return InputError(
            f"data must be a regular file or a folder, got {shown}, a pipe, a socket or a device."
            "\nCopy what it gives into a file."
        )
    close = difflib.get_close_matches(path.name, names_in(path.parent), n=1)
    remedy = "Check the path; texts of your own are given as a list: ['first', 'second']."
    if close:
        remedy = f"Did you mean {str(path.parent / close[0])!r}?"
    return InputError(f"data must be a path that exists, got {shown}.\n{remedy}")
