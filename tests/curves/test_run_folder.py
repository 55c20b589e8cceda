"""The folder of a run: read while it grows, and after its writer was killed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from hookline.curves import (
    Entry,
    Layout,
    RunFolder,
    StepReport,
    is_run,
    open_run,
    run_folder,
    run_version,
)
from hookline.curves.run_folder import _frame_bytes, statistic_from_json, statistic_to_json
from hookline.engine.model_fingerprint import recorded_model
from warm import run_python

STATISTICS = (hl.stats.moments(), hl.stats.histogram(), hl.stats.quantiles((0.1, 0.5)))


def monitored(path, steps, stats=None):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with hl.monitor(model, "1", ports="output", to=path, stats=stats) as seen:
        for k in range(steps):
            model(torch.randn(3, 4, generator=torch.Generator().manual_seed(k)))
    return seen


def test_an_opened_run_has_the_same_curves(tmp_path):
    seen = monitored(tmp_path / "run", 5)
    found = hl.open(tmp_path / "run")
    assert isinstance(found, hl.Curves)
    assert (found.sites, found.steps.tolist()) == (seen.sites, seen.steps.tolist())
    assert found["1"].results == seen["1"].results
    assert str(found) == str(seen)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda seen: pickle.loads(pickle.dumps(seen))])
def test_a_copy_of_an_opened_run_reads_its_folder(tmp_path, copied):
    model = nn.Linear(2, 2)
    with hl.monitor(model, to=tmp_path / "run") as seen:
        model(torch.ones(1, 2))
    made = copied(hl.open(tmp_path / "run"))
    assert made.at(0) == seen.at(0)
    assert made["(root)"].mean == seen["(root)"].mean


def test_all_statistics_of_hookline_are_made_again(tmp_path):
    seen = monitored(tmp_path / "run", 3, list(STATISTICS))
    found = hl.open(tmp_path / "run")
    for one, other in zip(found._source.read(), seen._source.read(), strict=True):
        assert one.results("1") == other.results("1")
        assert len(one.results("1")) == 3


def test_a_covariance_is_made_again(tmp_path):
    seen = monitored(tmp_path / "run", 2, hl.stats.covariance())
    (one, _), (other, _) = hl.open(tmp_path / "run")["1"].results, seen["1"].results
    assert torch.equal(one.matrix, other.matrix)


class Own:
    def start(self, value):
        return torch.zeros(2, dtype=torch.float64)

    def update(self, slots, value):
        return slots + value.sum().double()

    def merge(self, slots, other):
        return slots + other

    def result(self, slots):
        return {"sum": slots[0].item()}


def test_a_statistic_of_ones_own_gives_its_slots(tmp_path):
    seen = monitored(tmp_path / "run", 2, Own())
    results = hl.open(tmp_path / "run")["1"].results
    assert [one[0] for one in results] == seen["1"].sum.tolist()


@pytest.mark.slow
def test_a_run_is_read_while_it_grows(tmp_path):
    model = nn.Linear(2, 2)
    line = hl.monitor(model, ports="output", to=tmp_path / "run")
    with line:
        counts = []
        model(torch.ones(1, 2))
        found = None
        for _ in range(300):  # past the passes that wait for an optimizer
            model(torch.ones(1, 2))
            if found is None and (tmp_path / "run" / "curves.bin").exists():
                found = hl.open(tmp_path / "run")
            if found is not None:
                counts.append(len(found))
    assert counts[-1] > counts[0] > 0
    assert len(found) == 301


def test_a_new_site_begins_a_new_layout(tmp_path):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.n = nn.Identity(), nn.Identity(), 0

        def forward(self, x):
            self.n += 1
            return self.two(x) if self.n > 2 else self.one(x)

    model = Late()
    with hl.monitor(model, ["one", "two"], ports="output", to=tmp_path / "run") as seen:
        for _ in range(4):
            model(torch.ones(2))
    for curves in (seen, hl.open(tmp_path / "run")):
        assert curves.sites == ("one", "two")
        np.testing.assert_array_equal(curves["two"].mean, [np.nan, np.nan, 1, 1])
        np.testing.assert_array_equal(curves["one"].mean, [1, 1, np.nan, np.nan])


KILLED = """
import os, signal, sys, torch
import hookline as hl
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hl.monitor(model, to=sys.argv[1]) as seen:
    for k in range(100):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if len(seen) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="kills by a signal of POSIX")
