"""Stores for tests, written shard by shard as `hl.extract` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hookline.files.folder_or_url import Place, as_place
from hookline.files.safetensors_file import DTYPES
from hookline.stores.job_manifest import environment_with_origin, write_manifest
from hookline.stores.shard_file import BatchRows, encode_shard, shard_file_name

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_store(
    where: object,
    columns: Mapping[str, Tensor],
    *,
    lengths: Sequence[int] | None = None,
    tokens: Tensor | None = None,
    per_token: Sequence[str] = (),
    items: Sequence[int] | None = None,
    batch_size: int = 4,
    shard_batches: int = 2,
    skipped: Sequence[tuple[int, str]] = (),
    is_finished: bool = True,
) -> Place:
    """Write a store; `per_token` names the columns with a row a token, of `lengths` an item."""
    place = as_place(where)
    n_items = len(lengths) if lengths is not None else len(next(iter(columns.values())))
    items = range(n_items) if items is None else items
    job = {
        "sites": list(columns),
        "columns": [
            {"name": name, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape[1:]),
             "per": "token" if name in per_token else "item"}
            for name, tensor in columns.items()
        ],
        "batch_size": batch_size, "shard_batches": shard_batches, "n_items": n_items,
        "model": {}, "options": {}, "data": {},
    }  # fmt: skip
    write_manifest(place, job, environment_with_origin())
    offsets = [0, *torch.tensor(lengths or []).cumsum(0).tolist()]
    chunks = []
    for batch, first in enumerate(range(0, n_items, batch_size)):
        stop = min(first + batch_size, n_items)
        rows = slice(offsets[first], offsets[stop]) if lengths is not None else slice(0, 0)
        chunks.append(BatchRows(
            batch, list(items[first:stop]),
            {
                name: tensor[rows if name in per_token else slice(first, stop)].contiguous()
                for name, tensor in columns.items()
            },
            list(lengths[first:stop]) if lengths is not None else None,
            tokens[rows] if tokens is not None else None,
            [one for one in skipped if first <= one[0] < stop],
        ))  # fmt: skip
    shards = []
    for number, first in enumerate(range(0, len(chunks), shard_batches)):
        buffers, shard = encode_shard(number, chunks[first : first + shard_batches])
        place.write(shard_file_name(number), buffers)
        shards.append(shard)
    if is_finished:
        write_manifest(place, job, environment_with_origin(), shards)
    return place
