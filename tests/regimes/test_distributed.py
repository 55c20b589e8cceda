"""Distributed training on real processes: what a line sees is the single process's, in parts."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import hookline as hl
from distributed_models import EVERYTHING, half, images, llama, loss_of, recorded, sharded, tokens
from processes import on_ranks
from zoo import conv_net

# -- data parallel ------------------------------------------------------------------------------


@pytest.mark.cell("DDP", "record", "gradients")
@on_ranks
def test_under_ddp_each_rank_records_its_part_of_the_batch(rank, folder):
    plain, mine = conv_net(), half(images(), rank)
    expected = recorded(plain, mine)
    model = DistributedDataParallel(conv_net())
    for ground in (model, model.module):
        with hl.record(ground, ports=EVERYTHING) as run:
            model.zero_grad()
            loss_of(model, mine).backward()
        assert list(run) == list(expected)
        for site, value in run.items():
            if not site.endswith(":grad"):  # conv's own sums differ in the last bit, by layout
                assert_close(value, expected[site])


@pytest.mark.cell(
    "DDP",
    "gradients",
    note="Each rank records its own gradient of a parameter, before DDP reduces it.",
)
@pytest.mark.trap(30)
@on_ranks
def test_a_parameters_gradient_under_ddp_is_local_and_reduced(rank, folder):
    model = DistributedDataParallel(conv_net())
    raw = []
    handle = model.module.fc.weight.register_hook(lambda grad: raw.append(grad.clone()))
    run = recorded(model, half(images(), rank))
    handle.remove()
    # The raw hook sees the local gradient, and calls it the gradient.
    assert not torch.equal(raw[0], model.module.fc.weight.grad)
    local = recorded(conv_net(), half(images(), rank), "fc")
    assert_close(run["fc.weight:grad"], local["fc.weight:grad"])
    for name, parameter in model.module.named_parameters():
        assert_close(run.reduced(f"{name}:grad", op="mean"), parameter.grad)


@pytest.mark.cell(
    "DDP",
    "statistics",
    note="A statistic covers this rank's part of the batch. `run.reduced` of a recording `run`"
    " gives the mean, sum, maximum or minimum over the ranks.",
)
@on_ranks
def test_statistics_are_each_ranks_own_until_they_are_reduced(rank, folder):
    model = DistributedDataParallel(conv_net())
    run = recorded(model, half(images(), rank), "block", "output", keep=lambda t: t.mean())
    whole = recorded(conv_net(), images(), "block", "output")["block"]
    assert_close(run["block"], half(whole, rank).mean())
    assert_close(run.reduced("block"), whole.mean())
    assert_close(
        run.reduced("block", op="max"), torch.stack([half(whole, r).mean() for r in (0, 1)]).max()
    )
    numbers = recorded(
        model, half(images(), rank), "block", "output", keep=lambda t: t.mean().item()
    )
    assert numbers.reduced("block", op="sum") == pytest.approx(2 * whole.mean().item())


@on_ranks
def test_full_joins_the_parts_of_a_batch_by_rank(rank, folder):
    model = DistributedDataParallel(conv_net())
    run = recorded(model, half(images(), rank))
    whole = recorded(conv_net(), images())
    for site in ("stem", "block.1", "fc:input", "", "fc:grad_output"):
        assert_close(run.full(site, dim=0), whole[site])
    with hl.record(model, "fc") as several:
        model(images()[: rank + 1])
        model(half(images(), rank))
    assert several.passes[0].full("fc", dim=0).shape == (3, 6)
    assert_close(several.passes[1].full("fc", dim=0), whole["fc"])
    with pytest.raises(hl.RanksError, match="passes"):
        several.full("fc", dim=0)
    # One number with a stride of six: torch refuses to view it as bytes.
    with hl.record(model, "fc", keep=lambda t: t[:1, 0]) as first:
        model(half(images(), rank))
    assert first.full("fc", dim=0).shape == (2,)


@pytest.mark.cell("DDP", "edit", "edit gradients", "raw hooks", "watch", "features")
@on_ranks
def test_lines_under_ddp_change_and_see_as_in_one_process(rank, folder):
    model, mine = DistributedDataParallel(conv_net()), half(images(), rank)
    with hl.edit(model, "block", hl.edits.scale(0)), hl.record(model, "fc:input") as run:
        model(mine)
    assert_close(run["fc:input"], model.module.stem(mine).mean((2, 3)))
    seen = []
    with hl.edit(model, "block:grad_output", torch.zeros_like), hl.attach(model) as line:
        line.forward("fc", lambda module, args, output: seen.append(output.shape))
        line.backward("stem", lambda module, grad_input, grad_output: seen.append("back"))
        line.grad("fc.bias", torch.zeros_like)
        model.zero_grad()
        loss_of(model, mine).backward()
    assert seen == [(2, 6), "back"]
    assert not model.module.fc.bias.grad.any()
    assert not model.module.block[0].weight.grad.any()
    assert model.module.stem.weight.grad.any()
    with hl.watch(model, file=io.StringIO()) as line:
        model(mine)
    assert all(count for _, count in line.report().fired)
    assert_close(hl.features(model, mine, "stem")["stem"], model.module.stem(mine))
    assert_close(recorded(model, mine)["fc"], recorded(conv_net(), mine)["fc"])


@pytest.mark.cell("DDP", "clip")
@pytest.mark.trap(30)
@on_ranks
def test_under_ddp_what_is_clipped_is_the_reduced_gradient(rank, folder):
    model, mine = DistributedDataParallel(conv_net()), half(images(), rank)
    parameters = list(model.parameters())

    # A raw hook that clips what has been accumulated clips each rank's own, before the reduction.
    def clip_raw(parameter):
        nn.utils.clip_grad_norm_([parameter], 1e-3)

    raw = [parameter.register_post_accumulate_grad_hook(clip_raw) for parameter in parameters]
    loss_of(model, mine).backward()
    norms = [float(p.grad.norm()) for p in parameters]
    assert any(norm < 0.999e-3 for norm in norms)  # the mean of two clipped ones is no clipped one
    for handle in raw:
        handle.remove()
    for bound in ({"total_norm": 0.1}, {"norm": 0.1}, {"value": 0.01}):
        model.zero_grad()
        loss_of(model, mine).backward()
        if "total_norm" in bound:
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif "norm" in bound:
            for p in parameters:
                nn.utils.clip_grad_norm_([p], 0.1)
        else:
            nn.utils.clip_grad_value_(parameters, 0.01)
        expected = [p.grad.clone() for p in parameters]
        model.zero_grad()
        with hl.clip(model, **bound) as line:
            loss_of(model, mine).backward()
        for parameter, grad in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.grad, grad)
        assert line.report().clipped


# -- FSDP2 --------------------------------------------------------------------------------------


@pytest.mark.cell("FSDP2", "record", "gradients")
@pytest.mark.trap(30)
@on_ranks
def test_gradients_of_sharded_parameters_are_reduced_in_parts(rank, folder):
    model, mine = sharded(llama()), half(tokens(), rank)
    raw = []
    for parameter in model.parameters():
        parameter.register_hook(raw.append)
    run = recorded(model, mine)
    assert raw == []
    expected = recorded(llama(), tokens())
    own = recorded(llama(), mine)
    assert list(run) == list(own)
    n_parameters = 0
    for name, parameter in model.named_parameters():
        site = f"{name}:grad"
        assert torch.equal(run[site], parameter.grad.to_local())
        assert type(run[site]) is torch.Tensor
        assert_close(run.full(site), expected[site] / 2)
        n_parameters += 1
    assert n_parameters > 10
    for site in ("model.layers.0", "model.layers.1.mlp:grad_output", "lm_head", "model.norm:input"):
        assert_close(run[site], own[site])
        assert_close(run.full(site, dim=0), expected[site])


@on_ranks
def test_parameters_are_the_sharded_ones_even_while_unsharded(rank, folder):
    model, mine = sharded(conv_net()), half(images(), rank)
    with torch.no_grad():
        model(mine)
    assert type(model.fc.weight.data) is torch.Tensor  # the root keeps its own after a forward
    run = recorded(model, mine, "fc", "grad")
    assert_close(run.full("fc.weight:grad"), recorded(conv_net(), images())["fc.weight:grad"] / 2)


@pytest.mark.cell("FSDP2", "edit", "edit gradients", "raw hooks", "watch", "features")
@on_ranks
def test_lines_under_fsdp2_change_and_see_as_in_one_process(rank, folder):
    model, plain, mine = sharded(conv_net()), conv_net(), half(images(), rank)
    order = []
    with (
        hl.edit(model, "block", hl.edits.scale(2)),
        hl.edit(model, "fc.weight:grad", hl.edits.scale(0.5)),
        hl.record(model, ports=("output", "grad")) as run,
        hl.attach(model) as line,
    ):
        line.grad("block.0.bias", torch.zeros_like)
        line.accumulated("fc.weight", lambda p: order.append(p.grad.to_local().clone()))
        line.backward("stem", lambda module, grad_input, grad_output: order.append("stem"))
        loss_of(model, mine).backward()
    with hl.edit(plain, "block", hl.edits.scale(2)):
        expected = recorded(plain, images())
    assert_close(run.full("fc", dim=0), expected["fc"])
    assert_close(run.full("fc.weight:grad"), expected["fc.weight:grad"] / 4)
    assert_close(run.full("stem.weight:grad"), expected["stem.weight:grad"] / 2)
    assert not model.block[0].bias.grad.to_local().any()
    assert not run["block.0.bias:grad"].any()
    assert "stem" in order
    assert any(torch.is_tensor(one) and torch.equal(one, run["fc.weight:grad"]) for one in order)
    with hl.watch(model, file=io.StringIO()) as watching:
        model(mine)
    assert all(count for _, count in watching.report().fired)
    assert_close(hl.features(model, mine, "stem")["stem"], plain.stem(mine))
    again, expected = recorded(model, mine), recorded(conv_net(), images())
    assert_close(again.full("fc.weight:grad"), expected["fc.weight:grad"] / 2)


@pytest.mark.cell(
    "FSDP2",
    "statistics",
    note="A statistic of a parameter's gradient covers this rank's shard. `run.reduced` of a"
    " recording `run` gives the mean, sum, maximum or minimum over the ranks.",
)
@pytest.mark.trap(30)
@on_ranks
def test_statistics_of_shards_are_each_ranks_own_and_say_so(rank, folder):
    model, mine = sharded(conv_net()), half(images(), rank)
    expected = recorded(conv_net(), images(), "fc", "grad")["fc.weight:grad"] / 2
    raw = []
    handle = model.fc.weight.register_post_accumulate_grad_hook(
        lambda p: raw.append(p.grad.mean().item())
    )
    run = recorded(model, mine, "fc", "grad", keep=lambda g: g.mean().item())
    handle.remove()
    # The raw hook's number looks like the mean of the whole gradient, and is this rank's.
    assert raw[0] != pytest.approx(expected.mean().item(), rel=1e-3)
    assert run["fc.weight:grad"] == raw[0]
    assert run.reduced("fc.weight:grad") == pytest.approx(expected.mean().item(), rel=1e-4)
    whole = recorded(model, mine, "fc", "grad")
    if rank == 0:  # of one rank alone: were one of these a collective, it would wait for ever
        assert "fc.weight:grad" in str(whole.gradients())
        assert len({float(value.sum()) for value in whole.values()}) == 2
    dist.barrier()


@pytest.mark.cell("FSDP2", "clip")
@on_ranks
def test_the_norm_of_sharded_gradients_is_over_all_ranks(rank, folder):
    model, mine = sharded(conv_net()), half(images(), rank)
    whole = conv_net()
    for bound in ({"total_norm": 0.1}, {"norm": 0.1}, {"value": 0.01}):
        model.zero_grad()
        with hl.clip(model, **bound) as line:
            loss_of(model, mine).backward()
        whole.zero_grad()
        (loss_of(whole, images()) / 2).backward()
        with_torch = list(whole.parameters())
        if "total_norm" in bound:
            norm = nn.utils.clip_grad_norm_(with_torch, 0.1)
            assert line.report().rows[0].largest == pytest.approx(norm.item(), rel=1e-5)
        elif "norm" in bound:
            norms = [nn.utils.clip_grad_norm_([p], 0.1).item() for p in with_torch]
            assert [row.largest for row in line.report()] == pytest.approx(norms, rel=1e-4)
        else:
            nn.utils.clip_grad_value_(with_torch, 0.01)
            largest = [row.largest for row in line.report()]
            assert len(largest) == len(with_torch)
        for (name, mine_), theirs in zip(model.named_parameters(), with_torch, strict=True):
            assert_close(mine_.grad.full_tensor(), theirs.grad, msg=name)


@on_ranks
def test_gradients_that_fsdp2_adds_up_are_told_and_not_edited(rank, folder):
    model, mine = sharded(conv_net()), half(images(), rank)
    loss_of(model, mine).backward()
    with pytest.warns(hl.HooklineWarning, match="zero_grad"):
        with hl.record(model, "fc.bias:grad") as run:
            loss_of(model, mine).backward()
    assert torch.equal(run["fc.bias:grad"], model.fc.bias.grad.to_local())
    with pytest.raises(hl.AttachError, match=r"line\.accumulated"):
        with hl.edit(model, "fc.bias:grad", torch.zeros_like):
            loss_of(model, mine).backward()


@on_ranks
def test_a_gradient_that_fsdp2_does_not_reduce_says_so(rank, folder):
    model, mine = sharded(conv_net()), half(images(), rank)
    model.set_requires_gradient_sync(False)
    with pytest.warns(hl.HooklineWarning, match=r"set_requires_gradient_sync\(True\)"):
        with hl.record(model, "fc", ports="grad") as run:
            loss_of(model, mine).backward()
    with pytest.raises(hl.NotRecordedError, match="FSDP2 brought no reduced gradient"):
        run["fc.weight:grad"]
    model.set_requires_gradient_sync(True)
    with hl.record(model, "fc", ports="grad") as run:
        loss_of(model, mine).backward()
    assert torch.equal(run["fc.weight:grad"], model.fc.weight.grad.to_local())


@on_ranks
def test_what_was_selected_before_wrapping_works_or_tells(rank, folder):
    model = conv_net()
    modules, parameters = hl.select(model, "block"), hl.select(model, "fc.weight:grad")
    early = hl.record(model, "fc.weight:grad")
    sharded(model)
    lost = "fc.weight was replaced .* after the line was attached"
    with hl.record(model, modules) as run, pytest.warns(hl.HooklineWarning, match=lost):
        loss_of(model, half(images(), rank)).backward()
    assert run["block"].shape == (2, 4, 6, 6)
    with pytest.raises(hl.SelectionError, match="Select again"):
        hl.record(model, parameters)
    early.remove()
    other = conv_net()
    before = hl.select(other, "fc", ports=("output", "grad"))
    wrapped = DistributedDataParallel(other)
    with hl.record(wrapped, before) as run:
        loss_of(wrapped, half(images(), rank)).backward()
    assert run.sites[0].path == "fc"
    assert run["fc.weight:grad"].shape == (6, 4)
