"""extract on a real Ray cluster of this machine: the store is that of one process."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import torch
from torch import nn

import hookline as hl
from hookline.verbs.extract import ray_engine
from hookline.verbs.extract.resumable_extraction import Extraction
from thoroughness import tries
from warm import Running, run_python
from zoo import DiesInActors, conv_net

pytestmark = pytest.mark.processes

ROWS = torch.randn(60, 3, 6, 6, generator=torch.Generator().manual_seed(2))
SITES = ["stem", "block.1:input"]
TINY = {"batch_size": 1, "shard_bytes": 1}  # 60 shards


def files(folder):
    """The bytes of each shard."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


@pytest.fixture(scope="module")
def cluster():
    """A cluster with room for two actors, and its address."""
    before = signal.getsignal(signal.SIGTERM)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with pytest.MonkeyPatch.context() as patched:
        # Each actor would load it, because tests of other files have.
        patched.delitem(sys.modules, "torchvision", raising=False)
        yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory):
    """The store of one process."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    hl.extract(conv_net(), ROWS, SITES, folder, **TINY)
    assert len(files(folder)) == 60
    return folder


def test_actors_make_the_store_of_one_process(cluster, tmp_path, whole, left_as_found):
    model, folder = conv_net(), tmp_path / "s"
    before = left_as_found(model)
    store = hl.extract(model, ROWS, SITES, folder, engine="ray", **TINY)
    assert files(folder) == files(whole)
    assert store.statistics == hl.open(whole).statistics
    assert left_as_found(model) == before
    # Either engine goes on with what the other has begun.
    (folder / "shard-00000003.safetensors").unlink()
    hl.extract(model, ROWS, SITES, folder, **TINY)
    assert files(folder) == files(whole)


def actors():
    """The processes of actors below this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::_RayActor" in (path / "cmdline").read_bytes() and is_below(int(path.name)):
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return sorted(found)


def is_below(process):
    while process > 1:
        if process == os.getpid():
            return True
        stat = Path(f"/proc/{process}/stat").read_text()
        process = int(stat.rpartition(")")[2].split()[1])
    return False


def test_actors_run_under_the_callers_autocast(cluster, tmp_path, recwarn):
    with torch.autocast("cpu", torch.bfloat16):
        here = hl.extract(conv_net(), ROWS, "stem", tmp_path / "here", batch_size=30)
        there = hl.extract(conv_net(), ROWS, "stem", tmp_path / "s", batch_size=30, engine="ray")
    assert here["stem"].dtype is there["stem"].dtype is torch.bfloat16
    assert files(tmp_path / "here") == files(tmp_path / "s")
    assert not [one for one in recwarn if "an actor differs" in str(one.message)]


def test_actors_that_are_killed_change_nothing(cluster, tmp_path, whole):
    """Each time when some more shards are there."""
    chance, folder, killed = random.Random(0), tmp_path / "s", []
    n_kills = tries(17, gate=1)  # the process that comes in its place imports torch
    is_over = threading.Event()

    def kill():
        while not is_over.is_set() and len(killed) < n_kills:
            until = len(files(folder)) + chance.randrange(4)
            while len(files(folder)) < until and not is_over.wait(0.002):
                pass
            running = [one for one in actors() if one not in killed]
            if running:
                killed.append(chance.choice(running))
                os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        hl.extract(conv_net(), ROWS, SITES, folder, engine="ray", **TINY)
    finally:
        is_over.set()
        killer.join()
    assert len(killed) == n_kills
    assert files(folder) == files(whole)
    assert hl.open(folder, verify=True).items[:].tolist() == list(range(60))


DRIVER = """
import sys, torch, hookline as hl
sys.path.append(sys.argv[1])
from zoo import DiesInActors, conv_net
torch.set_num_threads(1)
rows = torch.randn(60, 3, 6, 6, generator=torch.Generator().manual_seed(2))
hl.extract(conv_net(), rows, ["stem", "block.1:input"], sys.argv[2], engine="ray",
           batch_size=1, shard_bytes=1)
"""


