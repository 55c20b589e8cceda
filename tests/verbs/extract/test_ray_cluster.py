"""A cluster of Ray: room for actors, and what is left of one that is interrupted."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch

import hookline as hl
from hookline.files.folder_or_url import as_place
from hookline.verbs.extract.ray_cluster import max_actors, ray_cluster, warn_of_other_nodes


@pytest.mark.parametrize("n", [1, 2])
def test_ctrl_c_while_a_cluster_starts_leaves_none(monkeypatch, n):
    """The second one is not waited with."""
    seen = []

    def init(**options):
        for _ in range(n):
            signal.raise_signal(signal.SIGINT)
        seen.append("init")

    fake = SimpleNamespace(
        is_initialized=lambda: False, init=init, shutdown=lambda: seen.append("shutdown")
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt), ray_cluster(fake):
            seen.append("used")
        assert seen == (["init", "shutdown"] if n == 1 else ["shutdown"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_machines_must_share_the_folder(tmp_path):
    two = SimpleNamespace(nodes=lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    with pytest.warns(hl.HooklineWarning, match="a folder that the 2 machines of the cluster"):
        warn_of_other_nodes(two, as_place(tmp_path))
    warn_of_other_nodes(two, as_place("memory://features"))  # a URL is the same anywhere


def nodes(*resources):
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": one} for one in resources])


def test_each_machine_has_as_many_actors_as_it_has_room_for():
    assert max_actors(nodes({"CPU": 2.0}), 1, "cpu") == 2
    assert max_actors(nodes({"CPU": 1.0}), 1, "cpu") == 1
    assert max_actors(nodes({"CPU": 6.0}, {"CPU": 7.0}), 4, "cpu") == 2
    assert max_actors(nodes({"CPU": 8.0}, {"CPU": 8.0}), 4, "cpu") == 4
    assert max_actors(nodes({"CPU": 9.0, "GPU": 2.0}, {"CPU": 2.0}), 4, "cuda") == 2
    with pytest.raises(hl.RanksError, match=r"4 CPUs for an actor, got at most 2(.|\n)*threads\(2"):
        max_actors(nodes({"CPU": 2.0}, {"CPU": 2.0}), 4, "cpu")
    with pytest.raises(hl.RanksError, match="must have a GPU for a model on one"):
        max_actors(nodes({"CPU": 8.0}), 4, "cuda")


def test_a_cluster_starts_where_python_tells_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS and Windows
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = []
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **options: started.append(options["num_cpus"]),
        shutdown=lambda: None,
    )
    with ray_cluster(fake):
        assert started == [max(os.cpu_count() or 1, torch.get_num_threads())]
