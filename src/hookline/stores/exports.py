"""Export a store to other formats, a part at a time, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from hookline.display.text import first_line
from hookline.errors import FolderError, InputError, StructureError, check_one_of
from hookline.files.folder_or_url import as_local_path
from hookline.stores.column import Column
from hookline.stores.shard_file import LENGTH, numpy_dtype
from hookline.util.optional_imports import how_to_install, require

Format = Literal["parquet", "datasets", "npy", "zarr", "lance"]

_PART_BYTES = 16 * 2**20  # of what is read at once
_CHUNK_BYTES = 2**20  # of a chunk of Zarr: a compromise of single rows and whole columns
# Dtypes that the formats lack. float32 holds each of their numbers exactly.
_WIDENED = frozenset({
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
})  # fmt: skip


class ExportedColumns(NamedTuple):
    """Hold the columns to export."""

    columns: Sequence[Column]
    n_items: int  # the number of items
    # Columns of a text for each item, by name. Only tables have them.
    texts: Mapping[str, NDArray[Any]]


def export(source: ExportedColumns, to: str | os.PathLike[str], format: Format) -> Path:
    """Write columns to a new file or folder in another format; `Store.export` says how."""
    fix = "Give one of them: store.export('features.parquet', 'parquet')."
    check_one_of("format", format, _FORMATS, fix)
    write, packages = _FORMATS[format]
    for module, package, install in packages:
        require(module, f"{package} must be installed to export to {format}", install, InputError)
    path = as_local_path(to)
    if path.exists():
        raise FolderError(f"{path} must not exist yet to export to it.\nGive a new name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(source, path.absolute())  # Arrow takes "a:b" for a URL
    except BaseException as error:
        # What is half written looks like a smaller export.
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # also of a path through a file
                path.unlink()
        is_refused = isinstance(error, OSError | UnicodeEncodeError)
        if is_refused and not isinstance(error, FolderError):
            raise FolderError(
                f"cannot write {path}: {first_line(error)}.\nGive another name, or free space."
            ) from error
        raise
    return path


# -- what is written ------------------------------------------------------------------------------


def _exported_dtype(column: Column) -> torch.dtype:
    return torch.float32 if column.dtype in _WIDENED else column.dtype


def _read_as_numpy(column: Column, rows: slice) -> NDArray[Any]:
    """Read rows as NumPy numbers; dtypes that it lacks are widened, which is exact."""
    if column.dtype in _WIDENED:
        return column[rows].float().numpy()
    return column.numpy(rows)


def _slices(n_rows: int, step: int) -> Iterator[slice]:
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _row_bytes(column: Column) -> int:
    return column.nbytes // max(len(column), 1)


def _n_rows_within(row_bytes: int, most_bytes: int) -> int:
    """Return how many rows fit into so many bytes, and at least one."""
    return max(1, most_bytes // max(row_bytes, 1))


# -- arrays ---------------------------------------------------------------------------------------


def _write_npy(source: ExportedColumns, path: Path) -> None:
    """Write an .npy file for each column, which `np.load(..., mmap_mode="r")` maps."""
    path.mkdir()
    names = {}
    for column in _add_lengths_column(source.columns):
        names[column.name] = f"{quote(column.name, safe='@()[] ')}.npy"
        header = {
            "descr": np.lib.format.dtype_to_descr(numpy_dtype(_exported_dtype(column))),
            "fortran_order": False,
            "shape": column.shape,
        }
        with (path / names[column.name]).open("xb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for rows in _slices(len(column), _n_rows_within(_row_bytes(column), _PART_BYTES)):
                file.write(np.ascontiguousarray(_read_as_numpy(column, rows)).data)
    (path / "columns.json").write_text(json.dumps(names, indent=1))


def _write_zarr(source: ExportedColumns, path: Path) -> None:
    """Write a Zarr group with an array for each column."""
    import zarr

    group = zarr.open_group(str(path), mode="w-")
    for column in _add_lengths_column(source.columns):
        n_rows = min(max(len(column), 1), _n_rows_within(_row_bytes(column), _CHUNK_BYTES))
        array = group.create_array(
            _array_name(column.name),
            shape=column.shape,
            dtype=numpy_dtype(_exported_dtype(column)),
            chunks=(n_rows, *(max(size, 1) for size in column.shape[1:])),
        )
        for rows in _slices(len(column), n_rows):
            array[rows] = _read_as_numpy(column, rows)


def _array_name(column: str) -> str:
    """Return the name of a Zarr array: one with slashes is a path, and dots alone name none."""
    name = re.sub(r"[%/\\]", lambda match: quote(match[0], safe=""), column)
    return name if name.strip(".") else "%2E" * len(name)


def _add_lengths_column(columns: Sequence[Column]) -> list[Column]:
    """Return the columns, and the lengths of items that cut a column of tokens into items."""
    ragged = [column for column in columns if column.is_ragged]
    named = {column.name for column in columns}
    return [*columns, *([ragged[0].lengths] if ragged and LENGTH not in named else [])]


# -- tables ---------------------------------------------------------------------------------------


def _write_parquet(source: ExportedColumns, path: Path) -> None:
    from pyarrow import parquet

    # pandas makes arrays of objects of nested lists, which NumPy cannot stack.
    schema = _arrow_schema(source, is_flat=True)
    # Activations do not repeat: a dictionary of them is larger than they are.
    with parquet.ParquetWriter(path, schema, use_dictionary=list(source.texts)) as writer:
        for batch in _record_batches(source, schema):
            writer.write_batch(batch)


def _write_lance(source: ExportedColumns, path: Path) -> None:
    import lance
    import pyarrow as pa

    # Lance takes a dot in a name for a field of a structure.
    schema = _arrow_schema(source)
    schema = pa.schema([field.with_name(field.name.replace(".", "/")) for field in schema])
    reader = pa.RecordBatchReader.from_batches(schema, _record_batches(source, schema))
    lance.write_dataset(reader, str(path), schema=schema, mode="create")


def _write_datasets(source: ExportedColumns, path: Path) -> None:
    """Write a folder that `datasets.load_from_disk` opens."""
    import pyarrow as pa
    from datasets import DatasetInfo, Features

    schema = _arrow_schema(source)
    path.mkdir()
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in _record_batches(source, schema):
            writer.write_batch(batch)
    # What `save_to_disk` writes beside the file; it would copy the file, and show a bar.
    DatasetInfo(features=Features.from_arrow_schema(schema)).write_to_directory(str(path))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name}], "_fingerprint": secrets.token_hex(8),
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (path / "state.json").write_text(json.dumps(state))


def _arrow_schema(source: ExportedColumns, *, is_flat: bool = False) -> Any:
    """Return the Arrow schema: a column of rows is of fixed size, one of tokens a list of them.

    `is_flat` makes a row of several dimensions one list, and notes its shape in the metadata.
    """
    import pyarrow as pa

    fields = []
    for column in source.columns:
        shape = column.shape[1:]
        kind = pa.from_numpy_dtype(_arrow_dtype(column))
        for size in (math.prod(shape),) * bool(shape) if is_flat else reversed(shape):
            kind = pa.list_(kind, size)
        metadata = {"shape": json.dumps(shape)} if is_flat and len(shape) > 1 else None
        kind = pa.list_(kind) if column.is_ragged else kind
        fields.append(pa.field(column.name, kind, metadata=metadata))
    fields += [pa.field(name, pa.string()) for name in source.texts]
    return pa.schema(fields)


def _arrow_dtype(column: Column) -> np.dtype[Any]:
    if column.dtype.is_complex:
        expected = f"a dtype that Arrow has, got {column.dtype}"
    elif 0 in column.shape[1:]:
        expected = f"rows of one or more numbers, got {list(column.shape[1:])}"
    else:
        dtype: np.dtype[Any] = numpy_dtype(_exported_dtype(column))
        return dtype
    raise StructureError(
        f"{column.name} must have {expected}."
        "\nExport to 'npy' or 'zarr', or leave the site out: store.export(to, format, 'fc')."
    )


def _record_batches(source: ExportedColumns, schema: Any) -> Iterator[Any]:
    """Yield record batches of a row an item."""
    import pyarrow as pa

    columns = source.columns
    for items, rows in _item_and_row_ranges(columns, source.n_items):
        arrays = [
            _to_arrow(
                _read_as_numpy(column, rows if column.is_ragged else items),
                field.type,
                column.lengths.numpy(items) if column.is_ragged else None,
            )
            for column, field in zip(columns, schema, strict=False)
        ]
        for texts in source.texts.values():
            # The name of a file may hold bytes that are no Unicode.
            escaped = [text.encode("utf-8", "backslashreplace").decode() for text in texts[items]]
            arrays.append(pa.array(escaped))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _to_arrow(numbers: NDArray[Any], kind: Any, lengths: NDArray[np.int64] | None) -> Any:
    """Return rows as an Arrow array; with lengths, as lists of rows."""
    import pyarrow as pa

    if lengths is not None:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = _to_arrow(numbers, kind.value_type, None)
        return pa.ListArray.from_arrays(offsets, rows, type=kind)
    if pa.types.is_fixed_size_list(kind):
        parts = _to_arrow(numbers, kind.value_type, None)
        return pa.FixedSizeListArray.from_arrays(parts, type=kind)
    return pa.array(numbers.reshape(-1), kind)


def _item_and_row_ranges(columns: Sequence[Column], n_items: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of items of about equal bytes, each with the range of its tokens."""
    per_item = sum(_row_bytes(column) for column in columns if not column.is_ragged)
    per_token = sum(_row_bytes(column) for column in columns if column.is_ragged)
    lengths = next((column.lengths for column in columns if column.is_ragged), None)
    before = 0
    for items in _slices(n_items, _n_rows_within(max(per_item, 8), _PART_BYTES)):
        if lengths is None:
            yield items, items
            continue
        stops = np.cumsum(lengths.numpy(items)) + before
        first, start = 0, before
        while first < len(stops):
            most = start + _n_rows_within(per_token, _PART_BYTES)
            last = max(int(np.searchsorted(stops, most, "right")), first + 1)
            stop = int(stops[last - 1])
            yield slice(items.start + first, items.start + last), slice(start, stop)
            first, start = last, stop
        before = start


# Of each package: what is imported, what is installed, and how.
_PYARROW = "pyarrow", "pyarrow", how_to_install("store")
_DATASETS = "datasets", "datasets", "Run pip install datasets"
_ZARR = "zarr", "zarr", "Run pip install zarr"
_LANCE = "lance", "pylance", "Run pip install pylance"
_Package = tuple[str, str, str]

_FORMATS: dict[str, tuple[Callable[[ExportedColumns, Path], None], tuple[_Package, ...]]] = {
    "parquet": (_write_parquet, (_PYARROW,)),
    "datasets": (_write_datasets, (_PYARROW, _DATASETS)),
    "zarr": (_write_zarr, (_ZARR,)),
    "lance": (_write_lance, (_PYARROW, _LANCE)),
    "npy": (_write_npy, ()),
}
