"""Threads and async tasks: a line in a block sees its own, one without a block sees them apart."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(k: int) -> torch.Tensor:
    return torch.full((1, 2), float(k))


def together(*actions):
    """Run each in a thread of its own, step by step beside the others; the first error is raised.

    An action is given `step`, at which all wait for one another.
    """
    barrier = threading.Barrier(len(actions), timeout=60)
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result() for future in [pool.submit(a, barrier.wait) for a in actions]]


@pytest.mark.trap(32)
@pytest.mark.cell("threads, one model", "record", "gradients", "edit", "edit gradients", "clip")
def test_two_threads_on_one_model_see_only_their_own(model):
    alone = []
    for k in (1, 2):
        with hl.edit(model, "1", hl.edits.scale(float(k))), hl.record(model, "2") as run:
            model(batch(k)).sum().backward()
        alone.append(run["2"])
    seen_by_hook = []
    handle = model[2].register_forward_hook(lambda m, a, output: seen_by_hook.append(output))

    def work(k):
        def action(step):
            step()
            with (
                hl.edit(model, "1", hl.edits.scale(float(k))),
                hl.edit(model, "0:grad_output", lambda g: g * k),
                hl.clip(model, "2:grad_output", norm=1e9) as clip,
                hl.record(model, "2", ports=("output", "grad_output", "grad_input")) as run,
            ):
                step()
                model(batch(k)).sum().backward()
                step()
            return run, clip.report().seen

        return action

    (one, n_one), (two, n_two) = together(work(1), work(2))
    handle.remove()
    for run, expected in ((one, alone[0]), (two, alone[1])):
        assert len(run.passes) == 1
        assert torch.equal(run["2"], expected)
        assert run["2:grad_output"].tolist() == [[1.0]]
        assert torch.equal(run["2:grad_input"], model[2].weight)
    assert (n_one, n_two) == (1, 1)
    assert len(seen_by_hook) == 2  # the raw hook cannot tell them apart
    assert not len(hl.inventory(model))


@pytest.mark.cell("threads, one model", "raw hooks", "watch", "features", "statistics")
def test_every_verb_in_a_thread_sees_only_its_own(model, capsys):
    def work(k):
        def action(step):
            seen = []
            with hl.attach(model) as line, hl.record(model, "0", keep=torch.mean) as means:
                line.forward("0", lambda m, a, output: seen.append(a[0][0, 0].item()))
                step()
                model(batch(k))
                step()
            feats = hl.features(model, batch(k), "0")
            return seen, means["0"], feats["0"]

        return action

    for k, (seen, mean, feature) in zip((1, 2), together(work(1), work(2)), strict=True):
        assert seen == [k]
        assert torch.equal(feature, model[0](batch(k)))
        assert torch.equal(mean, feature.mean())
    capsys.readouterr()
    with hl.watch(model), ThreadPoolExecutor(1) as pool:
        model(batch(1))
        lines = len(capsys.readouterr().out.splitlines())
        pool.submit(model, batch(2)).result()
        assert lines == 4
        assert capsys.readouterr().out == ""


@pytest.mark.cell("thread pools", "record", note="the context is taken along, or no `with` block")
def test_a_pool_is_not_seen_by_a_block_and_the_warning_says_how_it_would_be(model):
    with ThreadPoolExecutor(2) as pool:
        with (
            pytest.warns(hl.HooklineWarning, match=r"copy_context\(\)\.run\(model, \.\.\.\)"),
            hl.record(model, "0") as run,
        ):
            pool.submit(model, batch(1)).result()
        assert "1 runs in other threads or tasks were not seen" in str(run.report())
        with hl.record(model, "0") as run:
            pool.submit(contextvars.copy_context().run, model, batch(3)).result()
        assert torch.equal(run["0"], model[0](batch(3)))
        line = hl.record(model, "0")
        list(pool.map(model, [batch(k) for k in range(8)]))
        line.remove()
    found = {one["0"].sum().item() for one in line.recording.passes}
    assert len(line.recording.passes) == 8
    assert found == {model[0](batch(k)).sum().item() for k in range(8)}


@pytest.mark.cell("async tasks", "record", "edit")
@pytest.mark.parametrize("is_shared", [True, False])
def test_tasks_that_are_gathered_keep_their_lines_apart(model, is_shared):
    models = [model, model if is_shared else copy.deepcopy(model)]

    async def work(k):
        mine = models[k]
        with hl.edit(mine, "0", hl.edits.scale(k)), hl.record(mine, "0") as run:
            await asyncio.sleep(0)
            mine(batch(k + 1))
            await asyncio.sleep(0)
            await asyncio.to_thread(mine, batch(k + 3))  # it takes the context along
        return run

    async def main():
        return await asyncio.gather(work(0), work(1))

    for k, run in enumerate(asyncio.run(main())):
        assert len(run.passes) == 2
        for one, given in zip(run.passes, (k + 1, k + 3), strict=True):
            assert torch.equal(one["0"], models[k][0](batch(given)) * k)
    assert not len(hl.inventory(model))


@pytest.mark.cell("async tasks", "raw hooks", note="`hl.EVERYWHERE`")
def test_everywhere_is_of_one_task(model):
    async def work(k):
        seen = []
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward(nn.Linear, lambda m, a, output: seen.append(a[0].flatten()[0].item()))
            await asyncio.sleep(0)
            model[0](batch(k))
            await asyncio.sleep(0)
        return seen

    async def main():
        return await asyncio.gather(work(1), work(2))

    assert asyncio.run(main()) == [[1.0], [2.0]]


@pytest.mark.cell(
    "DataParallel", "record", note="several devices: without a `with` block, each replica a pass"
)
def test_replicas_share_the_hooks_and_run_in_threads_of_their_own(model):
    # What DataParallel does on several devices, which are not here: replicas, one thread each.
    line = hl.record(model, "0")
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    together(*[lambda step, r=r, k=k: r(batch(k)) for k, r in enumerate(replicas)])
    line.remove()
    assert len(line.recording.passes) == 2
    with (
        pytest.warns(hl.HooklineWarning, match="or attach without `with`"),
        hl.record(model, "0"),
    ):
        together(*[lambda step, r=r: r(batch(1)) for r in replicas])


@pytest.mark.cell("DataParallel", "record", "gradients", note="on the CPU it calls the module")
def test_data_parallel_on_the_cpu_is_the_module(model):
    parallel = nn.DataParallel(model)
    with hl.record(parallel, "0", ports=("output", "grad_output")) as run:
        parallel(batch(1)).sum().backward()
    assert list(run) == ["0", "0:grad_output"]
    assert torch.equal(run["0"], model[0](batch(1)))
