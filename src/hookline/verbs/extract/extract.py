"""extract: run a model over a data set, and store the values at the wanted sites."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypedDict, Unpack, final

import torch
from torch import nn

from hookline.display.units import size
from hookline.engine import Selector
from hookline.errors import FolderError, InputError, warn
from hookline.recordings.manifest import DAMAGE, MANIFEST
from hookline.stores import Store, open_store
from hookline.stores.identity import function_identity, model_identity
from hookline.stores.job import SHARD_BYTES, Job, batches_per_shard
from hookline.stores.manifest import environment, read_manifest, write_manifest
from hookline.stores.place import LocalPlace, Place, place_of
from hookline.stores.rows import Mask
from hookline.stores.shard_file import Shard, number_of, read_shard
from hookline.stores.writer import Writer
from hookline.verbs.extract.progress import Progress
from hookline.verbs.extract.sources import fingerprint, source_of
from hookline.verbs.extract.worker import Worker, shards_of
from hookline.verbs.record.keep import Keep
from hookline.verbs.record.prefix import Prefix
from hookline.verbs.shared.run_model import in_eval_mode

_MOST_NAMED = 5


class Extracting(TypedDict, total=False):
    """The options of `hl.extract` about what is kept, and how data is loaded.

    Args:
        keep: what to keep of each value, as in `hl.record`.
        dtype: the dtype of floating tensors as stored; None keeps theirs.
        mask: for rows that are tokens: the key of the mask in a batch that is a dict, or a function
            that takes the batch and returns a mask of shape (items, tokens), or the length of each
            item. Values with a row a token are stored without padding. None: rows are items.
        inputs: a function that takes a batch and returns what the model takes; None takes all.
        workers: the processes that load data; 0 loads it in this one.
        on_error: "raise" stops at an item that cannot be loaded; "skip" leaves it out and lists it
            in `store.skipped`.
        preprocess: for a folder of images: the function that makes a tensor of a picture.
        tokenize: for text: a tokenizer of transformers, or a function that takes a list of strings
            and returns the batch.
        eval: False keeps the mode that the model is in.
        shard_bytes: about how large a shard is, in bytes.
        progress: False shows no progress bar; it is only shown in a terminal.
    """

    keep: Callable[[Any], Any] | None
    dtype: torch.dtype | None
    mask: Mask
    inputs: Callable[[Any], Any] | None
    workers: int
    on_error: Literal["raise", "skip"]
    preprocess: Callable[[Any], Any] | None
    tokenize: Callable[..., Any] | None
    eval: bool
    shard_bytes: int
    progress: bool


def extract(
    model: nn.Module,
    data: Any,
    selector: Selector,
    to: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    resume: bool = True,
    **options: Unpack[Extracting],
) -> Store:
    """Run a model over a data set, and store the values at the wanted sites.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> rows = torch.arange(200.0).reshape(100, 2)
        >>> store = hl.extract(model, rows, ["0", "1"], tmp_path / "mine", batch_size=32)
        >>> store["1"].shape
        (100, 3)
        >>> store["1"][40:42].shape
        torch.Size([2, 3])

    Started again after it was killed, it goes on where it was: shards that are whole are kept. The
    same call gives the same bits, however often it was interrupted, on the same type of processor,
    with the same versions and number of threads: batches are cut by the index of the items. With
    another model, selector, option or data the folder is refused.

    The model runs in eval mode, without gradients, and no further than the last wanted site. The
    mode of each module is put back afterwards. Values are written while the model runs on.

    Args:
        model: the model.
        data: a `Dataset`, a `DataLoader` that does not shuffle, an array or tensor (or a dict or
            tuple of these) whose rows are items, an iterable of batches; or the path of a folder of
            images, of a data set of Hugging Face, or of a `.npy`, `.npz`, `.txt`, `.jsonl` or
            `.parquet` file.
        selector: the sites, as in `hl.select`: outputs and inputs, and leaves of these.
        to: the folder, or a URL of fsspec such as `s3://bucket/features`.
        batch_size: the items of a batch; None takes the loader's, or 32.
        resume: False refuses a folder that holds a store.
        **options: `keep`, `dtype`, `mask`, `inputs`, `workers`, `on_error`, `preprocess`,
            `tokenize`, `eval`, `shard_bytes`, `progress`; as in `hookline.verbs.Extracting`.

    Returns:
        The store. `store[site]` is read like an array; `store.items` has the index of each row's
        item.

    Raises:
        SelectionError: the selector matches nothing, or a gradient.
        NotRecordedError: the model did not reach one of the sites.
        InputError: the data is empty, of an unknown kind, or in an order that changes.
        StructureError: a value has no row for each item or token, or rows of another shape than
            before.
        FolderError: the folder holds something else, or a store of another job; another process is
            writing to it; it cannot be written.
    """
    unknown = options.keys() - Extracting.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"hl.extract() got an unexpected keyword argument {min(unknown)!r}."
            f"\nGive some of {', '.join(f'{known}=' for known in Extracting.__annotations__)}."
        )
    place = place_of(to)
    source = source_of(
        data,
        batch_size=batch_size,
        workers=options.get("workers", 0),
        on_error=options.get("on_error", "raise"),
        preprocess=options.get("preprocess"),
        tokenize=options.get("tokenize"),
    )
    kept: Keep = {"keep": options.get("keep"), "dtype": options.get("dtype"), "copy": True}
    prefix = Prefix(model, selector, "extract", kept)
    mode = in_eval_mode(prefix.modules) if options.get("eval", True) else nullcontext()
    with prefix, mode, place.locked():
        mask = options.get("mask", "attention_mask")
        worker = Worker(prefix, source, options.get("inputs"), mask)
        _Extraction(place, worker, model, options).run(resume=resume)
    return open_store(place)


@final
class _Extraction:
    """One start of a job, in one place.

    Args:
        place: where the store is.
        worker: runs the batches.
        model: the model.
        options: the options of `extract`.
    """

    def __init__(self, place: Place, worker: Worker, model: nn.Module, options: Extracting) -> None:
        self._place = place
        self._worker = worker
        self._options = options
        self._shards: dict[int, Shard] = {}
        self._job = self._begun_job(model)

    def run(self, *, resume: bool) -> None:
        """Do what is left of the job.

        Raises:
            FolderError: the place holds something else, or a store of another job.
        """
        manifest = read_manifest(self._place)
        if manifest is None:
            self._begin()
        else:
            self._resume(manifest, resume=resume)
        if manifest is not None and self._is_whole(manifest["shards"]):
            return
        shown = self._options.get("progress", True)
        with (
            Progress(self._job, self._shards, shown=shown) as progress,
            Writer(self._place, progress.written) as writer,
        ):
            for number, chunks in shards_of(self._worker, self._job, self._left()):
                writer.put(number, chunks, self._worker.offload.ready())
        shards = [self._shards[number] for number in range(len(self._shards))]
        write_manifest(self._place, self._job.as_json(), environment(), shards)
        _say(shards)

    def _begun_job(self, model: nn.Module) -> Job:
        """Return the job as far as it is known before the model has run."""
        options, source = self._options, self._worker.source
        dtype, mask = options.get("dtype"), options.get("mask", "attention_mask")
        return Job(
            model_identity(model),
            [str(site) for site in self._worker.sites],
            {
                "keep": function_identity(options.get("keep")),
                "dtype": None if dtype is None else str(dtype),
                "mask": function_identity(mask) if callable(mask) else mask,
                "inputs": function_identity(options.get("inputs")),
                "eval": options.get("eval", True),
                "shard_bytes": options.get("shard_bytes", SHARD_BYTES),
            },
            {**source.identity(), "first_batch": fingerprint(self._worker.first.data)},
            source.batch_size,
            source.n_items,
        )

    def _begin(self) -> None:
        """Write the manifest of a new store, after a first batch has shown what it will hold."""
        others = self._place.names()
        if others:
            raise FolderError(
                f"{self._place} must be empty or hold a store, got other files"
                f" ({', '.join(others[:3])}{', …' * (len(others) > 3)}).\nGive a new folder."
            )
        chunk = self._worker.first_chunk()
        forms = self._worker.forms
        if not forms:
            raise InputError(
                "the first batch must have an item that can be loaded, got none."
                f"\nLook at the errors: {chunk.skipped[:_MOST_NAMED]}"
            )
        n_batches = batches_per_shard(chunk, self._options.get("shard_bytes", SHARD_BYTES))
        self._job = self._job.planned(n_batches, tuple(forms.values()))
        n_bytes = sum(tensor.nbytes for tensor in chunk.columns.values())
        _check_space(self._place, n_bytes * (self._job.n_batches or 1))
        if self._worker.source.names is not None:
            self._place.write("names.json", [_json(self._worker.source.names)])
        write_manifest(self._place, self._job.as_json(), environment())

    def _resume(self, manifest: Mapping[str, Any], *, resume: bool) -> None:
        """Compare the job with the one that was begun here, and look which shards are whole."""
        if not resume:
            raise FolderError(
                f"{self._place} holds a store already.\nGive a new folder, or leave out"
                " resume=False to go on with it."
            )
        try:
            begun = Job.from_json(manifest["job"])
        except DAMAGE as error:
            raise FolderError(f"{self._place} is damaged: its {MANIFEST}: {error}.") from error
        differences = self._job.differences(begun)
        if differences:
            raise FolderError(
                f"{self._place} holds a store of another job:\n  "
                + "\n  ".join(differences[:_MOST_NAMED])
                + "\nGive a new folder, or the arguments that the store was begun with."
            )
        _compare_environments(self._place, manifest["environment"])
        self._job = begun
        self._worker.forms = {form.name: form for form in begun.columns}
        self._find_shards(is_finished=manifest["shards"] is not None)

    def _find_shards(self, *, is_finished: bool) -> None:
        """Note the shards that are whole; remove damaged ones, so that they are made again."""
        damaged = []
        for name in self._place.names():
            number = number_of(name)
            if number is None:
                continue
            try:
                shard = read_shard(self._place, name, verify=True)
                if shard.number != number or not self._has_place(shard, is_finished):
                    raise ValueError("it must hold the batches of its number")
            except (*DAMAGE, OSError):
                damaged.append(name)
                self._place.remove(name)
                continue
            self._shards[number] = shard
        if damaged:
            warn(
                f"{len(damaged)} shards in {self._place} were damaged and are made again:"
                f" {', '.join(damaged[:_MOST_NAMED])}{', …' * (len(damaged) > _MOST_NAMED)}."
            )

    def _left(self) -> Iterable[int]:
        n_shards = self._job.n_shards
        numbers: Iterator[int] = itertools.count() if n_shards is None else iter(range(n_shards))
        done = frozenset(self._shards)
        return (number for number in numbers if number not in done)

    def _has_place(self, shard: Shard, is_finished: bool) -> bool:
        """Tell whether a shard holds the batches of its number.

        The last shard of data without a length is shorter. It is made again if the store is not
        finished: the data may have grown.
        """
        found, expected = range(*shard.batches), self._job.batches_of(shard.number)
        if self._job.n_items is None and is_finished:
            return found.start == expected.start
        return found == expected

    def _is_whole(self, written: Mapping[str, Any] | None) -> bool:
        """Tell whether each shard of a finished store is there."""
        return written is not None and len(self._shards) == len(written["items"])


def _json(names: list[str]) -> bytes:
    return json.dumps(names).encode()


def _check_space(place: Place, n_bytes: int) -> None:
    """Warn if a store will not fit on its disk, before anything large is written."""
    if isinstance(place, LocalPlace):
        free = shutil.disk_usage(place.nearest()).free
        if n_bytes > free:
            warn(
                f"the store will take about {size(n_bytes)}, and {place} has {size(free)} free."
                "\nFree space, or store less: keep=lambda t: t.mean(1), dtype=torch.float16."
            )


def _compare_environments(place: Place, was: Mapping[str, Any]) -> None:
    """Warn of other versions, threads or processors than those that a store was begun with."""
    now = environment()
    found = [f"{key} was {was.get(key)}, is {now[key]}" for key in now if was.get(key) != now[key]]
    if found:
        warn(
            f"{place} was begun elsewhere: {'; '.join(found)}."
            "\nThe new shards may differ in their last bits from those that one run would make."
        )


def _say(shards: Sequence[Shard]) -> None:
    """Warn of numbers that are not finite, and of items that were skipped."""
    bad: dict[str, int] = {}
    for shard in shards:
        for name, found in shard.statistics.items():
            if found.non_finite:
                bad[name] = bad.get(name, 0) + found.non_finite
    for name, n_bad in bad.items():
        warn(
            f"{n_bad} numbers at {name} are NaN or infinite. They are stored as they are."
            f"\nFind them: store.statistics[{name!r}], or hl.watch(model) to see where they begin."
        )
    n_skipped = sum(len(shard.skipped) for shard in shards)
    if n_skipped:
        warn(f"{n_skipped} items could not be loaded.\nLook them up: store.skipped lists them.")