def test_a_killed_run_has_every_step_that_was_reported(tmp_path):
    done = run_python("-c", KILLED, tmp_path / "run")
    assert done.returncode == -signal.SIGKILL
    found = hl.open(tmp_path / "run")
    assert found.steps.tolist() == list(range(20))
    assert not np.isnan(found["weight:update"].norm).any()


@given(st.integers(0, 2_000))
def test_a_file_cut_anywhere_gives_whole_reports(tmp_path_factory, n_bytes):
    folder = tmp_path_factory.mktemp("run")
    layout = Layout((hl.stats.moments(),), (Entry("a", 0, 8), Entry("b", 0, 8)))
    writer = RunFolder(folder / "run")
    for step in range(10):
        writer.add(StepReport(step, 0.0, layout, np.full((1, 16), float(step))))
    writer.finish()
    file = folder / "run" / "curves.bin"
    os.truncate(file, max(8, min(n_bytes, file.stat().st_size)))
    reports = open_run(folder / "run")._source.read()
    assert [one.step for one in reports] == list(range(len(reports)))
    assert all((one.slots == one.step).all() for one in reports)


def test_a_damaged_byte_is_noticed(tmp_path):
    """Each byte of the headers of a report and of the layout, which no checksum covers."""
    monitored(tmp_path / "run", 5)
    file = tmp_path / "run" / "curves.bin"
    data = file.read_bytes()
    start = data.rindex(b"step")
    for at in [*range(start, start + 32), *range(8, 32)]:
        damaged = bytearray(data)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(hl.FolderError, match="is damaged at byte"):
            _ = hl.open(tmp_path / "run").steps


def test_a_folder_without_curves_is_refused(tmp_path):
    with pytest.raises(hl.FolderError, match="must hold the curves of a run, got none"):
        open_run(tmp_path)


def test_curves_say_that_another_run_is_in_their_folder(tmp_path):
    monitored(tmp_path / "run", 5)
    found = hl.open(tmp_path / "run")
    assert len(found) == 5
    shutil.rmtree(tmp_path / "run")
    monitored(tmp_path / "run", 9)  # its frames are as long as those of the first run
    with pytest.raises(hl.FolderError, match="got another run's or a shorter one"):
        _ = found.steps
    assert len(hl.open(tmp_path / "run")) == 9


def test_curves_say_that_their_file_was_cut_short(tmp_path):
    monitored(tmp_path / "run", 5)
    found = hl.open(tmp_path / "run")
    assert len(found) == 5
    os.truncate(tmp_path / "run" / "curves.bin", 500)
    with pytest.raises(hl.FolderError, match="got another run's or a shorter one"):
        _ = found.steps


def test_curves_of_a_deleted_folder_say_so(tmp_path):
    monitored(tmp_path / "run", 2)
    found = hl.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(hl.FolderError, match="cannot be read: No such file"):
        _ = found.steps


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "curves.bin")
    assert not is_run(tmp_path)


MOMENTS = [{"name": "moments", "options": {}}]


def layout_frame(entries, statistics=MOMENTS):
    return _frame_bytes(
        b"layo", json.dumps({"statistics": statistics, "entries": entries}).encode()
    )


def step_frame(n_ranks=1, seconds=1.0, n_slots=8):
    return _frame_bytes(b"step", struct.pack("<qdQ", 0, seconds, n_ranks) + b"\0" * 8 * n_slots)


def order_frame(*ranks, seconds=1.0):
    return _frame_bytes(b"ordr", struct.pack(f"<d{len(ranks)}i", seconds, *ranks))


def logged_frame(step=0, seconds=1.0, numbers=None):
    said = {"step": step, "seconds": seconds, "numbers": numbers or {"loss": 1.0}}
    return _frame_bytes(b"logs", json.dumps(said).encode())


LAYOUT = layout_frame([["a", 0, 8, None]])


def test_a_layout_an_order_and_user_numbers_are_read(tmp_path):
    frames = logged_frame(3) + LAYOUT + step_frame() + order_frame(0) + step_frame()
    (tmp_path / "curves.bin").write_bytes(b"hlcurve1" + frames)
    found = hl.open(tmp_path)
    first, second = found._source.read()
    assert (first.order, second.order.tolist()) == (None, [0])
    assert found.logged["loss"].steps.tolist() == [3]


