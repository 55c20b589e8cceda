"""Texts in parquet files, read a row group at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from hookline.data.fingerprints import content_fingerprint
from hookline.data.texts import KEY
from hookline.display.text import listed
from hookline.errors import InputError
from hookline.models.packages import import_package, in_short


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
        parquet = import_package("pyarrow.parquet", str(path), InputError)
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
                f'{path} must have a column "{KEY}", got {listed(schema.names, 5)}.'
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
            "fingerprint": content_fingerprint([self._path]),
        }

    def read(self, indices: Sequence[int]) -> list[str | None]:
        """Read texts. The last row group is kept: batches in order read each group once."""
        texts: list[str | None] = []
        for index in indices:
            group = int(np.searchsorted(self._ends, index, side="right"))
            start = int(self._ends[group - 1]) if group else 0
            texts.append(self._texts_of_group(group)[index - start].as_py())
        return texts

    def _texts_of_group(self, group: int) -> Any:
        if self._group is None or self._group[0] != group:
            self._group = None  # two groups at once would take twice the memory
            parquet = import_package("pyarrow.parquet", str(self._path), InputError)
            with parquet.ParquetFile(self._path) as file:
                table = file.read_row_group(group, columns=[KEY], use_threads=False)
            self._group = group, table.column(0)
        return self._group[1]
