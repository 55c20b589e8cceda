"""A path as items: the kind of data is known by the file's ending or the folder's content."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from hookline.data import array_files, images
from hookline.data.arrays import array_items
from hookline.data.data_source import LoadOptions
from hookline.data.huggingface import HuggingFaceItems, is_huggingface_folder
from hookline.data.indexed_source import Items
from hookline.data.texts import FileLines, ParquetTexts, TextItems, as_tokenizer
from hookline.errors import InputError
from hookline.util.local_paths import is_file, is_folder, is_special, names_in, printable

_TEXTS = (".txt", ".jsonl", ".parquet")
SUFFIXES = (*images.SUFFIXES, *array_files.SUFFIXES, *_TEXTS)


def resolve_path(spec: str | os.PathLike[str], argument: str, fix: str) -> Path:
    """Return the absolute path of a file of data, or of a folder.

    Args:
        spec: the path as the user has written it.
        argument: what it is given for, for messages.
        fix: what to do if there is no such path, and none with a similar name.

    Raises:
        InputError: it does not exist, or is a file of an unknown kind.
    """
    if not os.fspath(spec):  # it would be the current folder
        raise InputError(f"{argument} must be a path, got an empty text.\nGive a file or a folder.")
    # Absolute, so that it holds in other processes and after a change of directory.
    path = Path(os.path.abspath(os.path.expanduser(os.fsdecode(spec))))
    text = repr(printable(os.fsdecode(spec)))
    if is_special(path):
        raise InputError(
            f"{argument} must be a regular file or a folder, got {text}, a pipe, a socket or a"
            " device.\nCopy what it gives into a file."
        )
    if not is_file(path) and not is_folder(path):
        close = difflib.get_close_matches(path.name, names_in(path.parent), n=1)
        fix = f"Did you mean {str(path.parent / close[0])!r}?" if close else fix
        raise InputError(f"{argument} must be a path that exists, got {text}.\n{fix}")
    if is_file(path) and path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{argument} must be a folder or a file of {', '.join(SUFFIXES)}, got"
            f" {printable(path.name)}.\nConvert it to one of these."
        )
    return path


def items_of_path(path: Path, loading: LoadOptions) -> Items:
    """Return the items of a file or folder.

    Args:
        path: what `resolve_path` returned.
        loading: its preprocessing is for pictures, its tokenizer for texts.

    Raises:
        InputError: the path cannot be read, or pictures lack a preprocessing or texts a tokenizer.
    """
    suffix = path.suffix.lower()
    if is_folder(path) and is_huggingface_folder(path):
        return HuggingFaceItems(path, loading)
    if is_folder(path) or suffix in images.SUFFIXES:
        return images.ImageItems(path, loading.preprocess)
    if suffix in array_files.SUFFIXES:
        return array_items(array_files.open_arrays(path), str(path))
    tokenize = as_tokenizer(loading.tokenize, path.name)
    kind = ParquetTexts if suffix == ".parquet" else FileLines
    texts: TextItems = kind(path, tokenize)
    if not len(texts):
        raise InputError(f"{path} must have at least one text, got none.\nWrite one text a line.")
    return texts
