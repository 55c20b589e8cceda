"""One shard: a range of rows as a safetensors file that describes itself.

    8 bytes     the header's length, little-endian
    header      JSON: what the shard holds under "__metadata__", then dtype, shape and byte offsets
                of each column; padded with spaces
    bytes       the columns, one after the other, the widest dtypes first

The description has the checksum of the header and of each column, so that a store can be checked,
and its manifest made again, from the shards alone. The safetensors library reads the same files.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from hookline.display.text import first_line
from hookline.files.folder_or_url import Place
from hookline.files.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    IN_NUMPY,
    header_end,
    length_prefixed_header,
    to_byte_array,
)
from hookline.files.unreadable_or_damaged import DAMAGE, DamagedError, convert_read_errors
from hookline.statistics import Moments
from hookline.statistics.flat_numbers import to_real_float
from hookline.util.view_as_array import view_as_array

# Columns of the store itself. "@" begins no path of a module.
ITEM, LENGTH, TOKEN = "@item", "@length", "@token"
OWN = (ITEM, LENGTH, TOKEN)
METADATA = "__metadata__"  # what safetensors calls the description of a file

_NAME = re.compile(r"shard-(\d{8})\.safetensors")
_BLANK = b"0" * 32
_SEAL = re.compile(rb'seal\\": \\"([0-9a-f]{32})')
# NumPy has no such dtypes: their bytes are unsigned integers there.
_UNSIGNED = {1: np.uint8, 2: np.uint16}


@final
@dataclass(frozen=True)
class ColumnForm:
    """The form of a column."""

    name: str  # the site, as it is written, or one of the store's own columns
    dtype: str  # the name of its dtype, as safetensors writes it
    shape: tuple[int, ...]  # the shape of one row
    per: Literal["item", "token"]  # whether an item has one row, or each of its tokens has

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} an {self.per}"

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> ColumnForm:
        """Read a form as the manifest holds it."""
        return ColumnForm(row["name"], row["dtype"], tuple(row["shape"]), row["per"])

    @property
    def per_token(self) -> bool:
        """Tell whether each token has a row."""
        return self.per == "token"

    def empty(self) -> Tensor:
        """Return a column without rows."""
        return torch.empty(0, *self.shape, dtype=DTYPES[self.dtype], device="cpu")


class BatchRows(NamedTuple):
    """The rows of one batch."""

    batch: int  # the number of the batch
    items: Sequence[int]  # the index of each item in the data set
    # For each site a contiguous CPU tensor, of a row an item or a row a token.
    columns: Mapping[str, Tensor]
    # The number of tokens of each item; None for rows an item alone.
    lengths: Sequence[int] | None = None
    tokens: Tensor | None = None  # the id of each token; None where the data has none
    skipped: Sequence[tuple[int, str]] = ()  # the items that failed to load, each with its error


class ColumnSpan(NamedTuple):
    """The place of a column in a shard's file."""

    dtype: str  # the name of the dtype, as safetensors writes it
    shape: tuple[int, ...]  # its shape; the first size is the number of rows
    start: int  # the first byte in the file
    stop: int  # the byte after the last
    sum: str  # the checksum of the bytes between


@final
@dataclass(frozen=True)
class Shard:
    """The description of a shard."""

    number: int  # counts from 0
    batches: tuple[int, int]  # the first batch, and the one after the last
    items: int  # how many items it holds
    rows: int  # how many tokens it holds; the number of items where rows are items
    size: int  # the bytes of its file
    seal: str  # the checksum of its header
    spans: Mapping[str, ColumnSpan]  # the place of each column
    # The moments of each column; of complex numbers those of the magnitude.
    statistics: Mapping[str, Moments]
    # The items that failed to load, each with its error.
    skipped: list[tuple[int, str]] = field(default_factory=list)
    job: str = ""  # the digest of the job that it is of; empty for one that is not known


def shard_file_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:08d}.safetensors"


