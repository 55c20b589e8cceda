"""A monitor on several ranks: what is merged is the whole, and each rank has its own numbers."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from distributed_models import CPU, gated, half, images, mesh, stack
from processes import on_ranks
from zoo import conv_net

PORTS = ("output", "grad_output", "value", "grad", "update")
N_PARTS = 4


def batches(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 3, 6, 6, generator=generator)


def train(model, monitored, is_half, rank=0, steps=3, **options):
    """Train in parts; the loss is a mean over the whole batch, as DDP makes it over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.monitor(monitored, ports=PORTS, **options) as seen:
        for k in range(steps):
            optimizer.zero_grad()
            batch = batches(k)[8 * rank : 8 * rank + 8] if is_half else batches(k)
            for part in batch.chunk(N_PARTS):
                (model(part).square().mean() / N_PARTS).backward()
            optimizer.step()
    return seen


def assert_close(seen, expected, ports=PORTS, tolerance=1e-6):
    assert set(expected.sites) <= set(seen.sites)
    compared = 0
    for site in expected.sites:
        if site.rpartition(":")[2] in ports or ("output" in ports and ":" not in site):
            one, other = seen[site], expected[site]
            for name in ("count", "zeros", "non_finite", "mean", "std", "min", "max", "norm"):
                # The mean of a gradient may be near 0: its error is that of the numbers.
                scale = np.abs(other.max_abs).max()
                np.testing.assert_allclose(
                    getattr(one, name), getattr(other, name), rtol=tolerance,
                    atol=tolerance * scale, err_msg=f"{site} {name}",
                )  # fmt: skip
                compared += 1
    assert compared


@on_ranks
def test_merged_statistics_are_those_of_the_whole_tensor(rank, folder):
    model = DistributedDataParallel(conv_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ports = ("output", "grad_output")
    with hl.record(model, "*", ports=ports) as run, hl.monitor(model, "*", ports=ports) as seen:
        for part in batches(0)[8 * rank : 8 * rank + 8].chunk(N_PARTS):
            model(part).square().mean().backward()
        optimizer.step()
    for site in seen.sites:
        mine = torch.cat([one[site] for one in run.passes])
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine.contiguous())
        whole = torch.cat(parts).double()
        assert seen[site].count.tolist() == [whole.numel()]
        for name, number in {
            "mean": whole.mean(), "std": whole.std(correction=0), "min": whole.min(),
            "max": whole.max(), "norm": whole.norm(), "zeros": (whole == 0).sum(),
        }.items():  # fmt: skip
            assert getattr(seen[site], name)[0] == pytest.approx(number.item(), rel=1e-6), name


@on_ranks
def test_a_trained_model_has_the_curves_of_one_process(rank, folder):
    whole = conv_net()
    expected = None
    if rank == 0:
        # The whole in one process: without its process group for a moment.
        expected = alone(lambda: train(whole, whole, False))
    dist.barrier()
    model = DistributedDataParallel(conv_net())
    seen = train(model, model, True, rank)
    if expected is not None:
        assert_close(seen, expected, ("output", "value", "grad", "update"), 1e-5)
        np.testing.assert_array_equal(seen["stem"].count, expected["stem"].count)
        np.testing.assert_array_equal(seen["fc.weight"].count, [24] * 3)


def alone(act):
    """Do something as a process without a group does it."""
    world = dist.distributed_c10d._world
    group, world.default_pg = world.default_pg, None
    try:
        return act()
    finally:
        world.default_pg = group


@on_ranks
def test_activations_merge_to_six_digits(rank, folder):
    model = conv_net()
    with hl.monitor(model, ports="output") as seen:
        for k in range(2):
            model(batches(k)[8 * rank : 8 * rank + 8])
    whole = conv_net()
    expected = alone(lambda: forward_only(whole))
    assert_close(seen, expected, ("output",), 1e-6)
    assert seen.n_ranks == 2


def forward_only(model):
    with hl.monitor(model, ports="output") as seen:
        for k in range(2):
            model(batches(k))
    return seen


