"""Results by site take each way to write a site."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine import Site
from hookline.statistics.site_dict import SiteDict

WAYS = ["", "(root)", "(root):output", ":output", Site("")]


def test_each_way_to_write_a_site_finds_it():
    numbers = SiteDict({"(root)": 1, "fc": 2, "fc:input": 3})
    for way in WAYS:
        assert numbers[way] == numbers.get(way) == 1
        assert way in numbers
    assert numbers["fc:output"] == 2
    assert numbers[Site("fc", "input")] == 3
    assert numbers == {"(root)": 1, "fc": 2, "fc:input": 3}


def test_a_site_that_is_not_there_is_named_with_others():
    numbers = SiteDict({"(root)": 1, "fc": 2})
    with pytest.raises(hl.NotRecordedError, match=r"got 'fd'.\nGive one of them, .*'fc'"):
        numbers["fd"]
    assert numbers.get("fd", 7) == 7
    assert "fd" not in numbers


@pytest.mark.parametrize("way", WAYS)
def test_results_take_the_root_in_each_way(tmp_path, way):
    model, x = nn.Sequential(nn.Linear(3, 2)).eval(), torch.ones(4, 3)

    def first(output):
        return output[0, 0]

    store = hl.extract(model, x, ["", "0"], tmp_path)
    assert store.statistics[way] == store.statistics["(root)"]
    with hl.monitor(model, [""]) as seen:
        model(x)
    assert seen[way].mean == seen["(root)"].mean
    assert way in seen
    sweep = hl.sweep(model, x, {"": {"none": hl.edits.scale(0)}}, first)
    assert sweep[way, "none"] == sweep["(root)", "none"]
    estimate = hl.attribute(model, x, [""], first, clean=x + 1)
    assert estimate.scores[way] is estimate.scores["(root)"]


def test_a_column_becomes_a_tensor(tmp_path):
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    column = hl.extract(model, torch.ones(4, 3, dtype=torch.bfloat16), "", tmp_path)[""]
    assert torch.equal(torch.as_tensor(column), column[:])
    assert torch.as_tensor(column, dtype=torch.float64).shape == (4, 2)
