"""What a user gives becomes named values, in the order in which modules fire."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.compare.read_sides import read_side

X = torch.ones(2, 4)


def test_values_of_a_recording_come_in_firing_order():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    with hl.record(model, ["**", ":input"], ports=("output", "grad_output")) as run:
        model(X).sum().backward()
    side = read_side(run, "a")
    assert [(entry.key, entry.kind, entry.n_modules) for entry in side.entries][:5] == [
        ("(root):input", "stored", 3), ("0.0", "output", 1), ("0.1", "output", 2),
        ("0", "output", 2), ("1", "output", 3),
    ]  # fmt: skip
    gradients = [entry for entry in side.entries if entry.kind == "gradient"]
    assert {entry.key: entry.n_modules for entry in gradients}["0.0:grad_output"] == 5
    assert {entry.port for entry in gradients} == {"grad_output"}
    assert side.entries[0].is_input
    assert all(torch.is_tensor(entry.read()) for entry in side.entries)


def test_arrays_are_ordered_as_modules_fire():
    names = ["(root)", "h", "h.0", "h.0.fc", "h.1", "head"]
    side = read_side(dict.fromkeys(names, X), "a")
    assert [entry.key for entry in side.entries] == [
        "h.0.fc", "h.0", "h.1", "h", "head", "(root)",
    ]  # fmt: skip


def test_the_only_array_of_a_file_keeps_its_name(tmp_path):
    np.savez(tmp_path / "a.npz", a=X.numpy())
    np.savez(tmp_path / "b.npz", b=X.numpy())
    assert hl.compare(tmp_path / "a.npz", {"a": X}).ok
    with pytest.raises(hl.InputError, match="got none: a has a; b has b"):
        hl.compare(tmp_path / "a.npz", tmp_path / "b.npz")


def test_weights_are_known_by_their_names_or_their_class():
    state = nn.Linear(2, 2).state_dict()
    kinds = {entry.kind for entry in read_side(state, "a").entries}
    kinds |= {entry.kind for entry in read_side({"fc.weight": X, "fc.bias": X}, "a").entries}
    assert kinds == {"stored"}
    assert {entry.kind for entry in read_side({"fc": X, "act": X}, "a").entries} == {"output"}


@pytest.mark.parametrize(
    "names",
    [
        ("weight_ih_l0", "0.bias_hh_l1_reverse", "in_proj_weight", "fc.weight_v", "moe.weight3"),
        ("bn.running_mean", "running_var", "bn.num_batches_tracked"),
        ("fc.parametrizations.weight.original1", "0.weight_orig"),
    ],
)
def test_each_name_of_a_weight_is_known(names):
    activations = [f"h.{number}" for number in range(9)]
    activations += ["attn.weights", "head.bias.gelu", "biased"]
    side = read_side(dict.fromkeys([*names, *activations], X), "a")
    assert {entry.key for entry in side.entries if entry.kind == "stored"} == set(names)


def test_tensors_of_a_file_are_weights_if_it_says_so(tmp_path):
    odd = {"scale": X, "cls_token": X}
    for name, content in {"wrapped": {"state_dict": odd}, "plain": odd}.items():
        torch.save(content, tmp_path / f"{name}.pt")
    kinds = [
        {entry.kind for entry in read_side(tmp_path / f"{name}.pt", "a").entries}
        for name in ("wrapped", "plain")
    ]
    assert kinds == [{"stored"}, {"output"}]


def test_a_recording_of_several_ranks_is_read_as_a_whole():
    model = nn.Linear(4, 4)
    with hl.record(model) as run:
        model(X)
    both = hl.Recording(run.sites, run.report())
    both.ranks = (run, run)
    side = read_side(both, "a")
    assert [entry.key for entry in side.entries] == ["(root)"]
    assert torch.equal(side.entries[0].read(), run["(root)"])  # all ranks have the same
    assert read_side(both, "a", 0).entries[0].read().shape == (4, 4)
    assert hl.compare(both, run).ok
    assert hl.compare(run, both).ok


def test_several_passes_of_ranks_are_numbered():
    model = nn.Linear(4, 4)
    with hl.record(model) as run:
        model(X)
        model(X + 1)
    both = hl.Recording(run.sites, run.report())
    both.ranks = (run, run)
    assert [entry.key for entry in read_side(both, "a").entries] == ["(root)#pass0", "(root)#pass1"]
