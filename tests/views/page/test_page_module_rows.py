from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.recordings import Recording
from hookline.views.page.module_rows import list_rows, repeated_block_rows
from hookline.views.page.value_entries import OVERWRITTEN, measure_values


def rows_in(recording):
    return list_rows(recording, measure_values(recording))


def drawn(rows) -> list[str]:
    depths = []
    for row in rows:
        depths.append(0 if row.parent is None else depths[row.parent] + 1)
    names = [row.name + ("" if row.call is None else f" #{row.call}") for row in rows]
    return ["  " * depth + name for depth, name in zip(depths, names, strict=True)]


def test_modules_lie_under_those_that_hold_them(net, image):
    with hl.record(net, nn.Conv2d) as run:
        net(image)
    rows = rows_in(run)
    assert drawn(rows)[:6] == ["stem", "layer1", "  0", "    conv", "  1", "    conv"]
    assert [row.label for row in rows][3] == "layer1.0.conv"
    assert rows[1].entries == []
    assert rows[1].module_type == "Sequential"


def test_the_root_holds_all_where_it_was_recorded(looped):
    with hl.record(looped) as run:
        looped(torch.zeros(1, 2))
    assert drawn(rows_in(run)) == [
        "(root)", "  block #0", "  block #1", "  block #2", "  head",
    ]  # fmt: skip


def test_the_order_of_selectors_does_not_tear_the_tree_apart(net, image):
    with hl.record(net, ["layer2.0.conv", "layer1.0.conv", "layer2.1.conv"]) as run:
        net(image)
    assert drawn(rows_in(run)) == [
        "layer1", "  0", "    conv", "layer2", "  0", "    conv", "  1", "    conv",
    ]  # fmt: skip


def test_a_row_is_a_call_and_holds_its_values_of_all_passes(looped):
    with hl.record(looped, "block", ports=("input", "output")) as run:
        looped(torch.zeros(1, 2))
        looped(torch.zeros(1, 2))
    rows = rows_in(run)
    assert [row.label for row in rows] == ["block#0", "block#1", "block#2"]
    assert [(e.site.port, e.key.pass_number) for e in rows[1].entries] == [
        ("input", 0), ("output", 0), ("input", 1), ("output", 1),
    ]  # fmt: skip


class Twice(nn.Module):
    """Runs a module that holds others twice, the last of its children first."""

    def __init__(self):
        super().__init__()
        self.late = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x):
        return self.late(self.inner(self.inner(x)))


def test_calls_lie_in_the_call_of_their_holder_in_firing_order():
    with hl.record(model := Twice()) as run:
        model(torch.zeros(1, 2))
    assert drawn(rows_in(run)) == [
        "(root)", "  inner #0", "    0 #0", "    1 #0", "  inner #1", "    0 #1", "    1 #1",
        "  late",
    ]  # fmt: skip


def test_an_operation_lies_under_the_module_that_calls_it():
    class Adds(nn.Module):
        def forward(self, x):
            return x.add(1)

    model = nn.Sequential(nn.Linear(2, 2), Adds())
    with hl.record(model, ["*", "1@add"]) as run:
        model(torch.zeros(1, 2))
    rows = rows_in(run)
    assert drawn(rows) == ["0", "1", "  @add"]
    assert rows[2].label == "1@add"


def test_the_trunk_is_the_repeated_blocks(net, image):
    class Block(nn.Sequential):
        """No plain nn.Sequential."""

    model = nn.Sequential(nn.Linear(2, 2), *[Block(nn.Linear(2, 2)) for _ in range(3)])
    with hl.record(model) as run:
        model(torch.zeros(1, 2))
    rows = rows_in(run)
    assert [rows[index].label for index in repeated_block_rows(rows)] == ["1", "2", "3"]
    named = nn.Sequential()
    for number in range(3):
        named.add_module(f"layer_{number}", Block(nn.Linear(2, 2)))
    holder = nn.ModuleDict({"layers": named})
    with hl.record(holder) as run:
        named(torch.zeros(1, 2))
    rows = rows_in(run)
    trunk = [rows[index].label for index in repeated_block_rows(rows)]
    assert trunk == ["layers.layer_0", "layers.layer_1", "layers.layer_2"]
    with hl.record(net) as run:
        net(image)
    rows = rows_in(run)
    assert [rows[index].label for index in repeated_block_rows(rows)] == [
        "layer1.0", "layer1.1", "layer2.0", "layer2.1",
    ]  # fmt: skip


