"""Rows of two stores are paired by their items, which each of them may have skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from small_stores import write_store

VALUES = torch.arange(32.0).reshape(8, 4) ** 2
LENGTHS = [2, 1, 3, 1, 1, 2, 1, 2]
TOKENS = torch.arange(26.0).reshape(13, 2) ** 2


def rows_of(item):
    return slice(sum(LENGTHS[:item]), sum(LENGTHS[: item + 1]))


def store_of(where, items, change=0.0):
    """A store with a row an item and rows of tokens, of some of eight items."""
    tokens = torch.cat([TOKENS[rows_of(item)] for item in items])
    write_store(
        where,
        {"x": VALUES[items] + change, "t": tokens},
        lengths=[LENGTHS[item] for item in items], per_token=["t"], items=items,
    )  # fmt: skip
    return hl.open(where)


def joined(*stores):
    return hl.Store.cat(stores)


class Rows(torch.utils.data.Dataset):
    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return len(VALUES)

    def __getitem__(self, item):
        if item == self.broken:
            raise OSError("broken")
        return VALUES[item]


@pytest.mark.parametrize("change", [0.0, 9.0])
def test_rows_are_those_of_the_common_items(tmp_path, change):
    a = store_of(tmp_path / "a", [0, 1, 2, 4, 5, 6, 7], change)
    b = store_of(tmp_path / "b", [7, 0, 2, 3, 4, 5, 6])
    comparison = hl.compare(a, b)
    assert comparison["t"].verdict == "identical"
    assert comparison["x"].verdict == ("differs" if change else "identical")
    assert (comparison["x"].form, comparison["t"].form) == ("[6, 4] float32", "[11, 2] float32")
    assert [finding.kind for finding in comparison.findings][:1] == ["inputs"]
    text = comparison.findings[0].text
    assert "1 item only in a (1), 1 item only in b (3); rows are those of the 6 common" in text


def test_items_in_another_order_are_paired(tmp_path):
    a, b = store_of(tmp_path / "a", [0, 1, 2]), store_of(tmp_path / "b", [2, 0, 1])
    comparison = hl.compare(a, b)
    assert comparison.counts["identical"] == 2
    assert "have their items in another order" in comparison.findings[0].text


@pytest.mark.filterwarnings("ignore:.*could not be loaded")
def test_no_layer_is_blamed_for_a_skipped_item(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    stores = [hl.extract(model, Rows(k), "0", tmp_path / str(k), on_error="skip") for k in (2, 5)]
    comparison = hl.compare(*stores)
    assert comparison.suspect is None
    assert [finding.kind for finding in comparison.findings] == ["inputs"]


def test_items_that_cannot_be_paired_are_refused(tmp_path):
    a, b = store_of(tmp_path / "a", [0, 1, 2]), store_of(tmp_path / "b", [3, 4, 5])
    other = store_of(tmp_path / "c", [0, 1, 3])
    for pair in ((a, b), (joined(a, other), joined(a, a))):
        with pytest.raises(hl.InputError, match="must hold the same items"):
            hl.compare(*pair)
    assert hl.compare(joined(a, other), joined(a, other)).ok


def test_other_data_are_told_before_a_layer(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    stores = [hl.extract(model, VALUES + k, "0", tmp_path / str(k)) for k in range(2)]
    first = hl.compare(*stores).findings[0]
    assert (first.kind, first.text[:20]) == ("inputs", "the data may differ:")
    assert not hl.compare(stores[0], stores[0]).findings


def test_counts_of_items_that_differ_are_told(tmp_path):
    stores = [hl.extract(nn.Identity(), VALUES[:n], "", tmp_path / str(n)) for n in (3, 5)]
    comparison = hl.compare(*stores)
    assert comparison.rows[0].why == "shapes [3, 4] and [5, 4]"
    assert comparison.findings[0].text == "3 items in a and 5 items in b"
