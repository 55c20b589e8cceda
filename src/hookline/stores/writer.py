"""Write shards in a thread, while the model runs on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from hookline.stores.place import Place
from hookline.stores.shard_file import Chunk, Shard, encode, name_of


@final
class Writer:
    """Writes shards in the order in which they are given, at most `waiting` behind.

    Leaving the block waits for all of them. A shard that cannot be written raises in the next
    `put`, or at the end of the block.

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

    def put(self, number: int, chunks: Sequence[Chunk], ready: Callable[[], None]) -> None:
        """Have a shard written; wait if too many are waiting.

        Args:
            number: the number of the shard.
            chunks: the rows of its batches, in order.
            ready: called in the thread, to wait until the rows are on the CPU.

        Raises:
            FolderError: an earlier shard could not be written.
        """
        while len(self._running) >= self._waiting or (self._running and self._running[0].done()):
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._write, number, chunks, ready))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                while self._running:
                    self._running.popleft().result()
        finally:
            # What already waits is written also after an error: it need not be computed again.
            self._pool.shutdown()

    def _write(self, number: int, chunks: Sequence[Chunk], ready: Callable[[], None]) -> None:
        ready()
        buffers, shard = encode(number, chunks, self._job)
        self._place.write(name_of(number), buffers)
        self._written(shard)
