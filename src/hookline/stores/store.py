"""A store: the values of a whole data set at some sites, read from disk as they are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.display.results import Printout, Result
from hookline.display.text import first_line, name_without_torch, plural
from hookline.display.text_table import Heading
from hookline.display.units import measure, size
from hookline.engine import Selection, Site, parse_site
from hookline.engine.provenance import Provenance
from hookline.errors import (
    AmbiguousError,
    FolderError,
    NotRecordedError,
    SelectionError,
    StructureError,
)
from hookline.files.folder_or_url import Place, as_place
from hookline.files.sealed_json import MANIFEST
from hookline.files.unreadable_or_damaged import DAMAGE, convert_read_errors
from hookline.findings import Findings
from hookline.recordings.key_index import Key, only_site, suggestion_text
from hookline.statistics import Moments, merge_moments_by_key
from hookline.statistics.site_dict import SiteDict
from hookline.stores.column import Column
from hookline.stores.exports import ExportedColumns, Format, export
from hookline.stores.findings import judge_store
from hookline.stores.job_manifest import LOOP, read_manifest
from hookline.stores.mapped_shards import Shards
from hookline.stores.shard_file import ITEM, LENGTH, OWN, TOKEN, ColumnForm, shard_number
from hookline.stores.store_datasets import ShuffledRows, ShuffleOptions, StoreDataset

NAMES = "names.json"
_MOST_ROWS = 60
_MOST_LINES = 24
_NUMBERS = ("count", "non_finite", "zeros", "mean", "std", "rms", "min", "max")
_HEADINGS = (
    Heading("site", "path"), Heading("shape", "structure"), Heading("dtype"),
    Heading("a row for each", gives_way=3), Heading("mean", "number"), Heading("std", "number"),
    Heading("not finite", "number", 2), Heading("size", "number", 1),
)  # fmt: skip


@final
class Store(Result):
    """The values of a data set at some sites: `store[site]` is read like an array.

        >>> store = hl.open(tmp_path / "features")
        >>> store.sites
        ('body', 'fc')
        >>> len(store), store["fc"].shape
        (100, (100, 3))
        >>> store["fc"][40:42].shape
        torch.Size([2, 3])

    `hl.extract` and `hl.open` return stores. A site is written as in `hl.select`, or given as a
    selection of one site. `len(store)` is the number of items, and iteration yields the sites.
    Values lie on disk, and are read when a column is indexed. The rows are split over several
    files, the shards. The first read of a column from a shard verifies a checksum.

    `store.items` has the index of each item in its data set, since items may have been skipped. If
    rows are tokens, `store.tokens` has their ids.

    Args:
        place: where the store is.
        manifest: its manifest.

    Attributes:
        sites: the sites, as the store writes them.
        statistics: the `Moments` of each site, computed when the store was written; of complex
            numbers those of the magnitude.
        skipped: the index of each item that has no row in the store, and the reason.
        parts: the stores that `hl.Store.cat` joined; otherwise empty.
        place: the folder or URL of the store.
        n_items: the number of items.
        n_rows: the number of tokens; the number of items where rows are items.
        nbytes: the bytes of all files.

    Raises:
        FolderError: the store is not finished, or its manifest is damaged.
        NotRecordedError: by `store[site]`: the store has no such site.
        SelectionError: by `store[site]`: the site is malformed.
        AmbiguousError: by `store[site]`: a selection of several sites.
    """

    def __init__(self, place: Place, manifest: Mapping[str, Any]) -> None:
        self._place = place
        self._manifest = manifest
        self.parts: tuple[Store, ...] = ()
        if manifest.get("shards") is None:
            raise _unfinished_error(place, manifest["job"])
        try:
            shards = Shards(place, manifest["shards"])
            self._forms = tuple(_column_forms(manifest["job"]))
            numbers = manifest["statistics"].items()
            self.statistics: SiteDict[Moments] = SiteDict(
                {name: Moments.from_json(fields) for name, fields in numbers}
            )
            self.skipped: list[tuple[int, str]] = [
                (int(item), str(text)) for item, text in manifest["skipped"]
            ]
            self._set_shards(shards)
        except DAMAGE as error:
            raise _damaged_error(place, f"its {MANIFEST}: {first_line(error)}") from error

    def _set_shards(self, shards: Shards) -> None:
        self._shards = shards
        self.sites: tuple[str, ...] = tuple(
            form.name for form in self._forms if form.name not in OWN
        )
        self._columns = {form.name: Column(shards, form) for form in self._forms}
        self._by_site = {parse_column_name(name): name for name in self.sites}

    @property
    def place(self) -> Place:
        """The folder or URL of the store.

        Raises:
            AmbiguousError: the store joins several, and each has its own.
        """
        self._check_not_joined("place")
        return self._place

    @property
    def n_items(self) -> int:
        """The number of items."""
        return self._shards.item_bounds.length

    @property
    def n_rows(self) -> int:
        """The number of tokens; the number of items where rows are items."""
        return self._shards.row_bounds.length

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(self._shards.sizes)

    @property
    def items(self) -> Column:
        """The index of each item in its data set, as a column of int64.

            >>> store.items[[0, -1]]
            tensor([ 0, 99])

        `store.skipped` lists the items of the data set that have no row.
        """
        return self._columns[ITEM]

    @property
    def tokens(self) -> Column:
        """The id of each token, as a column; the rows must be tokens.

            >>> ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
            >>> tokens = hl.extract(
            ...     nn.Embedding(9, 4), ids, "", tmp_path / "tokens", mask=lambda ids: ids != 0
            ... )
            >>> tokens.tokens[:]
            tensor([1, 2, 3])

        Raises:
            NotRecordedError: the data had no token ids, or rows are items.
        """
        if TOKEN not in self._columns:
            form = self._token_id_form()
            if form is None:
                raise NotRecordedError(
                    "a store must hold rows for each token of a text to have token ids."
                    "\nExtract from text, or from batches with 'input_ids'."
                )
            self._columns[TOKEN] = Column(self._shards, form)
        return self._columns[TOKEN]

    def _token_id_form(self) -> ColumnForm | None:
        if self.parts:
            forms = {part._token_id_form() for part in self.parts if part.n_rows}
            return forms.pop() if len(forms) == 1 else None
        for shard in range(len(self._shards)):
            if self._shards.n_rows[shard]:
                span = self._shards.read_description(shard).spans.get(TOKEN)
                return span and ColumnForm(TOKEN, span.dtype, span.shape[1:], "token")
        return None

    @property
    def job(self) -> Mapping[str, Any]:
        """A dict that describes how the store was made.

            >>> store.job["sites"], store.job["batch_size"]
            (['body', 'fc'], 32)

        Its keys are `model`, `sites`, `options`, `data`, `batch_size`, `n_items`, `shard_batches`,
        `columns` and `first_batch`. The last is a fingerprint of the values of the first batch, by
        which `hl.extract` notices another model.

        Raises:
            AmbiguousError: `hl.Store.cat` joined several stores; write `store.parts[0].job`.
        """
        self._check_not_joined("job")
        job: Mapping[str, Any] = self._manifest["job"]
        return job

    @property
    def provenance(self) -> Provenance:
        """Say where the values come from: versions, device, model, flags that change numbers.

            >>> sorted(store.provenance.versions)[:2], "torch" in store.provenance.versions
            (['hookline', 'python'], True)

        Raises:
            AmbiguousError: `hl.Store.cat` joined several stores; write `store.parts[0].provenance`.
        """
        self._check_not_joined("provenance")
        made_on = self._manifest["environment"]
        origin = made_on.get("origin", {"versions": {}, "flags": {}})  # older hookline wrote none
        versions = {"hookline": str(self._manifest.get("hookline", "unknown"))}
        versions |= {name: str(made_on[name]) for name in ("python", "torch") if name in made_on}
        device = next(
            (made_on[name] for name in ("gpu", "machine") if made_on.get(name, "none") != "none"),
            "",
        )
        flags = {
            name: str(value)
            for name, value in made_on.items()
            if name in ("threads", "autocast", "matmul_precision")
        }
        return Provenance(
            {**origin["versions"], **versions},
            str(device),
            str(self._manifest["job"]["model"].get("weights", "")),
            {**origin["flags"], **flags},
        )

    @cached_property
    def names(self) -> Sequence[str] | None:
        """The name of each item of the data set, such as its file; None if the data had none.

            >>> store.names is None
            True

        `store.files` has the names of the items that have a row.

        Raises:
            AmbiguousError: `hl.Store.cat` joined several stores; write `store.parts[0].names`.
            FolderError: the names are damaged.
        """
        self._check_not_joined("names")
        try:
            with convert_read_errors(f"{self._place}/{NAMES}"):
                data = self._place.read(NAMES)
            names = json.loads(data)
            if not isinstance(names, list):
                raise ValueError("it must be a list")
        except FileNotFoundError:
            return None
        except DAMAGE as error:
            raise _damaged_error(self._place, f"its {NAMES}: {first_line(error)}") from error
        return names

    @cached_property
    def files(self) -> NDArray[Any] | None:
        """Return the file of each row of a folder of images: an array of strings, shape `(items,)`.

            >>> store.files is None
            True

        The paths begin in the folder of the data, and have `/` between folders. `store.files[17]`
        is the file whose values are in row 17. None if the items were not files.

        Raises:
            FolderError: the names are damaged.
        """
        if self.parts:
            parts = [part.files for part in self.parts]
            arrays = [files for files in parts if files is not None]
            return np.concatenate(arrays) if len(arrays) == len(parts) else None
        if self.names is None:
            return None
        try:
            files: NDArray[Any] = np.array(self.names, object)[self.items.numpy()]
            return files
        except IndexError as error:
            why = f"its {NAMES}: it must have a name for each item, got {len(self.names)}"
            raise _damaged_error(self._place, why) from error

    @cached_property
    def labels(self) -> NDArray[Any] | None:
        """Return the label of each row of a folder of images: strings, shape `(items,)`.

            >>> store.labels is None
            True

        The label is the name of the subfolder, as in torchvision's `ImageFolder`: "cat" for
        `cat/01.png` and for `cat/old/01.png`. It is empty for an image outside of subfolders. None
        if there are no subfolders. `store["fc"][store.labels == "cat"]` reads the rows of a label.

        Raises:
            FolderError: the names are damaged.
        """
        if self.files is None or not any("/" in file for file in self.files):
            return None
        labels = [file.partition("/")[0] if "/" in file else "" for file in self.files]
        return np.array(labels, object)

    def __getitem__(self, site: Key) -> Column:
        return self._columns[self._column_name(site)]

    def __contains__(self, site: object) -> bool:
        """Return whether the store has values at a site."""
        if not isinstance(site, Key):
            return False
        try:
            self._column_name(site)
        except (AmbiguousError, NotRecordedError, SelectionError):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return self.n_items

    @staticmethod
    def cat(stores: Sequence[Store]) -> Store:
        """Concatenate stores of the same sites into one; no value is copied or read.

            >>> both = hl.Store.cat([store, store])
            >>> len(both), both["fc"][[0, 100]].shape
            (200, torch.Size([2, 3]))

        Args:
            stores: one or more stores, in the order of their rows.

        Returns:
            A store with the rows of all. Its `parts` are the given stores. Its `items` has the
            index of each item in the data set of the item's own store.

        Raises:
            StructureError: there is no store, one is not a store, or the stores differ in their
                sites, shapes or dtypes.
        """
        stores = tuple(stores)
        if not stores:
            raise StructureError(
                "Store.cat must have one or more stores, got none."
                "\nGive a list: hl.Store.cat([store, other])."
            )
        for store in stores:
            if not isinstance(store, Store):
                raise StructureError(
                    f"Store.cat must have stores, got {type(store).__name__}."
                    "\nOpen them: hl.Store.cat([hl.open('a'), hl.open('b')])."
                )
        for other in stores[1:]:
            _check_same_columns(stores[0], other)
        joined = Store.__new__(Store)
        joined._place, joined._manifest, joined.parts = stores[0]._place, {}, stores
        joined._forms = stores[0]._forms
        joined.statistics = SiteDict(merge_moments_by_key(store.statistics for store in stores))
        joined.skipped = [item for store in stores for item in store.skipped]
        joined._set_shards(Shards.joined(store._shards for store in stores))
        return joined

    def dataset(self, *sites: Key) -> StoreDataset:
        """Return the rows as a `torch.utils.data.Dataset`, which is read by index.

            >>> rows = store.dataset("fc")
            >>> len(rows), rows[3].shape
            (100, torch.Size([3]))
            >>> store.dataset("fc", "@item")[7]["@item"]
            tensor(7)

        For one site a row is a tensor, for several a dict of tensors. Rows are tokens if one of the
        sites has a value for each token. A site with a value for each item then repeats the value
        for each token of the item.

        Args:
            *sites: the sites; all by default. `"@item"` is the index of an item in its data set,
                `"@token"` the id of a token, `"@length"` the number of an item's tokens.

        Returns:
            The data set, for a `DataLoader` or to index.

        Raises:
            NotRecordedError: the store has no such site.
        """
        columns, is_single = self._columns_and_is_single(sites)
        return StoreDataset(self._shards, columns, is_single=is_single)

    def shuffled(
        self,
        *sites: Key,
        batch_size: int | None = 256,
        seed: int = 0,
        shards: int = 16,
        drop_last: bool = False,
    ) -> ShuffledRows:
        """Return the rows in a shuffled order, as batches, for training.

            >>> for batch in store.shuffled("fc", batch_size=64):
            ...     print(batch.shape)
            torch.Size([64, 3])
            torch.Size([36, 3])

        Each iteration is an epoch with another order. `DataLoader(rows, batch_size=None,
        num_workers=4)` reads in workers; workers and the ranks of a distributed job share the rows.

        Args:
            *sites: the sites, as in `dataset`.
            batch_size: the number of rows in a batch; None yields single rows.
            seed: equal seeds give equal orders, epoch by epoch.
            shards: the number of shards (files of the store) whose rows are mixed at a time. More
                shards mix better and need more memory, which counts most if the store is at a URL.
            drop_last: True leaves out rows so that all batches are full, and all ranks have the
                same number of batches.

        Returns:
            An iterable of batches. A batch is a tensor for one site, and a dict of tensors for
            several; their first dimension is the row.

        Raises:
            NotRecordedError: the store has no such site.
            InputError: `batch_size` or `shards` is not a positive integer, or `seed` no integer
                from 0.
        """
        columns, is_single = self._columns_and_is_single(sites)
        how = ShuffleOptions(batch_size, seed, shards, drop_last)
        return ShuffledRows(self._shards, columns, how, is_single=is_single)

    def _columns_and_is_single(self, sites: Sequence[Key]) -> tuple[list[Column], bool]:
        columns = {name: self[name] for name in map(self._column_name, sites or self.sites)}
        return list(columns.values()), len(sites or self.sites) == 1

    def export(self, to: str | os.PathLike[str], format: Format, *sites: Key) -> Path:
        """Write the values in another format, without holding the whole store in memory.

            >>> import numpy as np
            >>> folder = store.export(tmp_path / "arrays", "npy")
            >>> np.load(folder / "fc.npy", mmap_mode="r").shape
            (100, 3)

        | `format` | `to` | read by | package |
        |---|---|---|---|
        | `"parquet"` | a file | pyarrow, pandas, polars, DuckDB | pyarrow |
        | `"datasets"` | a folder | `datasets.load_from_disk` | datasets |
        | `"npy"` | a folder | `np.load(file, mmap_mode="r")` | none |
        | `"zarr"` | a folder | `zarr.open_group` | zarr |
        | `"lance"` | a folder | `lance.dataset` | pylance |

        In parquet, datasets and Lance a row is an item. If a site has a value for each token, its
        column has a list of values for each item. In npy and Zarr such a column has a row for each
        token, and `@length` has the number of tokens of each item. `@item` has the index of each
        item in its data set, and `@token` the token ids. Tables of a folder of images also have the
        texts `@file` and `@label`. In parquet, a row of several dimensions is one flat list; its
        shape is in the metadata of the field. bfloat16 and float8 become float32, which
        holds the same numbers. Lance has `/` in names for each dot. The names of .npy files are
        quoted as in URLs, and listed in `columns.json`.

        Args:
            to: a new file or folder.
            format: a format of the table.
            *sites: the sites; all by default.

        Returns:
            The path of the file or folder.

        Raises:
            InputError: there is no such format, or its package is not installed.
            StructureError: the format cannot hold a column's dtype.
            FolderError: `to` exists, is a URL or cannot be written; a shard is gone or damaged.
            NotRecordedError: the store has no such site.
        """
        columns, _ = self._columns_and_is_single(sites)
        own_columns = [self.items]
        if any(column.is_ragged for column in columns) and self._token_id_form() is not None:
            own_columns.append(self.tokens)
        named = {column.name for column in columns}
        columns += [column for column in own_columns if column.name not in named]
        texts = {"@file": self.files, "@label": self.labels}
        text_columns = {name: column for name, column in texts.items() if column is not None}
        return export(ExportedColumns(columns, self.n_items, text_columns), to, format)

    def findings(self) -> Findings:
        """Say what is wrong with the values, by their statistics, and which items were skipped.

            >>> store.findings().ok
            True

        No value is read: `store.statistics` tells NaN, infinity, and sites that are zero or have
        one number in every item.
        """
        dtypes = {site: self._columns[site].dtype for site in self.sites}
        return judge_store(self.statistics, dtypes, self.skipped, self.n_items)

    def verify(self) -> None:
        """Verify the checksums of all values. This reads the whole store.

            >>> store.verify()

        `hookline.stores.verify(folder)` lists all damaged files instead of raising an error.

        Raises:
            FolderError: a shard (a file of the store) is gone or damaged.
        """
        for shard in range(len(self._shards)):
            for form in self._forms:
                self._shards.mapped_rows(shard, form)
            if self._token_id_form() is not None:
                self._shards.mapped_rows(shard, self.tokens._form)

    def release(self) -> None:
        """Unmap the files of the store from memory.

            >>> store.release()

        A file that was read stays mapped until it is released, and counts as memory of this
        process. The next look-up maps the file again.
        """
        self._shards.release()

    def _column_name(self, site: Key) -> str:
        """Return the name of a site's column, however the site is written."""
        if isinstance(site, str) and site in self._columns:
            return site
        if site == TOKEN:
            return self.tokens.name
        if isinstance(site, Selection):
            site = only_site(site)
        if not isinstance(site, str | Site):
            raise NotRecordedError(
                f"a key must be a site, got {site!r}.\nGive as the key the site itself, such as"
                f" {next(iter(self.sites), 'layer1')!r}; rows are in store[site][rows]."
            )
        parsed = parse_site(site) if isinstance(site, str) else site
        name = self._by_site.get(parsed)
        if name is None:
            raise NotRecordedError(self._not_stored_text(parsed))
        return name

    def _not_stored_text(self, site: Site) -> str:
        same_path = [name for stored, name in self._by_site.items() if stored.path == site.path]
        hint = suggestion_text(str(site), same_path, list(self.sites), "stored")
        return (
            f"{str(site)!r} was never selected{hint}"
            "\nLook up one that was, or select this one too when extracting."
        )

    def _check_not_joined(self, attribute: str) -> None:
        if self.parts:
            raise AmbiguousError(
                f"this store joins {len(self.parts)} stores, and each has its own {attribute}."
                f"\nWrite store.parts[0].{attribute} for one of them."
            )

    # -- how it shows itself --------------------------------------------------------------------

    def _place_text(self) -> str:
        return f"{len(self.parts)} stores" if self.parts else str(self._place)

    def _summary_text(self) -> str:
        rows = "" if self.n_rows == self.n_items else f", {plural(self.n_rows, 'token')}"
        return (
            f"{plural(len(self.sites), 'site')}, {plural(self.n_items, 'item')}{rows}"
            f" in {plural(len(self._shards), 'shard')}, {size(self.nbytes)}: {self._place_text()}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the sites with their forms and statistics, the shards and the job.

        Joined stores have no job in common: it is None.
        """
        return {
            "folder": self._place_text(),
            "items": self.n_items,
            "rows": self.n_rows,
            "bytes": self.nbytes,
            "skipped": self.skipped,
            "shards": self._shards.to_dicts(),
            "job": self._manifest.get("job"),
            "sites": self._table_rows(),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "site": name,
                "shape": self._columns[name].shape,
                "dtype": name_without_torch(self._columns[name].dtype),
                "bytes": self._columns[name].nbytes,
                "statistics": _moments_to_dict(self.statistics.get(name)),
            }
            for name in self.sites
        ]

    def _printout(self) -> Printout:
        rows = []
        for name in self.sites[:_MOST_ROWS]:
            column, moments = self._columns[name], self.statistics.get(name, Moments())
            mean, std = (moments.mean, moments.std) if moments.finite else (None, None)
            rows.append((
                name, f"{list(column.shape)}", name_without_torch(column.dtype),
                "token" if column.is_ragged else "item", measure(mean), measure(std),
                f"{moments.non_finite:,}", size(column.nbytes),
            ))  # fmt: skip
        return Printout(
            title="Store",
            head=f" of {self._summary_text()}",
            headings=_HEADINGS,
            rows=rows,
            n_rows=len(self.sites),
            most_lines=_MOST_LINES,
            more="sites: store.sites",
            is_compact=True,
        )


def _moments_to_dict(moments: Moments | None) -> dict[str, Any] | None:
    if moments is None:
        return None
    return {name: getattr(moments, name) for name in _NUMBERS}


def open_store(where: str | os.PathLike[str] | Place, *, verify: bool = False) -> Store:
    """Open a store that `hl.extract` wrote.

        >>> from hookline.stores import open_store
        >>> open_store(tmp_path / "features").n_items
        100

    Args:
        where: the folder, or a URL of fsspec such as `s3://bucket/features`.
        verify: verify the checksums of all values now. This reads the whole store.

    Raises:
        FolderError: there is no store, it is not finished or of another version, or it is damaged.
    """
    place = as_place(where)
    manifest = read_manifest(place)
    if manifest is None:
        raise _no_manifest_error(place)
    store = Store(place, manifest)
    if verify:
        store.verify()
    return store


def parse_column_name(name: str) -> Site:
    """Return the site of a column. A module whose name has a colon, `d.a:b`, is its own site."""
    try:
        return parse_site(name)
    except SelectionError:
        return Site(name)


def _column_forms(job: Mapping[str, Any]) -> Iterator[ColumnForm]:
    forms = list(map(ColumnForm.from_json, job["columns"]))
    yield from forms
    yield ColumnForm(ITEM, "I64", (), "item")
    if any(form.per_token for form in forms):
        yield ColumnForm(LENGTH, "I64", (), "item")


def _check_same_columns(first: Store, other: Store) -> None:
    """Compare the columns of two stores."""
    stores = first, other
    forms, other_forms = ({form.name: form for form in store._forms} for store in stores)
    for name in [*forms, *other_forms]:
        if forms.get(name) != other_forms.get(name):
            texts = [
                f"{store[name]!r} in {store._place_text()}"
                if name in store._columns
                else f"none in {store._place_text()}"
                for store in stores
            ]
            raise StructureError(
                f"stores that are joined must have the same columns, got {', '.join(texts)}."
                "\nExtract the same sites for all, with the same keep= and dtype=."
            )


def _n_shards(place: Place) -> int:
    return sum(shard_number(name) is not None for name in place.names())


def _unfinished_error(place: Place, job: Mapping[str, Any]) -> FolderError:
    n_shards = _n_shards(place)
    advice = "Start the same hl.extract again: it keeps the complete shards."
    if job["data"].get("kind") == LOOP:
        way = "record again, into a new folder."
        if n_shards:
            way = f"keep the complete shards: hookline store repair {place}"
        advice = f"End the block of hl.record(to=). If its process was killed, {way}"
    return FolderError(
        f"{place} is not finished: it holds {plural(n_shards, 'shard')} so far.\n{advice}"
    )


def _no_manifest_error(place: Place) -> FolderError:
    n_shards = _n_shards(place)
    if n_shards:
        return _damaged_error(place, f"its {MANIFEST} is gone; {plural(n_shards, 'shard')} left")
    return FolderError(
        f"{place} is not a store: it has no {MANIFEST}.\nGive the folder that hl.extract wrote."
    )


def _damaged_error(place: Place, why: str) -> FolderError:
    return FolderError(
        f"{place} is damaged: {why}.\nMake the manifest again from the shards: `hookline store"
        f" repair {place}`"
    )
