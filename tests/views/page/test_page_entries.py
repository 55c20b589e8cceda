from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.recordings import Recording
from hookline.views.page.entries import OVERWRITTEN, columns, read_values, tree_rows


def rows_of(recording):
    return tree_rows(recording, read_values(recording))


def drawn(rows) -> list[str]:
    return ["  " * row.depth + row.name for row in rows]


def titles(rows) -> list[str]:
    return [column.title for column in columns(rows)]


def test_modules_lie_under_those_that_hold_them(net, image):
    with hl.record(net, nn.Conv2d) as run:
        net(image)
    rows = rows_of(run)
    assert drawn(rows)[:6] == ["stem", "layer1", "  0", "    conv", "  1", "    conv"]
    assert [row.label for row in rows][3] == "layer1.0.conv"
    assert rows[1].entry is None
    assert rows[1].module_type == "Sequential"
    assert rows[1].has_children


def test_the_root_holds_all_where_it_was_recorded(looped):
    with hl.record(looped) as run:
        looped(torch.zeros(1, 2))
    assert drawn(rows_of(run)) == [
        "(root)", "  block", "    call 0", "    call 1", "    call 2", "  head",
    ]  # fmt: skip


def test_the_order_of_selectors_does_not_tear_the_tree_apart(net, image):
    with hl.record(net, ["layer2.0.conv", "layer1.0.conv", "layer2.1.conv"]) as run:
        net(image)
    assert drawn(rows_of(run)) == [
        "layer1", "  0", "    conv", "layer2", "  0", "    conv", "  1", "    conv",
    ]  # fmt: skip


def test_calls_passes_and_ports_get_a_line_each(looped):
    with hl.record(looped, "block", ports=("input", "output")) as run:
        looped(torch.zeros(1, 2))
        looped(torch.zeros(1, 2))
    rows = rows_of(run)
    assert len(rows) == 1 + 2 * 3 * 2
    assert rows[1].name == "input, pass 0, call 0"
    assert rows[-1].name == "output, pass 1, call 2"
    assert rows[-2].label == "block:input#2"
    assert {"Call", "Pass"} <= set(titles(rows))


def test_columns_that_would_say_nothing_are_left_out(net, image):
    with hl.record(net, "fc") as run:
        net(image)
    assert not {"Call", "Pass", "Feature maps"} & set(titles(rows_of(run)))


def test_a_lone_input_keeps_its_port_in_its_name(net, image):
    with hl.record(net, "fc:input") as run:
        net(image)
    assert [(row.name, row.label) for row in rows_of(run)] == [("fc:input", "fc:input")]


def test_a_single_recorded_call_keeps_its_number(looped):
    with hl.record(looped, "block#1") as run:
        looped(torch.zeros(1, 2))
    assert [row.label for row in rows_of(run)] == ["block#1"]


def test_values_come_in_the_order_in_which_they_fired(net, image):
    with hl.record(net, ["fc", "stem"]) as run:
        net(image)
    order = {row.label: row.entry.order for row in rows_of(run)}
    assert order == {"stem": 0, "fc": 1}


def test_an_overwritten_value_is_a_line_that_says_what_to_do(net, image):
    with hl.record(net, nn.BatchNorm2d) as run:
        net(image)
    seen = [row.entry for row in rows_of(run) if row.entry]
    assert [one.problem for one in seen] == [OVERWRITTEN] * 4
    assert "copy=True" in OVERWRITTEN


def test_a_structure_is_described_and_its_first_tensor_measured(holder):
    with hl.record(holder, "inner") as run:
        holder(torch.ones(2))
    (row,) = rows_of(run)
    assert row.entry.shape.startswith("OrderedDict(pair=Pair(left=Tensor[2]")
    assert row.entry.statistics.mean == 2


def test_a_tensor_that_torch_cannot_convert_is_a_line_saying_so():
    class Packed(nn.Module):
        def forward(self, x):
            return x.view(torch.float4_e2m1fn_x2)

    model = nn.Sequential(Packed())
    with hl.record(model, "0") as run:
        model(torch.zeros(4, dtype=torch.uint8))
    (row,) = rows_of(run)
    assert row.entry.problem.startswith("cannot be measured: ")


def test_a_recording_from_a_folder_gives_the_same_rows(looped, tmp_path):
    with hl.record(looped) as run:
        looped(torch.zeros(1, 2))
    assert rows_of(hl.open(run.save(tmp_path / "run"))) == rows_of(run)


def test_a_recording_that_lists_no_modules_still_has_a_tree(net, image):
    with hl.record(net, nn.Conv2d) as run:
        net(image)
    bare = Recording(run.sites, run.report)
    bare._log.passes[:] = run._log.passes
    assert drawn(rows_of(bare)) == drawn(rows_of(run))


def test_nothing_recorded_gives_no_rows(net):
    with pytest.warns(hl.HooklineWarning), hl.record(net) as run:
        pass
    assert rows_of(run) == []
    assert titles([])[0] == "Module"


def test_gradients_lie_beside_values_and_backward_passes_apart(looped):
    with hl.record(looped, ["head", "head:grad_output", "head.bias:grad"]) as run:
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward()
    assert drawn(rows_of(run)) == ["head", "  output", "  grad_output", "  bias:grad"]
    with hl.record(looped, ["block:grad_output", "head.bias:grad"]) as run:
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    rows = rows_of(run)
    assert [row.name for row in rows if row.entry][:2] == [
        "backward 0, call 2", "backward 0, call 1",
    ]  # fmt: skip
    assert len([row for row in rows if row.entry]) == 8


def cells_of(recording, label):
    rows = tree_rows(recording, read_values(recording))
    row = next(row for row in rows if row.label == label)
    return {column.key: (column.text(row), column.sort_key(row)) for column in columns(rows)}


def test_a_cell_shows_four_digits_and_sorts_by_all_of_them(net, image):
    with hl.record(net) as run:
        net(image)
    cells = cells_of(run, "fc")
    mean = run["fc"].double().mean().item()
    assert cells["mean"][0] == f"{mean:.4g}"
    assert abs(cells["mean"][1] - mean) < 1e-12
    assert cells["shape"] == ("[2, 5]", 10)


def test_a_line_without_a_value_is_empty(strange_run):
    cells = cells_of(strange_run, "blocks")
    assert cells["type"] == ("ModuleList", "ModuleList")
    assert all(cell == ("", None) for key, cell in cells.items() if key not in ("path", "type"))


def test_non_finite_elements_are_counted_in_their_cell(strange_run):
    assert cells_of(strange_run, "broken")["non-finite"] == ("16", 16)


def test_a_call_number_stands_only_where_there_are_several(looped):
    with hl.record(looped) as run:
        looped(torch.zeros(1, 2))
    assert cells_of(run, "block#2")["call"] == ("2", 2)
    assert cells_of(run, "head")["call"] == ("", None)
