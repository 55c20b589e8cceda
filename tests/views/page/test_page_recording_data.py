"""The data of a recording's page: its numbers against the tensors', its findings, its maps."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.views.page.module_rows import list_rows
from hookline.views.page.page_state import failed_pass_notices, missing_values_text
from hookline.views.page.quantised_maps import (
    ASKED_FOR,
    IN_FILE,
    choose_same_channels,
    quantised_maps,
)
from hookline.views.page.recording_data import (
    findings_data,
    rows_and_values_data,
    silent_sites_data,
    statistics_columns,
    try_to_judge,
)
from hookline.views.page.value_entries import list_values, measure_values
from hookline.views.page.what_to_draw import Choice


def data_of(recording):
    entries = measure_values(recording)
    return rows_and_values_data(list_rows(recording, entries), entries), entries


@pytest.mark.slow
def test_numbers_are_those_of_the_tensors(net, image):
    with hl.record(net, ports=("output", "grad_output"), copy=True) as run:
        net(image).square().sum().backward()
    core, entries = data_of(run)
    values = core["values"]
    assert len(entries) == len(run)
    for entry in entries:
        tensor, at = entry.recorded.read().double(), entry.order
        expected = {
            "mean": tensor.mean(), "std": tensor.std(correction=0), "min": tensor.min(),
            "max": tensor.max(), "zeros": (tensor == 0).double().mean(),
        }  # fmt: skip
        for name, number in expected.items():
            assert values[name][at] == pytest.approx(float(number), rel=6e-4, abs=1e-12), name
        assert core["shapes"][values["shape"][at]] == str(list(tensor.shape))
        assert core["ports"][values["port"][at]] == entry.site.port
        # The page computes the norm from the mean and the deviation.
        squares = values["std"][at] ** 2 + values["mean"][at] ** 2
        norm = math.sqrt(values["numel"][at] * squares)
        assert norm == pytest.approx(float(tensor.norm()), rel=1e-3)


def test_a_share_of_zeros_is_1_only_where_all_are_zero():
    ramp, zeros = torch.zeros(100_000), torch.zeros(4)
    ramp[0] = 1
    model = nn.ModuleList([nn.Identity(), nn.Identity()])
    with hl.record(model, "*") as run:
        model[0]((ramp, zeros))
        model[1](zeros)
    core, _ = data_of(run)
    assert core["values"]["zeros"] == [0.9999, 1]
    assert [part["zeros"] for part in core["values"]["parts"]["0"]] == [0.9999, 1]


def test_histograms_are_24_levels_with_logarithmic_heights():
    with hl.record(model := nn.Identity()) as run:
        model(torch.tensor([0.0] * 7 + [1.0] + [float("nan")]))
    core, _ = data_of(run)
    text = core["values"]["hist"]
    assert len(text) == 24
    low = round(62 * math.log(2) / math.log(8))
    assert [ord(c) - 48 for c in text] == [63, *[0] * 22, 1 + low]
    assert core["values"]["bad"] == {"0": 1}


def test_values_that_are_not_measured_wait_without_numbers(strange_run):
    entries = list_values(strange_run)
    columns = statistics_columns(entries)
    assert columns["waits"] == [entry.order for entry in entries]
    assert set(columns["mean"]) == {None}
    columns = statistics_columns(measure_values(strange_run))
    assert columns["waits"] == []
    (problem,) = columns["problem"].values()
    assert "copy=True" in problem


def test_findings_name_their_rows(strange_run):
    entries = measure_values(strange_run)
    rows = list_rows(strange_run, entries)
    data = findings_data(*try_to_judge(strange_run.findings), rows, entries)
    assert data["judged"]
    *others, unused = strange_run.findings()
    assert [finding["text"] for finding in data["findings"]] == [f.text for f in others]
    assert unused.site == silent_sites_data(strange_run)[0][0] == "unused"
    first = data["findings"][0]
    assert (first["kind"], rows[first["row"]].label) == ("non-finite", "broken")
    json.dumps(data, allow_nan=False)


def test_a_finding_in_a_leaf_a_call_and_a_parameter_has_its_row(looped):
    class Halves(nn.Module):
        def forward(self, x):
            return x, x / 0

    model = nn.Sequential(nn.Identity(), Halves())
    with hl.record(model, "1") as run:
        model(torch.ones(2, 3))
    entries = measure_values(run)
    rows = list_rows(run, entries)
    (finding, *_) = findings_data(*try_to_judge(run.findings), rows, entries)["findings"]
    assert finding["site"] == "1:output[1]"
    assert rows[finding["row"]].label == "1"


def test_what_follows_a_fault_of_the_forward_is_not_before_it():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with hl.record(model, ports=("output", "grad_output"), copy=True) as run:
        model(torch.ones(2, 4)).sum().backward()
    entries = measure_values(run)
    rows = list_rows(run, entries)
    (finding, *_) = findings_data(*try_to_judge(run.findings), rows, entries)["findings"]
    assert finding["site"] == "2"
    assert [rows[index].label for index in finding["also"]] == ["3", "4", "(root)"]


def test_sites_that_never_fired_come_with_the_reason(strange_run):
    ((site, kind, why),) = silent_sites_data(strange_run)
    assert (site, kind) == ("unused", "Linear")
    assert "not reached in this forward" in why


def test_what_a_recording_lacks_is_one_line(tmp_path):
    class Keeps(nn.Module):
        def forward(self, x, cache=None):
            return x

    model = nn.Sequential(Keeps(), nn.Identity())
    model.forward = lambda x: model[0](x, cache=object())
    with hl.record(model, ports=("input", "output")) as run:
        model(torch.ones(2, 4))
    run.save(tmp_path / "run")
    kept = hl.open(tmp_path / "run")
    assert (
        missing_values_text(kept) == "2 selected sites without a value, 1 part of values not saved"
    )
    assert failed_pass_notices(kept) == []
    assert [why for _, _, why in silent_sites_data(kept)][-1] == "not saved in the folder"


# -- maps -----------------------------------------------------------------------------------------


def numbers_of(maps, index=0):
    tile, bits = maps["tiles"][index], maps["bits"]
    codes = np.frombuffer(base64.b64decode(tile["q"]), np.uint8 if bits == 8 else "<u2")
    numbers = tile["lo"] + codes / (2**bits - 2) * (tile["hi"] - tile["lo"])
    numbers[codes == 2**bits - 1] = np.nan
    return torch.from_numpy(numbers.reshape(maps["h"], maps["w"]))


@pytest.mark.parametrize(("limits", "codes"), [(IN_FILE, 254), (ASKED_FOR, 65534)])
def test_maps_hold_the_numbers_up_to_half_a_code(limits, codes):
    value = torch.randn(2, 5, 6, 7)
    maps = quantised_maps(value, "Conv2d", Choice(sample=1), limits)
    order = value[1].abs().amax((1, 2)).argsort(descending=True).tolist()
    assert [tile["c"] for tile in maps["tiles"]] == order
    for index, channel in enumerate(order):
        part = value[1, channel]
        error = float(part.max() - part.min()) / codes / 2 + 1e-5
        assert (numbers_of(maps, index) - part).abs().max() <= error


def test_nan_is_told_from_numbers_in_a_map():
    value = torch.ones(1, 1, 2, 2)
    value[0, 0, 0, 1] = float("nan")
    value[0, 0, 1, 0] = 3
    shown = numbers_of(quantised_maps(value, "Conv2d", Choice(), IN_FILE))
    assert shown.isnan().tolist() == [[False, True], [False, False]]
    assert shown[1, 0] == 3


def test_a_gradient_shows_the_channels_of_its_output():
    value, gradient = torch.randn(1, 40, 4, 4), torch.randn(1, 40, 4, 4)
    own = quantised_maps(value, "Conv2d", Choice(), IN_FILE)
    beside = quantised_maps(gradient, "Conv2d", choose_same_channels(Choice(), own), IN_FILE)
    assert [tile["c"] for tile in own["tiles"]] == [tile["c"] for tile in beside["tiles"]]
    assert len(own["tiles"]) == 8


def test_attention_weights_are_heads_in_order_and_tokens_a_table():
    heads = quantised_maps(torch.randn(2, 12, 9, 9).softmax(-1), "", Choice(), IN_FILE)
    assert heads["kind"] == "heads"
    assert [tile["c"] for tile in heads["tiles"]] == list(range(12))
    tokens = quantised_maps(torch.randn(2, 200, 64), "Linear", Choice(), IN_FILE)
    assert (tokens["kind"], tokens["rows"], tokens["columns"]) == ("table", 200, 64)
    assert (tokens["h"], tokens["w"]) == (96, 64)
    pooled = quantised_maps(torch.randn(2, 64, 1, 1), "AdaptiveAvgPool2d", Choice(), IN_FILE)
    assert (pooled["kind"], pooled["h"], pooled["w"]) == ("table", 1, 64)
