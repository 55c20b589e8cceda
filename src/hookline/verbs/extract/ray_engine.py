"""Make shards on a Ray cluster, in actors."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from hookline.display.text import first_line, plural, type_and_line
from hookline.errors import HooklineError, InputError, RanksError, warn
from hookline.files.folder_or_url import Place
from hookline.models.torchvision_import import import_torchvision
from hookline.stores.first_batch_summary import compare_summaries
from hookline.stores.job_manifest import Job, compared_environment
from hookline.stores.shard_file import Shard
from hookline.verbs.extract.collective_steps import PATIENCE_S
from hookline.verbs.extract.engines import read_shard_of_other_process, write_shards
from hookline.verbs.extract.process_setup import ProcessSetup
from hookline.verbs.extract.ray_cluster import (
    explain_ray_errors,
    import_ray,
    max_actors,
    ray_cluster,
    warn_of_other_nodes,
)
from hookline.verbs.extract.unpicklable import find_unpicklable
from hookline.verbs.extract.worker import Worker
from hookline.verbs.shared.run_settings import Autocast, current_autocast

_LOOK_S = 60.0  # how long actors may take to start, before a warning
# How often a task is tried again after its process has died. Without a bound, a batch that kills
# its process would be tried for ever.
_RETRIES = 10
# A task is one shard, or some where there are many: what lies between two tasks costs 14 ms.
_TASKS_AN_ACTOR = 16
_MOST_SHARDS_A_TASK = 8


@final
class RayEngine:
    """Makes shards in actors of a Ray cluster, each with a copy of the model.

    Args:
        place: where the store is.
        setup: model, data and options. No line may be attached to the model yet: it is copied.

    Raises:
        HooklineError: Ray is not installed.
        InputError: the data has no length.
    """

    def __init__(self, place: Place, setup: ProcessSetup) -> None:
        self._ray = import_ray()
        if setup.source.n_items is None:
            raise InputError(
                "data must have a length for engine='ray', whose actors load batches by number, got"
                " an iterable.\nGive a Dataset, arrays or files."
            )
        self._place = place
        self._given = setup
        self._device = next(
            (parameter.device.type for parameter in setup.model.parameters()), "cpu"
        )
        self._open = ExitStack()

    def connect(self) -> None:
        """Connect to the cluster, and send it what actors are given.

        Raises:
            InputError: something cannot be sent to another process.
            RanksError: the cluster cannot be reached, or has no room for an actor.
        """
        self._open.enter_context(ray_cluster(self._ray))
        warn_of_other_nodes(self._ray, self._place)
        max_actors(self._ray, torch.get_num_threads(), self._device)
        self._setup = self._send_setup(self._given)

    def close(self) -> None:
        """End what `connect` has begun. Idempotent."""
        self._open.close()

    def run(self, job: Job, shards: Iterable[int], on_written: Callable[[Shard], None]) -> None:
        """Make shards in actors, and read the description of each one that is on disk."""
        left = list(shards)
        if not left:
            return  # the manifest alone was not written
        n_actors = min(max_actors(self._ray, torch.get_num_threads(), self._device), len(left))
        size = min(max(len(left) // (_TASKS_AN_ACTOR * n_actors), 1), _MOST_SHARDS_A_TASK)
        tasks = deque(left[at : at + size] for at in range(0, len(left), size))
        driver, environments, digest = compared_environment(), set(), job.digest
        with self._start_actors(n_actors, job) as actors, explain_ray_errors(self._ray):
            for made in self._run_tasks(actors, tasks):
                if made.error:
                    raise pickle.loads(made.error)
                environments.add(made.environment)
                for number in made.numbers:
                    on_written(read_shard_of_other_process(self._place, number, digest))
        for text in environments:
            _warn_of_differences(driver, json.loads(text))

    def _run_tasks(self, actors: list[Any], tasks: deque[list[int]]) -> Iterator[_TaskResult]:
        """Give tasks to the actors that run, and yield what each has made.

        Ray starts an actor when there is room, which may be never.
        """
        starting = {actor.confirm_running.remote(): actor for actor in actors}
        begun: dict[Any, Any] = {}
        waited_s = 0.0
        while begun or tasks:
            ended, _ = self._ray.wait([*begun, *starting], timeout=None if begun else _LOOK_S)
            if not ended:
                waited_s += _LOOK_S
                _warn_of_waiting(self._ray, self._device, waited_s)
                continue
            result = self._ray.get(ended[0])
            is_new = ended[0] in starting
            actor = starting.pop(ended[0]) if is_new else begun.pop(ended[0])
            # Each actor has a second task at hand when it ends the first, if there are enough.
            n_given = 2 if is_new and len(tasks) > len(starting) + 1 else 1
            for _ in range(min(n_given, len(tasks))):
                begun[actor.make_shards.remote(tasks.popleft())] = actor
            if not is_new:
                yield result

    @contextmanager
    def _start_actors(self, n: int, job: Job) -> Iterator[list[Any]]:
        """Start actors, which end with the block."""
        replica = self._ray.remote(_RayActor).options(
            num_cpus=torch.get_num_threads(),
            num_gpus=1 if self._device == "cuda" else None,
            max_restarts=-1,
            max_task_retries=_RETRIES,
        )
        given = self._place, [self._setup], job, _ProcessState.of_this_process()
        actors: list[Any] = []
        try:  # Ctrl-C may come while they are made
            for _ in range(n):
                actors.append(replica.remote(*given))
            yield actors
        finally:
            for actor in actors:
                self._ray.kill(actor)

    def _send_setup(self, setup: ProcessSetup) -> Any:
        try:
            return self._ray.put(setup)
        except HooklineError:
            raise
        except Exception as error:
            parts = {"model": setup.model, "selector": setup.selector, **setup.options}
            parts["data"] = getattr(setup.source, "dataset", setup.source)
            name, cause = find_unpicklable(parts, self._ray.cloudpickle.dumps) or (
                "model, data and options",
                error,
            )
            raise InputError(
                f"{name} must be picklable for engine='ray', got {type_and_line(cause)}."
                "\nMake it where it is used, leave it out in __getstate__, or extract without"
                " engine='ray'. Remove hooks from the model, and give functions without open files."
            ) from cause


def _warn_of_waiting(ray: Any, device: str, seconds: float) -> None:
    """Tell that no actor has started, because others hold the CPUs of the cluster."""
    n_threads = torch.get_num_threads()
    free, there = ray.available_resources(), ray.cluster_resources()
    kinds = ("CPU", "GPU") if device == "cuda" else ("CPU",)
    rooms = [f"{free.get(kind, 0):g} of {there.get(kind, 0):g} {kind}s" for kind in kinds]
    message = (
        f"engine='ray' has waited {seconds:g} s for an actor, which takes"
        f" {plural(n_threads, 'CPU')}{' and a GPU' if len(kinds) > 1 else ''}:"
        f" {' and '.join(rooms)} are free."
        "\nEnd other work on the cluster, which `ray status` lists, or ask for fewer CPUs:"
        " torch.set_num_threads(1). Shards that are written are kept."
    )
    if seconds >= PATIENCE_S:
        raise RanksError(message)
    warn(message)


@final
class _RayActor:
    """An actor: makes shards with its own copy of the model.

    Args:
        place: where the store is.
        setup: a list of one reference to model, data and options.
        job: the job, planned.
        process: what to take over from the driver.
    """

    def __init__(self, place: Place, setup: list[Any], job: Job, process: _ProcessState) -> None:
        self._place = place
        self._setup = setup
        self._job = job
        self._process = process
        # A line and the grad mode belong to a thread, and Ray calls from any.
        self._thread = ThreadPoolExecutor(1, "hookline-worker")
        self._worker: Worker | None = None
        self._open = ExitStack()

    def confirm_running(self) -> None:
        """Tell that the actor runs."""

    def make_shards(self, shards: list[int]) -> _TaskResult:
        """Make shards and write them."""
        error = b""
        try:
            self._thread.submit(self._make_in_thread, shards).result()
        except Exception as raised:
            error = _pickle_error(raised)  # Ray would give its text alone
        return _TaskResult(
            shards, json.dumps(self._thread.submit(compared_environment).result()), error
        )

    def _make_in_thread(self, shards: list[int]) -> None:
        if self._worker is None:
            self._process.apply()
            self._worker = self._open.enter_context(_fetch_setup(self._setup[0]).worker())
            self._worker.forms = {form.name: form for form in self._job.columns}
            _check_model_copy(self._worker, self._job)
        # The driver reads what it needs from the file of each shard.
        write_shards(self._place, self._worker, self._job, shards, lambda shard: None)


@final
@dataclass(frozen=True)
class _TaskResult:
    """Tell the driver what an actor has made."""

    numbers: list[int]  # the shards
    environment: str  # of the actor, as JSON
    error: bytes  # the pickled error that a shard raised, if one did; else empty


@final
@dataclass(frozen=True)
class _ProcessState:
    """Hold what an actor takes over from the driver."""

    n_threads: int  # the threads of torch: as many, for equal bits
    path: list[str]  # where modules are found, such as that of the model's class
    # Whether torchvision is loaded. Models of other packages import it.
    has_torchvision: bool
    autocast: Autocast  # of each kind of device
    precision: str  # of products of float32 matrices

    @staticmethod
    def of_this_process() -> _ProcessState:
        """Return what this process has."""
        return _ProcessState(
            torch.get_num_threads(),
            list(sys.path),
            "torchvision" in sys.modules,
            current_autocast(),
            torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Have it in this process, too; autocast in this thread."""
        torch.set_num_threads(self.n_threads)
        torch.set_float32_matmul_precision(self.precision)
        for kind, is_on, dtype in self.autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        sys.path += [entry for entry in self.path if entry not in sys.path]
        if self.has_torchvision:
            with suppress(ImportError):
                import_torchvision()


