"""Line: whatever ends it, nothing stays on."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import hookline as hl

VERBS = {
    "record": hl.record,
    "edit": lambda model: hl.edit(model, "", lambda t: t),
    "clip": lambda model: hl.clip(model, norm=1.0),
    "watch": hl.watch,
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_line_that_nobody_holds_is_taken_off_and_says_so(net, image, verb):
    gc.disable()  # nothing may hold it, itself included
    try:
        with pytest.warns(hl.HooklineWarning, match=rf"hl.{verb} line was dropped.*\n.*remove\(\)"):
            VERBS[verb](net)
    finally:
        gc.enable()
    assert not len(hl.inventory(net))


def test_the_warning_of_a_dropped_line_is_where_it_was_made(net):
    def drop():
        line = hl.record(net)
        del line

    with pytest.warns(hl.HooklineWarning, match="dropped") as caught:
        drop()
    (one,) = caught
    assert (one.filename, one.lineno) == (__file__, drop.__code__.co_firstlineno + 1)


@pytest.mark.parametrize("make", [hl.record, hl.attach, hl.profile])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_line_is_not_copied_nor_the_model_that_holds_it(net, image, copied, make):
    net.line = line = make(net)
    net(image)
    with pytest.raises(TypeError, match=r"line cannot be copied.*\nKeep it out of the model"):
        copied(net)
    line.remove()
    del net.line
    copied(net)


def test_a_recording_outlives_a_line_that_was_dropped(net, image):
    line = hl.record(net, "fc")
    net(image)
    run = line.recording
    with pytest.warns(hl.HooklineWarning, match="dropped"):
        del line
    assert run["fc"].shape == (2, 5)
    assert "its line was dropped" in " ".join(str(run.report()).split())


def test_a_line_dropped_inside_its_pass_ends_that(net, image):
    held = [hl.record(net, "stem*")]
    run = held[0].recording
    drop = net.fc.register_forward_pre_hook(lambda *_: held.clear())
    with pytest.warns(hl.HooklineWarning, match="dropped"):
        net(image)
    drop.remove()
    assert [one.failed for one in run.passes] == [False]


class Leaves(nn.Module):
    """Leaves its forward by an error that torch tells no hook of."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("is_handling", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_unheld_line_goes_though_its_pass_was_broken_off(error, is_handling):
    model = nn.Sequential(nn.Linear(2, 2), Leaves(error))

    def work():
        lines = hl.record(model), hl.attach(model)
        lines[1].saved("", lambda t: t, lambda t: t)
        try:
            raise ValueError if is_handling else StopIteration
        except ValueError:
            model(torch.zeros(1, 2))
        except StopIteration:
            pass
        model(torch.zeros(1, 2))

    def end():
        with pytest.raises(error):
            work()
        gc.collect()

    with pytest.warns(hl.HooklineWarning, match="dropped"):
        end()
    assert not len(hl.inventory(model))


def test_an_unheld_line_goes_with_the_thread_that_ended_in_it():
    model = nn.Sequential(nn.Linear(2, 2), Leaves(SystemExit))

    def work():
        line = hl.record(model)
        model(torch.zeros(1, 2))
        line.remove()

    def end():  # as threading does; pytest's own way of it would keep the frames
        with contextlib.suppress(SystemExit):
            work()
        gc.collect()

    with pytest.warns(hl.HooklineWarning, match="dropped"), ThreadPoolExecutor(1) as pool:
        pool.submit(end).result()
    assert not len(hl.inventory(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an hl.record line was dropped")
def test_an_interrupt_at_any_line_leaves_nothing(interrupted):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    torchs = checkpoint._checkpoint_hook, vars(checkpoint.CheckpointFunction).copy()

    def action():
        with hl.record(model):
            model(x)

    step = 1
    while interrupted(step, ("hookline.",), action):
        assert not len(hl.inventory(model)), step
        now = checkpoint._checkpoint_hook, vars(checkpoint.CheckpointFunction).copy()
        assert now == torchs, step
        step += 2
    assert step > 200


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
@pytest.mark.parametrize("is_raw", [True, False])
def test_lines_come_and_go_in_other_threads_between_two_hooks(kind, is_raw):
    """Torch calls these hooks out of a copy of its dictionary, made before the first one."""
    model, x, seen, begun = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), [], []
    ended = hl.attach(model)
    ended.options.quiet = True
    ended.forward("0", lambda *_: None)
    ended.forward_pre("0", lambda *_: None)

    def elsewhere():
        ended.remove()
        with hl.edit(model, "0:input", hl.edits.scale(0.0)), hl.record(model, "0") as run:
            model(x)
        seen.append(run["0"])

    def hook(*_):
        if not begun:  # a raw hook is called in the other thread, too
            begun.append(1)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(elsewhere).result()

    with hl.attach(model) as line:
        line.options.quiet = True
        if is_raw:
            handle = getattr(model[0], f"register_{kind}_hook")(hook)
        else:
            handle = getattr(line, kind)("0", hook)
        getattr(line, kind)("0", lambda *_: seen.append(kind))
        y = model(x)
        handle.remove()
    assert torch.equal(seen[-2], model[0].bias[None])
    assert seen[-1] == kind
    assert torch.equal(y, model(x))
    assert not len(hl.inventory(model))


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_a_dropped_line_may_be_collected_between_two_hooks(kind):
    model, x, seen = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), []

    def drop():
        held = [hl.record(model, "0", ports=("input", "output"))]
        held.append(held)  # so that only a collection can find it

    drop()
    assert len(hl.inventory(model)) > 2
    with hl.attach(model) as line:
        getattr(line, kind)("0", lambda *_: gc.collect() and None)
        getattr(line, kind)("0", lambda *_: seen.append(kind))
        with pytest.warns(hl.HooklineWarning, match="dropped"):
            model(x)
    assert seen == [kind]
    assert not len(hl.inventory(model))


@pytest.mark.slow
def test_threads_may_attach_to_one_model_while_others_run_it():
    model, x, errors = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(1, 3), []

    def guard(work, times):
        try:
            for _ in range(times):
                work()
        except Exception as error:
            errors.append(error)

    def look():
        with hl.record(model, ports="input") as run:
            model(x)
        assert len(run.passes) == 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        work = [(look, 100), (look, 100), (lambda: model(x), 1000)]
        threads = [threading.Thread(target=guard, args=one) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert not len(hl.inventory(model))
