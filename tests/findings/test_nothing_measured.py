"""Findings say of which sites nothing was measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


class Empty(nn.Module):
    def forward(self, x):
        return x[:, :0]


def net(device="cpu"):
    return nn.Sequential(nn.Linear(4, 3, device=device), nn.ReLU()).eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_findings_of_a_recording_name_what_has_no_numbers(device, tmp_path):
    model, x = net(device), torch.ones(0 if device == "cpu" else 2, 4, device=device)
    with hl.record(model) as run:
        model(x)
    assert run.findings().notes == ["Not judged, because they hold no numbers: 0, 1, (root)."]
    run.save(tmp_path / "run")
    if device == "cpu":
        assert hl.open(tmp_path / "run").findings().notes == run.findings().notes


def test_values_without_tensors_are_not_called_empty():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with hl.record(model, ports=("output", "grad_output", "grad_input")) as run:
        model(torch.ones(2, 4)).sum().backward()
    assert run["0:grad_input"] is None
    assert run.findings().notes == []
    with hl.record(model, keep=lambda t: t.norm().item()) as run:
        model(torch.ones(2, 4))
    assert run.findings().notes == []


def test_findings_of_a_training_name_what_has_no_numbers():
    model = net()
    with pytest.warns(hl.HooklineWarning, match="had an empty value"):
        with hl.monitor(model, ["0"], ports=["output", "value"]) as seen:
            model(torch.ones(0, 4))
    assert seen.findings().notes == ["Not judged, because they hold no numbers: 0."]
    with hl.monitor(model, ["0"], ports=["output", "value"]) as seen:
        model(torch.ones(1, 4))
    assert seen.findings().notes == []


def test_findings_of_a_store_name_what_has_no_numbers(tmp_path):
    store = hl.extract(Empty(), torch.ones(3, 4), "", tmp_path)
    assert store.findings().notes == ["Not judged, because they hold no numbers: (root)."]
