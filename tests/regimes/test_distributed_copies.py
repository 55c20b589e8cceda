"""Folders of four ranks, of which several hold the same: each copy is compared."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hookline as hl
from processes import on_ranks, ranks_of

pytestmark = pytest.mark.processes

ranks = pytest.fixture(scope="module")(ranks_of(4))

PORTS = ("output", "grad")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5), nn.Tanh())


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "split"))


def split(model, of_split):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, of_split, plan)


def recorded(model, x, ports=PORTS):
    with hl.record(model, ["**", "(root):input"], ports=ports, copy=True) as run:
        model(x).square().mean().backward()
    return run


def opened(run, folder, name="run"):
    run.save(folder / name)
    dist.barrier()
    return hl.open(folder / name)


@on_ranks
def test_copies_of_data_and_tensor_parallelism_are_compared(rank, folder):
    device_mesh = mesh()
    rows = batch()[4 * (rank // 2) :][:4]
    plain = recorded(net(), batch())
    for wrong in (None, 0, 3):
        model = split(net(), device_mesh["split"])
        if rank == wrong:
            model[3].register_forward_hook(lambda module, args, output: output * 1.1)
        run = opened(recorded(model, rows, "output"), folder, f"{wrong}")
        comparison = hl.compare(run, plain, dims={"0": -1, "1": -1})
        if wrong is None:
            assert comparison.ok, str(comparison)
            assert comparison["0"].form == "[8, 8] float32"
        else:
            assert comparison.first.why.startswith(f"rank {wrong}: relative 0.1"), wrong
            assert comparison.first.site == "3"


@on_ranks
def test_gradients_over_both_meshes_are_of_the_same_tokens(rank, folder):
    device_mesh = mesh()
    model = split(net(), device_mesh["split"])
    fully_shard(model, mesh=device_mesh["data"])
    run = opened(recorded(model, batch()[4 * (rank // 2) :][:4]), folder)
    plain = recorded(net(), batch())
    comparison = hl.compare(run, plain, dims={"0": -1, "1": -1})
    assert comparison.ok, str(comparison)
    gradients = {site: value * 1.1 for site, value in plain.items() if site.endswith(":grad")}
    row = hl.compare(run, {**plain, **gradients}, dims={"0": -1, "1": -1})["0.weight:grad"]
    assert (row.verdict, round(row.relative, 3)) == ("differs", 0.091)


@on_ranks
def test_advised_reductions_of_several_meshes_are_made(rank, folder):
    model = split(net(), mesh()["split"])
    run = opened(recorded(model, batch()[4 * (rank // 2) :][:4]), folder)
    plain, dims = recorded(net(), batch()), {"0": -1, "1": -1}
    why = hl.compare(run, plain, dims=dims)["0.weight:grad"].why
    assert why.endswith("give dims={'0.weight:grad': 'mean'}")
    comparison = hl.compare(run, plain, dims={**dims, "**:grad": "mean"})
    assert comparison.ok, str(comparison)


@on_ranks
def test_each_replica_of_a_dtensor_is_compared(rank, folder):
    device_mesh = mesh()
    whole = torch.arange(8.0).view(4, 2)

    model = nn.Identity()
    for placements, part in (
        ((Replicate(), Shard(0)), whole[2 * (rank % 2) :][:2]),
        ((Replicate(), Replicate()), whole),
        ((Replicate(), Partial()), whole / 2),
    ):
        with hl.record(model, copy=True) as plain:
            model(whole)
        for wrong in (None, 2, 3):
            local = part + 1.0 if rank == wrong else part.clone()
            tensor = DTensor.from_local(local, device_mesh, placements, run_check=False)
            with hl.record(model, copy=True) as run:
                model(tensor)
            name = f"{len(list(folder.iterdir()))}"
            dist.barrier()
            comparison = hl.compare(opened(run, folder, name), plain)
            assert comparison.ok is (wrong is None), (placements, wrong, str(comparison))
            dist.barrier()


@on_ranks
def test_a_part_of_one_rank_is_not_taken_for_the_whole(rank, folder):
    device_mesh = mesh()
    whole = torch.arange(8.0).view(4, 2)
    model = nn.Identity()
    with hl.record(model, copy=True) as plain:
        model(whole)
    tensor = DTensor.from_local(whole / 4, device_mesh, (Partial(), Partial()), run_check=False)
    with hl.record(model, copy=True) as run:
        model(tensor)
    row = hl.compare(run, plain)["(root)"]
    assert row.verdict == "not comparable"
    assert "of which one rank has summand" in row.why
    assert hl.compare(run, run).ok
    folder_run = opened(run, folder)
    assert hl.compare(folder_run, plain).ok
    assert hl.compare(folder_run.ranks[0], plain)["(root)"].verdict == "not comparable"


@on_ranks
def test_weights_of_shards_are_not_called_equal(rank, folder):
    device_mesh = init_device_mesh("cpu", (4,))

    models = []  # a live recording knows its model only while it is there

    def of(seed, name, shards=True):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8))
        models.append(model)
        if shards:
            fully_shard(model, mesh=device_mesh)
        run = recorded(model, batch(), ports="output")
        return opened(run, folder, name) if shards else run

    shards, same, other = of(0, "0"), of(0, "same"), of(1, "1")
    plain, odd = of(0, "", shards=False), of(1, "", shards=False)

    def told(*sides):
        return [f.text for f in hl.compare(*sides).findings if f.kind == "model"]

    assert told(shards, same) == []
    assert told(shards, plain) == []
    assert "weights of the model differ" in told(shards, other)[0]
    assert told(shards, odd)[0].startswith("each of 4 ranks has a part of the weights in a")
