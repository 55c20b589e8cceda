"""Data sets of Hugging Face: of the package datasets, or in the folder that it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from torch.utils.data import default_collate

from hookline.data.data_source import LoadOptions
from hookline.data.fingerprints import content_fingerprint
from hookline.data.images import apply_preprocess
from hookline.data.indexed_source import SingleItems
from hookline.data.texts import KEY, text_or_skip_mark
from hookline.display.text import listed
from hookline.errors import InputError
from hookline.models.packages import error_in_short, import_package
from hookline.util.local_paths import is_file
from hookline.util.optional_imports import module_if_imported

_IMAGE = "image"
_STATE = "state.json"


@final
class HuggingFaceItems(SingleItems):
    """Rows of a data set of the package datasets, from its folder or as an object.

    A row is a text where there is a column "text" and a tokenizer, a picture where there is a
    column "image" and a preprocessing. Otherwise it is a dict of tensors: the model's keyword
    arguments.

    Args:
        data: the folder that `save_to_disk` wrote, which is what is pickled; or the data set.
        loading: its preprocessing is for pictures, its tokenizer for texts.

    Raises:
        InputError: datasets is not installed, or the folder cannot be read.
    """

    fix = "Give columns that fit together: dataset.select_columns([...])."

    def __init__(self, data: Any, loading: LoadOptions) -> None:
        self._path: Path | None = data if isinstance(data, Path) else None
        self._dataset = None if self._path is not None else data
        columns = self.dataset.column_names
        self._preprocess = loading.preprocess if _IMAGE in columns else None
        self._tokenize = loading.tokenize if KEY in columns else None
        self._column = KEY if self._tokenize else _IMAGE if self._preprocess else None
        self._rows: Any = None

    @property
    def dataset(self) -> Any:
        """The data set, opened in each process."""
        if self._dataset is None:
            assert self._path is not None
            datasets = import_package("datasets", str(self._path), InputError)
            if not _arrow_files(self._path):
                raise InputError(
                    f"{self._path} must hold an Arrow file with at least one row, got none."
                    "\nSave one that has rows: dataset.save_to_disk(FOLDER)."
                )
            try:
                self._dataset = datasets.load_from_disk(str(self._path))
            except Exception as error:  # the readers of broken files raise anything
                raise InputError(
                    f"{self._path} must be a data set that save_to_disk wrote, got"
                    f" {error_in_short(error)}.\nWrite it anew: dataset.save_to_disk(FOLDER)."
                ) from error
        return self._dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        opened = {} if self._path is None else {"_dataset": None}
        return {**vars(self), **opened, "_rows": None}

    def identity(self) -> dict[str, Any]:
        """Return the columns, and a fingerprint of the folder's files."""
        features = {name: repr(kind) for name, kind in self.dataset.features.items()}
        identity = {"kind": "datasets", "columns": features}
        if self._path is not None:
            identity["fingerprint"] = content_fingerprint(_arrow_files(self._path))
        return identity

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Read rows, in one piece."""
        if self._rows is None:
            self._rows = self._formatted_dataset()
        rows = self._rows.__getitems__(list(indices))
        if self._tokenize is not None:
            return [text_or_skip_mark(row[KEY]) for row in rows]
        if self._preprocess is not None:
            return [apply_preprocess(row[_IMAGE], self._preprocess) for row in rows]
        return list(rows)

    def _formatted_dataset(self) -> Any:
        if self._column is not None:
            return self.dataset.with_format(None).select_columns([self._column])
        # Python lists would be collated a position at a time.
        is_set = self.dataset.format["type"] is not None
        return self.dataset if is_set else self.dataset.with_format("torch")

    def collate(self, values: list[Any], indices: list[int]) -> Any:
        """Tokenize texts; collate other rows."""
        return default_collate(values) if self._tokenize is None else self._tokenize(values)


def is_huggingface_dataset(data: Any) -> bool:
    """Return whether a value is a data set of the package datasets.

    Raises:
        InputError: it holds several data sets.
    """
    datasets = module_if_imported("datasets")
    if datasets is None:
        return False
    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise InputError(
            f"data must be one data set, got a {type(data).__name__} of {len(data)}:"
            f" {listed(list(data), 5)}.\nGive one of them: data[{next(iter(data), 'NAME')!r}]."
        )
    return isinstance(data, datasets.Dataset)


def stream_with_tensors(data: Any) -> Any:
    """Return a stream of the package datasets with tensors for lists; other data as it is."""
    datasets = module_if_imported("datasets")
    is_stream = datasets is not None and isinstance(data, datasets.IterableDataset)
    return data.with_format("torch") if is_stream else data


def is_huggingface_folder(path: Path) -> bool:
    """Return whether a folder is one that `save_to_disk` wrote."""
    if is_file(path / "dataset_dict.json"):
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise InputError(
            f"{path} must be one data set, got a folder of {len(splits)}: {listed(splits, 5)}."
            f"\nGive one of them: '{path / splits[0]}'."
        )
    return is_file(path / _STATE) and is_file(path / "dataset_info.json")


def _arrow_files(folder: Path) -> list[Path]:
    """List the files of a saved data set, in order."""
    try:
        state = json.loads((folder / _STATE).read_text())
        return [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / _STATE} must be one that save_to_disk wrote, got {error_in_short(error)}."
            "\nWrite the data set anew: dataset.save_to_disk(FOLDER)."
        ) from error
