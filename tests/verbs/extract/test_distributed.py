"""extract on the ranks of a process group: the store is that of one process, byte for byte."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import hookline as hl
from distributed_models import sharded
from hookline.verbs.extract import collective_steps as module
from thoroughness import tries
from zoo import conv_net

ROWS = torch.randn(50, 3, 6, 6, generator=torch.Generator().manual_seed(2))
SITES = ["stem", "block.1:input"]
SMALL = {"batch_size": 4, "shard_bytes": 10_000}  # 7 shards of 2 batches, the last one shorter


def files(folder):
    """The bytes of each shard."""
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}
    assert found
    return found


def manifest(folder):
    """The lines of the manifest, but for what each process has imported and seeded."""
    described = json.loads((folder / "manifest.json").read_text())
    del described["checksum"], described["environment"]["origin"]
    return json.dumps(described, indent=0).splitlines()


def by_one_process(data, folder):
    """The store of one process that has one thread, as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hl.extract(conv_net(), data, SITES, folder, **SMALL)
    torch.set_num_threads(threads)
    assert len(files(folder)) == 7
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return by_one_process(ROWS, tmp_path_factory.mktemp("whole") / "store")


@pytest.fixture(scope="module")
def whole_of_items(tmp_path_factory):
    """The same numbers from another kind of data: another job, which each shard names."""
    return by_one_process(Broken(None), tmp_path_factory.mktemp("items") / "store")


def of_kind(kind):
    if kind == "DDP":
        return DistributedDataParallel(conv_net())
    return sharded(conv_net()) if kind == "FSDP2" else conv_net()


def extract(rank, folder, kind, rows=ROWS, **options):
    hl.extract(of_kind(kind), rows, SITES, folder / "s", **{**SMALL, **options})


@pytest.mark.parametrize("kind", ["replicated", "DDP", "FSDP2"])
def test_ranks_make_the_store_of_one_process(ranks, tmp_path, whole, kind):
    ranks.run(__file__, "extract", str(tmp_path), kind)
    assert files(tmp_path / "s") == files(whole)
    assert manifest(tmp_path / "s") == manifest(whole)
    store = hl.open(tmp_path / "s", verify=True)
    assert store.items[:].tolist() == list(range(50))
    assert store.statistics == hl.open(whole).statistics
    # Any engine goes on with a store of any other: the identity of the weights is the same.
    (tmp_path / "s" / "shard-00000003.safetensors").unlink()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hl.extract(conv_net(), ROWS, SITES, tmp_path / "s", **SMALL)
    torch.set_num_threads(threads)
    assert files(tmp_path / "s") == files(whole)


# -- tensor parallelism ---------------------------------------------------------------------------

X = torch.randn(11, 4, generator=torch.Generator().manual_seed(3))


def mlp(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh())
    if kind == "one process":
        return model
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "split"))
    plan = {"0": ColwiseParallel(use_local_output=kind == "TP, local"), "2": RowwiseParallel()}
    parallelize_module(model, mesh["split"], plan)
    return fully_shard(model, mesh=mesh["data"]) if kind == "FSDP2 and TP" else model


def largest(value):
    return value.amax(1, keepdim=True).double()


def extract_split(rank, folder, kind, sites, **options):
    hl.extract(mlp(kind), X, sites, folder, batch_size=3, shard_bytes=1, **options)


def extract_two_split(rank, folder, kind):
    extract_split(rank, folder / "s", kind, ["0", "2"])
    extract_split(rank, folder / "t", kind, "0", keep=largest, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["TP", "FSDP2 and TP"])
def test_values_that_are_split_are_stored_whole(ranks, tmp_path, kind):
    ranks.run(__file__, "extract_two_split", str(tmp_path), kind)
    store, model = hl.open(tmp_path / "s", verify=True), mlp("one process")
    with hl.record(model, ["0", "2"]) as run:
        model(X)
    assert_close(store["0"][:], run["0"])
    assert_close(store["2"][:], run["2"])
    # Not keep= of each rank's part.
    assert_close(hl.open(tmp_path / "t")["0"][:], largest(run["0"]).bfloat16())
    # The identity of split weights is that of the whole.
    one = hl.extract(model, X, ["0", "2"], tmp_path / "one", batch_size=3, shard_bytes=1)
    assert store.job["model"] == one.job["model"]


