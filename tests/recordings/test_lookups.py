"""Typed look-ups: one tensor, or every tensor of a structure under its own key."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def lstm() -> hl.Recording:
    model = nn.Sequential(nn.LSTM(2, 3))
    with hl.record(model, "0") as run:
        model(torch.ones(4, 2))
    return run


def test_a_tensor_is_the_one_of_the_look_up(net, image):
    with hl.record(net, "fc") as run:
        net(image)
    assert run.tensor("fc") is run["fc"]
    assert run.passes[0].tensor("fc") is run["fc"]


def test_what_is_no_tensor_names_the_tensors_in_it(lstm):
    with pytest.raises(hl.StructureError) as caught:
        lstm.tensor("0")
    assert str(caught.value) == (
        "the value at '0' must be one tensor, got"
        " tuple(Tensor[4, 3], tuple(Tensor[1, 3], Tensor[1, 3]))."
        "\nWrite run.tensor('0:output[0]'), run.tensor('0:output[1][0]'),"
        " run.tensor('0:output[1][1]')."
    )
    with pytest.raises(hl.StructureError, match=r"\nWrite run.passes\[0\].tensor\('0:output\[1\]"):
        lstm.passes[0].tensor("0:output[1]")
    assert lstm.tensor("0:output[1][1]").shape == (1, 3)


def test_a_tensor_of_several_passes_is_ambiguous_as_in_a_look_up(net, image):
    with hl.record(net, "fc") as run:
        net(image)
        net(image)
    with pytest.raises(hl.AmbiguousError, match=r"run.stack\('fc'\)"):
        run.tensor("fc")
    assert torch.equal(run.tensor("fc#pass1"), run.passes[1]["fc"])


def test_leaves_are_the_tensors_under_keys_that_can_be_looked_up(holder, looped):
    with hl.record(holder, ports=("input", "output")) as run:
        holder(torch.ones(2))
    keys = [key for site in run for key in run.leaves(site)]
    assert "inner:output.out.extra.deep[0]" in keys
    assert "inner:input.mask" in keys
    for site in run:
        for key, tensor in run.leaves(site).items():
            assert torch.equal(run.tensor(key), tensor)
            assert torch.equal(run.passes[0].leaves(site)[key], tensor)
    with hl.record(looped, "block") as run:
        looped(torch.ones(1, 2))
    assert list(run.leaves("block#1")) == ["block#1"]


def test_leaves_of_a_value_without_tensors_are_none(looped):
    with hl.record(looped, "head:output", keep=lambda t: "text") as run:
        looped(torch.ones(1, 2))
    assert run.leaves("head") == {}
    with pytest.raises(hl.StructureError, match=r"got str.\nWrite run\['head'\]"):
        run.tensor("head")


def test_leaves_come_from_a_folder_too(lstm, tmp_path):
    opened = hl.open(lstm.save(tmp_path / "run"))
    assert list(opened.leaves("0")) == list(lstm.leaves("0"))
    assert all(torch.equal(opened.tensor(key), value) for key, value in lstm.leaves("0").items())


def test_all_ranks_are_read_by_the_only_one_that_has_a_site(net, image):
    ranks = []
    for part in ("stem", "fc"):  # a pipeline of two
        with hl.record(net, part) as run:
            net(image)
            net(image[:1])
        ranks.append(run)
    run = hl.Recording((ranks[0].sites[0], ranks[1].sites[0]), ranks[0].report())
    run.ranks = tuple(ranks)
    assert torch.equal(run.cat("fc"), ranks[1].cat("fc"))
    assert len(run.cat("fc", dim=None)) == 2
    assert run.stack("fc:output#pass0").shape == (1, 2, 5)
    assert run.tensor("stem#pass1") is ranks[0].tensor("stem#pass1")
    assert list(run.leaves("fc#pass0")) == ["fc#pass0"]
    assert list(run) == ["stem#pass0", "stem#pass1", "fc#pass0", "fc#pass1"]
    run.ranks = (ranks[0], ranks[0])
    with pytest.raises(hl.AmbiguousError, match="on each of 2 ranks"):
        run.cat("stem")


class Inner(nn.Module):
    def forward(self, x):
        return {"logits": x, "states": (x, x + 1)}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Inner()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.block(self.act(x))


@pytest.mark.parametrize(
    ("key", "proposed"),
    [
        ("(root).logits", "(root):output.logits"),
        (".logits", "(root):output.logits"),
        ("logits", "(root):output.logits"),
        ("block.logits", "block:output.logits"),
        ("block.states.1", "block:output.states[1]"),
        ("block.states[1]", "block:output.states[1]"),
        ("block.logits#0", "block:output.logits#0"),
        ("block.logits#pass0", "block:output.logits#pass0"),
        ("block.x:input", None),
        ("act.x", None),
        ("act.0", None),
        ("block.logitss", None),
    ],
)
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_leaf_written_as_a_path_is_proposed_as_a_leaf(key, proposed, is_saved, tmp_path):
    model = Outer()
    with hl.record(model) as run:
        model(torch.zeros(2))
    run = hl.open(run.save(tmp_path / "run")) if is_saved else run
    with pytest.raises(hl.NotRecordedError) as caught:
        run[key]
    if proposed is None:
        assert "has a part" not in str(caught.value)
        return
    assert str(caught.value).endswith(f"in its output.\nWrite {proposed!r}.")
    assert run[proposed].shape == (2,)
    with pytest.raises(hl.NotRecordedError, match="in its output"):
        run.passes[0][key]


def test_a_part_of_an_input_is_proposed_too():
    model = Outer()
    with hl.record(model, "block:input", keep=lambda t: {"x": t}) as run:
        model(torch.zeros(2))
    with pytest.raises(hl.NotRecordedError, match=r"in its input.\nWrite 'block:input.x'"):
        run["block.x:input"]


def test_an_operation_of_the_root_is_looked_up_as_selected():
    model = nn.Bilinear(2, 2, 3)
    with hl.record(model, "(root)@bilinear", ports=("output", "input")) as run:
        output = model(torch.ones(4, 2), torch.ones(4, 2))
    assert torch.equal(run["(root)@bilinear"], output)
    assert "(root)@bilinear:input" in run
