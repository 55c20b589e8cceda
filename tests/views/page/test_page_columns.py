from __future__ import annotations

import torch

import hookline as hl
from hookline.views.page.columns import columns
from hookline.views.page.tree_rows import tree_rows
from hookline.views.page.values import read_values


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