@on_ranks
def test_each_ranks_own_numbers_are_kept(rank, folder):
    model = conv_net()
    with hl.monitor(model, "stem", ports="output") as seen:
        model(batches(0)[8 * rank : 8 * rank + 8] + 100 * rank)
    own = alone(lambda: own_of(rank))
    for name in ("mean", "std", "count"):
        assert getattr(seen.rank(rank)["stem"], name) == getattr(own["stem"], name)
    assert seen.rank(0)["stem"].mean != seen.rank(1)["stem"].mean


def own_of(rank):
    model = conv_net()
    with hl.monitor(model, "stem", ports="output") as seen:
        model(batches(0)[8 * rank : 8 * rank + 8] + 100 * rank)
    return seen


@on_ranks
def test_a_report_is_one_collective(rank, folder):
    model = DistributedDataParallel(conv_net())
    calls = []
    gather = dist.all_gather

    def counting(*args, **options):
        calls.append(1)
        return gather(*args, **options)

    dist.all_gather = counting
    try:
        seen = train(model, model, True, rank, steps=6, every=2)
    finally:
        dist.all_gather = gather
    assert len(seen) == 3
    assert len(calls) == 3


@on_ranks
def test_fsdp2_shards_merge_to_the_whole(rank, folder):
    model = conv_net()
    fully_shard(model.block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    seen = train(model, model, True, rank)
    whole = conv_net()
    expected = alone(lambda: train(whole, whole, False))
    assert_close(seen, expected, ("output", "value", "grad", "update"), 1e-5)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.monitor(model, ports=("value", "grad", "update")) as seen:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return seen


def ignoring(model):
    return by_fsdp1(model, ignored_modules=[model[1]])


def beside(model):
    model[0] = by_fsdp1(model[0])
    return model


def unsharded(model):
    return by_fsdp1(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def by_fsdp1(model, **options):
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, **options)


@on_ranks
def test_a_copy_beside_what_fsdp1_shards_counts_once(rank, folder):
    expected = step(two_layers())
    for shard in (ignoring, beside, unsharded, by_fsdp1):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*NO_SHARD")
            model = shard(two_layers())
        seen = step(model)
        for layer, name in ((0, "weight"), (0, "bias"), (1, "weight"), (1, "bias")):
            for kind in ("value", "grad", "update"):
                site = f"{layer}.{name}:{kind}"
                assert seen[site].count == expected[site].count, (shard.__name__, site)
                assert seen[site].norm == pytest.approx(expected[site].norm), shard.__name__


@on_ranks
def test_a_rank_without_elements_of_a_shard_is_not_told_of(rank, folder):
    for shard in (lambda model: fully_shard(model, mesh=mesh()), by_fsdp1):
        seen = step(shard(two_layers()))  # a warning would be an error
        assert seen["1.bias:value"].count.tolist() == [1]
        assert seen["1.weight:update"].count.tolist() == [4]


@on_ranks
def test_copies_in_tensor_parallelism_count_once(rank, folder):
    model = stack(is_split=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.monitor(model, ports=("value", "update")) as seen:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert seen["0.weight"].count.tolist() == [24]
    assert seen["2.bias:value"].count.tolist() == [3]  # replicated


EACH = ("input", "output", "grad_input", "grad_output", "value", "grad", "update")


def step_of_three(model, x):
    """Train three steps on the sum of squares, whose gradients add up over parts of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.monitor(model, ports=EACH) as seen:
        for k in range(3):
            optimizer.zero_grad()
            result = model(x + k)
            result = result.full_tensor() if isinstance(result, DTensor) else result
            result.square().sum().backward()
            optimizer.step()
    return seen


def assert_of_one_process(seen, model, x, but=()):
    """Compare the curves with those of the whole model and batch in one process."""
    expected = alone(lambda: step_of_three(model, x))
    assert set(seen.sites) == set(expected.sites) - set(but)
    for site in seen.sites:
        for name in ("count", "zeros", "mean", "min", "max", "norm"):
            np.testing.assert_allclose(
                getattr(seen[site], name), getattr(expected[site], name),
                rtol=1e-4, atol=1e-5, err_msg=f"{site} {name}",
            )  # fmt: skip


@on_ranks
def test_plain_copies_in_tensor_parallelism_count_once(rank, folder):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    seen = step_of_three(gated(is_split=True), x)
    assert_of_one_process(seen, gated(is_split=False), x)
    assert seen.rank(1)["stem"].count.tolist() == [20, 20, 20]


def normed():
    torch.manual_seed(0)
    layers = nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)
    return nn.Sequential(*layers)


@on_ranks
def test_a_gradient_of_summands_is_that_of_the_optimizer(rank, folder):
    plan = {
        "0": SequenceParallel(), "4": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    model = parallelize_module(normed(), mesh(), plan)
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    with pytest.warns(hl.HooklineWarning, match="1:grad_input is left out: each rank has a sum"):
        seen = step_of_three(model, x.chunk(2, 1)[rank])
    assert_of_one_process(seen, normed(), x, but={"1:grad_input"})


@on_ranks
def test_parameters_of_each_replica_of_a_mesh_count_once(rank, folder):
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(gated(is_split=False), both["tp"], {"gate": ColwiseParallel()})
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    part = x.chunk(2)[rank]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add_up)
    assert_of_one_process(step_of_three(model, part), gated(is_split=False), x)


def add_up(parameter):
    grad = parameter.grad
    dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad)


@on_ranks
def test_only_rank_0_writes_and_it_writes_all(rank, folder):
    model = conv_net()
    with hl.monitor(model, "fc", ports="output", to=f"{folder}/run") as seen:
        model(half(images(), rank))
    dist.barrier()
    found = hl.open(f"{folder}/run")
    assert found.n_ranks == 2
    assert found["fc"].results == seen["fc"].results
    assert found.rank(1)["fc"].results == seen.rank(1)["fc"].results


@on_ranks
def test_a_site_that_runs_on_one_rank_alone_is_there(rank, folder):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Identity(), nn.Identity()

        def forward(self, x, second):
            return self.two(x) if second else self.one(x)

    model = Sometimes()
    parameter = nn.Parameter(torch.ones(1))
    model.weight = parameter
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with hl.monitor(model, ["one", "two"], ports="output") as seen:
        for k in range(3):
            model(parameter * (k + 1), k > 0 and rank == 1)
            optimizer.step()
    assert seen["two"].count.tolist()[1:] == [1, 1]
    assert seen["one"].count.tolist() == [2, 1, 1]
    assert seen.rank(1)["two"].mean[2] == 3


@on_ranks
def test_a_monitor_on_one_rank_alone_is_said_and_goes_on(rank, folder):
    gathering = importlib.import_module("hookline.verbs.monitor.rank_gatherer")
    before, gathering.gather_json = gathering.gather_json, impatient(gathering.gather_json)
    try:
        for turn in range(2):  # rank 1 comes when rank 0 has gone on, and is told at once
            if rank == turn:
                model = conv_net()
                with pytest.warns(hl.HooklineWarning, match="shows this rank's numbers alone"):
                    with hl.monitor(model, "fc", ports="output") as seen:
                        for _ in range(3):
                            model(images())
                assert seen["fc"].count.tolist() == [24, 24, 24]
            dist.barrier()
    finally:
        gathering.gather_json = before


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


OTHERS = {
    "steps: rank 0: every=1 from step 0; rank 1: every=2 from step 0": {"every": 2},
    r"statistics: rank 0: moments\(\); rank 1: histogram\(": {"stats": hl.stats.histogram()},
    "sites: rank 0: 0, 1; rank 1: no others": {"selector": "2"},
}


@on_ranks
def test_a_rank_with_other_arguments_is_told_and_alone(rank, folder):
    for message, other in OTHERS.items():
        model, options = small(), {"selector": "*", "ports": "output", **(other if rank else {})}
        expected = f"(?s)this rank's numbers alone: the ranks monitor different {message}"
        with pytest.warns(hl.HooklineWarning, match=expected):
            with hl.monitor(model, **options) as seen:
                for _ in range(3):
                    model(torch.ones(2, 4))
        assert seen.n_ranks == 1
        assert seen["2"].count.tolist() == [4] * len(seen)


@on_ranks
def test_stages_of_a_pipeline_may_have_other_sites(rank, folder):
    model = nn.ModuleDict({"first": nn.Linear(4, 4)} if rank == 0 else {"second": nn.Linear(4, 4)})
    with hl.monitor(model, "*", ports="output") as seen:
        for layer in model.values():
            layer(torch.ones(2, 4))
    assert set(seen.sites) == {"first", "second"}
    assert seen["second"].count.tolist() == [8]


@on_ranks
def test_an_interval_that_one_rank_has_set_is_told(rank, folder):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    line = hl.monitor(model, "2", ports="output")
    with pytest.warns(hl.HooklineWarning, match="rank 0: step 1 with every=1.*step 1 with every=2"):
        with line as seen:
            for step in range(4):
                if rank == 1 and step == 1:
                    line.first, line.every = 1, 2
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert seen["2"].count.tolist() == ([8, 4, 4, 4] if rank == 0 else [8, 4, 4])


@on_ranks
def test_a_rank_that_leaves_is_named_and_not_awaited(rank, folder):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"rank 1 has left hl\.monitor at step 2 \(ValueError: a bad batch\)"
    with pytest.warns(hl.HooklineWarning, match=message) if rank == 0 else suppress(ValueError):
        with hl.monitor(model, "2", ports="output") as seen:
            for step in range(4):
                if rank == 1 and step == 2:
                    raise ValueError("a bad batch")
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert seen["2"].count.tolist() == ([8, 8, 4, 4] if rank == 0 else [8, 8])
    dist.barrier()


@on_ranks
def test_slots_that_are_not_as_many_on_all_ranks_are_told(rank, folder):
    model = nn.Linear(4, 2 + rank)
    with pytest.warns(hl.HooklineWarning, match=r"merges \(root\) of those ranks alone.*rank 0: 8"):
        with hl.monitor(model, "", ports="output", stats=hl.stats.covariance()) as seen:
            model(torch.ones(2, 4))
    assert seen.n_ranks == 2


def impatient(gather_json):
    return lambda question, said, ranks: gather_json(question, said, ranks, 0.2)


@on_ranks
def test_parts_of_features_are_not_merged_as_rows(rank, folder):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    alone = hl.stats.covariance()
    expected = alone.result(alone.update(alone.start(x), normed()[:4](x)))
    for is_local in (True, False):
        plan = {"1": ColwiseParallel(use_local_output=is_local), "3": RowwiseParallel()}
        model = parallelize_module(normed(), mesh(), plan)
        with pytest.warns(hl.HooklineWarning, match="1 has no covariance over all ranks"):
            with hl.monitor(model, ["1", "3"], ports="output", stats=alone) as seen:
                model(x)
        assert seen["1"].results == [None]
        assert seen.rank(rank)["1"].results[0].matrix.shape == (3, 3)
        torch.testing.assert_close(seen["3"].results[0].matrix, expected.matrix)


@on_ranks
def test_parameters_that_are_no_copies_are_told(rank, folder):
    model = nn.ModuleDict({"router": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
    for name, layer in model.items():
        nn.init.constant_(layer.weight, 1.0 + rank * (name == "expert"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    said = r"the first rank's numbers of expert\.weight:value: other ranks"
    with pytest.warns(hl.HooklineWarning, match=said) as told:
        with hl.monitor(model, "*.weight", ports="value") as seen:
            for _ in range(2):
                model["expert"](model["router"](torch.ones(2, 4))).sum().backward()
                optimizer.step()
    assert len(told) == 1
    assert seen["expert.weight:value"].mean.tolist() == [1, 1]
    assert seen.rank(1)["expert.weight:value"].mean.tolist() == [2, 2]


@on_ranks
def test_in_join_no_rank_waits_for_steps_that_never_come(rank, folder):
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.monitor(model) as seen, model.join():
        with pytest.warns(hl.HooklineWarning, match=r"numbers alone: in join\(\), ranks make diff"):
            for _ in range(1 + rank):
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
    assert seen["(root)"].count.tolist() == [6] * (1 + rank)


@on_ranks
def test_a_destroyed_process_group_is_told(rank, folder):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    with hl.monitor(model, ports="output") as seen:
        step()
        with pytest.warns(hl.HooklineWarning, match="numbers alone: the process group was destr"):
            alone(step)
        step()
    assert seen["(root)"].count.tolist() == [12, 6, 6]