def shard_number(name: str) -> int | None:
    """Return the number of the shard in a file; None for another file."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def encode_shard(
    number: int, chunks: Sequence[BatchRows], job_digest: str = ""
) -> tuple[list[Any], Shard]:
    """Make a shard of the rows of consecutive batches, for the job of a digest.

    Returns:
        The bytes of its file as buffers, and its description. Equal rows give equal bytes.
    """
    parts = _column_parts(chunks)
    # The widest first, so that each column is aligned to the size of its numbers.
    names = sorted(parts, key=lambda name: (-parts[name][0].element_size(), name))
    buffers: list[Any] = []
    entries: dict[str, Any] = {}
    sums: dict[str, str] = {}
    end = 0
    for name in names:
        first, data = parts[name][0], list(map(to_byte_array, parts[name]))
        digest, start = xxh3_128(), end
        for piece in data:
            digest.update(piece.data)
            end += piece.nbytes
        sums[name] = digest.hexdigest()
        entries[name] = {
            "dtype": DTYPE_NAMES[first.dtype],
            "shape": [sum(map(len, parts[name])), *first.shape[1:]],
            "data_offsets": [start, end],
        }
        buffers += data
    description = {
        "seal": _BLANK.decode(), "job": job_digest, "number": number,
        "batches": [chunks[0].batch, chunks[-1].batch + 1],
        "items": sum(len(chunk.items) for chunk in chunks),
        "rows": sum(map(_n_rows, chunks)),
        "sums": sums,
        "statistics": {
            name: _moments(parts[name]).as_json()
            for name in names
            if name not in OWN
        },
        "skipped": [list(item) for chunk in chunks for item in chunk.skipped],
    }  # fmt: skip
    head = _sealed_header(description, entries)
    return [head, *buffers], decode_header(head, len(head) + end)


def _n_rows(chunk: BatchRows) -> int:
    return len(chunk.items) if chunk.lengths is None else sum(chunk.lengths)


def _column_parts(chunks: Sequence[BatchRows]) -> dict[str, list[Tensor]]:
    """Return the parts of each column, the store's own included."""
    parts = {name: [chunk.columns[name] for chunk in chunks] for name in chunks[0].columns}
    parts[ITEM] = [torch.tensor(chunk.items, dtype=torch.int64, device="cpu") for chunk in chunks]
    per_item = [chunk.lengths for chunk in chunks if chunk.lengths is not None]
    lengths = [torch.tensor(of_chunk, dtype=torch.int64, device="cpu") for of_chunk in per_item]
    if lengths:
        parts[LENGTH] = lengths
    if tokens := [chunk.tokens for chunk in chunks if chunk.tokens is not None]:
        parts[TOKEN] = tokens
    return parts


