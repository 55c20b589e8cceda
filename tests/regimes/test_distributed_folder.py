"""Recordings of several ranks on disk, and pipelines, on real processes."""

from __future__ import annotations

import io
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.testing import assert_close

import hookline as hl
from by_torch import (
    assert_printed,
    clipped_by_torch,
    hooked_by_torch,
    measured,
    raw_hook,
    seen_by_torch,
    triple,
    tripled,
)
from processes import on_ranks


class Blocks(nn.Module):
    """Blocks under their numbers, of which a stage keeps some."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(k): nn.Linear(4, 4) for k in range(4)})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x).tanh()
        return x


def blocks():
    torch.manual_seed(0)
    return Blocks()


def batch():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def recorded(model, x, selector=None, ports=("output", "grad_output", "grad")):
    with hl.record(model, selector, ports=ports) as run:
        model(x).square().sum().backward()
    return run


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@on_ranks
def test_all_ranks_save_one_folder_that_any_process_opens(rank, folder):
    model = blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    run = recorded(model, batch()[2 * rank :][:2])
    assert run.save(folder / "run") == folder / "run"
    dist.barrier()
    assert left_in(folder) == ["run"]
    opened, plain = hl.open(folder / "run"), recorded(blocks(), batch())
    assert len(opened.ranks) == 2
    assert list(opened) == list(run)
    for site, value in run.items():
        assert torch.equal(opened.ranks[rank][site], value)
    assert_close(opened.full("blocks.1", dim=0), plain["blocks.1"])
    assert_close(opened.full("blocks.1.weight:grad", dim=0), plain["blocks.1.weight:grad"] / 2)
    parts = plain["blocks.3"].split(2)
    assert_close(opened.reduced("blocks.3", op="max"), torch.maximum(*parts))
    assert_close(run.reduced("blocks.3", op="max"), torch.maximum(*parts))
    assert_close(opened.reduced("blocks.3"), run.reduced("blocks.3"))
    with pytest.raises(hl.RanksError, match="got a DTensor, whose shards"):
        opened.reduced("blocks.1.weight:grad")
    for ask, remedy in (
        (lambda: opened["blocks.1"], "run.ranks[0]['blocks.1']"),
        (lambda: opened.passes, "run.ranks[0].passes"),
        (opened.gradients, "run.ranks[0].gradients()"),
        (lambda: opened.full("blocks.1"), "dim=0"),
    ):
        with pytest.raises(hl.AmbiguousError) as caught:
            ask()
        assert remedy in str(caught.value)
    # A second one takes its place, on all ranks or on none.
    run.save(folder / "run")
    dist.barrier()
    assert left_in(folder) == ["run"]
    assert [name.partition("-")[0] for name in left_in(folder / "run")] == [
        "manifest.json", "rank0", "rank1",
    ]  # fmt: skip


@on_ranks
def test_where_one_rank_cannot_write_nothing_is_left_on_any(rank, folder):
    model = blocks()
    x = batch()
    with hl.record(model, "blocks.0") as run:
        y = model(x)
    assert y is not None
    if rank == 1:
        run["blocks.0"].zero_()
    with pytest.raises(hl.FolderError, match=r"rank 1: blocks.0 was overwritten"):
        run.save(folder / "run")
    dist.barrier()
    assert left_in(folder) == []
    dist.barrier()
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "thesis.txt").write_text("mine")
    dist.barrier()
    with hl.record(model, "blocks.0") as run:
        model(x)
    with pytest.raises(hl.FolderError, match="holds other files"):
        run.save(folder / "other")
    dist.barrier()
    assert left_in(folder / "other") == ["thesis.txt"]
    assert run.save(folder / f"mine{rank}", alone=True).is_dir()
    assert torch.equal(hl.open(folder / f"mine{rank}")["blocks.0"], run["blocks.0"])


def stage_of(rank):
    """This rank's two blocks, and a step of a pipeline over two microbatches."""
    model, x = blocks(), batch()
    for name in list(model.blocks):
        if int(name) // 2 != rank:
            del model.blocks[name]
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda y, _: y.square().sum(), scale_grads=False
    )

    def step():
        model.zero_grad()
        schedule.step(*([x] if rank == 0 else []), target=x)
        return [p.grad.clone() for p in model.parameters()]

    step()  # shapes are inferred by a run of its own, before anything is recorded
    return model, step