def test_a_part_that_cannot_be_joined_is_refused(ranks, tmp_path):
    said = ranks.ask(__file__, "extract_split", str(tmp_path / "s"), "TP, local", "0")
    for kind, text in said:
        assert kind == "raised"
        assert "StructureError: 0 must be a DTensor or equal on all ranks" in text
    assert not list((tmp_path / "s").glob("[!.]*"))
    ranks.run(__file__, "extract_split", str(tmp_path / "s"), "TP, local", "2")


# -- errors ---------------------------------------------------------------------------------------


class Broken(torch.utils.data.Dataset):
    """An item that cannot be loaded, on one rank."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        if index == self.item:
            raise OSError("this disk is broken")
        return ROWS[index]


def extract_broken(rank, folder, kind, item, only):
    extract(rank, folder, kind, Broken(item if rank == only else None))


@pytest.mark.parametrize("kind", ["replicated", "FSDP2"])
@pytest.mark.parametrize(("item", "rank"), [(0, 1), (9, 1), (36, 0), (49, 0)])
def test_an_error_on_one_rank_is_told_to_all(ranks, tmp_path, whole_of_items, kind, item, rank):
    """In the first batch, in the first of its own, in the middle and at the end."""
    said = ranks.ask(__file__, "extract_broken", str(tmp_path), kind, item, rank)
    assert "InputError: item" in said[rank][1]
    assert "this disk is broken" in said[rank][1]
    assert "RanksError" in said[1 - rank][1]
    assert f"on another: rank {rank}: InputError: item {item} must load" in said[1 - rank][1]
    ranks.run(__file__, "extract_broken", str(tmp_path), kind, item, None)
    assert files(tmp_path / "s") == files(whole_of_items)


class Fails:
    """Fails within the forward, at the block, for one batch."""

    def __init__(self, fails):
        self.fails = fails

    def __repr__(self):
        return "Fails()"

    def __call__(self, value):
        if self.fails and value.shape[2:] == (6, 6) and len(value) == 2:
            raise ZeroDivisionError("within the forward")
        return value


def fail_within(rank, folder, only):
    """Item 49 is in a batch of 2."""
    keep = Fails(rank == only)
    hl.extract(sharded(conv_net()), ROWS, ["stem", "fc"], folder / "s", keep=keep, **SMALL)


def test_an_error_within_a_sharded_forward_hangs_no_rank(ranks, tmp_path):
    """The others wait for this rank's part of the layers behind the one that has failed."""
    said = ranks.ask(__file__, "fail_within", str(tmp_path), 1)
    assert "ZeroDivisionError: within the forward" in said[1][1]
    assert "on another: rank 1: ZeroDivisionError" in said[0][1]
    ranks.run(__file__, "fail_within", str(tmp_path), None)  # the process group still works
    assert len(hl.open(tmp_path / "s")["fc"]) == 50


def extract_others(rank, folder):
    with pytest.raises(hl.RanksError, match=r"same arguments on every rank.*rank 1: model.weights"):
        model = conv_net()
        with torch.no_grad():
            model.stem.weight[0] += rank
        hl.extract(model, ROWS, SITES, folder / "s", **SMALL)
    with pytest.raises(hl.InputError, match="must have a length for 2 ranks"):
        hl.extract(conv_net(), iter(ROWS.split(4)), SITES, folder / "s")
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "mine.txt").write_text("mine")
    error = hl.RanksError if rank else hl.FolderError
    with pytest.raises(error, match=r"must be empty or hold a store"):
        hl.extract(conv_net(), ROWS, SITES, folder / "mine")


def test_what_ranks_cannot_do_together_is_refused_on_all(ranks, tmp_path):
    ranks.run(__file__, "extract_others", str(tmp_path))
    assert not list((tmp_path / "s").glob("[!.]*"))


def extract_alone(rank, folder):
    patience, module.PATIENCE_S = module.PATIENCE_S, 0.5
    try:
        if rank == 1:
            dist.barrier()  # it comes when the others have left
        with pytest.raises(hl.RanksError, match=r"waited 0\.5 s for rank 1, which did not"):
            extract(rank, folder, "replicated")
        if rank == 0:
            dist.barrier()
    finally:
        module.PATIENCE_S = patience