def _check_model_copy(worker: Worker, job: Job) -> None:
    """Compare the values that this actor's copy of the model gives for the first batch."""
    if job.first_batch is None:
        return
    values = worker.summarise(worker.run_first())
    differences = compare_summaries(job.first_batch, values, is_same_setup=False).far
    if not differences:
        return
    again = worker.summarise(worker.rerun_first())
    if not compare_summaries(values, again, is_same_setup=True).far:
        raise RanksError(
            "the model must give the same values in an actor of Ray as in this process, got"
            f" {differences[0]}.\nPut changes into the model itself: actors get a copy of it,"
            " without hl.edit and other lines."
        )


def _fetch_setup(setup: Any) -> ProcessSetup:
    """Return what the driver has sent."""
    try:
        received: ProcessSetup = import_ray().get(setup)
    except Exception as error:
        raise InputError(
            "model, data and options must be importable on each machine of the cluster, got"
            f" {first_line(error)}.\nInstall their packages there, or define them in the script."
        ) from error
    return received


def _pickle_error(error: Exception) -> bytes:
    """Return an error for the driver, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"hookline: in an actor of Ray:\n{trace}")
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RanksError(f"an actor of Ray must make its shards, got:\n{trace}"))


def _warn_of_differences(driver: dict[str, Any], actor: dict[str, Any]) -> None:
    differences = [
        f"{key} is {actor[key]}, here {driver[key]}" for key in driver if driver[key] != actor[key]
    ]
    if differences:
        warn(
            f"an actor differs from this process: {'; '.join(differences)}."
            "\nIts shards may differ in their last bits from those that this process would make."
        )
