"""Record into a store: write each pass of the user's own loop to disk after it is complete."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Never, final

import torch
from torch import nn

from hookline.display.text import first_line, listed, plural
from hookline.engine import Line, Pass, Report
from hookline.engine.model_fingerprint import function_identity, model_identity
from hookline.engine.pytree import describe, tree
from hookline.errors import (
    AttachError,
    FolderError,
    HooklineError,
    NotRecordedError,
    StructureError,
    warn,
)
from hookline.files.folder_or_url import Place, as_place
from hookline.recordings import PassRecord, Recording
from hookline.stores import Store, open_store
from hookline.stores.batch_columns import CpuOffload, extract_columns
from hookline.stores.job_manifest import (
    LOOP,
    SHARD_BYTES,
    Job,
    batches_per_shard,
    environment_with_origin,
    write_manifest,
)
from hookline.stores.shard_file import BatchRows, ColumnForm, Shard, ShardWriter
from hookline.util.creating_process import CreatingProcess
from hookline.verbs.record.keep import KeepOptions
from hookline.verbs.shared.finalizing_line import FinalizingLine


@final
class StoreLine(FinalizingLine[Line]):
    """A line that fills a store: a context manager, or ended by `remove()`.

    After the block, `store` is the written store. `hl.open(folder)` returns it, too.
    """

    def __init__(self, line: Line, sink: StoreSink) -> None:
        super().__init__(line)
        self._sink = sink

    def __enter__(self) -> StoreLine:
        self._line.__enter__()
        return self

    def __getitem__(self, key: object) -> Never:
        raise TypeError(
            "a value must be looked up in the store, got the line that fills it."
            "\nLook it up there, after the block: line.store[...]."
        )

    @property
    def store(self) -> Store:
        """The written store.

        Raises:
            FolderError: the line has not ended, or no pass ran.
        """
        return open_store(self._sink.place)

    def report(self) -> Report:
        """Report the sites that were attached, how often each fired, and why some never did."""
        return self._line.report()

    def _after_removal(self, error: BaseException | None) -> None:
        self._sink.finish(self._line.report(), error)


@final
class StoreSink:
    """Write the passes of a recording to a store, each when the next pass begins.

    A forked child writes nothing: the store, its lock and its thread are its parent's.

    Args:
        place: the place of the store.
        model: the model.
        recording: the recording that the line fills. Written passes are removed from it.
        options: the options of `record`.

    Raises:
        FolderError: the place holds files, another process writes there, or it cannot be written.
    """

    def __init__(
        self, place: Place, model: nn.Module, recording: Recording, options: KeepOptions
    ) -> None:
        self.place = place
        self._recording = recording
        self._shards: dict[int, Shard] = {}
        self._chunks: list[BatchRows] = []
        self._forms: dict[str, ColumnForm] | None = None
        self._n_passes = self._n_items = self._n_seen = 0
        self._left_out: dict[str, list[int]] = {}  # numbers of passes, by the reason
        self._offload = CpuOffload(
            next((parameter.device for parameter in model.parameters()), _CPU)
        )
        self._job = _make_job(model, recording, options)
        self._is_open = True
        self._process = CreatingProcess()
        self._has_told = False
        with ExitStack() as stack:
            _check_empty(place)
            place.lock_until_exit(stack)
            _check_empty(place)  # once more: another writer may have come between
            self._writer = stack.enter_context(ShardWriter(place, self._add_shard))
            self._open = stack.pop_all()

    def begin_pass(self, current: Pass) -> None:
        """Write the passes before this one, because their gradients have arrived by now."""
        passes = self._recording.pop_passes()
        if self._process.is_current:
            try:
                self._write_passes(passes)
            except HooklineError:  # it ends this pass, too
                self._count_skipped_pass("the model raised")
                raise
        else:
            self._warn_of_fork()
        self._recording.begin_pass(current)

    def finish(self, report: Report, error: BaseException | None) -> None:
        """Write the remaining passes and the manifest; `error` ended the block. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._recording.finish(report)
        if not self._process.is_current:
            return
        problem = None
        with self._open:
            try:
                self._write_passes(self._recording.pop_passes())
            except HooklineError as last_error:
                problem = last_error  # the rows of the passes before are written all the same
            if self._chunks:
                self._write_shard()
        if self._forms is not None:
            shards = [self._shards[number] for number in range(len(self._shards))]
            write_manifest(self.place, self._job.as_json(), environment_with_origin(), shards)
        if self._left_out and not isinstance(error or problem, HooklineError):
            self._warn_of_skipped_passes()
        if problem is not None and error is None:  # an error in the block is the cause
            raise problem

    def _warn_of_fork(self) -> None:
        """Warn once that a forked child writes nothing."""
        if not self._has_told:
            self._has_told = True
            warn(
                f"hl.record: a forked process runs the model. Its values are not written to"
                f" {self.place}, the store of its parent.\nTo record them, call hl.record in this"
                " process, with a folder of its own."
            )

    def _warn_of_skipped_passes(self) -> None:
        """Warn of the passes without rows: the rows no longer match the batches one to one."""
        n_passes = sum(map(len, self._left_out.values()))
        reasons = "; ".join(
            f"{why} (pass {listed(numbers, _MOST_NAMED)})"
            for why, numbers in self._left_out.items()
        )
        warn(
            f"hl.record: {n_passes} of {plural(self._n_seen, 'pass', 'passes')} added no rows to"
            f" {self.place}: {reasons}.\nLeave out the batches of these passes"
            " where you match rows with your data; the first pass is 0."
        )

    def _write_passes(self, passes: list[PassRecord]) -> None:
        for record in passes:
            if record.failed or not len(record):
                why = "the model raised" if record.failed else "no selected site had a value"
                self._count_skipped_pass(why)
                continue
            number = self._n_seen
            try:
                chunk = self._make_chunk(record)
            except NotRecordedError as error:
                # Noted, too: a loop that goes on after errors catches this one.
                self._count_skipped_pass("a value was missing")
                raise NotRecordedError(
                    f"each pass must have a value at each site for to=, got none in pass {number}:"
                    f" {first_line(error)}.\nCall backward() for gradients before the model runs"
                    " again, and record sites that not each pass reaches in a store of their own."
                ) from error
            except HooklineError:
                self._count_skipped_pass("a value was of another form")
                raise
            self._n_seen += 1
            self._chunks.append(chunk)
            if len(self._chunks) == self._job.shard_batches:
                self._write_shard()

    def _count_skipped_pass(self, why: str) -> None:
        """Note that the next pass adds no rows."""
        self._left_out.setdefault(why, []).append(self._n_seen)
        self._n_seen += 1

    def _make_chunk(self, record: PassRecord) -> BatchRows:
        n_items = _n_rows(record)
        columns, forms = extract_columns(record, self._recording.sites, n_items, None, self._forms)
        items = range(self._n_items, self._n_items + n_items)
        on_cpu = {name: self._offload(tensor) for name, tensor in columns.items()}
        chunk = BatchRows(self._n_passes, items, on_cpu)
        if self._forms is None:
            self._forms = forms
            n_passes = batches_per_shard(chunk, SHARD_BYTES)
            self._job = replace(self._job, shard_batches=n_passes, columns=tuple(forms.values()))
            write_manifest(self.place, self._job.as_json(), environment_with_origin())
        self._n_passes += 1
        self._n_items += n_items
        return chunk

    def _write_shard(self) -> None:
        number = self._chunks[0].batch // self._job.shard_batches
        self._writer.submit(number, self._chunks, self._offload.make_waiter())
        self._chunks = []

    def _add_shard(self, shard: Shard) -> None:
        self._shards[shard.number] = shard


