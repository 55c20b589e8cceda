"""Values of several ranks, taken apart and put together again."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache, GPT2Config
from transformers.modeling_outputs import BaseModelOutput

import hookline as hl
from hookline.recordings.match_rank_values import RankValue, check_same_structure
from rank_folders import folder_of_ranks

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Held:
    t: object
    n: float = 2.0


class Settings:
    """An object of which only the tensors are values."""

    def __init__(self, t):
        self.t, self.width, self.device = t, 4, torch.device("cpu")


def opened(folder, keeps, x=None):
    """What one process reads of ranks that keep these values."""
    model, runs = nn.Identity(), []
    for keep in keeps:
        with hl.record(model, keep=keep) as run:
            model(torch.ones(2, 2) if x is None else x)
        runs.append(run)
    return hl.open(folder_of_ranks(folder / "run", runs))


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: (t, [t, {"k": t, 3: None}], 2.5, "text", t.shape),
        lambda t: Pair(t, {"names": {"b", "a"}}),
        Held,
        lambda t: BaseModelOutput(last_hidden_state=t, hidden_states=(t, t)),
        lambda t: [Settings(t), {}, ()],
    ],
)
def test_a_value_is_put_together_with_other_tensors(hold):
    apart = RankValue(hold(torch.ones(2)))
    assert not [node for node in apart.nodes if node["kind"] == "other"]
    new = RankValue(apart.rebuild([tensor + 1 for tensor in apart.tensors]))
    assert new.nodes == apart.nodes
    assert all(tensor.tolist() == [2, 2] for tensor in new.tensors)


def test_numbers_of_an_object_are_its_settings():
    kinds = {node["at"]: node["kind"] for node in RankValue([Settings(torch.ones(2)), 1.5]).nodes}
    expected = {"[0].t": "plain", "[0].width": "same", "[0].device": "ignored", "[1]": "number"}
    assert kinds == {"": "container", "[0]": "container", **expected}


def test_a_cache_is_taken_apart():
    cache = DynamicCache(config=GPT2Config(n_layer=2))
    cache.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    apart = RankValue({"cache": cache})
    check_same_structure("run.full('x')", [0, 1], [apart.nodes, apart.nodes])
    new = apart.rebuild([tensor * 3 for tensor in apart.tensors])["cache"]
    assert type(new) is DynamicCache
    assert new.layers[0].keys.unique().item() == 3
    assert cache.layers[0].keys.unique().item() == 1


def test_what_is_shared_many_times_is_taken_apart_once():
    value = [torch.ones(1), 2.0]
    for _ in range(60):
        value = [value, value]
    apart = RankValue(value)
    check_same_structure("run.full('x')", [0, 1], [apart.nodes, RankValue(value).nodes])
    new = apart.rebuild([torch.zeros(1)], [3.0])
    assert new[0] is new[1]
    for _ in range(60):
        new = new[1]
    assert new == [0, 3.0]


@pytest.mark.parametrize(
    "value",
    [{torch.ones(1)}, object(), np.array(["a"]), np.datetime64("2020"), [nn.Linear(1, 1)]],
    ids=["a set of tensors", "an object", "texts of NumPy", "a date", "modules"],
)
def test_what_cannot_be_combined_is_refused(value):
    nodes = RankValue(value).nodes
    with pytest.raises(hl.RanksError, match="combines tensors, NumPy arrays and numbers, got"):
        check_same_structure("run.reduced('x')", [0, 1], [nodes, nodes])


def test_a_folder_reduces_numbers_at_any_depth(tmp_path):
    run = opened(tmp_path, [lambda t: {"n": [1, 2.5], "t": t}, lambda t: {"n": [2.5, 3], "t": -t}])
    total = run.reduced("(root)", op="sum")
    assert total["n"] == [3.5, 5.5]
    assert total["t"].unique().item() == 0
    assert run.reduced("(root)", op="max")["n"] == [2.5, 3.0]
    with pytest.raises(hl.RanksError, match=r"the same on every rank, got rank 0: 1 at .n\[0\]"):
        run.full("(root)", dim=0)


@pytest.mark.parametrize(
    ("keeps", "op", "expected"),
    [
        ([lambda t: 1, lambda t: 2], "mean", 1.5),
        ([lambda t: 10**30, lambda t: 1], "sum", 10**30 + 1),
        ([lambda t: 1, lambda t: 2.5], "min", 1.0),
        ([lambda t: True, lambda t: False], "sum", 1),
    ],
)
def test_numbers_of_several_kinds_are_reduced(tmp_path, keeps, op, expected):
    total = opened(tmp_path, keeps).reduced("(root)", op=op)
    assert (total, type(total)) == (expected, type(expected))


def test_a_number_that_is_none_is_reduced_to_none(tmp_path):
    run = opened(tmp_path, [lambda t: math.nan, lambda t: 1.0])
    assert all(math.isnan(run.reduced("(root)", op=op)) for op in ("mean", "sum", "max", "min"))


@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
def test_a_folder_refuses_what_was_not_saved_and_what_differs(tmp_path):
    run = opened(tmp_path / "lost", [lambda t: 1j, lambda t: 1j])
    with pytest.raises(hl.RanksError, match="got NotSaved"):
        run.reduced("(root)")
    run = opened(tmp_path / "text", [lambda t: ["a", t], lambda t: ["b", t]])
    for ask in (lambda: run.reduced("(root)"), lambda: run.full("(root)", dim=0)):
        with pytest.raises(hl.RanksError, match=r"got rank 0: 'a' at \[0\]; rank 1: 'b'"):
            ask()
    run = opened(tmp_path / "keys", [lambda t: {"a": t}, lambda t: {"b": t}])
    with pytest.raises(hl.RanksError, match=r"not of one kind: .* at \.a; .* at \.b"):
        run.reduced("(root)")