@pytest.mark.cell(
    "pipeline parallelism", "record", "gradients", "statistics", "edit", "edit gradients",
    "raw hooks", "clip", "watch", note="Each microbatch counts as one run of the model.",
)  # fmt: skip
@on_ranks
def test_stages_of_a_pipeline_do_what_hooks_do_on_the_whole(rank, folder):
    model, step = stage_of(rank)
    path = f"blocks.{2 * rank}"
    back = f"{path}:grad_output"

    def by_hand(change=None, change_back=None):
        """The whole model under hooks on the first block of each stage; this stage's gradients."""
        whole, came, came_back = blocks(), [], []
        with ExitStack() as hooks:
            for first in ("blocks.0", "blocks.2"):
                hooks.enter_context(hooked_by_torch(whole, f"{first}:grad_output", change_back))
                hooks.enter_context(seen_by_torch(whole, first, change=change))
            came = hooks.enter_context(seen_by_torch(whole, path))
            came_back = hooks.enter_context(hooked_by_torch(whole, back))
            for part in batch().split(2):
                whole(part).square().sum().backward()
        names = {name for name, _ in model.named_parameters()}
        grads = [p.grad for name, p in whole.named_parameters() if name in names]
        return grads, came, came_back

    bare, came, came_back = by_hand()
    file = io.StringIO()
    with (
        hl.record(model, path, ports=("output", "grad_output")) as run,
        hl.record(model, path, keep=measured) as numbers,
        hl.watch(model, path, ports="output", file=file),
    ):
        assert_close(step(), bare)
    assert_close([one[path] for one in run.passes], came)
    assert_close([one[back] for one in run.passes], came_back)
    assert_close([one[path] for one in numbers.passes], [measured(value) for value in came])
    assert_printed(file.getvalue(), came)
    edited, _, _ = by_hand(change=tripled)
    with hl.edit(model, path, tripled):
        assert_close(step(), edited)
    with hl.attach(model) as line:
        line.forward(path, lambda module, args, output: tripled(output))
        assert_close(step(), edited)
    edited_back, _, _ = by_hand(change_back=triple)
    with hl.edit(model, back, triple):
        assert_close(step(), edited_back)
    with hl.attach(model) as line:
        raw_hook(line, back)
        assert_close(step(), edited_back)
    clipped, _, _ = by_hand(change_back=lambda grad: clipped_by_torch([grad], norm=1e-3)[0])
    with hl.clip(model, back, norm=1e-3):
        assert_close(step(), clipped)
    for changed in (edited, edited_back, clipped):
        assert not all(map(torch.equal, changed, bare))


@pytest.mark.cell(
    "pipeline parallelism",
    "record",
    "gradients",
    "edit",
    note="Each microbatch counts as one run of the model.",
)
@on_ranks
def test_in_a_pipeline_each_microbatch_is_a_pass_of_its_stage(rank, folder):
    stage_model = blocks()
    for name in list(stage_model.blocks):
        if int(name) // 2 != rank:
            del stage_model.blocks[name]
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, _: y.square().sum())
    x = batch()

    def step():
        schedule.step(*([x] if rank == 0 else []), target=x)

    step()  # shapes are inferred by a run of its own, before anything is recorded
    stage_model.zero_grad()
    with hl.record(stage_model, ports=("output", "grad_output", "grad")) as run:
        step()
    mine = [f"blocks.{2 * rank}", f"blocks.{2 * rank + 1}"]
    plain, expected = blocks(), []
    for part in x.split(2):
        with hl.record(plain, ports=("output", "grad_output", "grad")) as one:
            plain(part).square().sum().backward()
        expected.append(one)
    assert len(run.passes) == 2
    for micro, one in zip(run.passes, expected, strict=True):
        for path in mine:
            assert_close(micro[path], one[path])
            assert_close(micro[f"{path}:grad_output"], one[f"{path}:grad_output"])
    # A parameter's gradients belong to the latest pass, one for each backward: GPipe runs all
    # microbatches forward and then all of them back.
    for back, one in zip(run.passes[-1].backwards, expected, strict=True):
        assert_close(back[f"{mine[0]}.weight:grad"], one[f"{mine[0]}.weight:grad"])
    with hl.edit(stage_model, mine[0], hl.edits.scale(0)), hl.record(stage_model, mine[1]) as cut:
        step()
    assert_close(cut.stack(mine[1])[0], stage_model.blocks[mine[1][-1]].bias.expand(2, 4))
    # Each rank has its own sites; one folder holds them all, and a look-up finds whose it is.
    run.save(folder / "run")
    dist.barrier()
    opened = hl.open(folder / "run")
    assert {site.path.split(".")[1] for site in opened.sites if site.path} == set("0123")
    assert_close(opened.ranks[rank].passes[0][mine[0]], expected[0][mine[0]])
    other = f"blocks.{2 * (1 - rank)}"
    with pytest.raises(hl.RanksError, match="rank"):
        run.passes[0].full(other, dim=0)
