"""clocks: wall time, and the events of a device. No device is at hand: the events are a fake."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.profile import clocks, profile
from hookline.verbs.profile.clocks import EventClock, WallClock, clock_for


class Device:
    """A stream that works on while Python goes on: its time is apart from Python's."""

    def __init__(self):
        self.milliseconds = 0.0
        self.waits = 0
        self.is_done = False

    def event(self):
        return Event(self)


class Event:
    """What `torch.Event` does, as far as a clock needs it."""

    def __init__(self, device):
        self.device = device
        self.at = None

    def record(self):
        assert self.at is None
        self.at = self.device.milliseconds

    def query(self):
        return self.device.is_done

    def synchronize(self):
        self.device.waits += 1
        self.device.is_done = True

    def elapsed_time(self, other):
        assert self.device.is_done, "nobody waited for the device"
        return other.at - self.at


class OnDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device, forward, backward):
        ctx.device, ctx.milliseconds = device, backward
        device.milliseconds += forward
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.device.milliseconds += ctx.milliseconds
        return grad * 2, None, None, None


class Work(nn.Module):
    def __init__(self, device, forward, backward):
        super().__init__()
        self.arguments = device, forward, backward

    def forward(self, x):
        return OnDevice.apply(x, *self.arguments)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(profile, "clock_for", lambda _: EventClock(device.event))
    return device


def model_of(device):
    inner = nn.Sequential(Work(device, 2, 20), Work(device, 3, 30))
    return nn.Sequential(Work(device, 1, 10), inner)


def test_times_are_those_of_the_devices_stream(device):
    model = model_of(device)
    with hl.profile(model, flops=False) as prof:
        for _ in range(2):
            loss = model(torch.ones(2, requires_grad=True)).sum()
            device.milliseconds += 100
            loss.backward()
        assert device.waits == 0
    assert device.waits == 0
    assert prof["1"].time == pytest.approx((0.010, 0.100, 0))
    assert device.waits == 1
    assert prof["1.1"].self_time == pytest.approx((0.006, 0.060, 0))
    assert prof.total.time == pytest.approx((0.012, 0.120, 0))
    assert prof.total.outside == pytest.approx(0.2)
    assert prof.total.overhead > 0  # in Python's own time


class Collects(Work):
    """Has Python collect garbage, while the device waits."""

    def forward(self, x):
        gc.collect()
        return super().forward(x)


def test_a_device_that_waits_for_a_collection_is_not_charged(device):
    model = nn.Sequential(Work(device, 1, 10), Collects(device, 2, 20))

    def wait(phase, info):
        device.milliseconds += 500 * (phase == "start")

    with hl.profile(model, flops=False) as prof:
        gc.callbacks.append(wait)
        try:
            model(torch.ones(2, requires_grad=True)).sum().backward()
        finally:
            gc.callbacks.remove(wait)
    assert prof["1"].time == pytest.approx((0.002, 0.020, 0))
    assert prof.total.garbage > 0


def test_a_trace_is_in_the_devices_time(device, tmp_path):
    import json

    with hl.profile(model_of(device), flops=False) as prof:
        prof._line.root(torch.ones(2, requires_grad=True)).sum().backward()
    events = json.loads(prof.trace(tmp_path / "trace.json").read_text())["traceEvents"]
    durations = {(e["name"], e["cat"]): e["dur"] for e in events if e["ph"] == "X"}
    assert durations["1.0", "forward"] == pytest.approx(2000)
    assert durations["1", "backward"] == pytest.approx(50_000)


def test_a_long_run_reads_what_is_done_without_waiting(device, monkeypatch):
    monkeypatch.setattr(clocks, "_MANY", 10)
    model = model_of(device)
    device.is_done = True
    with hl.profile(model, flops=False) as prof:
        for _ in range(50):
            model(torch.ones(2))
        (lane,) = prof._profile_lanes.lanes
        assert len(lane.clock._waiting) < 20
    assert device.waits == 0
    assert prof["0"].time.forward == pytest.approx(0.050)


def test_each_device_has_its_clock():
    assert isinstance(clock_for(torch.device("cpu")), WallClock)
    assert isinstance(clock_for(torch.device("meta")), WallClock)
    if not torch.backends.cuda.is_built():
        with pytest.raises(RuntimeError):  # it asks for a CUDA event
            clock_for(torch.device("cuda"))


def test_a_wall_clock_stands_still_between_pause_and_resume():
    clock = WallClock()
    first = clock.resume() if clock.pause() else None
    for _ in range(1000):
        pass
    second = clock.pause()
    assert clock.resume() == pytest.approx(second, abs=1e-9)
    assert second > first
    cell = [0.0]
    clock.add_time(cell, 0, first, second)
    assert cell == [second - first]
    assert clock.overhead > 0
