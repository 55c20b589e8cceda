"""Show the progress of an extraction: rows a second, bytes, time left."""

from __future__ import annotations

from typing import final

from hookline.display.units import count, size
from hookline.stores.job_manifest import Job
from hookline.stores.shard_file import Shard
from hookline.verbs.shared.progress_bar import progress_bar


@final
class Progress:
    """Count the written shards, and show them in a terminal.

    Args:
        job: the job.
        shards: the shards that are there. New ones are added.
        n_ranks: how many processes make shards; those of the others are estimated.
        forecast: the bytes of the store, as the first batch has shown them; 0 if it is not known.
        shown: whether to show a bar, where stderr is a terminal.
    """

    def __init__(
        self, job: Job, shards: dict[int, Shard], n_ranks: int, forecast: int, *, shown: bool
    ) -> None:
        self._shards = shards
        self._n_ranks = n_ranks
        self._n_items = job.n_items
        self._n_there = sum(shard.items for shard in shards.values())
        self._bar = progress_bar(shown=shown)
        self._n_bytes = sum(shard.size for shard in shards.values())
        self._task = self._bar.add_task(
            "extract", total=job.n_items, completed=self._n_there, rows=self._amount_text(forecast)
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def count_shard(self, shard: Shard) -> None:
        """Note a shard that is on disk. Another thread may call this."""
        self._shards[shard.number] = shard
        self._n_bytes += shard.size * self._n_ranks
        self._n_there += shard.items * self._n_ranks
        self._bar.advance(self._task, shard.items * self._n_ranks)
        task = self._bar.tasks[0]
        speed = "" if task.speed is None else f", {count(task.speed)} items/s"
        self._bar.update(self._task, rows=f"{self._amount_text(0)}{speed}")

    def _amount_text(self, forecast: int) -> str:
        """Say how many bytes there are, and about how many there will be."""
        if self._n_items is not None and self._n_there:
            forecast = round(self._n_bytes * self._n_items / self._n_there)
        return size(self._n_bytes) + (f" of about {size(forecast)}" if forecast else "")
