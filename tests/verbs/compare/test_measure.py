"""Values are taken apart into tensors, which are paired by their leaf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.compare import measure
from hookline.verbs.compare.measure import measure_values
from hookline.verbs.compare.read_sides import StepNumbers

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def leaves(a, b):
    return [(pair.leaf, pair.alone_in) for pair in measure_values(a, b)]


def test_tensors_are_paired_by_leaf_and_the_others_are_alone():
    a, b = {"h": (X, None), "extra": X}, {"h": (X, X)}
    assert leaves(a, b) == [(("h", 0), ""), (("extra",), "a"), (("h", 1), "b")]
    assert leaves((X, 3), (X,)) == [((0,), "")]  # a flag on one side alone is no value


def test_a_lone_tensor_is_paired_with_the_first_of_its_shape():
    assert leaves(X, {"mask": X[:1], "ids": X}) == [((), ""), (("mask",), "b")]
    assert leaves(X, [X[:1], X[:2]]) == [((), "a"), ((0,), "b"), ((1,), "b")]
    (pair,) = measure_values([X], X[:2])
    assert pair.why == "shapes [4, 8] and [2, 8]"


def test_arrays_of_numpy_are_read_and_texts_are_not():
    values = [np.float32(2), np.arange(3).astype(">i4"), np.array(["a"]), True, 0.5]
    pairs = list(measure_values(values, values))
    assert [pair.leaf for pair in pairs] == [(0,), (1,), (3,), (4,)]
    assert not any(pair.gap.differs for pair in pairs)


def test_rows_of_several_lengths_in_an_array_are_each_a_tensor():
    rows, doubled = np.empty(2, dtype=object), np.empty(2, dtype=object)
    rows[:] = np.ones(3), np.ones(4)
    doubled[:] = np.ones(3), np.full(4, 2.0)
    compared = hl.compare({"fc": rows}, {"fc": doubled})
    assert [(site.site, site.verdict) for site in compared] == [
        ("fc:output[0]", "identical"),
        ("fc:output[1]", "differs"),
    ]


def test_a_value_that_holds_itself_ends():
    cache = [X]
    cache.append(cache)
    assert all(not pair.gap.differs for pair in measure_values(cache, cache))


def test_tensors_without_numbers_are_said():
    (pair,) = measure_values(X.to("meta"), X)
    assert "has no numbers" in pair.why
    assert pair.gap is None


@pytest.mark.slow
def test_columns_of_stores_are_read_in_blocks(tmp_path, monkeypatch):
    model = nn.Linear(8, 3)
    stores = []
    for number in range(2):
        data = torch.cat([X] * 5)
        data[13] += number
        hl.extract(model, data, "", tmp_path / str(number), batch_size=4)
        stores.append(hl.open(tmp_path / str(number)))
    monkeypatch.setattr(measure, "_BLOCK_NUMEL", 9)
    (row,) = hl.compare(*stores).rows
    assert (row.verdict, row.row) == ("differs", 13)
    small = hl.extract(model, X, "", tmp_path / "small")
    (row,) = hl.compare(stores[0], small).rows
    assert row.why == "shapes [20, 3] and [4, 3]"


def test_curves_are_compared_at_the_steps_of_both():
    def curve(*steps):
        return StepNumbers(np.array(steps), np.array(steps, np.float64))

    (pair,) = measure_values(curve(0, 2, 4), curve(0, 1, 2, 3))
    assert pair.forms == ("3 steps", "4 steps")
    assert (pair.gap.differs, pair.gap.problem) == (False, "")
    (pair,) = measure_values(curve(0, 2), curve(1, 3))
    assert (pair.gap, pair.why) == (None, "no step is in both")


def test_of_a_step_that_comes_twice_the_last_number_counts():
    resumed = StepNumbers(np.array([0, 1, 2, 1, 2, 3]), np.array([0.0, 9, 9, 1, 2, 3]))
    whole = StepNumbers(np.arange(6), np.arange(6.0))
    for pair in ((resumed, whole), (whole, resumed)):
        (result,) = measure_values(*pair)
        assert (result.gap.differs, result.gap.problem) == (False, "")
    assert resumed.numbers_at(np.array([1, 3])).tolist() == [1.0, 3.0]
    other = StepNumbers(np.array([0, 1, 1]), np.array([0.0, 1.0, 5.0]))
    (result,) = measure_values(other, whole)
    assert result.gap.n_unequal == 1


def test_what_was_logged_is_compared_too():
    model = nn.Linear(8, 3)
    curves = []
    for factor in (1.0, 2.0):
        with hl.monitor(model, ports="output") as seen:
            model(X)
            seen.log(loss=factor)
        curves.append(seen)
    comparison = hl.compare(*curves)
    assert comparison.first.site == "logged/loss"
    assert comparison["logged/loss"].norm_ratio == pytest.approx(0.5)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_compared_part_by_part(layout):
    parts = [X[:2], X]

    def nested(*parts):
        return torch.nested.nested_tensor([part.clone() for part in parts], layout=layout)

    (same,) = measure_values(nested(*parts), nested(*parts))
    assert not same.gap.differs
    (other,) = measure_values(nested(*parts), nested(X[:2], X + 1))
    assert other.gap.relative > 0.1
    for odd, said in ((nested(X, X[:2]), "of nested tensors"), (X, "[4, 8]")):
        (pair,) = measure_values(nested(*parts), odd)
        assert pair.gap is None
        assert said in pair.why


def test_integers_beyond_64_bits_are_compared_exactly():
    pairs = list(measure_values([2**64, -(2**70), 7], [2**64 + 1, -(2**70), 7]))
    assert [pair.gap.differs for pair in pairs] == [True, False, False]
