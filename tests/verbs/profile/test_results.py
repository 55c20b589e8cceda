"""The results of a profile: rows, tables, the nested calls, the trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.display.results import printout_of
from hookline.display.units import duration
from hookline.verbs.profile import thread_lane
from hookline.verbs.profile.call_tree import CallContext, outermost_contexts
from hookline.verbs.profile.rows import Phases, sum_phases


class Regions(nn.Module):
    """A container that is never called, a checkpointed block, a shared layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.again = self.stem

    def forward(self, x):
        x = self.stem(x)
        x = checkpoint(self.h[0], x, use_reentrant=True)
        return self.stem(self.h[1](x))


@pytest.fixture(scope="module")
def prof():
    model = Regions()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.profile(model) as prof:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    return prof


def test_the_parts_add_up_to_the_whole(prof):
    total = prof.total
    alone = sum_phases(row.self_time for row in prof.rows)
    assert total.time == pytest.approx(alone)
    assert prof[""].time == pytest.approx(alone)
    assert total.seconds == pytest.approx(sum(alone) + total.optimizer + total.outside)
    assert min(*alone, total.optimizer, total.outside, total.overhead) > 0
    for row in prof.rows:
        assert all(part >= own for part, own in zip(row.time, row.self_time, strict=True))
    assert total.passes == 3
    assert total.parameters == prof[""].parameters == sum(p.numel() for p in Regions().parameters())


def test_a_container_that_is_never_called_stands_for_its_modules(prof):
    row = prof["h"]
    assert row.calls == 0
    assert row.time == pytest.approx(sum_phases([prof["h.0"].time, prof["h.1"].time]))
    assert row.flops == sum_phases([prof["h.0"].flops, prof["h.1"].flops])
    assert row.self_time.all == 0


def test_a_row_is_found_by_any_of_its_paths(prof):
    assert prof["stem"] is not None
    assert prof["again"] == prof["stem"]
    assert prof["(root)"] == prof[""]
    with pytest.raises(hl.SelectionError, match=r"got 'x\.0'\. There is h\.0, "):
        prof["x.0"]
    with pytest.raises(LookupError, match=r"9 modules, got 'nothing'\.\nRead prof\.rows"):
        prof["nothing"]


def test_the_modules_that_cost_most_come_first(prof):
    for by, cost in {
        "self": lambda row: row.self_time.all,
        "time": lambda row: row.time.all,
        "flops": lambda row: row.self_flops.all,
        "activations": lambda row: row.self_activation_bytes,
        "backward": lambda row: row.self_time.backward,
    }.items():
        found = prof.top(3, by=by)
        assert [cost(row) for row in found.rows] == sorted(map(cost, prof.rows), reverse=True)[:3]
        assert found.total == prof.total
    assert prof.top(1, by="time").rows[0].path == ""
    assert "h.1.0" in str(prof.top(10))
    with pytest.raises(hl.InputError, match=r"by must be one of 'self', .* got 'cost'"):
        prof.top(by="cost")
    with pytest.raises(hl.InputError, match="n must be a positive integer, got 0"):
        prof.top(0)


def test_a_table_can_be_folded(prof):
    assert [row.path for row in prof.fold(1).rows] == ["", "stem", "h"]
    assert prof.fold(0).total == prof.total


def test_a_printed_table_has_the_columns_that_have_numbers(prof):
    text = printout_of(prof.table).text(200)
    head = text.splitlines()[0]
    for name in ("calls", "forward", "self", "backward", "recompute", "FLOPs", "kept", "peak"):
        assert name in head
    for name in ("Forward", "Recompute", "Optimizer", "Outside the model", "left out of all times"):
        assert name in text
    with torch.no_grad(), hl.profile(nn.Linear(2, 2)) as forward:
        forward._line.root(torch.ones(1, 2))
    head = str(forward).splitlines()[0]
    assert "backward" not in head
    assert "kept" not in head
    assert "Median of a pass" in str(prof.per_pass)
    assert repr(prof) == "<Profile of Regions, 3 passes>"
    assert str(prof.table) == repr(prof.table)


def test_a_notebook_shows_escaped_cells():
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(2, 2))
    with hl.profile(model) as prof:
        model(torch.ones(1, 2)).sum().backward()
    html = prof._repr_html_()
    assert "&lt;b&gt;" in html
    assert "Sequential" in html
    assert "outside the model" in html.lower()


def test_a_short_time_is_marked_as_inexact():
    row = hl.profile(nn.Linear(2, 2))
    try:
        (only,) = row.rows
    finally:
        with pytest.warns(hl.HooklineWarning):
            row.remove()
    assert not replace(only, n_inner=1, time=Phases(forward=1e-5)).is_exact
    assert replace(only, n_inner=1, time=Phases(forward=1e-3)).is_exact


