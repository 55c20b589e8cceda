"""A store on the page: statistics of all rows from the manifest, pictures of the items chosen."""

from __future__ import annotations

import json
import re

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.stores import excerpt
from hookline.views.page import FolderSource, OpenRecordings, write_folder_contents_page
from hookline.views.page.recording_data import rows_and_values_data
from hookline.views.page.url_parameters import format_items, parse_items
from hookline.views.page.value_entries import read_tensor
from page_data import core_of
from small_stores import write_store

ROWS = torch.arange(20.0 * 3 * 4 * 4).reshape(20, 3, 4, 4)


@pytest.fixture
def folder(tmp_path):
    hl.extract(nn.Sequential(nn.Identity(), nn.ReLU()), ROWS, ["0", "1"], tmp_path / "s")
    return tmp_path / "s"


def test_statistics_are_of_all_items_and_pictures_of_some(folder):
    shown, _ = OpenRecordings(FolderSource(folder, [3, 5])).current_page_and_version()
    (row,) = [row for row in shown.rows if row.label == "0"]
    (entry,) = row.entries
    values = rows_and_values_data(shown.rows, shown.values)["values"]
    assert [values[name][entry.order] for name in ("mean", "max")] == [479.5, 959]
    with shown.read_lock():
        assert torch.equal(read_tensor(entry), ROWS[[3, 5]])
        measured = shown.measure(entry)
    assert measured.statistics.max == 287  # its histogram is of the items shown
    assert "a store of 20 items" in shown.contents.about
    assert "items 3 and 5" in shown.contents.about


def test_a_file_has_the_statistics_of_all_items(folder, tmp_path):
    contents = FolderSource(folder, [3, 5]).read()
    path, findings = write_folder_contents_page(contents, tmp_path / "store.html", title="A store")
    core = core_of(path.read_text())
    assert max(core["values"]["max"]) == 959
    assert findings.ok
    assert core["judged"]


def test_shapes_sizes_and_counts_are_of_all_items(folder, tmp_path):
    core = core_of(hl.write_page(hl.open(folder), tmp_path).read_text())
    values = core["values"]
    assert core["shapes"] == ["[20, 3, 4, 4]"]
    assert values["numel"] == [960, 960]
    assert values["stored"] == {"0": 3840, "1": 3840}
    assert values["range"]["0"] == [0, 383, 384]  # the histogram is of the first eight items


def test_a_page_tells_shards_skipped_items_and_origin(tmp_path):
    broken = torch.ones(9, 2)
    broken[4, 1] = float("nan")
    write_store(
        tmp_path / "s", {"x": broken, "y": torch.zeros(9, 2)}, skipped=[(8, "no such file")]
    )
    store = hl.open(tmp_path / "s")
    core = core_of(hl.write_page(store, tmp_path / "store.html").read_text())
    assert [finding["kind"] for finding in core["findings"]] == ["non-finite", "dead", "skipped"]
    assert [finding["row"] for finding in core["findings"]] == [0, 1, None]
    shown = core["store"]
    assert [items for _, items, _, _ in shown["shards"]] == [8, 1]
    assert (shown["skipped"], shown["nSkipped"]) == ([[8, "no such file"]], 1)
    assert ["torch", store.provenance.versions["torch"]] in shown["origin"]


def test_the_server_shows_a_store(folder, served):
    server = served(folder)
    page, maps = server.get().text, json.loads(server.get("maps?at=1").text)
    assert "a store of 20 items; the table&#39;s statistics are of all" in page
    assert core_of(page)["values"]["mean"][0] == 479.5
    assert core_of(page)["store"]["nShards"] == 1
    assert json.loads(server.get("findings").text)["judged"]
    assert maps["own"]["maps"]["samples"] == 8


