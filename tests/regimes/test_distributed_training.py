"""Tensor parallelism, training, and deep models on real processes."""

from __future__ import annotations

import io
import re
import warnings
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import hookline as hl
from distributed_models import (
    EVERYTHING,
    half,
    images,
    llama,
    loss_of,
    mesh,
    recorded,
    rows,
    sharded,
    split,
    stack,
    tokens,
)
from processes import on_ranks
from thoroughness import tries
from zoo import conv_net

# -- tensor parallel ----------------------------------------------------------------------------


@pytest.mark.cell("tensor parallelism", "record", "gradients", "statistics")
@on_ranks
def test_tensor_parallel_values_gathered_are_a_single_processs(rank, folder):
    model, batch = split(llama()), tokens()
    run = recorded(model, batch)
    expected = recorded(llama(), batch)
    assert list(run) == list(expected)
    replicated = ("model.layers.0", "model.layers.1.mlp", "lm_head", "model.layers.1:grad_output")
    for site in replicated:
        assert type(run[site]) is torch.Tensor
        assert_close(run[site], expected[site])
    for site in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.act_fn",
                 "model.layers.1.mlp.up_proj:grad_output"):  # fmt: skip
        assert run[site].shape[-1] * 2 == expected[site].shape[-1]
        assert_close(run.full(site, dim=-1), expected[site])
    for name, _ in model.named_parameters():
        site = f"{name}:grad"
        found = run.full(site) if "_proj" in name else run[site]
        assert_close(found, expected[site])
    # What is a DTensor where it was recorded knows how its parts lie; keep= gets this rank's part.
    assert_close(
        run.full("model.layers.0.mlp.down_proj:input"),
        expected["model.layers.0.mlp.down_proj:input"],
    )
    kept = recorded(
        model, batch, "model.layers.0.mlp.down_proj", "input", keep=lambda t: t.square().sum()
    )
    whole = expected["model.layers.0.mlp.down_proj:input"].square().sum()
    assert_close(kept.reduced("model.layers.0.mlp.down_proj:input", op="sum"), whole)


@pytest.mark.cell(
    "tensor parallelism", "edit", "edit gradients", "raw hooks", "watch", "features", "clip"
)
@on_ranks
def test_tensor_parallel_lines_change_as_in_one_process(rank, folder):
    model, plain, batch = split(llama()), llama(), tokens()
    found = []
    for one in (model, plain):
        one.zero_grad()
        with (
            hl.edit(one, "model.layers.0.mlp", hl.edits.scale(0.5)),
            hl.edit(one, "model.layers.1.mlp.gate_proj:grad_output", hl.edits.scale(0)),
            hl.edit(one, "lm_head.weight:grad", hl.edits.scale(2)),
            hl.clip(one, total_norm=0.5) as line,
            hl.attach(one) as raw,
        ):
            raw.forward("model.norm", lambda module, args, output: output + 1)
            loss_of(one, batch).backward()
        found.append((line.report().rows[0].largest, [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for p in one.parameters()
        ]))  # fmt: skip
    (norm, grads), (expected_norm, expected) = found
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    for mine, theirs in zip(grads, expected, strict=True):
        assert_close(mine, theirs)
    with hl.watch(model, "model.layers.*.mlp.**", file=io.StringIO()) as watching:
        model(input_ids=batch)
    assert all(count for site, count in watching.report().fired if site.port == "output")
    layer = "model.layers.0"
    assert_close(
        hl.features(model, {"input_ids": batch}, layer),
        hl.features(plain, {"input_ids": batch}, layer),
    )


SITES = ("0:grad_output", "1:grad_output", "1:grad_input", "2:grad_input", "2:grad_output",
         "3:grad_input", ":grad_output", "0:grad_input")  # fmt: skip


@pytest.mark.cell("tensor parallelism", "clip")
@on_ranks
def test_the_norm_of_a_split_gradient_is_that_of_the_whole(rank, folder):
    bounds = ({"norm": 0.1}, {"norm": 0.1, "norm_type": 1.0}, {"norm": 0.05, "norm_type": inf},
              {"norm": inf}, {"value": 0.01})  # fmt: skip
    models = [stack(is_split=is_split) for is_split in (True, False)]
    for site in SITES:
        for bound in bounds:
            found = []
            for model in models:
                model.zero_grad()
                x = rows()
                with hl.clip(model, site, **bound) as line:
                    loss_of(model, x).backward()
                grads = [p.grad for p in model.parameters()]
                (row,) = line.report()
                found.append([
                    x.grad, *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)
                ])  # fmt: skip
                found.append(row)
            (split_grads, split_row, whole_grads, whole_row) = found
            assert_close(split_grads, whole_grads, msg=f"{site} {bound}")
            if "norm" in bound:
                assert split_row.largest == pytest.approx(whole_row.largest, rel=1e-4), site
                assert split_row.clipped == whole_row.clipped