def _sealed_header(description: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    """Return the 8 bytes of length and the header, with its checksum filled in."""
    head = length_prefixed_header(
        json.dumps({METADATA: {"hookline": json.dumps(description)}, **entries})
    )
    at = head.index(_BLANK)
    return head[:at] + xxh3_128_hexdigest(head).encode() + head[at + len(_BLANK) :]


def decode_header(head: bytes, file_size: int) -> Shard:
    """Read the description of a shard from its header, and verify the header's checksum.

    `head` has the first bytes, to the end of the header; `file_size` is that of the whole file.

    Raises:
        ValueError, KeyError, TypeError: the header is damaged, or the file has another size.
    """
    match = _SEAL.search(head)
    if match is None:
        raise ValueError("it must have the header of a shard")
    blank = head[: match.start(1)] + _BLANK + head[match.end(1) :]
    seal = xxh3_128_hexdigest(blank)
    if seal.encode() != match[1]:
        raise ValueError(f"the checksum of its header must be {match[1].decode()}, got {seal}")
    header = json.loads(head[8:])
    description = json.loads(header.pop(METADATA)["hookline"])
    spans = {}
    for name, entry in header.items():
        start, stop = (len(head) + offset for offset in entry["data_offsets"])
        spans[name] = ColumnSpan(
            entry["dtype"], tuple(entry["shape"]), start, stop, description["sums"][name]
        )
    end = max((span.stop for span in spans.values()), default=len(head))
    if end != file_size:
        raise ValueError(f"it must be {end} bytes long, got {file_size}")
    first, last = description["batches"]
    return Shard(
        description["number"], (first, last), description["items"], description["rows"], file_size,
        seal, spans,
        {name: Moments.from_json(fields) for name, fields in description["statistics"].items()},
        [(item, text) for item, text in description["skipped"]],
        description.get("job", ""),  # the first hookline 0.1.0 wrote none
    )  # fmt: skip


def renumber_shard(
    head: bytes, file_size: int, number: int, first_batch: int
) -> tuple[bytes, Shard]:
    """Give a shard another number and first batch; its columns stay as they are.

    Returns:
        The new header, and the description of the shard with it.
    """
    header = json.loads(head[8:])
    description = json.loads(header.pop(METADATA)["hookline"])
    first, last = description["batches"]
    batches = [first_batch, first_batch + last - first]
    description.update(seal=_BLANK.decode(), job="", number=number, batches=batches)
    new = _sealed_header(description, header)
    return new, decode_header(new, len(new) + file_size - len(head))


def verify_checksum(span: ColumnSpan, data: NDArray[np.uint8]) -> None:
    """Compare a column's bytes with their checksum."""
    actual = xxh3_128_hexdigest(data.data)
    if actual != span.sum:
        raise ValueError(f"its checksum must be {span.sum}, got {actual}")


def bytes_to_array(span: ColumnSpan, data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return a column's bytes as an array; a dtype that NumPy lacks is unsigned integers."""
    array: NDArray[Any] = data.view(numpy_dtype(DTYPES[span.dtype])).reshape(span.shape)
    return array


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype of arrays that hold a torch dtype's bytes."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(_UNSIGNED[dtype.itemsize])


def array_to_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor that shares its memory, in the dtype that its bytes are of."""
    return torch.from_numpy(array).view(dtype)


def _moments(tensors: Sequence[Tensor]) -> Moments:
    moments = Moments()
    for tensor in tensors:
        plain = tensor if tensor.dtype in IN_NUMPY else to_real_float(tensor)
        moments = moments + Moments.of(view_as_array(plain))
    return moments


def read_shard(place: Place, name: str, *, verify: bool = False) -> Shard:
    """Read the description of a shard in a place; `verify` also compares the bytes of all columns.

    Raises:
        FileNotFoundError: the file does not exist.
        UnreadableError: the file cannot be read now.
        DamagedError: the bytes of the file were read, and are wrong.
    """
    try:
        with convert_read_errors(f"{place}/{name}"):
            size = place.size(name)
            first = place.read(name, 0, min(8, size))
            end = header_end(first)
            if not 8 < end <= size:
                raise ValueError(f"it must be as long as its header says, got {size} bytes")
            shard = decode_header(first + place.read(name, 8, end), size)
            for span in shard.spans.values() if verify else ():
                verify_checksum(span, place.view(name, span.start, span.stop))
    except DAMAGE as error:
        raise DamagedError(first_line(error)) from error
    return shard


@final
class ShardWriter:
    """Writes shards in the order in which they are given, at most `waiting` behind.

    Leaving the block waits for all of them. A shard that cannot be written raises in the next
    `submit`, or at the end of the block.

    Args:
        place: where the store is.
        written: called in the thread with each shard that is on disk.
        job: the digest of the job that the shards are of.
        waiting: how many shards may wait, one that is being written included. This bounds memory.
    """

    def __init__(
        self, place: Place, written: Callable[[Shard], None], *, job: str = "", waiting: int = 2
    ) -> None:
        self._place = place
        self._written = written
        self._job = job
        self._waiting = waiting
        self._pool = ThreadPoolExecutor(1, "hookline-writer")
        self._running: deque[Future[None]] = deque()

    def submit(self, number: int, chunks: Sequence[BatchRows], wait: Callable[[], None]) -> None:
        """Have a shard of some batches written; wait if too many are waiting.

        `wait` is called in the thread, to wait until the rows are on the CPU.

        Raises:
            FolderError: an earlier shard could not be written.
        """
        while len(self._running) >= self._waiting or (self._running and self._running[0].done()):
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._write, number, chunks, wait))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                while self._running:
                    self._running.popleft().result()
        finally:
            # What already waits is written also after an error: it need not be computed again.
            self._pool.shutdown()

    def _write(self, number: int, chunks: Sequence[BatchRows], wait: Callable[[], None]) -> None:
        wait()
        buffers, shard = encode_shard(number, chunks, self._job)
        self._place.write(shard_file_name(number), buffers)
        self._written(shard)