def test_shards_open_and_a_histogram_says_whose_it_is(folder, served, new_page):
    base = served(folder).base
    page = new_page(base, base)
    region = page.get_by_role("region", name="The store")
    expect(region).to_contain_text("Items20")
    region.get_by_text("1 shard").click()
    expect(region.get_by_role("row").nth(1)).to_contain_text("shard-")
    expect(page.locator(".axis").first).to_contain_text("of the items shown")
    expect(page.locator(".axis span").last).to_have_text("383")
    expect(page.locator("dl.numbers", has_text="Stored").first).to_contain_text("Max959")


@at_any_width
def test_axe_finds_no_fault_at_any_width(folder, tmp_path, new_page, scheme, width):
    address = hl.write_page(hl.open(folder), tmp_path / "store.html").as_uri()
    page = new_page(address, address, color_scheme=scheme, viewport={"width": width, "height": 900})
    page.locator("#store summary").last.click()
    assert faults_of(page) == []
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)


def test_an_item_that_is_not_there_is_refused(folder):
    with pytest.raises(hl.InputError, match="below 20"):
        OpenRecordings(FolderSource(folder, [99])).current_page_and_version()


def test_an_excerpt_of_tokens_is_padded(tmp_path):
    ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
    store = hl.extract(nn.Embedding(5, 2), ids, "", tmp_path / "t", mask=lambda given: given > 0)
    run = excerpt(store, [1, 0])
    assert run["(root)"].shape == (2, 2, 2)
    assert (run["(root)"][0, 1] == 0).all()


@pytest.mark.parametrize(
    ("text", "items"), [("5", (5,)), ("5,17", (5, 17)), ("3:6", (3, 4, 5)), ("17, 5", (17, 5))]
)
def test_items_are_numbers_or_a_range(text, items):
    assert parse_items(text) == items
    assert parse_items(format_items(items)) == items


@pytest.mark.parametrize(
    "text", ["", "x", "3:", "5:5", "0:65", "1,,2", "-1", "0:1e9", "0:99999999999", "²"]
)
def test_other_items_are_refused(text):
    with pytest.raises(hl.InputError, match="items must name 1 to 64 items"):
        parse_items(text)


def test_a_recording_has_no_items_to_choose(tmp_path):
    model = nn.Identity()
    with hl.record(model) as run:
        model(torch.ones(2))
    run.save(tmp_path / "r")
    with pytest.raises(hl.InputError, match="items can be chosen of a store, got a recording"):
        FolderSource(tmp_path / "r", [1]).read()


@pytest.mark.slow
def test_an_address_shows_other_items_and_keeps_them(folder, served):
    server = served(folder)
    first, other = server.get(), server.get("items/3,5/")
    assert "pictures and histograms of items 0 to 7" in first.text
    assert "pictures and histograms of items 3 and 5" in other.text
    assert core_of(other.text)["values"]["mean"][0] == 479.5
    for base, largest in (("", 383), ("items/3,5/", 287)):
        maps = json.loads(server.get(f"{base}maps?at=0&sample=1&order=max").text)["own"]["maps"]
        assert maps["tiles"][0]["hi"] <= largest


def test_many_choices_of_items_keep_few_open(folder):
    shelf = OpenRecordings(FolderSource(folder))
    for item in range(10):
        shown, _ = shelf.current_page_and_version((item,))
        assert shelf.current_page_and_version((item,))[0] is shown
    assert len(shelf._pages) == 4


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["x", "0:100", "20"])
def test_an_address_with_wrong_items_says_so(folder, served, wrong):
    answer = served(folder).get(f"items/{wrong}/")
    assert answer.status == 404
    assert "There is nothing to show" in answer.text


def test_the_form_leads_to_other_items(folder, served, new_page):
    base = served(folder).base
    page = new_page(base, base)
    field = page.get_by_label("Items", exact=True)
    assert field.input_value() == "0:8"
    field.fill("17, 5")
    field.press("Enter")
    expect(page.get_by_text("pictures and histograms of items 17 and 5")).to_be_visible()
    page.get_by_label("Items", exact=True).fill("2")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("pictures and histograms of item 2")).to_be_visible()
    expect(page).to_have_url(re.compile("/items/2/"))
