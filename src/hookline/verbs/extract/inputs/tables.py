"""Texts in tables: parquet files, and data sets of the package datasets."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from hookline.errors import InputError
from hookline.models.loaded import Preprocess
from hookline.models.packages import in_short
from hookline.models.places import is_file
from hookline.util.imported import imported
from hookline.verbs.extract.inputs.fingerprints import files_fingerprint
from hookline.verbs.extract.inputs.images import prepared
from hookline.verbs.extract.inputs.loading import Loaded, load_each
from hookline.verbs.extract.inputs.texts import KEY, text_or_skip

_IMAGE = "image"
_STATE = "state.json"


@final
class ParquetTexts:
    """The column "text" of a parquet file, read a row group at a time.

    Args:
        path: the file.

    Raises:
        InputError: pyarrow is not installed, the file is broken or has no such column of texts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        parquet = _import("pyarrow.parquet", str(path))
        try:
            with parquet.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors, too
            raise InputError(
                f"{path} must be a parquet file, got {in_short(error)}."
                "\nWrite it anew: pyarrow.parquet.write_table(table, FILE)."
            ) from error
        if KEY not in schema.names:
            raise InputError(
                f'{path} must have a column "{KEY}", got {_listed(schema.names)}.'
                f'\nRename the column of texts: table.rename_columns({{"NAME": "{KEY}"}}).'
            )
        if "string" not in str(schema.field(KEY).type):
            raise InputError(
                f'{path} must have texts in its column "{KEY}", got {schema.field(KEY).type}.'
                "\nConvert it to strings first."
            )
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._schema = {name: str(schema.field(name).type) for name in schema.names}
        self._group: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None}

    def identity(self) -> dict[str, Any]:
        """Return name, schema and fingerprint of the file."""
        return {
            "kind": "parquet",
            "name": self._path.name,
            "size": self._path.stat().st_size,
            "schema": self._schema,
            "fingerprint": files_fingerprint([self._path]),
        }

    def read(self, indices: Sequence[int]) -> list[str | None]:
        """Read texts. The last row group is kept: batches in order read each group once."""
        found: list[str | None] = []
        for index in indices:
            group = int(np.searchsorted(self._ends, index, side="right"))
            start = int(self._ends[group - 1]) if group else 0
            found.append(self._column(group)[index - start].as_py())
        return found

    def _column(self, group: int) -> Any:
        if self._group is None or self._group[0] != group:
            self._group = None  # two groups at once would take twice the memory
            parquet = _import("pyarrow.parquet", str(self._path))
            with parquet.ParquetFile(self._path) as file:
                table = file.read_row_group(group, columns=[KEY], use_threads=False)
            self._group = group, table.column(0)
        return self._group[1]


@final
class HuggingFaceItems:
    """Rows of a data set of the package datasets, from its folder or as an object.

    A row is a text where there is a column "text" and a tokenizer, a picture where there is a
    column "image" and a preprocessing. Otherwise it is a dict of tensors: the model's keyword
    arguments.

    Args:
        data: the folder that `save_to_disk` wrote, which is what is pickled; or the data set.
        preprocess: converts a picture to a tensor, or None.
        tokenize: converts texts to a dict of tensors, or None.

    Raises:
        InputError: datasets is not installed, or the folder cannot be read.
    """

    names = None
    may_draw = True
    fix = "Give columns that fit together: dataset.select_columns([...])."

    def __init__(
        self,
        data: Any,
        preprocess: Preprocess | None,
        tokenize: Callable[[list[str]], dict[str, Tensor]] | None,
    ) -> None:
        self._path: Path | None = data if isinstance(data, Path) else None
        self._dataset = None if self._path is not None else data
        columns = self.dataset.column_names
        self._preprocess = preprocess if _IMAGE in columns else None
        self._tokenize = tokenize if KEY in columns else None
        self._rows: Any = None

    @property
    def dataset(self) -> Any:
        """The data set, opened in each process."""
        if self._dataset is None:
            assert self._path is not None
            datasets = _import("datasets", str(self._path))
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
                    f" {in_short(error)}.\nWrite it anew: dataset.save_to_disk(FOLDER)."
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
        found = {"kind": "datasets", "columns": features}
        if self._path is None:
            return found
        return {**found, "fingerprint": files_fingerprint(_arrow_files(self._path))}

    def load(self, number: int, wanted: range) -> Loaded:
        """Load a batch; errors are in the result."""
        return load_each(number, wanted, self._get, self._collate)

    def _get(self, indices: Sequence[int]) -> list[Any]:
        if self._rows is None:
            self._rows = self._selected()
        rows = self._rows.__getitems__(list(indices))
        if self._tokenize is not None:
            return [text_or_skip(row[KEY]) for row in rows]
        if self._preprocess is not None:
            return [prepared(row[_IMAGE], self._preprocess) for row in rows]
        return list(rows)

    def _selected(self) -> Any:
        if self._tokenize is not None:
            return self.dataset.with_format(None).select_columns([KEY])
        if self._preprocess is not None:
            return self.dataset.with_format(None).select_columns([_IMAGE])
        # Python lists would be collated a position at a time.
        is_set = self.dataset.format["type"] is not None
        return self.dataset if is_set else self.dataset.with_format("torch")

    def _collate(self, found: list[Any]) -> Any:
        return default_collate(found) if self._tokenize is None else self._tokenize(found)


def is_huggingface(data: Any) -> bool:
    """Return whether a value is a data set of the package datasets."""
    datasets = imported("datasets")
    return datasets is not None and isinstance(data, datasets.Dataset)


def is_huggingface_folder(path: Path) -> bool:
    """Return whether a folder is one that `save_to_disk` wrote.

    Raises:
        InputError: it holds several data sets, each in a folder of its own.
    """
    if is_file(path / "dataset_dict.json"):
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise InputError(
            f"{path} must be one data set, got a folder of {len(splits)}: {_listed(splits)}."
            f"\nGive one of them: '{path / splits[0]}'."
        )
    return is_file(path / _STATE) and is_file(path / "dataset_info.json")


def _arrow_files(folder: Path) -> list[Path]:
    """List the files of a saved data set, in order.

    Raises:
        InputError: its description is broken.
    """
    try:
        state = json.loads((folder / _STATE).read_text())
        return [folder / one["filename"] for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / _STATE} must be one that save_to_disk wrote, got {in_short(error)}."
            "\nWrite the data set anew: dataset.save_to_disk(FOLDER)."
        ) from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", …" * (len(names) > 5)


def _import(package: str, needed_by: str) -> Any:
    """Import an optional package.

    Raises:
        InputError: it is not installed; the message has the command that installs it.
    """
    root = package.partition(".")[0]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"{needed_by} needs the package {root}, got {in_short(error)}."
            f"\nInstall it: pip install {root}"
        ) from error
