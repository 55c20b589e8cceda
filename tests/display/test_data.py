"""data: results as dicts, JSON and tables of pandas, all with the same keys."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.display.data import json_text

X = torch.ones(3, 4)


def profiled(model):
    with hl.profile(model) as prof:
        model(X).sum().backward()
    return prof


def recorded(model):
    with hl.record(model, nn.Linear, ports=("output", "grad_output")) as run:
        model(X).sum().backward()
    return run


RESULTS = {
    "summary": (lambda model: hl.summary(model, X), "rows"),
    "inventory": (hl.inventory, "hooks"),
    "profile": (profiled, "rows"),
    "medians": (lambda model: profiled(model).per_pass, "rows"),
    "diagnosis": (lambda model: hl.doctor(model, X), "sites"),
    "gradients": (lambda model: recorded(model).gradients(), "rows"),
    "report": (lambda model: recorded(model).report(), "sites"),
}


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_plain_data_and_a_table_of_pandas(name, model):
    make, rows_key = RESULTS[name]
    result = make(model)
    data = result.to_dict()
    assert json.loads(json_text(data))[rows_key]
    frame = result.to_pandas()
    assert list(frame.columns) == list(data[rows_key][0])
    assert len(frame) == len(data[rows_key])


def test_numbers_of_a_table_are_those_of_its_rows(model):
    prof = profiled(model)
    frame = prof.to_pandas().set_index("path")
    assert frame.loc["0", "flops_forward"] == prof["0"].flops.forward == 2 * 3 * 4 * 2
    assert frame.loc["0", "time_backward"] == prof["0"].time.backward
    assert prof.to_dict()["total"]["seconds"] == prof.total.seconds
    assert hl.summary(model, X).to_dict()["flops"] == prof.total.flops.forward
    (linear,) = [row for row in recorded(model).report().to_dict()["sites"] if row["site"] == "0"]
    assert linear == {"site": "0", "type": "Linear", "fired": 1, "why": ""}


def test_a_missing_pandas_is_said(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        hl.inventory(model).to_pandas()
    assert str(caught.value) == "to_pandas() needs pandas.\nRun pip install pandas."


def test_numbers_that_json_lacks_are_strings():
    data = {
        "a": [math.nan, math.inf, -math.inf, 1.5],
        3: {"site": hl.Site("fc")},
        "b": (None, True),
    }
    assert json.loads(json_text(data)) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.5], "3": {"site": "fc"}, "b": [None, True]
    }  # fmt: skip
