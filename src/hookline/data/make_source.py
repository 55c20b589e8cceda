"""Data of any kind as a source of batches; the kind of a path is known by its ending."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from hookline.data import array_files, images
from hookline.data.arrays import array_items, is_array
from hookline.data.data_source import DataSource, LoadOptions, OnError
from hookline.data.dataset_items import DatasetItems
from hookline.data.huggingface import (
    HuggingFaceItems,
    is_huggingface_dataset,
    is_huggingface_folder,
    stream_with_tensors,
)
from hookline.data.indexed_source import IndexedSource, Items
from hookline.data.iterable_source import IterableSource
from hookline.data.texts import FileLines, ParquetTexts, TextItems, as_tokenizer
from hookline.errors import InputError, check_one_of, check_positive_int
from hookline.util.local_paths import is_file, is_folder, is_special, names_in, printable

_TEXTS = (".txt", ".jsonl", ".parquet")
SUFFIXES = (*images.SUFFIXES, *array_files.SUFFIXES, *_TEXTS)
_BATCH_SIZE = 32
# The options of a user's own DataLoader that are kept, beyond those of `LoadOptions`.
_OF_WORKERS = ("worker_init_fn", "timeout", "multiprocessing_context", "prefetch_factor")
_PATH_FIX = "Check the path; texts of your own are given as a list: ['first', 'second']."


def make_source(data: Any, loading: LoadOptions) -> DataSource:
    """Return data of any kind as batches by number.

        >>> import torch
        >>> source = make_source(torch.arange(10), LoadOptions(batch_size=4))
        >>> [batch.items for batch in source.batches([2, 0])]
        [[8, 9], [0, 1, 2, 3]]

    An item that draws random numbers gets the same ones in every run and every process: the global
    generators of torch, NumPy and Python are seeded with the number of its batch.

    Args:
        data: one of those that `hl.extract` lists; with a tokenizer, also a column of texts of
            NumPy or pandas.
        loading: how it is loaded. A DataLoader has its own batch size, and an iterable of ready
            batches has none.

    Raises:
        InputError: the data are empty or of no kind that is known, or an option does not fit.
    """
    _check_options(loading)
    if loading.tokenize is not None:
        loading = loading._replace(tokenize=as_tokenizer(loading.tokenize))
    if isinstance(data, DataLoader):
        return _loader_source(data, loading)
    if isinstance(data, IterableDataset):
        data = stream_with_tensors(data)
        # Its own generator: the default one would draw from the user's.
        loader = DataLoader(data, loading.batch_size or _BATCH_SIZE, generator=torch.Generator())
        return _iterable_source(loader, loading._replace(batch_size=None))
    if isinstance(data, str | os.PathLike):
        return _item_source(items_of_path(resolve_path(data, "data", _PATH_FIX), loading), loading)
    if is_huggingface_dataset(data):
        return _item_source(HuggingFaceItems(data, loading), loading)
    if loading.tokenize is not None and _is_column_of_texts(data):
        data = np.asarray(data).tolist()
    if is_array(data) or isinstance(data, tuple | Mapping):
        return _item_source(array_items(data), loading)
    if not _is_unsupported(data):
        if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            return _item_source(DatasetItems(data, default_collate, loading.tokenize), loading)
        if isinstance(data, Iterable):
            return _iterable_source(data, loading)
    raise InputError(
        "data must be a Dataset, a DataLoader, an iterable of batches, an array, a dict or tuple of"
        f" arrays, or a path, got {_kind_in_words(data)}."
        f"\n{_remedy(data)}"
    )


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


def _check_options(loading: LoadOptions) -> None:
    size: Any = loading.batch_size
    if size is not None:
        check_positive_int("batch_size", size, "Give batch_size=32.")
    if type(loading.workers) is not int or loading.workers < 0:
        raise InputError(
            f"workers must be an integer >= 0, got {loading.workers!r}."
            "\nGive workers=0 to load in this process."
        )
    fix = "Give 'skip' to leave out items that fail to load, and list them."
    check_one_of("on_error", loading.on_error, get_args(OnError), fix)


def _item_source(
    items: Items, loading: LoadOptions, options: Mapping[str, Any] | None = None
) -> DataSource:
    if not len(items):
        raise InputError(
            "data must have at least one item, got an empty"
            f" {type(getattr(items, 'dataset', items)).__name__}.\nGive data with items."
        )
    loading = loading._replace(batch_size=loading.batch_size or _BATCH_SIZE)
    return IndexedSource(items, loading, options)


def _iterable_source(data: Iterable[Any], loading: LoadOptions) -> DataSource:
    kind = type(data).__name__
    wrapped = getattr(data, "iterable", None)  # of a progress bar, as tqdm(loader)
    if isinstance(wrapped, DataLoader):
        _check_sequential_order(wrapped)
    if loading.batch_size is not None:
        raise InputError(
            f"batch_size must be left out for ready batches, got {loading.batch_size} for this"
            f" {kind}.\nLeave it out; each batch is run as the {kind} gives it."
        )
    if loading.on_error == "skip":
        raise InputError(
            f"on_error must be 'raise' for ready batches, got 'skip' for this {kind}."
            "\nGive a Dataset, whose items are loaded one by one."
        )
    return IterableSource(data, loading.tokenize)


def _loader_source(loader: DataLoader[Any], loading: LoadOptions) -> DataSource:
    """Return the source of a DataLoader: its data set, with its options."""
    _check_sequential_order(loader)
    if loading.batch_size not in (None, loader.batch_size):
        raise InputError(
            f"batch_size must be the DataLoader's own, {loader.batch_size}, got"
            f" {loading.batch_size}.\nLeave it out, or give the data set: loader.dataset."
        )
    is_indexed = not isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None
    # A subclass may change the batches on their way, such as by moving them to a device.
    if not is_indexed or type(loader).__iter__ is not DataLoader.__iter__:
        return _iterable_source(loader, loading._replace(batch_size=None))
    options = {name: getattr(loader, name) for name in _OF_WORKERS}
    loading = loading._replace(
        batch_size=loader.batch_size,
        workers=loading.workers or loader.num_workers,
        pin_memory=loading.pin_memory or loader.pin_memory,
    )
    tokenize = loading.tokenize if loader.collate_fn is default_collate else None
    items = DatasetItems(loader.dataset, loader.collate_fn, tokenize)
    return _item_source(items, loading, options)


def _check_sequential_order(loader: DataLoader[Any]) -> None:
    is_iterable = isinstance(loader.dataset, IterableDataset)
    order: Any = loader.sampler
    drops_last = loader.drop_last
    if loader.batch_size is None and loader.batch_sampler is not None:
        order = loader.batch_sampler
        if type(order) is BatchSampler:  # as of a loader that accelerate has prepared
            order, drops_last = order.sampler, order.drop_last
    if not is_iterable and type(order) is not SequentialSampler:
        name = type(order).__name__
        what = "that shuffles" if name == "RandomSampler" else f"with a {name}"
        expected = f"that goes through its data set in order, got one {what}"
    elif not is_iterable and len(order) != len(loader.dataset):  # type: ignore[arg-type]
        n_items = len(loader.dataset)  # type: ignore[arg-type]
        expected = f"of its whole data set, got {len(order)} of {n_items} items"
    elif drops_last:
        expected = "that keeps its last batch, got one with drop_last=True"
    else:
        return
    size = "" if loader.batch_size is None else f", batch_size={loader.batch_size}"
    raise InputError(
        f"data must be a DataLoader {expected}."
        f"\nGive DataLoader(dataset{size}), so that each run and each resume has the same rows."
    )


def _is_column_of_texts(data: Any) -> bool:
    """Tell whether data is an array or a column of a table that may hold texts, by its dtype."""
    kind = getattr(data.dtype, "kind", None) if is_array(data) else None
    return kind in ("O", "T", "U") and len(data.shape) == 1


def _is_unsupported(data: Any) -> bool:
    """Return whether a value is none of data, though it has a length or gives values."""
    kinds = (type, nn.Module, bytes, bytearray, set, frozenset)
    no_length = isinstance(data, Dataset) and not hasattr(data, "__len__")
    return (
        isinstance(data, kinds) or hasattr(data, "__dataframe__") or no_length or _is_of_ray(data)
    )


def _is_of_ray(data: Any) -> bool:
    return type(data).__module__.startswith("ray.data") and hasattr(data, "iter_rows")


def _kind_in_words(data: Any) -> str:
    if _is_of_ray(data):
        return "a ray.data.Dataset"
    return f"the class {data.__name__}" if isinstance(data, type) else type(data).__name__


def _remedy(data: Any) -> str:
    if _is_of_ray(data):
        return (
            "Give its rows, list(data.iter_rows()), or the files that it reads. Without"
            " engine='ray', data.iter_torch_batches(batch_size=32) gives batches."
        )
    if hasattr(data, "__dataframe__"):
        return "Give its columns as arrays, such as data['name'].to_numpy()."
    if isinstance(data, Dataset):
        return "Give it a __len__, so that its items have indices; or make it an IterableDataset."
    return "Give torch.utils.data.TensorDataset(...), or a folder of images such as 'photos/'."
