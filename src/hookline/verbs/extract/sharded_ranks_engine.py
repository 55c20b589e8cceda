"""Make shards on ranks among which the weights of the model are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from hookline.engine import Site, list_fsdp2_gathers, reshard, sharding_kind
from hookline.errors import RanksError
from hookline.files.folder_or_url import Place
from hookline.stores.job_manifest import Job
from hookline.stores.shard_file import Shard
from hookline.verbs.extract.collective_steps import PATIENCE_S, Ranks, raise_if
from hookline.verbs.extract.engines import Engine, write_shards
from hookline.verbs.extract.worker import Worker, run_shards

# What a rank says before each forward: the greatest number counts.
_DONE, _HAS_BATCH, _FAILED = range(3)


def sharded_ranks_engine(place: Place, model: nn.Module, worker: Worker, ranks: Ranks) -> Engine:
    """Return the engine that makes shards on ranks that run equal numbers of forwards.

    A forward of a sharded model gathers weights: a collective. With FSDP2, each rank has batches
    of its own, and one that has none left runs its last batch again. With tensor parallelism, all
    ranks run each batch, and rank 0 writes.
    """
    is_split = sharding_kind(model) == "split"

    def run(job: Job, shards: Iterable[int], on_written: Callable[[Shard], None]) -> None:
        error: Exception | None = None
        with _in_lockstep(model, worker) as steps:
            try:
                write(job, shards, on_written)
                steps.join_remaining()
            except _OtherRankFailed:
                pass  # below, the rank that has failed says how
            except RanksError:
                raise  # a rank is lost, and will say nothing
            except Exception as caught:
                error = caught
                steps.announce_failure()
        ranks.run_on_each(lambda: raise_if(error))

    def write(job: Job, shards: Iterable[int], on_written: Callable[[Shard], None]) -> None:
        if is_split and ranks.rank > 0:
            for _ in run_shards(worker, job, shards):
                pass  # rank 0 has the same rows
            return
        share = shards if is_split else itertools.islice(shards, ranks.rank, None, ranks.n_ranks)
        write_shards(place, worker, job, share, on_written)

    return run


class _OtherRankFailed(Exception):
    """Another rank has failed. That rank says how."""


@contextmanager
def _in_lockstep(model: nn.Module, worker: Worker) -> Iterator[_Lockstep]:
    """Have a worker run each forward in step with the other ranks."""
    # A group of its own, on the CPU: a collective of the model's group would wait for the GPU.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    forward = worker.forward
    try:
        with list_fsdp2_gathers(model) as called:
            steps = _Lockstep(model, worker, group, called)
            worker.forward = steps.forward
            steps.learn_gather_order()
            yield steps
    finally:
        worker.forward = forward
        with suppress(RuntimeError):  # a rank is gone
            dist.destroy_process_group(group)


@final
class _Lockstep:
    """Keeps ranks at equal numbers of forwards.

    Args:
        model: the model.
        worker: runs the batches.
        group: a process group of all ranks.
        called: the modules whose weights are gathered, as they are called.
    """

    def __init__(self, model: nn.Module, worker: Worker, group: Any, called: list[Any]) -> None:
        self._model = model
        self._worker = worker
        self._forward = worker.forward
        self._group = group
        self._called = called
        self._order: list[Any] = []  # those of a forward that succeeds
        self._last: Any = None
        self._is_over = False

    def learn_gather_order(self) -> None:
        """Run the first batch on all ranks, and note which modules gather their weights."""
        self._last = self._worker.first_inputs()
        self._run_forward(self._last)
        self._worker.drop_recorded()
        self._order = list(self._called)

    def forward(self, inputs: Any) -> list[Site]:
        """Run the model on a batch when all ranks have come.

        Raises:
            _OtherRankFailed: another rank has failed.
            RanksError: a rank was lost.
        """
        if self._exchange_state(_HAS_BATCH) == _FAILED:
            raise _OtherRankFailed
        self._last = inputs
        return self._run_forward(inputs)

    def join_remaining(self) -> None:
        """Run the last batch again as long as another rank has one.

        Raises:
            _OtherRankFailed: another rank has failed.
            RanksError: a rank was lost.
        """
        while (state := self._exchange_state(_DONE)) == _HAS_BATCH:
            self._run_forward(self._last)
            self._worker.drop_recorded()
        self._is_over = True
        if state == _FAILED:
            raise _OtherRankFailed

    def announce_failure(self) -> None:
        """Tell the others, when they come for their next forward, that this rank has failed."""
        if not self._is_over:
            self._is_over = True
            self._exchange_state(_FAILED)

    def _run_forward(self, inputs: Any) -> list[Site]:
        self._called.clear()
        try:
            return self._forward(inputs)
        except Exception:
            self._join_remaining_gathers()
            raise

    def _join_remaining_gathers(self) -> None:
        """Take part in the collectives of the other ranks' forwards, after this one's has failed.

        They wait for this rank's shards of each module that is called after the failure.
        """
        reshard(self._model)
        for module in self._order[len(self._called) :]:
            module.unshard()
            module.reshard()

    def _exchange_state(self, state: int) -> int:
        highest = torch.tensor(state, device="cpu")
        try:
            dist.all_reduce(highest, dist.ReduceOp.MAX, self._group)
        except RuntimeError as error:
            self._is_over = True
            raise RanksError(
                "hl.extract must run on every rank to its end, got a rank that is lost"
                f" ({str(error).splitlines()[0][:120]})."
                "\nLook at the output of the other ranks, and start again: shards that are written"
                " are kept."
            ) from error
        return int(highest)
