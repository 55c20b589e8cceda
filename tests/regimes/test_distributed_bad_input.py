"""Ranks that do not agree, do not come, or die: a clear error on every rank, in bounded time."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from hookline.engine.distributed import rendezvous
from hookline.recordings.gather_and_reduce import CollectiveLookup, reduce_over_ranks
from processes import Processes, on_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def by_fsdp1(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def recorded(selector=None, **options):
    model = net()
    with hl.record(model, selector, **options) as run:
        model(torch.ones(2, 4))
    return run


def said(action, kind=hl.RanksError):
    with pytest.raises(kind) as caught:
        action()
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_without_a_process_group_the_error_says_so():
    run = recorded()
    for ask in (lambda: run.full("0"), lambda: run.reduced("0"), lambda: run.passes[0].full("0")):
        assert "init_process_group" in said(ask)


@on_ranks
def test_different_sites_are_named_by_rank_on_every_rank(rank, folder):
    run = recorded(["0", "2"] if rank == 0 else "2")
    for ask in (lambda: run.full("0", dim=0), lambda: run.reduced("0")):
        text = said(ask)
        assert "rank 1: '0' was never selected" in text
        assert "rank 0: 0, 2; rank 1: 2" in text
    text = said(lambda: run.save(folder / "run"))
    assert "rank 0: 0, 2; rank 1: 2" in text
    assert "alone=True" in text
    dist.barrier()
    assert not list(folder.iterdir())
    # They have met all the same, so that what they agree on goes on.
    assert run.full("2", dim=0).shape == (4, 2)


@on_ranks
def test_ranks_that_ask_for_different_things_are_told_which(rank, folder):
    run = recorded()
    text = said(lambda: run.full("0", dim=0) if rank == 0 else run.reduced("2"))
    assert text.startswith(
        "the ranks ask for different things: rank 0: run.full('0', dim=0);"
        " rank 1: run.reduced('2', op='mean')."
    )
    assert run.reduced("0").shape == (2, 4)


@on_ranks
def test_a_rank_that_does_not_come_is_named_after_the_timeout(rank, folder):
    run = recorded()
    if rank == 0:
        text = said(lambda: run.full("0", dim=0, timeout=0.3))
        assert text.startswith("run.full('0', dim=0) waited 0.3 s for rank 1, which did not come.")
    dist.barrier()
    if rank == 1:  # too late: it is told at once, and does not wait for the others in its turn
        assert "waited 0.3 s for rank 1" in said(lambda: run.full("0", dim=0, timeout=1000))
    dist.barrier()
    if rank == 1:
        text = said(lambda: run.save(folder / "run", timeout=0.3))
        assert "waited 0.3 s for rank 0" in text
    dist.barrier()
    if rank == 0:
        assert "waited 0.3 s for rank 0" in said(lambda: run.save(folder / "run", timeout=1000))
    dist.barrier()
    assert not list(folder.iterdir())
    assert run.full("0", dim=0).shape == (4, 4)


@on_ranks
def test_a_call_after_the_failure_of_one_rank_is_told(rank, folder):
    """Rank 1 leaves out a step, and comes to the call of the next one."""
    if rank == 1:
        fails()
    run = recorded()
    said_of = r"may combine values of different steps: .*\(rank 1: ValueError: a bad batch\)\.\n"
    with pytest.warns(hl.HooklineWarning, match=rf"run.reduced\('0', op='mean'\) {said_of}"):
        run.reduced("0")
    run.reduced("0")  # it is told once
    fails()
    run.reduced("0")  # all ranks have left out the step


def fails():
    with suppress(ValueError), hl.record(net(), "0"):
        raise ValueError("a bad batch")


@on_ranks
def test_a_model_that_raised_on_one_rank_is_told_of(rank, folder):
    model = net()
    with hl.record(model, "0") as run:
        for step in range(3):
            with suppress(RuntimeError):
                model(torch.ones(2, 3 if step == rank == 1 else 4))
    with pytest.warns(hl.HooklineWarning, match=r"\(rank 1: its model raised\)"):
        run.passes[-1].reduced("0")


@on_ranks
def test_the_failure_of_a_rank_that_does_not_come_is_named(rank, folder):
    run = recorded()
    if rank == 1:
        fails()
    dist.barrier()
    if rank == 0:
        text = said(lambda: run.full("0", dim=0, timeout=0.3))
        assert "for rank 1, which did not come (rank 1: ValueError: a bad batch)." in text
    dist.barrier()
    # It has missed the other call, which it knows by its name.
    with pytest.warns(hl.HooklineWarning, match="may combine values of different steps"):
        run.reduced("0")


@on_ranks
def test_a_rank_that_is_behind_joins_the_others_and_is_told(rank, folder):
    run = recorded()
    if rank == 0:
        said(lambda: run.reduced("0", timeout=0.3))
    else:
        wait_for_calls(2)
    message = "rank 1 missed this call before, or came too late"
    with pytest.warns(hl.HooklineWarning, match=message):
        run.reduced("0")
    run.reduced("0")


def wait_for_calls(number):
    """Wait until rank 0 has begun so many calls more than rank 1."""
    store, name = rendezvous.default_store(), hashlib.sha256(b"[0, 1]").hexdigest()[:12]
    start = store.add(f"hookline/{name}/1", 0)
    while store.add(f"hookline/{name}/0", 0) < start + number:
        pass


@on_ranks
def test_any_error_in_a_look_up_is_told_to_the_others(rank, folder):
    def find():
        if rank == 1:
            raise ValueError("what no look-up raises")
        return torch.ones(2)

    ask = CollectiveLookup("run.reduced('0')", (), None, 60.0)
    if rank == 1:
        with pytest.raises(ValueError, match="what no look-up raises"):
            reduce_over_ranks(ask, find, "mean")
    else:
        with pytest.raises(hl.RanksError, match="rank 1: ValueError: what no look-up raises"):
            reduce_over_ranks(ask, find, "mean")


@on_ranks
def test_what_cannot_be_joined_is_refused_on_every_rank(rank, folder):
    run = recorded()
    text = said(lambda: run.full("0"), hl.AmbiguousError)
    assert "dim=0 if each rank has a part of the batch" in text
    assert "must be a dimension of" in said(lambda: run.full("0", dim=5), ValueError)
    with pytest.raises(ValueError, match="'mean', 'sum', 'max', 'min'"):
        run.reduced("0", op="median")
    uneven = net()
    with hl.record(uneven, "0") as parts:
        uneven(torch.ones(rank + 1, 4))
    assert parts.full("0", dim=0).shape == (3, 4)
    assert "rank 0: Tensor[1, 4] float32; rank 1: Tensor[2, 4]" in said(lambda: parts.reduced("0"))
    assert "cannot be joined" in said(lambda: parts.full("0", dim=1), ValueError)
    late = net()
    line = hl.record(late, "0")
    if rank == 0:
        late(torch.ones(2, 4))
    assert "rank 1: 0 was selected, but has no value" in said(lambda: line.recording.full("0", 0))
    late(torch.ones(2, 4))
    line.remove()
    sharded = net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with hl.record(sharded, "0.weight:grad") as run:
        sharded(torch.ones(2, 4)).sum().backward()
    assert "keep=" in said(lambda: run.reduced("0.weight:grad"))
    nan = recorded("0", keep=lambda t: torch.tensor([float("nan") if rank else 1.0]))
    assert nan.reduced("0", op="max").isnan().all()
    small = recorded("0", keep=lambda t: torch.tensor([2048.0 + 2 * rank], dtype=torch.float16))
    assert small.reduced("0", op="sum").item() == 4098.0


KEPT = {
    "are not of one kind: rank 0: None; rank 1: 2.5": lambda t, rank: 2.5 if rank else None,
    "rank 0: Tensor[] float32 at .a; rank 1: Tensor[] float32 at .b": lambda t, rank: {
        "ab"[rank]: t.mean()
    },
    "to be the same on every rank, got rank 0: 'r0' at .name; rank 1: 'r1'": lambda t, rank: {
        "name": f"r{rank}", "t": t
    },
    "got object at [1]": lambda t, rank: (t, object()),
    "got MaskedArray": lambda t, rank: np.ma.masked_array([1.0], [False]),
    "got list at [0]": lambda t, rank: holding_itself(t),
}  # fmt: skip


def holding_itself(part):
    loop = [part]
    loop.insert(0, loop)
    return loop


@on_ranks
def test_no_rank_gets_its_own_value_for_what_is_no_tensor(rank, folder):
    for words, keep in KEPT.items():
        run = recorded("0", keep=lambda t, keep=keep: keep(t, rank))
        for ask in (lambda run=run: run.reduced("0"), lambda run=run: run.full("0", dim=0)):
            assert words in said(ask)
    number = recorded("0", keep=lambda t: {"mean": rank + 0.5, "rows": t})
    text = said(lambda: number.full("0", dim=0))
    assert "every rank, got rank 0: 0.5 at .mean; rank 1: 1.5 at .mean" in text
    spectrum = recorded("0", keep=lambda t: {"spectrum": torch.fft.fft(t), "y": t})
    for op in ("max", "min"):
        assert "have an order, got Tensor[2, 4] complex64 at .spectrum" in said(
            lambda op=op: spectrum.reduced("0", op=op)
        )


@on_ranks
def test_clipping_shards_on_one_rank_only_is_an_error_no_hang(rank, folder):
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    text = said(lambda: hl.clip(model, "0" if rank else "2", norm=1.0))
    assert "rank 0: '2.weight:grad', '2.bias:grad'; rank 1: '0.weight:grad'" in text
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(torch.ones(2, 4)).sum().backward()


@on_ranks
def test_gradients_that_fsdp1_keeps_flat_are_not_hooked(rank, folder):
    model = by_fsdp1(net(), use_orig_params=True)
    for attach in (
        lambda: hl.record(model, ports=("output", "grad")),
        lambda: hl.edit(model, "0.weight:grad", torch.zeros_like),
        lambda: hl.clip(model, value=1.0),
        lambda: hl.attach(model).grad("0.weight", print),
    ):
        text = said(attach, hl.AttachError)
        assert "0.weight must be a parameter with which the model computes" in text
        assert "fully_shard" in text
    assert not len(hl.inventory(model))


@on_ranks
def test_parts_of_fsdp1_are_not_clipped_by_their_norm(rank, folder):
    model = by_fsdp1(net(), use_orig_params=False)
    for bound in ({"norm": 1.0}, {"total_norm": 1.0}):
        text = said(lambda bound=bound: hl.clip(model, **bound), hl.AttachError)
        assert "norm of its own part" in text
        assert "model.clip_grad_norm_" in text
    assert not len(hl.inventory(model))
    with hl.clip(model, value=0.01), hl.record(model, ports="grad") as run:
        model(torch.ones(2, 4) * (1 + rank)).square().sum().backward()
    assert run["_flat_param:grad"].abs().max() > 0.01
    assert all(p.grad.abs().max() <= 0.01 for p in model.parameters())


def die_in_the_midst(rank):
    """Rank 1 dies in its forward; what rank 0 then has to say, and what is left on its model."""
    model = DistributedDataParallel(net())
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    text = ""
    try:
        with hl.record(model, ports=("output", "grad_output", "grad")) as run:
            if rank == 1:
                os._exit(3)
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        text = f"{type(error).__name__} "
    after = [dict(m._forward_hooks) for m in model.modules()]
    try:
        run.passes[0].full("0", dim=0, timeout=0.3)
    except hl.RanksError as error:
        text += str(error)
    return text, hooks == after, run.passes[0]["0"].shape


@pytest.mark.processes
def test_a_rank_that_dies_in_a_pass_is_an_error_elsewhere():
    with Processes(2, 60.0) as processes:
        (kind, found), (other, _) = processes.ask(__file__, "die_in_the_midst")
    assert (kind, other) == ("ok", "died"), found
    text, is_clean, shape = found
    assert "RuntimeError" in text
    assert "waited 0.3 s for rank 1, which did not come" in text
    assert is_clean
    assert shape == (2, 4)


@on_ranks
def test_a_group_of_some_ranks_is_asked_alone(rank, folder):
    alone = [dist.new_group([0]), dist.new_group([1])]
    run = recorded()
    assert run.full("0", dim=0, group=alone[rank]).shape == (2, 4)
    assert "not in the group" in said(lambda: run.full("0", dim=0, group=alone[1 - rank]))
