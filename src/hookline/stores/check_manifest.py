"""Check that a manifest has the form that hookline writes, field by field.

A checksum that is right says that the file is the one that was written, not who wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hookline.files.safetensors_file import DTYPES

_MOST = 2**62  # of rows, and of the bytes of a row: NumPy counts in 63 bits
_WORDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
_NEVER_RESUMED = ("unknown", "merged")  # kinds of data: of repaired stores, and of merged ones
_LISTS = ("batches", "items", "rows", "sizes")


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check the fields of a store's manifest, as JSON gives it.

    Raises:
        ValueError: a field is missing or of another form. The message names it.
    """
    _check_origin(_get_typed(manifest, "environment", dict))
    is_finished = manifest.get("shards") is not None
    job = _get_typed(manifest, "job", dict)
    _check_job(job, is_finished=is_finished)
    if not is_finished:
        return
    shards = _get_typed(manifest, "shards", dict)
    _check_shards(shards)
    _check_file_sizes(shards, job["columns"])
    _get_typed(manifest, "statistics", dict)
    _get_typed(manifest, "skipped", list)


def _check_origin(environment: Mapping[str, Any]) -> None:
    """Check the versions and flags, which older hookline did not write."""
    if "origin" not in environment:
        return
    origin = _get_typed(environment, "origin", dict, "environment.")
    for name in ("versions", "flags"):
        texts = _get_typed(origin, name, dict, "environment.origin.")
        _check_texts(list(texts.values()), f"environment.origin.{name}")


def _check_job(job: Mapping[str, Any], *, is_finished: bool) -> None:
    """Check the fields of a job."""
    for name in ("model", "options", "data"):
        _get_typed(job, name, dict, "job.")
    _check_texts(_get_typed(job, "sites", list, "job."), "job.sites")
    if _get_required(job, "n_items", "job.") is not None:
        _check_number(job["n_items"], "job.n_items")
    # 0 stands for batches that come ready, of any size, and for what a repair does not know.
    needs_size = not is_finished and job["n_items"] is not None
    needs_batches = not is_finished or job["data"].get("kind") not in _NEVER_RESUMED
    _check_number(_get_required(job, "batch_size", "job."), "job.batch_size", least=int(needs_size))
    _check_number(
        _get_required(job, "shard_batches", "job."), "job.shard_batches", least=int(needs_batches)
    )
    for number, column in enumerate(_get_typed(job, "columns", list, "job.")):
        where = f"job.columns[{number}]"
        if not isinstance(column, dict):
            raise _wrong_field(where, "an object", column)
        _check_column(column, f"{where}.")


def _check_column(column: Mapping[str, Any], where: str) -> None:
    _get_typed(column, "name", str, where)
    if _get_typed(column, "dtype", str, where) not in DTYPES:
        raise _wrong_field(f"{where}dtype", "a dtype of safetensors", column["dtype"])
    if _get_typed(column, "per", str, where) not in ("item", "token"):
        raise _wrong_field(f"{where}per", "'item' or 'token'", column["per"])
    shape = _get_typed(column, "shape", list, where)
    for size in shape:
        _check_number(size, f"{where}shape")
    if math.prod(size for size in shape if size) * DTYPES[column["dtype"]].itemsize > _MOST:
        raise _wrong_field(f"{where}shape", "the shape of a row that fits into memory", shape)


def _check_shards(shards: Mapping[str, Any]) -> None:
    """Check the lists of the shards. They are long, so Python looks at none of their elements."""
    for name in _LISTS:
        numbers = _get_typed(shards, name, list, "shards.")
        if not {*map(type, numbers)} <= {int} or min(numbers, default=0) < 0:
            wrong = next(value for value in numbers if type(value) is not int or value < 0)
            raise _wrong_field(f"shards.{name}", "a list of numbers from 0 up", wrong)
        if sum(numbers) > _MOST:
            raise _wrong_field(f"shards.{name}", "numbers of things that can exist", max(numbers))
    _check_texts(_get_typed(shards, "seals", list, "shards."), "shards.seals")
    lengths = {name: len(shards[name]) for name in (*_LISTS, "seals")}
    if len({*lengths.values()}) > 1:
        raise _wrong_field("shards", "lists with an entry for each shard", lengths)


def _check_file_sizes(shards: Mapping[str, Any], columns: list[dict[str, Any]]) -> None:
    """Check that the files can hold as many rows as are listed."""
    is_ragged = any(column["per"] == "token" for column in columns)
    if not is_ragged and shards["rows"] != shards["items"]:
        raise ValueError("shards.rows must be shards.items where rows are items")
    if any(n_rows and not n for n_rows, n in zip(shards["rows"], shards["items"], strict=True)):
        raise ValueError("shards.items must not be 0 where shards.rows is not")
    n_bytes = {"item": 16 if is_ragged else 8, "token": 0}  # the store's own columns
    for column in columns:
        row_bytes = math.prod(column["shape"]) * DTYPES[column["dtype"]].itemsize
        n_bytes[column["per"]] += row_bytes
    least_bytes = sum(shards["items"]) * n_bytes["item"] + sum(shards["rows"]) * n_bytes["token"]
    if least_bytes > sum(shards["sizes"]):
        raise ValueError(
            f"shards.sizes must add up to {least_bytes:,} bytes for the listed rows, got"
            f" {sum(shards['sizes']):,}"
        )


def _get_required(parent: Mapping[str, Any], name: str, where: str = "") -> Any:
    if name not in parent:
        raise ValueError(f"{where}{name} must be there")
    return parent[name]


def _get_typed(parent: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return a field, which must be an object, a list or a text."""
    value = _get_required(parent, name, where)
    if not isinstance(value, kind):
        raise _wrong_field(f"{where}{name}", _WORDS[kind], value)
    return value


def _check_number(value: Any, where: str, *, least: int = 0) -> None:
    if type(value) is not int or not least <= value < _MOST:
        raise _wrong_field(where, f"a number from {least} up", value)


def _check_texts(values: list[Any], where: str) -> None:
    if not {*map(type, values)} <= {str}:
        wrong = next(value for value in values if type(value) is not str)
        raise _wrong_field(where, "a list of texts", wrong)


def _wrong_field(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{where} must be {expected}, got {value!r:.80}")
