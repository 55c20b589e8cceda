"""Threads and async tasks: a line sees those that made it, or when asked all of them, apart."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from thoroughness import tries
from zoo import data_parallel


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
@pytest.mark.cell(
    "several threads that share a model", "record", "gradients", "edit", "edit gradients", "clip"
)
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


@pytest.mark.cell(
    "several threads that share a model", "raw hooks", "watch", "features", "statistics"
)
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


@pytest.mark.cell(
    "thread pools",
    "record",
    note="Pass `every_thread=True` to `hl.record`, or run the model by"
    " `pool.submit(copy_context().run, model, x)`. Otherwise no hook is called in the"
    " pool's threads.",
)
def test_a_pool_is_not_seen_by_a_block_and_the_warning_says_how(model):
    with ThreadPoolExecutor(2) as pool:
        with (
            pytest.warns(hl.HooklineWarning, match=r"copy_context\(\)\.run, model, x\)"),
            hl.record(model, "0") as run,
        ):
            pool.submit(model, batch(1)).result()
        assert "1 run in other threads or tasks was not seen" in " ".join(str(run.report()).split())
        with hl.record(model, "0") as run:
            pool.submit(contextvars.copy_context().run, model, batch(3)).result()
        assert torch.equal(run["0"], model[0](batch(3)))
        line = hl.record(model, "0", every_thread=True)
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


@pytest.mark.cell(
    "async tasks",
    "raw hooks",
    note="Hooks by `hl.attach(hl.EVERYWHERE)` are called only in the task that attached them.",
)
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
    "DataParallel", "record", "edit",
    note="On several devices, pass `every_thread=True` to `hl.record` and `hl.edit`. Each"
    " replica then counts as one run of the model.",
)  # fmt: skip
def test_replicas_share_the_hooks_and_run_in_their_own_threads(model):
    # What DataParallel does on several devices, which are not here: replicas, one thread each.
    line = hl.record(model, "0", every_thread=True)
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    together(*[lambda step, r=r, k=k: r(batch(k)) for k, r in enumerate(replicas)])
    line.remove()
    assert len(line.recording.passes) == 2
    found = sorted(one["0"].tolist() for one in line.recording.passes)
    assert found == sorted(model[0](batch(k)).tolist() for k in range(2))
    edit = hl.edit(model, "0", lambda t: t * 3 + 1, every_thread=True)
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    edited = together(*[lambda step, r=r, k=k: r(batch(k)) for k, r in enumerate(replicas)])
    edit.remove()
    for k, value in enumerate(edited):
        torch.testing.assert_close(value, model[2](model[1](model[0](batch(k)) * 3 + 1)))
    with (
        pytest.warns(hl.HooklineWarning, match="or attach with every_thread=True"),
        hl.record(model, "0"),
    ):
        together(*[lambda step, r=r: r(batch(1)) for r in replicas])


@pytest.mark.cell(
    "DataParallel",
    "record",
    "gradients",
    note="Tested on the CPU, where `DataParallel` calls the module directly.",
)
def test_data_parallel_on_the_cpu_is_the_module(model):
    parallel = data_parallel(model)
    with hl.record(parallel, "0", ports=("output", "grad_output")) as run:
        parallel(batch(1)).sum().backward()
    assert list(run) == ["0", "0:grad_output"]
    assert torch.equal(run["0"], model[0](batch(1)))


@pytest.fixture
def elsewhere():
    """A thread that runs what it is given, and gives back what that returned or raised."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


@pytest.mark.trap(32)
def test_from_its_first_hook_a_line_leaves_other_threads_alone(model, elsewhere):
    expected = model(batch(1))
    line = elsewhere(hl.edit, model, "1", hl.edits.scale(0))  # made, and not entered yet
    assert torch.equal(model(batch(1)), expected)
    assert torch.equal(model[1](batch(1)), batch(1).tanh())
    assert torch.equal(elsewhere(model, batch(1))[0], model[2].bias)
    line.remove()


