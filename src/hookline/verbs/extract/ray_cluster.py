"""The Ray cluster that runs actors: reached or started, ended, and left without a trace here."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import torch

from hookline.display.text import type_and_line
from hookline.errors import HooklineError, RanksError, warn
from hookline.files.folder_or_url import LocalPlace, Place
from hookline.util.optional_imports import how_to_install, require

_CONNECT_S = 10.0


def import_ray() -> Any:
    """Import Ray, without its statistics of usage.

    Raises:
        HooklineError: it is not installed.
    """
    variables = dict(os.environ)
    try:
        return require("ray", "engine='ray' needs ray", how_to_install("ray"), HooklineError)
    finally:
        _restore_environ(variables)  # Ray sets one when it is imported


@contextmanager
def ray_cluster(ray: Any) -> Iterator[None]:
    """Use the Ray that is initialised; else connect to RAY_ADDRESS, or start one on this machine.

    Raises:
        RanksError: the cluster cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address in (None, "", "local"):
        options |= {"address": "local", "num_cpus": _count_cpus(), "include_dashboard": False}
    else:
        _check_reachable(address)
    with _restore_process_state():
        try:  # Ctrl-C may come while the cluster starts
            _connect(ray, options, address or "a local cluster")
            yield
        finally:
            ray.shutdown()


def _count_cpus() -> int:
    """Count the CPUs that this process may use; macOS and Windows tell those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), torch.get_num_threads())
    return max(os.cpu_count() or 1, torch.get_num_threads())


def _connect(ray: Any, options: dict[str, Any], address: str) -> None:
    is_started = options.get("address") == "local"
    try:
        with warnings.catch_warnings(), _defer_interrupt() if is_started else nullcontext():
            warnings.simplefilter("ignore")  # Ray tells of its own deprecations
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _unreachable_error(address, error) from error


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Have a first Ctrl-C come after the block, and a second one at once.

    Ray does not end the processes of a cluster that was interrupted while it started.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _check_reachable(address: str) -> None:
    """Open a connection to a cluster's address: Ray itself would try for minutes.

    Raises:
        RanksError: nobody answers.
    """
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if parts.hostname is None or parts.port is None:
        return  # such as "auto"
    try:
        socket.create_connection((parts.hostname, parts.port), _CONNECT_S).close()
    except OSError as error:
        raise _unreachable_error(address, error) from error


def _unreachable_error(address: str, error: Exception) -> RanksError:
    return RanksError(
        f"engine='ray' must reach {address}, got {type_and_line(error)}."
        "\nStart it (ray start --head), set RAY_ADDRESS to it, or unset that to run here. Shards"
        " that are written are kept."
    )


@contextmanager
def _restore_process_state() -> Iterator[None]:
    """Turn off statistics of usage. Put back what ray.init changes: a signal handler, variables."""
    handler, variables = signal.getsignal(signal.SIGTERM), dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield
    finally:
        _restore_environ(variables)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _restore_environ(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def explain_ray_errors(ray: Any) -> Iterator[None]:
    """Tell what to do when Ray fails.

    Raises:
        RanksError: an actor's process has died too often, or the cluster is lost.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        raise RanksError(
            f"engine='ray' must keep its actors, got {type_and_line(error)}."
            "\nLook at the logs of Ray for the reason, often memory. Then start again: shards that"
            " are written are kept."
        ) from error


def max_actors(ray: Any, n_threads: int, device: str) -> int:
    """Return how many actors the cluster has room for.

    Raises:
        RanksError: it has room for none: Ray would wait for ever.
    """
    machines = [{"CPU": 0, **node["Resources"]} for node in ray.nodes() if node["Alive"]]
    n_cpus = [int(machine["CPU"]) for machine in machines]
    if max(n_cpus) < n_threads:
        raise RanksError(
            f"a machine of the cluster must have {n_threads} CPUs for an actor, got at most"
            f" {max(n_cpus)}.\nUse as many threads here, too: torch.set_num_threads({max(n_cpus)})."
        )
    if device != "cuda":
        return sum(n // n_threads for n in n_cpus)
    n_actors = sum(
        min(int(machine.get("GPU", 0)), n // n_threads)
        for machine, n in zip(machines, n_cpus, strict=True)
    )
    if not n_actors:
        raise RanksError(
            "the cluster must have a GPU for a model on one, got none."
            "\nMove the model to the CPU: model.cpu()."
        )
    return int(n_actors)


def warn_of_other_nodes(ray: Any, place: Place) -> None:
    """Warn if machines of the cluster may have no such folder."""
    n_nodes = sum(node["Alive"] for node in ray.nodes())
    if n_nodes > 1 and isinstance(place, LocalPlace):
        warn(
            f"{place} must be a folder that the {n_nodes} machines of the cluster share."
            "\nGive a folder of a network file system, or a URL such as 's3://bucket/features'."
        )
