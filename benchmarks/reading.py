"""Reading a store, beside `np.memmap` of the same numbers and the formats it is exported to."""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import hookline as hl
from benchmarks.timing import Clock, Contender, Measure, Plan, Result, run_rounds
from hookline.files.folder_or_url import LocalPlace
from hookline.stores.job_manifest import read_manifest, write_manifest
from hookline.stores.shard_file import read_shard, renumber_shard, shard_file_name

N_ROWS, WIDTH, RUN = 131_072, 768, 512
_BATCH = 64
_FEW = 64  # rows that a slow format reads in one measurement, or batches


class Reader(Protocol):
    """One way of reading the rows; each gives an array or a tensor of its own memory."""

    def slice(self, start: int, stop: int) -> Any: ...
    def row(self, row: int) -> Any: ...
    def batch(self, rows: NDArray[np.int64]) -> Any: ...


@dataclass
class Memmap:
    array: NDArray[np.float32]

    def slice(self, start: int, stop: int) -> Any:
        return self.array[start:stop].copy()

    def row(self, row: int) -> Any:
        return self.array[row].copy()

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return self.array[rows]


@dataclass
class MemmapAsTensors(Memmap):
    def slice(self, start: int, stop: int) -> Any:
        return torch.from_numpy(super().slice(start, stop))

    def row(self, row: int) -> Any:
        return torch.from_numpy(super().row(row))

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return torch.from_numpy(super().batch(rows))


@dataclass
class Column:
    column: Any

    def slice(self, start: int, stop: int) -> Any:
        return self.column[start:stop]

    def row(self, row: int) -> Any:
        return self.column[row]

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return self.column[rows]


@dataclass
class ColumnAsArrays(Column):
    def slice(self, start: int, stop: int) -> Any:
        return self.column.numpy(slice(start, stop))

    def row(self, row: int) -> Any:
        return self.column.numpy(row)

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return self.column.numpy(rows)


class Parquet:
    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self.file = parquet.ParquetFile(path, memory_map=True)
        groups = range(self.file.num_row_groups)
        sizes = [self.file.metadata.row_group(group).num_rows for group in groups]
        self.stops = np.cumsum(sizes)

    def slice(self, start: int, stop: int) -> Any:
        groups = range(self.group(start), self.group(stop - 1) + 1)
        first = self.stops[groups[0] - 1] if groups[0] else 0
        table = self.file.read_row_groups(list(groups), columns=["x"])
        return _numbers(table.slice(start - first, stop - start))

    def row(self, row: int) -> Any:
        return self.slice(row, row + 1)[0]

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return np.stack([self.row(row) for row in rows.tolist()])

    def group(self, row: int) -> int:
        return int(np.searchsorted(self.stops, row, "right"))


class Lance:
    def __init__(self, path: Path) -> None:
        import lance

        self.dataset = lance.dataset(str(path))

    def slice(self, start: int, stop: int) -> Any:
        return _numbers(self.dataset.to_table(columns=["x"], offset=start, limit=stop - start))

    def row(self, row: int) -> Any:
        return _numbers(self.dataset.take([row], columns=["x"]))[0]

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return _numbers(self.dataset.take(rows.tolist(), columns=["x"]))


class Zarr:
    def __init__(self, path: Path) -> None:
        import zarr

        self.array = zarr.open_group(str(path), mode="r")["x"]

    def slice(self, start: int, stop: int) -> Any:
        return self.array[start:stop]

    def row(self, row: int) -> Any:
        return self.array[row]

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return self.array.oindex[rows]


class HuggingFace:
    def __init__(self, path: Path) -> None:
        from datasets import load_from_disk

        self.dataset = load_from_disk(str(path)).select_columns(["x"]).with_format("numpy")

    def slice(self, start: int, stop: int) -> Any:
        return self.dataset[start:stop]["x"]

    def row(self, row: int) -> Any:
        return self.dataset[row]["x"]

    def batch(self, rows: NDArray[np.int64]) -> Any:
        return self.dataset[rows]["x"]


