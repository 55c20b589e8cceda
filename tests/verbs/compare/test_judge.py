"""A router's choice that rounding flipped is no fault; one that rounding cannot flip is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hookline as hl
from ported_transformer import run_of

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))


class Router(nn.Module):
    """Chooses two of six experts by their scores."""

    def __init__(self, order):
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.order = order

    def forward(self, x):
        scores = self.fc(x)
        weights, indices = scores.topk(2)
        parts = {"scores": scores, "weights": weights, "indices": indices}
        return tuple(parts[name] for name in self.order)


class Mixture(nn.Module):
    """A sum of two experts, by a router."""

    def __init__(self, order):
        super().__init__()
        self.gate = Router(order)
        self.experts = nn.Parameter(torch.randn(6, 8))
        self.order = order

    def forward(self, x):
        return self.experts[self.gate(x)[self.order.index("indices")]].sum(1)


def pair(order=("scores", "weights", "indices")):
    """A mixture, and its copy whose scores are near ties that rounding puts in another order."""
    torch.manual_seed(0)
    model = Mixture(order).eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for mixture, steps in ((model, (0, 1, 2)), (twin, (2, 0, 1))):
            fc = mixture.gate.fc
            for number, step in enumerate(steps):  # of three scores each two are chosen
                fc.weight[number::3] = fc.weight[::3] * (1 + 1e-7 * step)
                fc.bias[number::3] = fc.bias[::3]
    return model, twin


@pytest.mark.parametrize(
    "order", [("scores", "weights", "indices"), ("indices", "scores", "weights")]
)
def test_a_choice_flipped_by_noise_is_told_and_no_module_blamed(order):
    model, twin = pair(order)
    comparison = hl.compare(run_of(model, X), run_of(twin, X))
    row = comparison[f"gate:output[{order.index('indices')}]"]
    assert row.verdict == "noise"
    assert row.why.endswith("integers not equal: their scores are equal up to noise")
    assert (comparison.suspect, comparison.ok) == (None, False)
    finding = comparison.findings[-1]
    assert (finding.kind, finding.site) == ("choice", row.site)
    assert comparison["(root)"].verdict == "differs"


@pytest.mark.parametrize("fault", ["third best", "other scores", "out of range"])
def test_a_choice_that_noise_cannot_flip_is_a_fault(fault, monkeypatch):
    model, twin = pair()
    forward = twin.gate.forward

    def faulty(x):
        scores, weights, indices = forward(x)
        if fault == "third best":
            indices = scores.topk(5).indices[:, 3:]
        elif fault == "other scores":
            scores = scores.flip(-1)
        else:
            indices = indices + torch.tensor([0, 6])
        return scores, weights, indices

    monkeypatch.setattr(twin.gate, "forward", faulty)
    twin.experts.data = torch.cat([twin.experts.data] * 2)
    comparison = hl.compare(run_of(model, X), run_of(twin, X))
    assert comparison.suspect == "gate"
    assert all(finding.kind != "choice" for finding in comparison.findings)


class Greedy(nn.Module):
    """The best score of each row, or of all, and its place."""

    def __init__(self, *, of_all):
        super().__init__()
        self.of_all, self.step = of_all, 0.0

    def forward(self, x):
        scores = x.flatten() if self.of_all else x
        scores = torch.cat([scores, scores + self.step], -1)
        return scores, scores.argmax(-1)


@pytest.mark.parametrize("of_all", [False, True])
def test_the_place_of_the_largest_is_a_choice_too(of_all):
    model, twin = Greedy(of_all=of_all), Greedy(of_all=of_all)
    model.step, twin.step = 1e-6, -1e-6
    row = hl.compare(run_of(model, X), run_of(twin, X))["(root):output[1]"]
    assert (row.verdict, "equal up to noise" in row.why) == ("noise", True)
    twin.step = -1.0
    row = hl.compare(run_of(model, X), run_of(twin, X))["(root):output[1]"]
    assert row.verdict == "differs"


class Counter(nn.Module):
    """A number beside the place of the largest score."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        return x.sum(), x.argmax(-1) + self.step


def test_a_number_is_no_scores_of_a_choice():
    row = hl.compare(run_of(Counter(0), X), run_of(Counter(1), X))["(root):output[1]"]
    assert row.verdict == "differs"
