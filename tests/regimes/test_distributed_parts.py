"""The parts of a transformer that FSDP shards and tensor parallelism splits, on four ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close

import hookline as hl
from distributed_models import CPU
from processes import on_ranks, ranks_of

pytestmark = pytest.mark.processes

ranks = pytest.fixture(scope="module")(ranks_of(4))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer():
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block())
    return nn.Sequential(nn.Embedding(50, 16), blocks, nn.LayerNorm(16), nn.Linear(16, 50)).eval()


def split(model, mesh):
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel()}
    plan |= {"up": ColwiseParallel(), "out": RowwiseParallel(), "down": RowwiseParallel()}
    for block in model[1]:
        parallelize_module(block, mesh, plan)
    return model


def by_fsdp1(model, mesh, *, use_orig_params):
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, device_mesh=mesh,
        use_orig_params=use_orig_params,
    )  # fmt: skip


def by_fsdp2(model, mesh):
    for block in model[1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(shard, rank):
    """Compare the parts of a model that is split over two ranks and sharded over two."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = transformer(), shard(split(transformer(), both["tp"]), both["dp"])
    x = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))[rank // 2 :: 2]
    parts, names = hl.anatomy(plain, x), [".resid_post", ".q.1", ".pattern.1", ".attn_heads.1"]
    here = hl.anatomy(model, x)
    assert here.to_dict() == parts.to_dict()
    with hl.record(model, names) as run, torch.no_grad():
        model(x)
    with hl.record(plain, names) as wanted, torch.no_grad():
        plain(x)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for name in (".q.1", ".pattern.1"):
        assert_close(run[name], wanted[name].chunk(2, 1)[rank % 2], **close)
    assert_close(run[".resid_post.1"], wanted[".resid_post.1"], **close)
    own, whole = here.heads(run[".attn_heads.1"]), parts.heads(wanted[".attn_heads.1"])
    assert_close(own, whole.chunk(2, 1)[rank % 2], **close)
    assert_close(here.lens(run).logits, parts.lens(wanted).logits, **close)
    assert_close(here.contributions(run, 1), parts.contributions(wanted, 1), **close)
    with torch.no_grad():
        assert_close(model(x), plain(x), **close)


@on_ranks
def test_fsdp1_with_flat_weights_and_splitting_together(rank, folder):
    compare(lambda model, mesh: by_fsdp1(model, mesh, use_orig_params=False), rank)


@on_ranks
def test_fsdp1_with_own_weights_and_splitting_together(rank, folder):
    compare(lambda model, mesh: by_fsdp1(model, mesh, use_orig_params=True), rank)


@on_ranks
def test_fsdp2_and_splitting_together(rank, folder):
    compare(by_fsdp2, rank)


@on_ranks
def test_names_that_one_rank_alone_asks_for_are_an_error(rank, folder):
    model, x = fully_shard(transformer()), torch.arange(10).view(2, 5)
    with pytest.raises(hl.RanksError, match=r"rank 0: hl\.anatomy of a sharded model; ranks 1, 2,"):
        hl.anatomy(model, x) if rank == 0 else hl.check(model)
    assert hl.anatomy(model, x).n_layers == 2