def test_a_driver_that_is_killed_goes_on_to_the_same_bytes(cluster, tmp_path, whole):
    folder, n_killed, moments = tmp_path / "s", 0, tries((0, 7, 30), gate=(7,))
    tests = str(Path(__file__).parents[2])
    with others_hold(tries(0, gate=1)):  # one actor is enough, and each imports torch
        for until in moments:
            driver = Running(
                "-c", DRIVER, tests, str(folder), streams=[os.devnull, os.devnull],
                env={**os.environ, "RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            end = time.monotonic() + 60
            while time.monotonic() < end and len(files(folder)) <= until:
                time.sleep(0.002)
            n_killed += driver.wait(signal.SIGKILL) == -signal.SIGKILL
        hl.extract(conv_net(), ROWS, SITES, folder, engine="ray", **TINY)
    assert n_killed == len(moments)
    assert files(folder) == files(whole)


def test_an_error_in_an_actor_is_raised_as_it_is(cluster, tmp_path):
    items = [*ROWS[:50], torch.ones(5), *ROWS[51:]]
    with pytest.raises(hl.InputError, match="items 48 to 51 must fit together") as caught:
        hl.extract(conv_net(), items, "stem", tmp_path / "s", batch_size=4, engine="ray")
    assert "in an actor of Ray" in caught.value.__notes__[-1]


def test_a_batch_that_kills_each_actor_is_not_tried_for_ever(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "_RETRIES", tries(1, gate=0))
    with pytest.raises(hl.RanksError, match=r"must keep its actors, got Actor\w+Error"):
        hl.extract(DiesInActors(), ROWS[:2], "", tmp_path / "s", engine="ray")


def test_a_store_that_lacks_its_manifest_alone_needs_no_actor(cluster, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Extraction, "_write_final_manifest", lambda self, heartbeat: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hl.extract(conv_net(), ROWS, SITES, tmp_path / "s", **TINY)
    store = hl.extract(conv_net(), ROWS, SITES, tmp_path / "s", engine="ray", **TINY)
    assert len(store) == 60


@contextmanager
def others_hold(n_cpus):
    """Another program on the cluster."""

    class Holder:  # inside, because the workers cannot import the tests
        pass

    actor = ray.remote(num_cpus=n_cpus)(Holder).remote()
    ray.get(actor.__ray_ready__.remote())
    try:
        yield
    finally:
        ray.kill(actor)


def test_a_cluster_without_room_is_told_and_not_waited_for(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "_LOOK_S", 0.1)
    monkeypatch.setattr(ray_engine, "PATIENCE_S", 0.15)
    message = r"has waited 0.\d s for an actor, which takes 1 CPU: 0 of 2 CPUs are free"
    with (
        others_hold(2),
        pytest.warns(hl.HooklineWarning, match=message),
        pytest.raises(hl.RanksError, match=message),
    ):
        hl.extract(conv_net(), ROWS, SITES, tmp_path / "s", engine="ray", **TINY)


def test_one_actor_does_all_where_there_is_room_for_one(cluster, tmp_path, whole):
    with others_hold(1):
        hl.extract(conv_net(), ROWS, SITES, tmp_path / "s", engine="ray", **TINY)
    assert files(tmp_path / "s") == files(whole)


START = """
import os, signal, sys, warnings
warnings.simplefilter("error")
import torch, hookline as hl
torch.set_num_threads(1)
before = signal.getsignal(signal.SIGTERM), dict(os.environ), print
store = hl.extract(torch.nn.ReLU(), torch.ones(10, 2), "", sys.argv[1], engine="ray")
import ray
assert (signal.getsignal(signal.SIGTERM), dict(os.environ), print) == before
print(store["(root)"].shape, ray.is_initialized())
"""


def test_without_a_cluster_one_is_started_and_ended(tmp_path):
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    found = run_python("-c", START, "s", cwd=tmp_path, env=environment)
    assert found.stdout == "(10, 2) False\n", found.stderr


# -- refused before anything starts ---------------------------------------------------------------


class Unpicklable(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "data", "engine", "message"),
    [
        (nn.ReLU(), iter([ROWS]), "ray", "must have a length for engine='ray'"),
        (nn.ReLU(), ROWS, "dask", "engine must be 'ray' or None, got 'dask'"),
        (Unpicklable(), ROWS, "ray", r"^model\.lock must be picklable for engine='ray', got TypeE"),
    ],
)
def test_what_ray_cannot_do_is_refused(cluster, tmp_path, model, data, engine, message):
    with pytest.raises(hl.InputError, match=message):
        hl.extract(model, data, "", tmp_path / "s", engine=engine)
    assert not (tmp_path / "s").exists()


def test_a_function_that_cannot_be_pickled_is_named(cluster, tmp_path):
    lock = threading.Lock()
    with pytest.raises(hl.InputError, match="the variable lock of keep must be picklable"):
        hl.extract(nn.ReLU(), ROWS, "", tmp_path / "s", engine="ray", keep=lambda t: (lock, t)[1])
    assert not (tmp_path / "s").exists()


def test_ray_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(hl.HooklineError, match=r"engine='ray' needs ray\.\n.*pip install"):
        hl.extract(nn.ReLU(), ROWS, "", tmp_path / "s", engine="ray")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_a_cluster_that_does_not_answer_is_named(monkeypatch, tmp_path, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(hl.RanksError, match=f"must reach {address}, got ConnectionRefusedError"):
        hl.extract(nn.ReLU(), ROWS, "", tmp_path / "s", engine="ray")
    assert not (tmp_path / "s").exists()


def test_another_environment_of_an_actor_is_warned_of():
    here = {"threads": 1, "torch": "2.13"}
    ray_engine._warn_of_differences(here, dict(here))
    with pytest.warns(hl.HooklineWarning, match="an actor differs.*threads is 2, here 1"):
        ray_engine._warn_of_differences(here, {**here, "threads": 2})


def test_an_edit_that_actors_lack_is_an_error(cluster, tmp_path):
    model = conv_net()
    with (
        hl.edit(model, "stem", lambda t: t * 0),
        pytest.raises(hl.RanksError, match=r"in an actor of Ray .* got stem: values differ"),
    ):
        hl.extract(model, ROWS, "stem", tmp_path / "s", engine="ray")
