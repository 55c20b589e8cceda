"""Line: whatever ends it, nothing stays on."""

from __future__ import annotations

import gc
import sys
import threading

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


def test_a_recording_outlives_a_line_that_was_dropped(net, image):
    line = hl.record(net, "fc")
    net(image)
    run = line.recording
    with pytest.warns(hl.HooklineWarning, match="dropped"):
        del line
    assert run["fc"].shape == (2, 5)
    assert "its line was dropped" in str(run.report())


@pytest.mark.filterwarnings("ignore:an hl.record line was dropped")
def test_an_interrupt_at_any_line_of_hooklines_code_leaves_nothing(interrupted):
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


def test_threads_may_attach_to_one_model_while_others_run_it():
    model, x, errors = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(1, 3), []

    def guard(work, times):
        try:
            for _ in range(times):
                work()
        except Exception as error:
            errors.append(error)

    def inspect():
        with hl.record(model, ports="input") as run:
            model(x)
        assert len(run.passes) == 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        work = [(inspect, 100), (inspect, 100), (lambda: model(x), 1000)]
        threads = [threading.Thread(target=guard, args=one) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert not len(hl.inventory(model))