def test_a_rank_that_does_not_come_is_named(ranks, tmp_path):
    ranks.run(__file__, "extract_alone", str(tmp_path))


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["replicated", "FSDP2"])
def test_a_rank_may_have_nothing_to_do(ranks, tmp_path, kind):
    """One shard for two ranks; then none for either."""
    for _ in range(2):
        ranks.run(__file__, "extract_one_shard", str(tmp_path), kind)
    assert len(files(tmp_path / "s")) == 1
    assert len(hl.open(tmp_path / "s", verify=True)) == 50


def extract_one_shard(rank, folder, kind):
    extract(rank, folder, kind, shard_bytes=10**9)


class Counts:
    """Counts the tensors in memory that are like a value."""

    def __init__(self):
        self.n = []

    def __repr__(self):
        return "Counts()"

    def __call__(self, value):
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        self.n.append(sum(one.shape == value.shape for one in tensors))
        return value


def extract_without_a_shard(rank, folder):
    keep = Counts()
    hl.extract(sharded(conv_net()), ROWS, "stem", folder / "s", keep=keep, batch_size=4)
    if rank == 1:
        assert len(keep.n) == 14  # 13 batches, of which it plans with the first one
        assert max(keep.n[7:]) <= max(keep.n[:7])


def test_a_rank_that_only_keeps_step_keeps_no_values(ranks, tmp_path):
    ranks.run(__file__, "extract_without_a_shard", str(tmp_path))


# -- killed ---------------------------------------------------------------------------------------

TINY = {"batch_size": 1, "shard_bytes": 1}  # 50 shards


def start_group(folder, kind):
    """Fork two ranks that extract; their process ids."""
    meeting = tempfile.mktemp(dir=folder)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                warnings.simplefilter("ignore")
                dist.init_process_group(
                    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
                )
                extract(rank, folder, kind, **TINY)
            finally:
                os._exit(0)
        children.append(child)
    return children


def has_ended(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["replicated", "FSDP2"])
def test_a_group_killed_many_times_goes_on_to_the_same_bytes(tmp_path, kind):
    """All ranks are killed at once, each time when some more shards are there."""
    import torch._dynamo  # FSDP2 loads it: here once, not in each child

    chance = random.Random(0)
    folder = tmp_path / "s"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hl.extract(conv_net(), ROWS, SITES, tmp_path / "whole", **TINY)
    torch.set_num_threads(threads)
    n_killed, n_moments = 0, tries(20, gate=4)
    for _ in range(n_moments):
        children = start_group(tmp_path, kind)
        until = len(list(folder.glob("shard-*"))) + chance.randrange(3)
        while len(list(folder.glob("shard-*"))) < until and not has_ended(children[0]):
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
        n_killed += sum(os.WIFSIGNALED(os.waitpid(child, 0)[1]) for child in children)
    for child in start_group(tmp_path, kind):
        os.waitpid(child, 0)
    assert n_killed > 1.5 * n_moments
    assert files(folder) == files(tmp_path / "whole")
    assert len(hl.open(folder, verify=True)) == 50
    assert not list(folder.glob(".*.part"))


# -- the values of the first batch ----------------------------------------------------------------


def hooked(rank, kind, on):
    model = of_kind(kind)
    if rank in on:
        model.stem.register_forward_hook(lambda module, args, output: output * 0)
    return model


def hook_on_one_rank(rank, folder):
    with pytest.raises(hl.RanksError, match=r"every rank, got on rank 1 .*: values differ"):
        hl.extract(hooked(rank, "replicated", [1]), ROWS, SITES, folder / "s", **SMALL)


def test_a_hook_on_one_rank_alone_is_an_error(ranks, tmp_path):
    ranks.run(__file__, "hook_on_one_rank", str(tmp_path))
    assert not list((tmp_path / "s").glob("shard-*"))


def hooks_after_a_store(rank, folder, kind):
    hl.extract(hooked(rank, kind, []), ROWS, SITES, folder / "s", **SMALL)
    with pytest.raises(hl.FolderError, match=r"(?s)of another model.*stem: values differ"):
        hl.extract(hooked(rank, kind, [0, 1]), ROWS, SITES, folder / "s", **SMALL)


@pytest.mark.parametrize("kind", ["replicated", "FSDP2"])
def test_ranks_refuse_the_store_of_another_model(ranks, tmp_path, kind):
    ranks.run(__file__, "hooks_after_a_store", str(tmp_path), kind)
