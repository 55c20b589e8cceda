"""Do a step on all ranks of a process group, and fail on all of them together.

Without a process group, the step is done in this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, final

import torch.distributed as dist

from hookline.display.text import type_and_line
from hookline.engine import default_store, format_by_rank, gather_json, has_process_group
from hookline.errors import RanksError

T = TypeVar("T")

_QUESTION = "hl.extract(...)"
# How long ranks wait for a rank that does not get on. The first batch may take that long to load.
PATIENCE_S = 600.0
_POLL_S = 0.05


@final
class Ranks:
    """The ranks of the process group; this process alone where there is none.

    Attributes:
        n_ranks: the number of ranks.
        rank: the rank of this process.
    """

    def __init__(self) -> None:
        self.n_ranks: int = dist.get_world_size() if has_process_group() else 1
        self.rank: int = dist.get_rank() if has_process_group() else 0

    def gather(self, step: Callable[[], Any]) -> list[Any]:
        """Do a step on each rank, and gather the results. A collective.

        Args:
            step: the step. An error in it does not keep other ranks waiting.

        Returns:
            What the step returned on each rank, as JSON, in the order of ranks.

        Raises:
            RanksError: the step failed on another rank, or a rank did not come. An error of this
                rank's step is raised as it is.
        """
        value, error = None, None
        try:
            value = step()
        except Exception as caught:
            error = caught
        if self.n_ranks == 1:
            if error is not None:
                raise error
            return [value]
        text = None if error is None else f"{type_and_line(error)}"
        try:
            answers = gather_json(_QUESTION, [value, text], range(self.n_ranks), PATIENCE_S)
        except RanksError:
            if error is None:
                raise
        if error is not None:
            raise error
        failed = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
        if failed:
            raise RanksError(
                "hl.extract must succeed on every rank, got an error on another:"
                f" {format_by_rank(failed, failed.values())}"
                "\nMend that error, and start again: shards that are written are kept."
            )
        return [result for result, _ in answers]

    def run_on_each(self, step: Callable[[], T]) -> T:
        """Do a step on each rank; return the result of this one. A collective.

        Raises:
            RanksError: the step failed on another rank, or a rank did not come.
        """
        results: list[T] = []
        self.gather(lambda: results.append(step()))
        return results[0]

    def run_on_first(self, step: Callable[[], Any]) -> Any:
        """Do a step on rank 0 alone, and return its result on each rank. A collective.

        Raises:
            RanksError: the step failed on rank 0, or a rank did not come.
        """
        return self.gather(step if self.rank == 0 else lambda: None)[0]

    def run_at_own_pace(self, step: Callable[[Heartbeat], None]) -> None:
        """Do a long step on each rank, at its own pace. A collective.

        Args:
            step: the step. It sends heartbeats from time to time, and ends when that has stopped.

        Raises:
            RanksError: the step failed on another rank, or a rank was lost.
        """
        if self.n_ranks == 1:
            step(Heartbeat(None, ""))
            return
        store = default_store()
        heartbeat = Heartbeat(
            store, f"hookline/extract/{store.add(f'hookline/extract/{self.rank}', 1)}"
        )
        error = None
        try:
            step(heartbeat)
        except Exception as caught:
            error = caught
        heartbeat.wait_for_ranks(self.n_ranks, failed=error is not None)
        self.gather(lambda: raise_if(error))
        if self.rank == 0:
            heartbeat.delete_keys()


@final
class Heartbeat:
    """Tells the ranks that this one gets on, and whether another has failed.

    Args:
        store: the store over which the ranks found each other; None for one rank.
        base: the beginning of its keys.
    """

    def __init__(self, store: Any, base: str) -> None:
        self._store = store
        self._beats, self._ended, self._failed = f"{base}/beats", f"{base}/ended", f"{base}/failed"

    def beat(self) -> None:
        """Tell that this rank gets on."""
        if self._store is not None:
            self._store.add(self._beats, 1)

    def yield_until_failure(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield numbers until another rank has failed."""
        for number in numbers:
            if self._store is not None and self._store.check([self._failed]):
                return
            yield number

    def wait_for_ranks(self, n_ranks: int, *, failed: bool) -> None:
        """Wait until so many ranks have ended, as long as some of them get on."""
        if failed:
            self._store.set(self._failed, "1")
        n_beats, since = -1, time.monotonic()
        self._store.add(self._ended, 1)
        while self._store.add(self._ended, 0) < n_ranks:
            n_now = self._store.add(self._beats, 0)
            if n_now != n_beats:
                n_beats, since = n_now, time.monotonic()
            elif time.monotonic() > since + PATIENCE_S:
                return  # the meeting after this names the ranks that are missing
            time.sleep(_POLL_S)

    def delete_keys(self) -> None:
        """Delete the keys. All ranks have ended."""
        for key in (self._beats, self._ended, self._failed):
            self._store.delete_key(key)


def raise_if(error: Exception | None) -> None:
    """Raise an error, if there is one."""
    if error is not None:
        raise error
