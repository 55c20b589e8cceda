"""Folders of ranks keep the placements of DTensors: what `full` gives is the job's, bit by bit."""

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
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.testing import assert_close

import hookline as hl
from processes import on_ranks, ranks_of

pytestmark = pytest.mark.processes

ranks = pytest.fixture(scope="module")(ranks_of(4))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def recorded(model, x, ports=("output", "grad")):
    with hl.record(model, ports=ports) as run:
        model(x).square().sum().backward()
    return run


def split(model, mesh):
    """Tensor parallelism whose layers return DTensors: shards, and a result on each rank."""
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def assert_opened_is_as_in_the_job(run, folder, dims=None):
    """Every value of the opened folder, joined, beside what the job itself joins."""
    expected = {site: run.full(site, dim=(dims or {}).get(site)) for site in run}
    run.save(folder / "run")
    dist.barrier()
    opened = hl.open(folder / "run")
    for site, value in expected.items():
        assert torch.equal(opened.full(site, dim=(dims or {}).get(site)), value), site
    assert len(expected) > 0
    return opened


@on_ranks
def test_uneven_shards_of_fsdp2_are_joined_from_the_folder(rank, folder):
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))  # 10 and 5 rows over four ranks
    run = recorded(model, batch()[2 * rank :][:2])
    opened = assert_opened_is_as_in_the_job(
        run, folder, dict.fromkeys(("(root)", "0", "1", "2"), 0)
    )
    plain = recorded(net(), batch())
    for site in ("0.weight:grad", "2.weight:grad", "2.bias:grad"):
        assert_close(opened.full(site), plain[site] / 4)
    assert [len(part["2.bias:grad"]) for part in opened.ranks] == [2, 2, 1, 0]


@on_ranks
def test_tensor_parallel_values_are_joined_from_the_folder(rank, folder):
    run = recorded(split(net(), init_device_mesh("cpu", (4,))), batch())
    opened = assert_opened_is_as_in_the_job(run, folder)
    for site, value in recorded(net(), batch()).items():
        assert_close(opened.full(site), value)


@on_ranks
def test_an_opened_part_keeps_its_placement_when_saved_again(rank, folder):
    run = recorded(split(net(), init_device_mesh("cpu", (4,))), batch())
    opened = assert_opened_is_as_in_the_job(run, folder)
    opened.ranks[rank].save(folder / "again")
    dist.barrier()
    again = hl.open(folder / "again")
    for site, value in opened.ranks[0].items():
        assert torch.equal(again.full(site), opened.full(site)), site
        assert torch.equal(again.ranks[0][site], value), site
    with pytest.raises(hl.RanksError, match="whose shards are different parts"):
        again.reduced("0")


@on_ranks
def test_fsdp2_over_tensor_parallelism_is_joined_from_the_folder(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "split"))
    model = split(net(), mesh["split"])
    fully_shard(model, mesh=mesh["data"])
    run = recorded(model, batch()[4 * (rank // 2) :][:4])
    expected = {site: run.full(site) for site in run}
    run.save(folder / "run")
    dist.barrier()
    opened, plain = hl.open(folder / "run"), recorded(net(), batch())
    for site, value in expected.items():
        if site.endswith(":grad"):  # one mesh of both dimensions, cut twice along one of them
            assert torch.equal(opened.full(site), value), site
            assert_close(opened.full(site), plain[site] / 2)
        else:  # each row of the mesh has its own part of the batch
            assert torch.equal(opened.full(site, dim=0)[4 * (rank // 2) :][:4], value), site
            assert_close(opened.full(site, dim=0), plain[site])
    with pytest.raises(hl.AmbiguousError, match="the ranks form 2 meshes, from ranks 0, 2 on"):
        opened.full("2")


def unlike_copies():
    return pytest.warns(hl.HooklineWarning, match="should hold the same numbers")


class Placed(nn.Module):
    """Returns parts of the same numbers in several placements."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        mesh = self.mesh

        def put(*placements):
            return DTensor.from_local(x, mesh, placements, run_check=False)

        return {
            "sum": put(Partial(), Partial()),
            "average": put(Partial("avg"), Shard(1)),
            "largest": put(Shard(0), Partial("max")),
            "copies": put(Replicate(), Shard(0)),
            "plain": x,
        }


@on_ranks
def test_partial_values_in_a_structure_are_joined(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank // 2 * 2))
    x = x if rank < 2 else x + rank
    model = Placed(mesh)
    with hl.record(model) as run:
        model(x)
    with unlike_copies():
        expected = run.full("(root)", dim=0)
    run.save(folder / "run")
    dist.barrier()
    opened = hl.open(folder / "run")
    with unlike_copies():
        joined = opened.full("(root)", dim=0)
    with unlike_copies():
        copies = opened.full("(root):output['copies']")
    for name in ("sum", "average", "largest", "plain"):
        assert_close(joined[name], expected[name], rtol=0, atol=1e-6)
        assert joined[name].shape == expected[name].shape
    assert torch.equal(copies, joined["copies"])
    if rank < 2:  # the ranks with the first coordinates: the others' copies differ here
        assert torch.equal(copies, expected["copies"])
    with pytest.raises(hl.AmbiguousError, match="dim must say"):
        opened.full("(root)")


@on_ranks
def test_a_placement_that_is_unknown_is_refused_with_a_guess(rank, folder):
    mesh = init_device_mesh("cpu", (4,))
    odd = _MaskPartial("sum", torch.Size([2]), 0)  # an embedding whose rows are split
    model = nn.Identity()
    with hl.record(model) as run:
        model(DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [odd]))
    run.save(folder / "run")
    dist.barrier()
    opened = hl.open(folder / "run")
    with pytest.raises(hl.RanksError) as caught:
        opened.full("(root)")
    first, second = str(caught.value).splitlines()
    assert first.startswith("run.full('(root)', dim=None): placements must be Shard, Replicate")
    assert "Mask" in first
    assert second == "Each part has the shape of the whole: they may be summands, or copies."
    assert opened.full("(root)", dim=0)[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@on_ranks
def test_a_folder_of_some_ranks_of_the_mesh_misses_a_part(rank, folder):
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Identity()
    with hl.record(model) as run:
        model(DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Shard(0)]))
    group = dist.new_group([0, 1, 2])
    if rank < 3:
        run.save(folder / "run", group=group)
        opened = hl.open(folder / "run")
        with pytest.raises(hl.RanksError, match=r"the part at \(3,\) of the mesh \[4\] is missing"):
            opened.full("(root)")
    dist.barrier()


class Noisy(nn.Module):
    """Return a DTensor whose copies should be the same, and may differ."""

    def __init__(self, mesh, noise):
        super().__init__()
        self.mesh, self.noise = mesh, noise

    def forward(self, x):
        placements = [Shard(0), Replicate()]
        return DTensor.from_local(x + self.noise, self.mesh, placements, run_check=False)


@on_ranks
def test_full_warns_where_copies_of_a_part_differ(rank, folder):
    both = init_device_mesh("cpu", (2, 2))
    for noise in (0, rank // 2):  # each part has one noise
        noisy = Noisy(both, noise)
        with hl.record(noisy, "") as run:
            noisy(torch.ones(2, 3))
        run.full("")
    noisy = Noisy(both, rank % 2)
    with hl.record(noisy, "") as run:
        noisy(torch.ones(2, 3))
    with unlike_copies():
        run.full("")
    run.save(f"{folder}/run")
    dist.barrier()
    opened = hl.open(f"{folder}/run")
    with unlike_copies():
        opened.full("")
