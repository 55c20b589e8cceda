"""A job of one rank: nobody else writes to its values, unless its weights are sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from processes import on_ranks, ranks_of

ranks = pytest.fixture(scope="module")(ranks_of(1))


class Head(nn.Module):
    def forward(self, x, w):
        return x @ w.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.ones(512, 512)), Head()

    def forward(self, x):
        return self.head(x, self.w).sum()


@on_ranks
def test_one_rank_with_sharded_weights_keeps_what_is_freed(rank, folder):
    model = nn.Sequential(Net())
    fully_shard(model[0])
    fully_shard(model)
    for options in ({}, {"keep": lambda value: value["w"][0]}):
        with hl.record(model, "0.head:input", **options) as run:
            model(torch.ones(2, 512)).backward()
        value = run["0.head:input"]
        kept = value if options else value["w"]
        assert kept.untyped_storage().nbytes() >= kept.numel() * 4
        assert kept.sum().item() == kept.numel()


@on_ranks
def test_one_rank_without_sharded_weights_copies_nothing(rank, folder):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with torch.no_grad(), hl.record(model, "1") as run:
        out = model(torch.ones(1, 2))
    assert run["1"].data_ptr() == out.data_ptr()


@on_ranks
def test_one_rank_keeps_a_dtensor_whose_local_part_is_written_to(rank, folder):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    mesh = init_device_mesh("cpu", (1,))
    for options in ({}, {"keep": lambda value: value}):
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        with torch.no_grad(), hl.record(model, "0", **options) as run:
            model(x)
        x.to_local().data.zero_()
        assert run["0"].sum() == 8