def test_blocks_recorded_alone_are_the_trunk():
    model = nn.ModuleDict({"body": nn.Sequential(*[nn.ReLU() for _ in range(3)])})
    model["head"] = nn.Linear(2, 2)
    with hl.record(model, ["body.*", "head"]) as run:
        model["head"](model["body"](torch.zeros(1, 2)))
    rows = rows_in(run)
    trunk = [rows[index].label for index in repeated_block_rows(rows)]
    assert trunk == ["body.0", "body.1", "body.2"]


def test_a_lone_input_keeps_its_port_in_its_name(net, image):
    with hl.record(net, "fc:input") as run:
        net(image)
    assert [row.label for row in rows_in(run)] == ["fc"]


def test_a_single_recorded_call_keeps_its_number(looped):
    with hl.record(looped, "block#1") as run:
        looped(torch.zeros(1, 2))
    assert [row.label for row in rows_in(run)] == ["block#1"]


def test_values_come_in_the_order_in_which_they_fired(net, image):
    with hl.record(net, ["fc", "stem"]) as run:
        net(image)
    assert [(row.label, row.entries[0].order) for row in rows_in(run)] == [("stem", 0), ("fc", 1)]


def test_an_overwritten_value_is_a_line_that_says_what_to_do(net, image):
    with hl.record(net, nn.BatchNorm2d) as run:
        net(image)
    assert [entry.problem for entry in measure_values(run)] == [OVERWRITTEN] * 4
    assert "copy=True" in OVERWRITTEN


def test_a_structure_is_described_and_its_first_tensor_measured(holder):
    with hl.record(holder, "inner") as run:
        holder(torch.ones(2))
    (row,) = rows_in(run)
    (entry,) = row.entries
    assert entry.shape.startswith("OrderedDict(pair=Pair(left=Tensor[2]")
    assert entry.statistics.mean == 2


def test_a_tensor_that_torch_cannot_convert_is_a_line_saying_so():
    class Packed(nn.Module):
        def forward(self, x):
            return x.view(torch.float4_e2m1fn_x2)

    model = nn.Sequential(Packed())
    with hl.record(model, "0") as run:
        model(torch.zeros(4, dtype=torch.uint8))
    (entry,) = measure_values(run)
    assert entry.problem.startswith("cannot be measured: ")


def test_a_recording_from_a_folder_gives_the_same_rows(looped, tmp_path):
    with hl.record(looped) as run:
        looped(torch.zeros(1, 2))
    assert rows_in(hl.open(run.save(tmp_path / "run"))) == rows_in(run)


def test_a_recording_that_lists_no_modules_still_has_a_tree(net, image):
    with hl.record(net, nn.Conv2d) as run:
        net(image)
    bare = Recording(run.sites, run.report)
    bare._log.passes[:] = run._log.passes
    assert drawn(rows_in(bare)) == drawn(rows_in(run))


def test_nothing_recorded_gives_no_rows(net):
    with pytest.warns(hl.HooklineWarning), hl.record(net) as run:
        pass
    assert rows_in(run) == []
    assert repeated_block_rows([]) == []


def test_gradients_lie_beside_values_and_backward_passes_apart(looped):
    with hl.record(looped, ["head", "head:grad_output", "head.bias:grad"]) as run:
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward()
    (row,) = rows_in(run)
    assert row.label == "head"
    assert [str(entry.site) for entry in row.entries] == [
        "head", "head:grad_output", "head.bias:grad",
    ]  # fmt: skip
    with hl.record(looped, ["block:grad_output", "head.bias:grad"]) as run:
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    rows = rows_in(run)
    assert [entry.key.backward for entry in rows[0].entries] == [0, 1]
    assert sum(len(row.entries) for row in rows) == 8