def test_a_trace_has_the_trace_event_format(prof, tmp_path):
    data = json.loads(prof.trace(tmp_path / "trace.json").read_text())
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    complete = [event for event in data["traceEvents"] if event["ph"] == "X"]
    for event in data["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
    for event in complete:
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    names = {event["name"] for event in data["traceEvents"] if event["ph"] == "M"}
    assert names == {"process_name", "thread_name"}
    assert data["otherData"]["events that were not kept"] == 0


def test_events_of_a_trace_nest_and_add_up(prof, tmp_path):
    data = json.loads(prof.trace(tmp_path / "trace.json").read_text())
    complete = [event for event in data["traceEvents"] if event["ph"] == "X"]
    open_until = []
    for event in sorted(complete, key=lambda one: (one["ts"], -one["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-6:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-6, event
        open_until.append(end)
    for phase in ("forward", "recompute"):
        found = sum(e["dur"] for e in complete if e["cat"] == phase and e["name"] == "h.0")
        assert found / 1e6 == pytest.approx(getattr(prof["h.0"].time, phase))
    found = sum(e["dur"] for e in complete if e["cat"] == "backward" and e["name"] == "h.1.0")
    assert found / 1e6 == pytest.approx(prof["h.1.0"].time.backward)
    assert sum(e["name"] == "stem" and e["cat"] == "forward" for e in complete) == 6


def test_a_trace_keeps_no_more_than_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr(thread_lane, "_MOST_EVENTS", 8)
    model = nn.Linear(2, 2)
    with hl.profile(model) as prof:
        for _ in range(5):
            model(torch.ones(1, 2))
    data = json.loads(prof.trace(tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in data["traceEvents"]) == 2
    assert data["otherData"]["events that were not kept"] == 3
    assert prof[""].calls == 5


def test_nested_calls_have_the_costs_of_the_table(prof):
    def nodes(calls):
        for node in calls:
            yield node
            yield from nodes(node["children"])

    calls = prof.calls()
    (root,) = calls
    assert (root["path"], root["children"][0]["path"]) == ("(root)", prof.rows[1].path)
    for row in prof.rows:
        own = [node for node in nodes(calls) if node["path"] == (row.path or "(root)")]
        assert sum(node["calls"] for node in own) == row.calls
        assert sum(node["kept"] for node in own) == row.self_activation_bytes
        for name, costs in (("seconds", row.self_time), ("flops", row.self_flops)):
            sums = [sum(parts) for parts in zip(*(node[name] for node in own), strict=True)]
            assert sums == pytest.approx(list(costs) if own else [])


def test_a_context_finds_its_place_again():
    top = CallContext()
    block = top.child("").child("block")
    inner = block.child("inner")
    assert inner.recomputed_child("block") is block
    assert top.child("").recomputed_child("block") is block
    assert top.recomputed_child("inner") is inner
    assert top.recomputed_child("new") is top.children["new"]
    assert [one.path for one in top.walk()] == [None, "", "block", "inner", "new"]
    again = inner.child("block")
    assert outermost_contexts([block, again], lambda path: path == "block") == [block]


def test_a_table_is_made_once_after_the_end(net, image):
    with hl.profile(net) as prof:
        net(image)
        first = prof.table
        net(image)
    assert first.total.passes == 1
    assert prof.table.total.passes == 2
    assert prof.table is prof.table


def test_a_narrow_terminal_has_whole_numbers_in_fewer_columns(prof):
    printout = printout_of(prof.table)
    assert "A wider terminal" not in printout.text(300)
    for width in (40, 60, 80):
        narrow = printout.text(width)
        _, _, left_out = narrow.partition(f"Left out at {width} columns: ")
        assert "peak," in left_out
        for row in prof.rows:
            assert f"{duration(row.time.forward)} " in narrow
            assert row.module.name in narrow


def test_a_file_that_cannot_be_written_is_said(prof, tmp_path):
    with pytest.raises(hl.FolderError, match="No such file or directory"):
        prof.trace(tmp_path / "missing" / "file")
    with pytest.raises(hl.FolderError, match="No space left on device"):
        prof.trace("/dev/full")
    with pytest.raises(hl.FolderError):
        prof.trace(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("depth", ["1", -1, True, None])
def test_a_depth_that_is_no_number_from_0_on_is_refused(depth):
    model = nn.Linear(2, 2)
    with hl.profile(model, flops=False) as prof:
        model(torch.ones(1, 2))
    for table in (prof, prof.per_pass):
        with pytest.raises(hl.InputError) as caught:
            table.fold(depth)
        assert str(caught.value) == (
            f"depth must be an integer from 0 on, got {depth!r}.\nWrite prof.fold(1)."
        )


def test_a_file_that_is_no_path_is_refused():
    model = nn.Linear(2, 2)
    with hl.profile(model, flops=False) as prof:
        model(torch.ones(1, 2))
    with pytest.raises(hl.FolderError) as caught:
        prof.trace(None)
    assert str(caught.value) == (
        "the file must be a path, got None.\nGive its name, such as 'profile.html'."
    )
