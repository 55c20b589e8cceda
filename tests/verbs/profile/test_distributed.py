"""profile on two ranks: each has its own table, of the work that it does."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from distributed_models import half, images, loss_of, sharded, stack
from hookline.util import stopwatch
from processes import on_ranks
from zoo import conv_net


def profiled(model, batch):
    with hl.profile(model) as prof:
        for _ in range(2):
            loss_of(model, batch).backward()
    return prof


def check_against_one_process(prof, batch):
    expected = profiled(conv_net(), batch)
    assert [row.path for row in prof.rows] == [row.path for row in expected.rows]
    assert [row.calls for row in prof.rows] == [row.calls for row in expected.rows]
    assert [row.flops for row in prof.rows] == [row.flops for row in expected.rows]
    assert prof.total.flops.all
    for row in prof.rows:
        assert row.time.forward > 0
        assert row.time.backward > 0
    parts = sum([*prof.total.time, prof.total.collectives, prof.total.outside])
    assert parts == pytest.approx(prof.total.seconds)


@on_ranks
def test_under_ddp_each_rank_measures_its_part(rank, folder):
    mine = half(images(), rank)
    model = DistributedDataParallel(conv_net())
    check_against_one_process(profiled(model, mine), mine)
    check_against_one_process(profiled(model.module, mine), mine)


@on_ranks
def test_under_fsdp2_each_rank_measures_its_part(rank, folder):
    mine = half(images(), rank)
    model = sharded(conv_net())
    before = [p.placements for p in model.parameters()]
    check_against_one_process(profiled(model, mine), mine)
    assert [p.placements for p in model.parameters()] == before


@on_ranks
def test_one_rank_may_profile_alone(rank, folder):
    model = sharded(conv_net())
    if rank:
        loss_of(model, half(images(), rank)).backward()
        loss_of(model, half(images(), rank)).backward()
    else:
        assert profiled(model, half(images(), rank))["block"].calls == 2
    assert torch.isfinite(next(model.parameters()).grad.full_tensor()).all()


@on_ranks
def test_flops_of_split_weights_are_said_to_be_unknown(rank, folder):
    model = stack(is_split=True)
    with hl.profile(model) as prof:
        model(torch.ones(5, 4)).sum().backward()
    assert prof["1"].time.forward > 0
    assert prof.total.flops.all == 0
    assert "tensor parallelism splits the model's weights" in " ".join(str(prof).split())


class Hand:
    """A clock whose hand is moved."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@on_ranks
def test_collectives_of_fsdp2_are_in_no_module(rank, folder):
    hand, model = Hand(), sharded(conv_net())
    counts = {"wait_for_unshard": 0, "post_backward": 0}

    def slow(name, seconds):
        original = getattr(FSDPParamGroup, name)

        def moved(*args, **kwargs):
            counts[name] += 1
            hand.seconds += seconds
            return original(*args, **kwargs)

        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch.STOPWATCH, "_clock", hand)
        for name, seconds in (("wait_for_unshard", 1), ("post_backward", 100)):
            patch.setattr(FSDPParamGroup, name, slow(name, seconds))
        prof = profiled(model, half(images(), rank))
    stopwatch.STOPWATCH.resume_from(time.perf_counter())
    assert counts["wait_for_unshard"] >= 4
    assert counts["post_backward"] >= 4
    assert {row.path: row.time for row in prof.rows if row.time.all} == {}
    assert prof.total.seconds == counts["wait_for_unshard"] + 100 * counts["post_backward"]
    # The root's gradients are reduced when backward has ended.
    late = prof.total.outside
    assert late in (0, 200)
    assert prof.total.collectives == prof.total.seconds - late