def test_two_runs_of_one_model_differ_in_their_heads(tmp_path):
    versions = set()
    for name in ("one", "other"):
        monitored(tmp_path / name, 1)
        versions.add(run_version(tmp_path / name).rpartition("-")[2])
    assert len(versions) == 2


def test_a_run_is_written_and_read_without_pread(tmp_path, monkeypatch):
    monkeypatch.delattr("os.pwrite")  # as on Windows
    monkeypatch.delattr("os.pread")
    monitored(tmp_path / "run", 3)
    assert len(hl.open(tmp_path / "run")["1"].mean) == 3


def test_a_run_that_has_not_grown_is_not_read_again(tmp_path, monkeypatch):
    monitored(tmp_path / "run", 3)
    found = hl.open(tmp_path / "run")
    assert len(found["1"].mean) == 3
    monkeypatch.setattr(run_folder, "_read_at", None)  # reading would raise
    assert len(found["1"].std) == len(found["1"].max) == len(found.steps) == 3


@pytest.mark.parametrize(
    "frames",
    [
        step_frame(),
        _frame_bytes(b"layo", b"{"),
        _frame_bytes(b"layo", b"[" * 100_000),
        _frame_bytes(b"layo", b"[]"),
        layout_frame([[["a"], 0, 8, None]]),
        layout_frame([["a", 1, 8, None]]),
        layout_frame([["a", -1, 8, None]]),
        layout_frame([["a", 0, -8, None]]),
        layout_frame([["a", 0, 8, ["x"]]]),
        layout_frame([["a", 0, 8, None]], [{"name": "histogram", "options": {"odd": 1}}]),
        LAYOUT + step_frame(n_ranks=2**40),
        LAYOUT + step_frame(n_ranks=0),
        LAYOUT + step_frame(n_slots=7),
        LAYOUT + step_frame(seconds=float("nan")),
        LAYOUT + step_frame(seconds=1e300),
        LAYOUT + step_frame() + struct.pack("<4sIQQ", b"step", 0, 2**62, 1) + step_frame(),
        layout_frame([]) + step_frame(n_ranks=2**40, n_slots=0),
        order_frame(0),
        LAYOUT + order_frame(0, 1, 2),
        LAYOUT + order_frame(-2),
        logged_frame("x"),
        logged_frame(seconds=1e300),
        logged_frame(numbers={"loss": "x"}),
        _frame_bytes(b"logs", b"[]"),
    ],
)  # fmt: skip
def test_frames_that_no_monitor_writes_are_damage(tmp_path, frames):
    (tmp_path / "curves.bin").write_bytes(b"hlcurve1" + frames)
    with pytest.raises(hl.FolderError, match="is damaged at byte"):
        _ = hl.open(tmp_path).steps


def test_a_run_identifies_its_model_as_it_began(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    began = recorded_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, to=tmp_path / "run") as seen:
        assert seen.model == began
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert seen.model == hl.open(tmp_path / "run").model == began != recorded_model(model)


def test_a_run_in_memory_identifies_no_model():
    model = nn.Linear(2, 3)
    with hl.monitor(model, ports="output") as seen:
        model(torch.ones(1, 2))
    assert seen.model is None


@pytest.mark.parametrize(
    "statistic",
    [
        hl.stats.moments(compile=False),
        hl.stats.histogram(low=0.1, high=10, per_octave=4),
        hl.stats.quantiles((0.1, 0.9), error=0.1, low=1e-3),
        hl.stats.covariance(),
    ],
    ids=lambda statistic: type(statistic).__name__,
)
def test_a_statistic_is_made_again_from_json(statistic):
    again = statistic_from_json(json.loads(json.dumps(statistic_to_json(statistic))))
    x = torch.randn(20, 3)
    slots = statistic.update(statistic.start(x), x)
    torch.testing.assert_close(again.update(again.start(x), x), slots)
    assert str(again.result(slots)) == str(statistic.result(slots))


def test_one_of_a_users_class_gives_its_slots():
    class Own:
        pass

    again = statistic_from_json(json.loads(json.dumps(statistic_to_json(Own()))))
    assert again.result(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(hl.FolderError, match=r"the statistic Own must be known to measure"):
        again.start(torch.ones(1))
