"""The plan of an extraction: what a store will hold, what of it is there, and what is left."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, final

from torch import nn

from hookline.data.fingerprints import fingerprint
from hookline.display.text import listed, plural
from hookline.display.units import size
from hookline.engine import path_text, sharding_kind
from hookline.engine.model_fingerprint import function_identity, model_identity
from hookline.errors import FolderError, InputError, RanksError, StructureError, warn
from hookline.files.folder_or_url import LocalPlace, Place
from hookline.files.sealed_json import MANIFEST
from hookline.files.unreadable_or_damaged import DAMAGE, DamagedError
from hookline.stores.first_batch_summary import compare_summaries
from hookline.stores.job_manifest import (
    SHARD_BYTES,
    Job,
    batches_per_shard,
    compared_environment,
    environment_with_origin,
    read_manifest,
    write_manifest,
)
from hookline.stores.shard_file import Shard, read_shard, shard_number
from hookline.verbs.extract.collective_steps import Heartbeat, Ranks
from hookline.verbs.extract.engines import Engine, read_shard_of_other_process
from hookline.verbs.extract.process_setup import ProcessSetup
from hookline.verbs.extract.progress import Progress
from hookline.verbs.extract.worker import Worker
from hookline.verbs.inventory import inventory

_MOST_NAMED = 5
_MOST_VALUES = 3  # of columns whose values differ, so that there is room for the reasons
_MOST_HOOKS = 20
_N_THREADS = 8  # that read shards

T = TypeVar("T")


@final
class Extraction:
    """One start of a job, in one place.

    Rank 0 alone reads and writes the manifest. Each rank runs the first batch, since a model whose
    weights are sharded runs on all ranks or on none.
    """

    def __init__(self, place: Place, setup: ProcessSetup, worker: Worker, ranks: Ranks) -> None:
        self._place = place
        self._options = setup.options
        self._worker = worker
        self._ranks = ranks
        self._shards: dict[int, Shard] = {}
        self._n_written: int | None = None  # of a finished store
        self._batch_bytes = 0
        self._is_split = sharding_kind(setup.model) == "split"
        self._job = self._job_before_run(setup)
        self._begun: tuple[Job, Mapping[str, Any]] | None = None  # on rank 0, of a store

    def run(self, engine: Engine, *, resume: bool) -> None:
        """Do what is left of the job.

        Args:
            engine: makes the shards.
            resume: whether to go on with a store that is there.

        Raises:
            FolderError: the place holds something else, or a store of another job.
            RanksError: the ranks have different jobs, or one of them failed.
        """
        self._compare_jobs_of_ranks()
        is_new = self._ranks.run_on_first(lambda: self._check_is_new(resume=resume))
        self._compare_first_batch_of_ranks(self._ranks.gather(self._plan_from_first_batch))
        if is_new:
            self._ranks.run_on_first(self._write_new_manifest)
        else:
            self._compare_first_batch_with_store()
        job, self._n_written = self._ranks.run_on_first(
            lambda: [self._job.as_json(), self._n_written]
        )
        self._job = Job.from_json(job)
        self._worker.forms = {form.name: form for form in self._job.columns}
        if not is_new:
            self._ranks.run_at_own_pace(self._verify_shards)
        numbers = set(itertools.chain.from_iterable(self._ranks.gather(lambda: list(self._shards))))
        if len(numbers) == self._n_written:
            return
        if self._begun is not None:
            _warn_of_differences(f"{self._place} was begun elsewhere", self._begun[1])
        n_bytes = self._batch_bytes * (self._job.n_batches or 0)
        shown = self._ranks.rank == 0 and self._options.get("progress", True)
        with Progress(
            self._job, self._shards, self._ranks.n_ranks, n_bytes, shown=shown
        ) as progress:
            n_shards = self._job.n_shards
            each: Iterable[int] = itertools.count() if n_shards is None else range(n_shards)
            missing = (number for number in each if number not in numbers)
            engine(self._job, missing, progress.count_shard)
        self._ranks.run_at_own_pace(self._write_final_manifest)

    def _job_before_run(self, setup: ProcessSetup) -> Job:
        """Return the job as far as it is known before the model has run."""
        options, source = setup.options, setup.source
        dtype, mask = options.get("dtype"), options.get("mask", "attention_mask")
        return Job(
            {**model_identity(setup.model, whole=True), "hooks": _hook_texts(setup.model)},
            [str(site) for site in self._worker.sites],
            {
                "keep": function_identity(options.get("keep")),
                "dtype": None if dtype is None else str(dtype),
                "mask": function_identity(mask) if callable(mask) else mask,
                "inputs": function_identity(options.get("inputs")),
                "eval": options.get("eval", True),
                "shard_bytes": options.get("shard_bytes", SHARD_BYTES),
            },
            {**source.identity(), "first_batch": fingerprint(self._worker.first_batch.data)},
            source.batch_size,
            source.n_items,
        )

    def _compare_jobs_of_ranks(self) -> None:
        """Compare the jobs of all ranks, and what decides the bits of their results."""
        answers = self._ranks.gather(lambda: [self._job.as_json(), compared_environment()])
        for rank, (job, there) in enumerate(answers):
            differences = Job.from_json(job).differences(Job.from_json(answers[0][0]))
            if differences:
                raise RanksError(
                    f"hl.extract must have the same arguments on every rank, got on rank {rank}:"
                    f" {differences[0].replace('in the store, now', 'on rank 0, here')}"
                    "\nGive each rank the same model, weights, data and options."
                )
            if self._ranks.rank == 0:
                _warn_of_differences(f"rank {rank}", there, answers[0][1])

    def _check_is_new(self, *, resume: bool) -> bool:
        """Read what is in the place; return whether that is nothing."""
        manifest = read_manifest(self._place)
        if manifest is not None:
            self._check_resumable(manifest, resume=resume)
            return False
        check_empty_or_store(self._place)
        return True

    def _plan_from_first_batch(self) -> dict[str, Any]:
        """Plan the store from the first batch; return its values in a few numbers."""
        chunk = self._worker.run_first()
        forms = self._worker.forms
        if not forms:
            item, why = chunk.skipped[0]
            raise InputError(
                f"the first batch must have an item that can be loaded, got none: {why} (item"
                f" {item}).\nMend the data, or leave out its first {len(chunk.skipped)} items."
            )
        n_batches = batches_per_shard(chunk, self._options.get("shard_bytes", SHARD_BYTES))
        self._batch_bytes = sum(tensor.nbytes for tensor in chunk.columns.values())
        values = self._worker.summarise(chunk)
        columns = tuple(forms.values())
        self._job = replace(self._job, shard_batches=n_batches, columns=columns, first_batch=values)
        return values

    def _compare_first_batch_of_ranks(self, summaries: list[dict[str, Any]]) -> None:
        """Compare the values that all ranks have for the first batch. A collective.

        Raises:
            StructureError: tensor parallelism has given each rank a part of a value, and no way to
                join the parts.
            RanksError: a rank has another model, as by a hook on it.
        """
        if self._is_split:
            for name, column in summaries[0]["columns"].items():
                if any(values["columns"].get(name) != column for values in summaries):
                    raise StructureError(
                        f"{name} must be a DTensor or equal on all ranks, got a plain tensor that"
                        " differs.\nSelect a site after the parts are joined, or parallelize with"
                        " use_local_output=False."
                    )
            return
        differing = [
            (rank, differences[0])
            for rank, values in enumerate(summaries)
            if (differences := compare_summaries(summaries[0], values, is_same_setup=False).far)
        ]
        if differing and self._is_model_repeatable(summaries):
            rank, text = differing[0]
            raise RanksError(
                f"the model must give the same values on every rank, got on rank {rank} {text}."
                "\nGive each rank the same model, with the same hooks, edits and attributes."
            )

    def _is_model_repeatable(self, summaries: list[dict[str, Any]]) -> bool:
        """Run the first batch again on all ranks; tell whether its values are the same.

        A collective, with a warning if they are not.
        """
        again = self._ranks.gather(lambda: self._worker.summarise(self._worker.rerun_first()))
        pairs = zip(summaries, again, strict=True)
        differences = [compare_summaries(*pair, is_same_setup=True).far for pair in pairs]
        if not any(differences):
            return True
        if self._ranks.rank == 0:
            warn(
                "the model gives other values each time it runs on the first batch"
                f" ({next(filter(None, differences))[0]}), so another model is not noticed."
                "\nMake it repeatable: seed its own generators, and reset its state in forward."
            )
        return False

    def _compare_first_batch_with_store(self) -> None:
        """Compare the first batch with that of the store that was begun here. A collective."""
        differences = self._ranks.run_on_first(self._first_batch_differences)
        if differences and self._is_model_repeatable(
            self._ranks.gather(lambda: self._job.first_batch)
        ):
            raise FolderError(
                f"{self._place} holds a store of another model, which gives other values for the"
                " first batch:\n  "
                + "\n  ".join(differences[:_MOST_NAMED])
                + "\nGive a new folder, or the model that the store was begun with, with the same"
                " hooks and edits."
            )
        if self._begun is not None:
            self._job, _ = self._begun

    def _first_batch_differences(self) -> list[str]:
        """Name the differences from the store, values first; warn of those that may be rounding."""
        assert self._begun is not None
        assert self._job.first_batch is not None
        begun, was = self._begun
        differences = self._job.column_differences(begun)
        if differences:
            return differences
        if begun.first_batch is None:
            warn(
                f"{self._place} was begun by an older hookline, which did not note the values of"
                " the first batch: changes of hooks, attributes and code are not noticed."
            )
            return []
        is_same_place = {**was, **compared_environment()} == was
        try:
            values = compare_summaries(
                begun.first_batch, self._job.first_batch, is_same_setup=is_same_place
            )
            reasons = self._job.model_differences(begun)
        except DAMAGE as error:
            raise FolderError(f"{self._place} is damaged: its {MANIFEST}: {error}.") from error
        # In the same place equal models have equal bits, almost always.
        if values.far or (values.near and is_same_place and reasons):
            return [*[*values.far, *values.near][:_MOST_VALUES], *reasons]
        if values.near and is_same_place:
            warn(
                f"{self._place}: {values.near[0]} from those of the store, for the first batch."
                "\nThe new shards may differ in their last bits. The model may be another one that"
                " gives nearly the same values."
            )
        return []

    def _write_new_manifest(self) -> None:
        """Write the manifest of a new store."""
        _warn_of_space(self._place, self._batch_bytes * (self._job.n_batches or 1))
        if self._worker.source.names is not None:
            self._place.write("names.json", [json.dumps(self._worker.source.names).encode()])
        write_manifest(self._place, self._job.as_json(), environment_with_origin())

    def _write_final_manifest(self, heartbeat: Heartbeat) -> None:
        """Write the manifest of a store whose shards are all there, made by whichever process.

        Raises:
            FolderError: a shard cannot be read here.
        """
        if self._ranks.rank:
            return
        n_shards = len(self._shards) if self._job.n_shards is None else self._job.n_shards
        missing = [number for number in range(n_shards) if number not in self._shards]
        digest = self._job.digest

        def read(number: int) -> None:
            self._shards[number] = read_shard_of_other_process(self._place, number, digest)
            heartbeat.beat()

        _map_in_threads(read, missing)
        shards = [self._shards[number] for number in range(n_shards)]
        write_manifest(self._place, self._job.as_json(), environment_with_origin(), shards)
        _warn_of_nan_and_skipped(shards)

    def _check_resumable(self, manifest: Mapping[str, Any], *, resume: bool) -> None:
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
        self._begun = begun, manifest["environment"]
        written = manifest["shards"]
        self._n_written = None if written is None else len(written["items"])

    def _verify_shards(self, heartbeat: Heartbeat) -> None:
        """Note the shards that are whole; remove damaged ones, so that they are made again.

        All bytes are read, so each rank reads its share.

        Raises:
            UnreadableError: a shard cannot be read now. Nothing is removed.
        """
        names = [name for name in self._place.names() if shard_number(name) is not None]
        digest = self._job.digest
        damaged = []

        def look(name: str) -> None:
            heartbeat.beat()
            try:
                shard = read_shard(self._place, name, verify=True)
                is_named_so = (shard.number, shard.job) == (shard_number(name), digest)
                if not is_named_so or not self._has_batches_of_number(shard):
                    raise DamagedError("it must hold the batches of its number, of this job")
            except FileNotFoundError:
                return  # it went away meanwhile, and is made again
            except DamagedError:
                damaged.append(name)
            else:
                self._shards[shard.number] = shard

        _map_in_threads(look, names[self._ranks.rank :: self._ranks.n_ranks])
        damaged.sort()
        for name in damaged:  # only now: nothing is removed if a file could not be read
            self._place.remove(name)
        if damaged:
            warn(
                f"{plural(len(damaged), 'damaged shard')} in {self._place} will be made again:"
                f" {listed(damaged, _MOST_NAMED)}."
            )

    def _has_batches_of_number(self, shard: Shard) -> bool:
        """Tell whether a shard holds the batches of its number.

        The last shard of data without a length is shorter. It is made again if the store is not
        finished: the data may have grown.
        """
        batches, expected = range(*shard.batches), self._job.batch_range(shard.number)
        if self._job.n_items is None and self._n_written is not None:
            return batches.start == expected.start
        return batches == expected


def check_empty_or_store(place: Place) -> None:
    """Check that a place is empty or holds a store. Locking it alone would leave a file there.

    Raises:
        FolderError: it holds other files, or another manifest.
    """
    names = place.names()
    if names and read_manifest(place) is None:
        raise FolderError(
            f"{place} must be empty or hold a store, got other files"
            f" ({listed(names, 3)}).\nGive a new folder."
        )


def _hook_texts(model: nn.Module) -> list[str]:
    """Name the hooks that may change what a model computes, those of edits included."""
    hooks = [
        f"{hook.kind} hook at {path_text(hook.path)} ({hook.function})"
        for hook in inventory(model)
        if hook.owner != "torch"
        and hook.kind in ("forward_pre", "forward")
        and not (hook.owner == "hookline" and hook.function.startswith(("pass ", "record ")))
    ]
    return hooks[:_MOST_HOOKS]


def _map_in_threads(step: Callable[[T], None], values: Iterable[T]) -> None:
    """Do a step for each, in several threads: it waits for a disk or the network."""
    with ThreadPoolExecutor(_N_THREADS) as pool:
        for _ in pool.map(step, values):
            pass


def _warn_of_space(place: Place, n_bytes: int) -> None:
    """Warn if a store will not fit on its disk, before anything large is written."""
    if isinstance(place, LocalPlace):
        free = shutil.disk_usage(place.nearest_existing()).free
        if n_bytes > free:
            warn(
                f"the store will take about {size(n_bytes)}, and {place} has {size(free)} free."
                "\nFree space, or store less: keep=lambda t: t.mean(1), dtype=torch.float16."
            )


def _warn_of_differences(
    subject: str, was: Mapping[str, Any], now: Mapping[str, Any] | None = None
) -> None:
    """Warn of other versions, threads or processors than those that a store was begun with."""
    now = compared_environment() if now is None else now
    differences = [
        f"{key} was {was.get(key)}, is {now[key]}" for key in now if was.get(key) != now[key]
    ]
    if differences:
        warn(
            f"{subject}: {'; '.join(differences)}."
            "\nThe new shards may differ in their last bits from those that one run would make."
        )


def _warn_of_nan_and_skipped(shards: Sequence[Shard]) -> None:
    """Warn of numbers that are not finite, and of items that were skipped."""
    bad: Counter[str] = Counter()
    for shard in shards:
        bad.update({name: moments.non_finite for name, moments in shard.statistics.items()})
    for name, n_bad in (+bad).items():
        numbers = plural(n_bad, f"number at {name} is", f"numbers at {name} are")
        warn(
            f"{numbers} NaN or infinite, and stored so."
            f"\nFind which: store.statistics[{name!r}], or hl.watch(model) to see where they begin."
        )
    n_skipped = sum(len(shard.skipped) for shard in shards)
    if n_skipped:
        items = plural(n_skipped, "item")
        warn(f"{items} could not be loaded.\nRead which, and why: store.skipped.")
