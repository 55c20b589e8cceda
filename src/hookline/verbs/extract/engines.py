"""The engines: who makes the shards of a job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from hookline.display.text import first_line
from hookline.errors import FolderError
from hookline.files.folder_or_url import Place
from hookline.files.unreadable_or_damaged import DamagedError
from hookline.stores.job_manifest import Job
from hookline.stores.shard_file import Shard, ShardWriter, read_shard, shard_file_name
from hookline.verbs.extract.collective_steps import Heartbeat, Ranks
from hookline.verbs.extract.worker import Worker, run_shards

# Makes shards of a planned job, by their numbers, which are endless for data without a length. It
# calls a function with each shard that is on disk, perhaps in another thread; it may leave out
# those that other processes have written.
Engine = Callable[[Job, Iterable[int], Callable[[Shard], None]], None]


def in_process_engine(place: Place, worker: Worker, ranks: Ranks) -> Engine:
    """Return the engine that makes shards in this process; each of several ranks every n-th one."""

    def run(job: Job, shards: Iterable[int], on_written: Callable[[Shard], None]) -> None:
        share = itertools.islice(shards, ranks.rank, None, ranks.n_ranks)

        def work(heartbeat: Heartbeat) -> None:
            def note(shard: Shard) -> None:
                on_written(shard)
                heartbeat.beat()

            write_shards(place, worker, job, heartbeat.yield_until_failure(share), note)

        ranks.run_at_own_pace(work)

    return run


def write_shards(
    place: Place,
    worker: Worker,
    job: Job,
    shards: Iterable[int],
    on_written: Callable[[Shard], None],
) -> None:
    """Make shards in this thread, and write them in another one."""
    with ShardWriter(place, on_written, job=job.digest) as writer:
        for number, chunks in run_shards(worker, job, shards):
            writer.submit(number, chunks, worker.offload.make_waiter())


def read_shard_of_other_process(place: Place, number: int, job: str) -> Shard:
    """Read the description of a shard that another process has written.

    Raises:
        FolderError: it is not there, cannot be read now, or is of another job than the one with
            this digest.
    """
    try:
        shard = read_shard(place, shard_file_name(number))
        if shard.job != job:
            raise DamagedError("it is of another job")
        return shard
    except (DamagedError, FileNotFoundError) as error:
        raise FolderError(
            f"{place} must be a folder that all machines share, got no"
            f" {shard_file_name(number)} that can be read here: {first_line(error)}."
            "\nGive a folder of a network file system, or a URL such as 's3://bucket/features'."
        ) from error
