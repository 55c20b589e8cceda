"""What is recorded in a job of several ranks stays what it was: collectives raise no version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hookline as hl
from processes import on_ranks


class Summed(torch.autograd.Function):
    """Sums over the ranks in place: forward, backward, or both, as tensor parallelism does."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if "forward" in where:
            dist.all_reduce(x.data)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if "backward" in ctx.where:
            dist.all_reduce(grad)
        return grad, None


class Parallel(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.lin, self.act, self.where = nn.Linear(2, 2, bias=False), nn.ReLU(), where
        nn.init.ones_(self.lin.weight)

    def forward(self, x):
        return self.act(Summed.apply(self.lin(x), self.where))


KEEPS = [{}, {"keep": lambda t: t}, {"keep": lambda t: t[:, :1]}, {"copy": True}]


@pytest.mark.cell("tensor parallelism", "record")
@on_ranks
def test_a_value_overwritten_by_a_collective_is_kept(rank, folder):
    x = torch.full((1, 2), float(rank + 1))
    for options in KEEPS:
        model = Parallel("forward")
        with hl.record(model, ["lin", "act"], ports=("output", "input"), **options) as run:
            with torch.no_grad():
                model(x)
        assert run["lin"].unique().item() == 2.0 * (rank + 1)
        assert run["act"].unique().item() == run["act:input"].unique().item() == 6.0


@on_ranks
def test_a_gradient_overwritten_by_a_collective_is_kept(rank, folder):
    for options in KEEPS:
        model = Parallel("backward")
        x = torch.ones(1, 2, requires_grad=True)
        with hl.record(
            model, ["act", "lin"], ports=("grad_input", "grad_output"), **options
        ) as run:
            (model(x).sum() * (rank + 1)).backward()
        assert run["act:grad_output"].unique().item() == rank + 1
        assert run["act:grad_input"].unique().item() == rank + 1
        assert run["lin:grad_output"].unique().item() == 3


@on_ranks
def test_a_graphs_value_overwritten_by_a_collective_is_told_of(rank, folder):
    model = Parallel("forward")
    with hl.record(model, ["lin", "act"], detach=False) as run:
        out = model(torch.ones(1, 2))
    with pytest.raises(hl.OverwrittenError, match="lin was overwritten"):
        run["lin"]
    torch.autograd.grad(out.sum(), [run["act"]])


@on_ranks
def test_copy_false_copies_nothing_in_a_job_either(rank, folder):
    model = Parallel("")
    with torch.no_grad(), hl.record(model, "act", copy=False) as run:
        out = model(torch.ones(1, 2))
    assert run["act"].data_ptr() == out.data_ptr()


def passed(x, keep):
    model = nn.Identity()
    with hl.record(model, keep=keep) as run:
        model(x)
    return run


@on_ranks
def test_numbers_and_arrays_are_reduced_at_any_depth(rank, folder):
    x, own = torch.full((2, 2), float(rank + 1)), rank + 1.5
    array = np.array([[0, 1], [2, 3]], np.float16)[::-1]

    def kept(t):
        return {
            "t": t, "array": array * rank, "name": "fc", "no": None,
            "more": [own, (rank, own if rank else 1), np.float32(own), complex(0, own)],
        }  # fmt: skip

    run = passed(x, kept)
    total = run.reduced("(root)", op="sum")
    assert total["more"] == [4.0, (1, 3.5), 4.0, 4j]
    assert type(total["more"][1][0]) is int
    assert (total["name"], total["no"]) == ("fc", None)
    assert total["t"].unique().item() == 3.0
    assert total["array"].dtype == np.float32
    assert total["array"].tolist() == [[2, 3], [0, 1]]
    mean = run.reduced("(root)")
    assert mean["more"] == [2.0, (0.5, 1.75), 2.0, 2j]
    for op, expected in (("max", 2.5), ("min", 1.5)):
        run = passed(x, lambda t: [own, t.tolist()])
        assert run.reduced("(root)", op=op) == [expected, [[expected - 0.5] * 2] * 2]
    run = passed(x, lambda t: (t.numpy() + rank, t.shape, 7))
    whole = run.full("(root)", dim=0)
    assert whole[0].tolist() == [[1, 1], [1, 1], [3, 3], [3, 3]]
    assert whole[1:] == ((2, 2), 7)


class Head(nn.Module):
    """A tied head: it is given the weight."""

    def forward(self, x, w):
        return x @ w.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.ones(64, 64)), Head()

    def forward(self, x):
        return self.head(x, self.w[:32]).sum() + self.head(x, self.w).sum()


def sharded_net():
    model = nn.Sequential(Net())
    fully_shard(model[0])
    return fully_shard(model)


@pytest.mark.cell("FSDP2", "record")
@on_ranks
def test_a_gathered_weight_is_kept_when_its_memory_is_freed(rank, folder):
    model = sharded_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    with hl.record(model, "0.head:input") as run:
        model(torch.ones(2, 64)).backward()
        optimizer.step()
    for call, rows in enumerate((32, 64)):
        kept = run[f"0.head:input#{call}"]["w"]
        assert kept.untyped_storage().nbytes() >= 4 * 64 * rows
        assert torch.equal(kept, torch.ones(rows, 64))
    with hl.record(model, "0.head:input", copy=False) as run:
        model(torch.ones(2, 64)).backward()
    with pytest.raises(hl.OverwrittenError, match="its memory was freed"):
        run["0.head:input#1"]


@pytest.mark.cell("FSDP2", "gradients")
@on_ranks
def test_a_sharded_gradient_is_kept_through_clip_step_and_zero(rank, folder):
    for options in ({}, {"keep": lambda t: t}, {"copy": True}):
        model = sharded_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
        with hl.record(model, "**", ports="grad", **options) as run:
            model(torch.ones(2, 64)).backward()
            expected = model[0].w.grad.to_local().clone()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert expected.abs().min() > 0
        assert torch.equal(run["0.w:grad"], expected)