def _numbers(table: Any) -> NDArray[np.float32]:
    rows = table.column("x").combine_chunks()
    # The numbers of a slice: `values` would be those of the whole array.
    found: NDArray[np.float32] = rows.flatten().to_numpy().reshape(-1, WIDTH)
    return found


_OTHERS: dict[str, tuple[str, str, Callable[[Path], Reader]]] = {
    "lance": ("lance", "lance.dataset", Lance),
    "datasets": ("datasets", "datasets.load_from_disk, as NumPy", HuggingFace),
    "zarr": ("zarr", "zarr.open_group", Zarr),
    "parquet": ("parquet", "pyarrow.parquet.ParquetFile, memory-mapped", Parquet),
}


class _Data:
    """The numbers, correlated in runs as the tokens of a text are, in each format."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="hookline-reading-"))
        folder = tempfile.TemporaryDirectory(dir=self.base)
        self._finalizer = weakref.finalize(self, _remove, folder, self.base)
        self.base = Path(folder.name)
        runs = torch.randn(N_ROWS // RUN, WIDTH, generator=torch.Generator().manual_seed(0))
        values = torch.randn(N_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        values.mul_(0.1).view(-1, RUN, WIDTH).add_(runs[:, None])
        model = nn.Sequential()
        model.add_module("x", nn.Identity())
        n_bytes = 8192 * WIDTH * 4
        self.store = hl.extract(
            model, values, "x", self.base / "store", batch_size=512, shard_bytes=n_bytes
        )
        values.numpy().tofile(self.base / "raw")
        mapped = np.memmap(self.base / "raw", np.float32, "r", shape=(N_ROWS, WIDTH))
        self.array = np.asarray(mapped)
        self.store.verify()

    @functools.cache  # noqa: B019  # the data lives as long as the process
    def other(self, format: Any) -> Path:
        return self.store.export(self.base / f"other-{format}", format)


def _remove(folder: tempfile.TemporaryDirectory[str], base: Path) -> None:
    folder.cleanup()
    base.rmdir()


@functools.cache
def _data() -> _Data:
    return _Data()


def reading_row(work: str, title: str, target: float) -> Callable[[str, Plan], Result]:
    """A row: read a store in one way, "slice", "row" or "batch"; seconds a row."""

    def measure(name: str, plan: Plan) -> Result:
        data = _data()
        result = Result(name, title, "hand-written", target, unit="s a row")
        memmap = Memmap(data.array)
        contenders = [
            _contender("hand-written", "np.memmap, as a plain array", memmap, work, memmap),
            _contender(
                "memmap, as tensors", "torch.from_numpy of it", MemmapAsTensors(data.array), work,
                memmap,
            ),
            _contender("hookline", "store[site][...]", Column(data.store["x"]), work, memmap),
            _contender(
                "hookline, as arrays", "store[site].numpy(...)", ColumnAsArrays(data.store["x"]),
                work, memmap,
            ),
        ]  # fmt: skip
        for format, (shown, how, make) in _OTHERS.items():
            try:
                reader = make(data.other(format))
            except (ImportError, hl.InputError) as error:
                result.skipped[shown] = str(error).splitlines()[0]
                continue
            other = _contender(shown, how, reader, work, memmap, few=True)
            contenders.append(replace(other, every=5))
        return run_rounds(result, contenders, plan)

    return measure


def _contender(
    name: str, how: str, reader: Reader, work: str, memmap: Memmap, *, few: bool = False
) -> Contender:
    numbers = np.random.default_rng(0)
    rows = numbers.integers(0, N_ROWS, _FEW if few else 20_000).tolist()
    batches = numbers.integers(0, N_ROWS, (4 if few else 500, _BATCH))
    starts = range(0, 8192 if few else N_ROWS, 1024)

    def check() -> None:
        assert np.array_equal(reader.slice(5000, 5010), memmap.slice(5000, 5010))
        assert np.array_equal(reader.row(77_777), memmap.row(77_777))
        assert np.array_equal(reader.batch(batches[0]), memmap.batch(batches[0]))

    def by_slice(calls: int, clock: Clock) -> float:
        start = clock()
        for first in starts:
            reader.slice(first, first + 1024)
        return (clock() - start) / (1024 * len(starts))

    def by_row(calls: int, clock: Clock) -> float:
        start = clock()
        for row in rows:
            reader.row(row)
        return (clock() - start) / len(rows)

    def by_batch(calls: int, clock: Clock) -> float:
        start = clock()
        for batch in batches:
            reader.batch(batch)
        return (clock() - start) / batches.size

    works: dict[str, Measure] = {"slice": by_slice, "row": by_row, "batch": by_batch}
    return Contender(name, how, works[work], check)


def shuffled_row(shards: int, title: str, target: float) -> Callable[[str, Plan], Result]:
    """A row: read a store once, shuffled, in batches of 256; seconds a row."""

    def measure(name: str, plan: Plan) -> Result:
        data = _data()
        column = data.store["x"]
        result = Result(name, title, "bare", target, unit="s a row")

        def in_order(calls: int, clock: Clock) -> float:
            start = clock()
            for first in range(0, N_ROWS, 1024):
                column[first : first + 1024]
            return (clock() - start) / N_ROWS

        def shuffled(calls: int, clock: Clock) -> float:
            rows = data.store.shuffled("x", batch_size=256, shards=shards)
            start = clock()
            for _ in rows:
                pass
            return (clock() - start) / N_ROWS

        contenders = [
            Contender("bare", "store[site] in slices of 1,024 rows", in_order),
            Contender("hookline", f"store.shuffled(site, shards={shards})", shuffled),
        ]
        run_rounds(result, contenders, plan)
        result.notes.append(f"variance of the means of batches: {_variance(data, shards):.2f} x")
        return result

    return measure


def _variance(data: _Data, shards: int) -> float:
    """Return the variance of the means of batches, against that of independent draws."""
    rows = data.store.shuffled("x", batch_size=256, shards=shards)
    means = torch.stack([batch.mean(0) for batch in rows])
    expected = data.array.var(0) / 256
    return float((means.var(0).numpy() / expected).mean())


def opening_row(n_shards: int, n_sites: int, title: str, target: float) -> Callable[..., Result]:
    """A row: open a store of so many shards; seconds."""

    def measure(name: str, plan: Plan) -> Result:
        with tempfile.TemporaryDirectory() as base:
            model = nn.Sequential(*(nn.Identity() for _ in range(n_sites)))
            folder = Path(base) / "store"
            hl.extract(model, torch.zeros(4, 4), "*", folder, batch_size=4)
            _copy_shards(LocalPlace(folder), n_shards)

            def opened(calls: int, clock: Clock) -> float:
                start = clock()
                hl.open(folder)
                return clock() - start

            result = Result(name, title, None, target)
            return run_rounds(result, [Contender("hookline", "hl.open(folder)", opened)], plan)

    return measure


def _copy_shards(place: LocalPlace, n_shards: int) -> None:
    """Make a store of one shard a store of many: copies with numbers of their own."""
    manifest = read_manifest(place)
    assert manifest is not None
    data = place.read(shard_file_name(0))
    one = read_shard(place, shard_file_name(0))
    end = min(span.start for span in one.spans.values())
    shards = []
    for number in range(n_shards):
        head, shard = renumber_shard(data[:end], len(data), number, number)
        (place.folder / shard_file_name(number)).write_bytes(head + data[end:])
        shards.append(shard)
    job = {**manifest["job"], "n_items": 4 * n_shards}
    write_manifest(place, job, manifest["environment"], shards)
