"""A store on the page: statistics of all rows from the manifest, pictures of the items chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.cli.viewing import items_of
from hookline.stores import excerpt
from hookline.views.page import FolderSource, OpenRecordings

ROWS = torch.arange(20.0 * 3 * 4 * 4).reshape(20, 3, 4, 4)


@pytest.fixture
def folder(tmp_path):
    hl.extract(nn.Sequential(nn.Identity(), nn.ReLU()), ROWS, ["0", "1"], tmp_path / "s")
    return tmp_path / "s"


def test_statistics_are_of_all_items_and_pictures_of_some(folder):
    shown, _ = OpenRecordings(FolderSource(folder, [3, 5])).shown()
    (row,) = [row for row in shown.rows if row.label == "0"]
    cells = {column.key: column.text(row) for column in shown.columns}
    assert cells["shape"] == "[20, 3, 4, 4]"
    assert cells["mean"] == "479.5"
    assert cells["max"] == "959"
    with shown.reading():
        assert torch.equal(shown.tensor(row.seen), ROWS[[3, 5]])
        measured = shown.measure(row.seen)
    assert measured.statistics.max == 287  # its histogram is of the items shown
    assert "a store of 20 items" in shown.about
    assert "items 3 to 5" in shown.about


def test_the_server_shows_a_store(folder, served):
    server = served(folder)
    page, site = server.get().text, server.get("site?at=1").text
    assert "a store of 20 items; the table&#39;s statistics are of all" in page
    assert "479.5" in page
    assert "Sample" in site


def test_an_item_that_is_not_there_is_refused(folder):
    with pytest.raises(hl.InputError, match="below 20"):
        OpenRecordings(FolderSource(folder, [99])).shown()


def test_an_excerpt_of_tokens_is_padded(tmp_path):
    ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
    store = hl.extract(nn.Embedding(5, 2), ids, "", tmp_path / "t", mask=lambda given: given > 0)
    run = excerpt(store, [1, 0])
    assert run["(root)"].shape == (2, 2, 2)
    assert (run["(root)"][0, 1] == 0).all()


@pytest.mark.parametrize(
    ("text", "items"), [(None, None), ("5", [5]), ("5,17", [5, 17]), ("3:6", [3, 4, 5])]
)
def test_items_are_numbers_or_a_range(text, items):
    assert items_of(text) == items


@pytest.mark.parametrize("text", ["", "x", "3:", "5:5", "0:65", "1,,2"])
def test_other_items_are_refused(text):
    with pytest.raises(hl.InputError, match="--items must name 1 to 64 items"):
        items_of(text)