@on_ranks
def test_clips_of_split_gradients_that_are_wrong_are_refused(rank, folder):
    with pytest.raises(hl.RanksError, match="must select the same sites"):
        hl.clip(stack(is_split=True), f"{rank}:grad_output", norm=0.1)
    model = stack(is_split=True)
    model.is_checkpointed = True
    with pytest.raises(hl.AttachError, match=r"1:grad_output must .*\n.*use_reentrant=False"):
        with hl.clip(model, "1:grad_output", norm=0.1):
            loss_of(model, rows()).backward()
    with hl.clip(model, "1:grad_output", value=0.1) as line:
        loss_of(model, rows()).backward()
    assert line.report().seen == 1
    model = stack(is_split=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with warnings.catch_warnings(), pytest.raises(Exception, match="must run outside of compiled"):
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        with hl.clip(model, "3:grad_input", norm=0.1):
            loss_of(compiled, rows()).backward()


# -- training -----------------------------------------------------------------------------------


N_STEPS = tries(20, gate=8)


def trained(wrap, make, batch, *, is_watched):
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    line = hl.record(model, ports=EVERYTHING) if is_watched else None
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if line is not None:
        assert len(line.recording.passes) == N_STEPS
        line.remove()
    return torch.stack([getattr(loss, "to_local", lambda loss=loss: loss)() for loss in losses])


@on_ranks
def test_steps_under_a_line_give_the_same_losses_exactly(rank, folder):
    setups = (
        (DistributedDataParallel, conv_net, half(images(), rank)),
        (DistributedDataParallel, llama, half(tokens(), rank)),
        (sharded, llama, half(tokens(), rank)),
        (split, llama, tokens()),
    )
    for wrap, make, batch in setups:
        without = trained(wrap, make, batch, is_watched=False)
        with_line = trained(wrap, make, batch, is_watched=True)
        assert torch.equal(without, with_line), wrap
        assert without[-1] < without[0]


@on_ranks
def test_a_line_on_one_rank_only_holds_up_no_other(rank, folder):
    for wrap, batch in ((DistributedDataParallel, half(tokens(), rank)),
                        (sharded, half(tokens(), rank)), (split, tokens())):  # fmt: skip
        model = wrap(llama())
        if rank == 0:
            run = recorded(model, batch)
            run.gradients()
            assert all(value is None or value.sum() is not None for value in run.values()
                       if torch.is_tensor(value))  # fmt: skip
            assert run.save(folder / wrap.__name__, alone=True).is_dir()
        else:
            loss_of(model, batch).backward()
    dist.barrier()


# -- deep models --------------------------------------------------------------------------------


def resnet():
    from hookline.models import load_model

    torch.manual_seed(0)
    name = tries("resnet34", gate="resnet18")
    return load_model(f"torchvision:{name}", weights="none").model.eval()


def pictures():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def in_stages(model):
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4, model):
        fully_shard(stage, mesh=mesh())
    return model


LLAMA = re.compile(r"^model\.layers\.\d+$")
N_BLOCKS = tries(12, gate=4)
DEEP = {
    "llama, DDP": (DistributedDataParallel, lambda: llama(N_BLOCKS), tokens, LLAMA),
    "llama, FSDP2": (sharded, lambda: llama(N_BLOCKS), tokens, LLAMA),
    "llama, TP": (split, lambda: llama(N_BLOCKS), tokens, LLAMA),
    "resnet, DDP": (DistributedDataParallel, resnet, pictures, r"^layer\d\.\d+$"),
    "resnet, FSDP2": (in_stages, resnet, pictures, r"^layer\d\.\d+$"),
}


@on_ranks
def test_every_block_of_a_deep_model_has_one_processs_values(rank, folder):
    for name, (wrap, make, batch, blocks) in DEEP.items():
        mine = batch() if "TP" in name else half(batch(), rank)
        ports = ("output", "grad_output")
        expected = recorded(make(), mine, re.compile(blocks), ports)
        model = wrap(make())
        found = recorded(model, mine, re.compile(blocks), ports)
        assert list(found) == list(expected), name
        for site, value in found.items():
            scale = expected[site].abs().max().item()
            assert_close(value, expected[site], rtol=1e-3, atol=1e-4 * scale, msg=f"{name} {site}")
