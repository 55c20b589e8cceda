"""Passes, and the backward passes over them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import hookline as hl
from hookline.recordings.pass_log import Log


@pytest.fixture
def twice(looped):
    """One forward, two backward passes, the second twice as large."""
    with hl.record(looped, ["head", "head:grad_output", "block:grad_output"]) as run:
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    return run


def test_several_backward_passes_over_one_forward_are_kept_apart(twice):
    (one,) = twice.passes
    first, second = one.backwards
    assert torch.equal(second["head:grad_output"], 2 * first["head:grad_output"])
    assert [torch.equal(b, 2 * a) for a, b in zip(
        first.calls("block:grad_output"), second.calls("block:grad_output"), strict=True
    )] == [True] * 3  # fmt: skip


@pytest.mark.parametrize("where", [lambda run: run, lambda run: run.passes[0]])
def test_a_look_up_that_does_not_say_which_backward_raises(twice, where):
    with pytest.raises(hl.AmbiguousError) as caught:
        where(twice)["head:grad_output"]
    assert str(caught.value) == (
        "'head:grad_output' has a gradient of each of 2 backward passes."
        "\nWrite run.passes[0].backwards[0]['head:grad_output'] for one."
    )
    assert twice["head"].shape == (1, 1)  # a value has one answer


def test_a_backward_holds_its_gradients_in_the_order_they_came(twice):
    expected = ["head:grad_output", *(f"block:grad_output#{k}" for k in (2, 1, 0))]
    for run in twice.passes[0].backwards:
        assert run.order == expected
        assert list(run) == [*sorted(expected[1:]), expected[0]]
        assert run.number == 0
        assert len(run.backwards) == 1
        assert torch.equal(run["head"], twice["head"])  # the value that they belong to


def test_gradients_have_the_call_number_of_their_value(looped):
    with hl.record(looped, ["block", "block:grad_output"]) as run:
        looped(torch.ones(1, 2)).sum().backward()
    assert run.passes[0].order == [
        "block#0", "block#1", "block#2",
        "block:grad_output#2", "block:grad_output#1", "block:grad_output#0",
    ]  # fmt: skip
    weight = looped.block.weight
    assert torch.allclose(run["block:grad_output#1"], run["block:grad_output#2"] @ weight)
    with pytest.raises(hl.AmbiguousError, match="'block:grad_output#0' to 'block:grad_output#2'"):
        run["block:grad_output"]
    with pytest.raises(hl.NotRecordedError, match="its calls are #0 to #2, got #3"):
        run["block:grad_output#3"]


def test_gradients_come_back_from_a_folder_and_from_pickle(twice, tmp_path):
    twice.save(tmp_path / "run")
    for other in (
        hl.open(tmp_path / "run"), copy.deepcopy(twice), pickle.loads(pickle.dumps(twice)),
    ):  # fmt: skip
        assert len(other.passes[0].backwards) == 2
        assert other.passes[0].order == twice.passes[0].order
        for ours, theirs in zip(
            other.passes[0].backwards, twice.passes[0].backwards, strict=True
        ):  # fmt: skip
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pass_is_copied_with_its_recording_alone(twice, copied):
    with pytest.raises(TypeError, match=r"(?s)^pass 0 .*write \.passes\[0\] of the copy\.$"):
        copied(twice.passes[0])


def test_structured_gradients_come_back_from_a_folder(tmp_path):
    lstm = torch.nn.LSTM(3, 4)
    with hl.record(lstm, "", ports=("output", "grad_output")) as run:
        out, _ = lstm(torch.randn(5, 2, 3))
        out.sum().backward()
    run.save(tmp_path / "run")
    grad, rest = hl.open(tmp_path / "run")[":grad_output"]
    assert torch.equal(grad, torch.ones(5, 2, 4))
    assert rest == (None, None)


def test_a_structured_gradient_changed_in_place_is_not_returned():
    lstm = torch.nn.LSTM(3, 4)
    with hl.record(lstm, "", ports="grad_output") as run:
        out, (h, _) = lstm(torch.randn(5, 2, 3))
        (out.sum() + h.square().sum()).backward()
    run[":grad_output"][1][0].add_(1)
    with pytest.raises(hl.OverwrittenError):
        run[":grad_output"]


def test_a_tensor_given_by_name_is_looked_up_by_it():
    a = torch.ones(2, requires_grad=True)
    with hl.record({"a": a}) as run:
        (a * 3).sum().backward()
    assert run["a"].tolist() == run["a:grad"].tolist() == [3.0, 3.0]


def test_a_shard_is_looked_for_in_the_pass_of_its_value(looped, monkeypatch):
    with hl.record(looped, "head") as run:
        for _ in range(3):
            looped(torch.ones(1, 2))
    searched = []
    entries = Log.entries
    monkeypatch.setattr(Log, "entries", lambda log, current, *rest: (
        searched.append(current.number), entries(log, current, *rest)
    )[1])  # fmt: skip
    assert not run.passes[1].holds_shard("head")
    assert searched == [1]  # hl.compare asks for each value, also of 100,000 passes
