"""The table of a comparison: text, HTML, plain values and look-ups."""

from __future__ import annotations

import json

import pytest
import torch

import hookline as hl
from hookline.display.json_text import json_text
from hookline.verbs.compare.comparison import ratio_text
from ported_transformer import FAULTS, net, run_of


@pytest.fixture(scope="module")
def comparison():
    port, model = net(), net()
    FAULTS["tanh for erf"][0](port)
    return hl.compare(run_of(port), run_of(model))


def test_equal_stretches_are_one_line_and_the_first_is_above(comparison):
    text = str(comparison)
    head, _, table = text.partition("\n\n")
    assert head.startswith("80 sites: ")
    assert "- first beyond noise: blocks.1.mlp.act (relative" in head
    assert "its inputs are equal up to noise" in head.replace("\n", " ")
    first, *rest = table.splitlines()[2:]
    assert first.split() == ["…", "46", "sites", "identical", "0"]
    assert rest[0].split()[:2] == ["blocks.1.mlp.act", "differs"]
    assert all(len(line) <= 80 for line in text.splitlines())
    html = comparison._repr_html_()
    assert "<br>- structure of the model differs" in html
    assert "blocks.1.mlp.act" in html


def test_the_values_are_plain_and_rows_are_found(comparison):
    data = json.loads(json_text(comparison.to_dict()))
    assert (data["ok"], data["first"]) == (False, "blocks.1.mlp.act")
    assert data["counts"]["differs"] == comparison.counts["differs"] > 0
    assert [finding["kind"] for finding in data["findings"]] == ["model", "site"]
    row = comparison["blocks.1.mlp.act"]
    assert row == comparison.first
    assert str(row).startswith("blocks.1.mlp.act: differs (relative")
    assert row.relative > row.floor.relative
    table = comparison.to_pandas()
    assert len(table) == len(comparison) == len(list(comparison)) == 80
    assert {"site", "verdict", "relative", "worst_row", "floor_relative"} <= set(table.columns)
    with pytest.raises(hl.NotRecordedError, match=r"got 'mlp.act'.\nGive one of .*blocks"):
        comparison["mlp.act"]


@pytest.mark.parametrize(
    ("values", "why"),
    [(torch.full((2, 3), torch.nan), "all elements are NaN in both"),
     (torch.ones(0, 3), "no elements")],
)  # fmt: skip
def test_what_has_no_number_to_compare_is_not_identical(values, why):
    comparison = hl.compare({"x": values}, {"x": values.clone()})
    assert (comparison["x"].verdict, comparison["x"].why) == ("not comparable", why)
    assert not comparison.ok
    assert why in comparison.findings[0].text


def test_recordings_on_the_meta_device_have_nothing_to_compare():
    model = torch.nn.Linear(3, 2, device="meta")
    runs = []
    for _ in range(2):
        with hl.record(model, ["**", "(root):input"]) as run:
            model(torch.ones(4, 3, device="meta"))
        runs.append(run)
    comparison = hl.compare(*runs)
    assert comparison.counts["not comparable"] == len(comparison) == 2
    assert "has no numbers" in comparison["(root)"].why


def test_some_nan_and_some_empty_values_may_be_identical():
    values = {"x": torch.tensor([1.0, torch.nan]), "unused": torch.ones(0, 3)}
    assert hl.compare(values, {name: value.clone() for name, value in values.items()}).ok


def test_a_worst_row_or_element_is_named_by_its_place():
    x = torch.ones(8, 16)
    wrong = x.clone()
    wrong[5, 3] = 1.01
    (row,) = hl.compare({"x": wrong}, {"x": x}).rows
    assert (row.row, row.element) == (5, (5, 3))
    wrong = x.clone()
    wrong[0, 0] = 1 + 1e-4
    (row,) = hl.compare({"x": wrong.double()}, {"x": x}).rows
    assert "relative" in row.why or "element [0, 0]" in row.why


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, ""),
        (1.0, "1"),
        (1.003, "1.003"),
        (0.9998, "0.9998"),
        (1 - 3e-7, "0.9999997"),
        (1.02, "1.02"),
        (2.5, "2.5"),
    ],
)
def test_a_ratio_close_to_one_keeps_the_digits_that_tell_it(ratio, text):
    assert ratio_text(ratio) == text