def test_a_line_sees_what_its_own_thread_ran_before_the_block(model):
    line = hl.record(model, "0")
    model(batch(1))
    with line as run:
        model(batch(2))
    first, second = run.passes
    assert torch.equal(first["0"], model[0](batch(1)))
    assert torch.equal(second["0"], model[0](batch(2)))


def test_a_line_is_entered_and_hooked_only_where_it_was_made(model, elsewhere):
    line = elsewhere(hl.attach, model)
    with pytest.raises(hl.AttachError, match="thread or async task that made it, got another"):
        line.forward("0", lambda *_: None)
    with pytest.raises(hl.AttachError, match="every_thread=True"), line:
        pass
    assert not len(hl.inventory(model))
    elsewhere(line.forward, "0", lambda *_: None)  # it is as it was, and anybody may end it
    line.options.quiet = True
    line.remove()
    assert not len(hl.inventory(model))


def test_every_verb_sees_every_thread_when_it_is_asked_to(model, elsewhere, capsys):
    plain, seen = model(batch(1)), []
    with (
        hl.edit(model, "1:output", hl.edits.scale(2.0), every_thread=True),
        hl.attach(model, every_thread=True) as line,
        hl.clip(model, "2:grad_output", norm=0.5, every_thread=True) as clip,
        hl.watch(model, "0", ports="output", every_thread=True),
        hl.record(model, "1", ports=("output", "grad_output"), every_thread=True) as run,
    ):
        elsewhere(line.forward, "0", lambda m, args, output: seen.append(args[0]))
        y = elsewhere(model, batch(1))
        elsewhere(y.sum().backward)
    assert torch.equal(run["1"], model[1](model[0](batch(1))) * 2)
    assert torch.equal(y, model[2](run["1"]))
    assert torch.equal(run["1:grad_output"], model[2].weight * 0.5 / (1 + 1e-6))
    assert (clip.report().clipped, len(seen)) == (1, 1)
    assert capsys.readouterr().out.count("Linear") == 1
    assert torch.equal(elsewhere(model, batch(1)), plain)


def test_everywhere_in_every_thread(model, elsewhere):
    seen = []
    with hl.attach(hl.EVERYWHERE, every_thread=True) as line:
        line.forward(nn.Tanh, lambda *_: seen.append("forward"))
        line.backward(nn.Tanh, lambda *_: seen.append("backward"))
        elsewhere(lambda: model(batch(1)).sum().backward())
        asyncio.run(asyncio.wait_for(asyncio.to_thread(model, batch(1)), 60))
    elsewhere(model, batch(1))
    assert seen == ["forward", "backward", "forward"]


def test_a_pass_broken_off_is_over_for_whoever_runs_next(model):
    class Stop(BaseException):
        pass

    def stop(module, args):
        raise Stop

    def broken():
        line = hl.edit(model, "0", hl.edits.scale(0))
        with hl.attach(model) as other, pytest.raises(Stop):
            other.forward_pre("1", stop)
            model(batch(1))
        return line

    # In one thread, as tasks are: the line's own context, then another one.
    line = contextvars.copy_context().run(broken)
    expected = model[2](model[1](nn.functional.linear(batch(1), model[0].weight, model[0].bias)))
    assert torch.equal(model(batch(1)), expected)
    line.remove()


@pytest.mark.slow
def test_threads_and_tasks_at_once_mix_no_value():
    n_passes = tries(8_000, gate=4_000)
    soak = runpy.run_path(str(Path(__file__).with_name("soak.py")))["Soak"](n_passes, seed=0)
    # Python 3.11 may collect while torch copies a list of hooks, and then let another thread
    # attach: torch raises "mutated during iteration", also without hookline.
    gc.collect()
    gc.disable()
    try:
        found = soak.run()
    finally:
        gc.enable()
    assert (found["mixed"], found["errors"], found["hooks left"]) == (0, 0, 0), found["first"]
    assert found["passes"] == n_passes
    assert len(found["by kind"]) == 8