_CPU = torch.device("cpu")
_MOST_NAMED = 5
_AGAIN = "A loop of your own cannot be resumed: run it again, with a new folder."


def make_store_line(
    line: Line, recording: Recording, to: str | os.PathLike[str], options: KeepOptions
) -> StoreLine:
    """Make a recording line write to a store.

    Raises:
        AttachError: the line has no model, or sees every thread; or a gradient of a parameter,
            which has no row for each item, is not given any by `keep`.
        FolderError: the store cannot be started there.
    """
    try:
        if line.root is None or line.passes.every_thread:
            raise AttachError(
                "to= must have a model and one thread: the rows of a store are in the order of the"
                " passes.\nLeave out every_thread=, and give the model."
            )
        whole = [str(site) for site in recording.sites if site.port == "grad"]
        if whole and options.get("keep") is None:
            raise AttachError(
                f"to= must have values with a row for each item, got {listed(whole, _MOST_NAMED)}:"
                " gradients of parameters come from a whole batch.\nLeave out the port grad, or"
                " give keep= a function that makes such rows; hl.monitor(model, ports='grad')"
                " measures these gradients in each step."
            )
        place = as_place(to)
        place.again = _AGAIN
        sink = StoreSink(place, line.root, recording, options)
    except BaseException:
        line.options.quiet = True
        line.remove()
        raise
    line.passes.sink = sink
    return StoreLine(line, sink)


def _make_job(model: nn.Module, recording: Recording, options: KeepOptions) -> Job:
    dtype = options.get("dtype")
    return Job(
        model_identity(model),
        [str(site) for site in recording.sites],
        {
            "keep": function_identity(options.get("keep")),
            "dtype": None if dtype is None else str(dtype),
        },
        {"kind": LOOP},
        1,
        None,
    )


def _check_empty(place: Place) -> None:
    """Check that a place holds nothing. The lock alone would leave a file there."""
    names = place.names()
    if names:
        raise FolderError(
            f"{place} must be empty, got files in it ({', '.join(names[:3])}"
            f"{', …' * (len(names) > 3)}).\nGive a new folder: a loop of your own cannot"
            " be resumed, as hl.extract can."
        )


def _n_rows(record: PassRecord) -> int:
    """Return the number of rows of a pass: the first dimension of its first value."""
    for key in record:
        for _, tensor in tree.tensors(record[key]):
            if tensor.ndim:
                return len(tensor)
            raise StructureError(
                f"{key} must have a row for each item, got {describe.in_words(tensor)}."
                "\nGive keep= a function that makes such rows."
            )
    raise StructureError(
        f"pass {record.number} must have a tensor at a selected site, got none."
        "\nSelect sites whose values are tensors."
    )
