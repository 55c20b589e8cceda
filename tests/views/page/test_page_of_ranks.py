"""The page of a folder that several ranks saved: one rank at a time, by choice."""

from __future__ import annotations

import json

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from page_data import core_of
from rank_folders import folder_of_ranks


@pytest.fixture
def folder(tmp_path):
    """Two ranks, of which the second has a NaN."""
    torch.manual_seed(0)  # other weights may leave a unit dead
    model, runs = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), []
    for rank in range(2):
        x = torch.ones(4, 2) + rank
        x[rank:, 0] *= float("nan") if rank else 1
        with hl.record(model) as run:
            model(x)
        runs.append(run)
    return folder_of_ranks(tmp_path / "run", runs)


def test_each_rank_has_its_own_values_and_findings(served, folder):
    server = served(folder)
    for rank, base in enumerate(("", "items/1/")):
        page = server.get(base).text
        assert f"rank {rank} of 2 ranks" in page
        assert len(core_of(page)["values"]["row"]) == 3
        answer = json.loads(server.get(f"{base}findings").text)
        (finding,) = answer["findings"]
        text = hl.open(folder).ranks[1].findings()[0].text
        assert (finding["level"], finding["row"] is None) == ("error", not rank)
        assert (finding["kind"], finding["text"]) == (
            ("non-finite", text) if rank else ("rank", f"Rank 1: {text}")
        )
        tile = json.loads(server.get(f"{base}maps?at=0").text)["own"]["maps"]["tiles"][0]
        finite = hl.open(folder).ranks[rank]["0"]
        assert tile["hi"] == pytest.approx(float(finite[finite.isfinite()].max()), rel=1e-5)


@pytest.mark.parametrize(("items", "got"), [("2", "rank 2"), ("0,1", "ranks 0 and 1")])
def test_a_rank_that_is_not_there_is_refused(served, folder, items, got):
    answer = served(folder).get(f"items/{items}/")
    assert answer.status == 404
    assert f"has 2 ranks, of which a page shows one, got {got}." in answer.text
    assert "Give a rank from 0 to 1." in answer.text


def test_a_rank_is_chosen_by_keyboard(served, folder, new_page):
    base = served(folder).base
    page = new_page(base, base)
    expect(page.get_by_text("rank 0 of 2 ranks")).to_be_visible()
    expect(page.locator("#tally")).to_have_text("1 error")
    page.get_by_label("Rank").fill("1")
    page.keyboard.press("Enter")
    expect(page.get_by_text("rank 1 of 2 ranks")).to_be_visible()
    expect(page.locator("#tally")).to_contain_text("1 error")


def test_the_error_of_another_rank_opens_its_page(served, folder, new_page):
    base = served(folder).base
    page = new_page(base, base)
    page.get_by_role("button", name="Rank 1: NaN begins").press("Enter")
    expect(page.get_by_text("rank 1 of 2 ranks")).to_be_visible()
    expect(page.locator("#pane-heading")).to_have_text("0")


def test_another_rank_that_is_damaged_is_an_error_of_the_list(served, folder):
    file = next((folder / "rank1").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    (finding,) = json.loads(served(folder).get("findings").text)["findings"]
    assert finding["level"] == "error"
    assert finding["text"].startswith("Rank 1: ")
    assert "is damaged" in finding["text"]
    assert finding["advice"] == "Choose rank 1, or give --items 1, to see it."


@pytest.mark.slow
def test_two_folders_of_ranks_are_compared(served, folder, tmp_path):
    other = folder_of_ranks(tmp_path / "other", hl.open(folder).ranks)
    server = served(folder, other)
    assert server.get().status == 200
    rows = json.loads(server.get("comparison").text)["rows"]
    assert len(rows) >= 3
