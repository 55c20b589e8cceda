"""The page of a sweep in a real browser: a heat map that the keyboard reads cell by cell."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.errors import InputError
from page_data import data_of

MINUS = "\N{MINUS SIGN}"
WORDS = ["the", "<b>cat</b>", "sat", "the"]


class Tokens(nn.Module):
    """Two blocks, the second half as wide, in which each token sees those before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids):
        x = self.embed(ids)
        return self.second((self.first(x) + x.cumsum(1)).tanh())


@pytest.fixture(scope="module")
def swept():
    """Sweeps over sites and positions; the clean run differs from the third token on."""
    torch.manual_seed(0)
    ids, clean = torch.tensor([[1, 2, 3, 1]]), torch.tensor([[1, 2, 4, 1]])
    model = Tokens().eval()

    def metric(out):
        return out[0, -1, 0]

    sites = ["first", "second"]
    return {
        "sweep": hl.sweep(model, ids, sites, metric, clean=clean, each={"position": 1}),
        "units": hl.sweep(model, ids, sites, metric, clean=clean, each={"position": 1, "unit": 2}),
        "estimate": hl.attribute(
            model, ids, sites, metric, clean=clean, each={"position": 1}, check=3
        ),
    }


@pytest.fixture
def visit(new_page, tmp_path, swept):
    def visit(name, texts=None, **options):
        path = hl.write_page(swept[name], tmp_path / "sweep.html", texts=texts)
        return new_page(path.as_uri(), path.as_uri(), **options)

    return visit


def cell(page):
    return page.get_by_role("gridcell")


def menu(page, name):
    return page.get_by_role("combobox", name=name, exact=True)


def number(text):
    return float(text.replace(MINUS, "-").replace("+", ""))


def word_of(cell_text, word):
    return number(re.search(rf"(?:^|; ){word} ([^;]+)", cell_text)[1])


def test_every_cell_is_read_by_keyboard_with_its_numbers(visit, swept):
    page, sweep = visit("sweep"), swept["sweep"]
    page.get_by_role("grid").press("Control+Home")
    for row, site in enumerate(sweep.labels["site"]):
        for position in range(4):
            text = cell(page).inner_text()
            assert text.startswith(f"{site}, position {position};")
            assert word_of(text, "effect") == pytest.approx(sweep[site, position], rel=1e-3)
            assert word_of(text, "metric") == pytest.approx(sweep.values[row, position], rel=1e-3)
            assert text.endswith("unmoved") == sweep.unmoved[row, position]
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
    assert 0 < sweep.unmoved.sum() < sweep.unmoved.size


def test_the_metrics_without_a_change_and_clean_are_on_top(visit, swept):
    page, sweep = visit("sweep"), swept["sweep"]
    facts = page.locator("#metrics dd").all_inner_texts()
    assert number(facts[0]) == pytest.approx(sweep.baseline, rel=1e-3)
    assert number(facts[1]) == pytest.approx(sweep.clean, rel=1e-3)
    expect(page.get_by_role("status")).to_have_text(f"8 changes, {sweep.forwards} forwards")


def test_the_largest_effect_is_chosen_and_leads_the_table(visit, swept):
    page, sweep = visit("sweep", {"position": WORDS}), swept["sweep"]
    row, column = np.unravel_index(np.abs(sweep.effects).argmax(), (2, 4))
    name = f"{sweep.labels['site'][row]}, position {column} “{WORDS[column]}”"
    expect(page.locator("#pane-heading")).to_have_text(name)
    first, last = (page.locator("#findings button").nth(k) for k in (0, -1))
    expect(first.locator("strong")).to_have_text(name)
    assert number(first.locator(".number").inner_text()) == pytest.approx(
        sweep.effects[row, column], rel=1e-3
    )
    last.click()
    expect(page.get_by_role("grid")).to_be_focused()
    expect(last).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#pane-heading")).to_have_text(last.locator("strong").text_content())


def test_the_picture_has_colours_for_signs_and_a_click_reads_it(visit, swept):
    page, sweep = visit("sweep", color_scheme="light"), swept["sweep"]
    colours = page.evaluate(
        "() => { const c = document.querySelector('canvas'), g = c.getContext('2d');"
        " const f = document.querySelector('.chosen-cell').getBoundingClientRect();"
        " const b = c.getBoundingClientRect(), d = c.width / b.width;"
        " return [...g.getImageData((f.x + 5 - b.x) * d, (f.y + 5 - b.y) * d, 1, 1).data]; }"
    )
    largest = sweep.effects.flat[np.abs(sweep.effects).argmax()]
    red, _, blue, _ = colours
    assert (red > blue) == (largest > 0)
    page.locator("canvas").click(position={"x": 60, "y": 30})
    expect(page.locator("#pane-heading")).to_have_text(re.compile("^first, position "))


def test_a_third_axis_is_fixed_by_a_menu_and_axes_are_turned(visit, swept):
    page, units = visit("units"), swept["units"]
    menu(page, "unit").select_option("3")
    page.get_by_role("grid").press("Control+Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert word_of(cell(page).inner_text(), "effect") == pytest.approx(
        units["first", 2, 3], rel=1e-3
    )
    menu(page, "Columns").select_option("unit")
    page.get_by_role("grid").press("Control+End")  # the second site has four units only
    expect(cell(page)).to_have_text("no such change")
    expect(page.locator("#pane-heading")).to_have_text("No such change")
    menu(page, "Rows").select_option("unit")
    expect(page.get_by_role("heading", name="Effect by unit and site")).to_be_visible()


def test_another_number_is_drawn_by_the_menu(visit, swept):
    page, sweep = visit("sweep"), swept["sweep"]
    menu(page, "Number").select_option(label="metric")
    reach = np.abs(sweep.effects).max()
    assert number(page.locator("#key-high").inner_text()) == pytest.approx(
        sweep.baseline + reach, rel=1e-3
    )


def test_estimates_stand_beside_what_was_measured(visit, swept):
    page, estimate = visit("estimate"), swept["estimate"]
    row, column = np.argwhere(~np.isnan(estimate.measured))[0]
    page.get_by_role("grid").press("Control+Home")
    for key in ["ArrowDown"] * row + ["ArrowRight"] * column:
        page.keyboard.press(key)
    text = cell(page).inner_text()
    for word, array in (("estimated", estimate.effects), ("measured", estimate.measured)):
        assert word_of(text, f"{word} effect") == pytest.approx(array[row, column], rel=1e-3)
    expect(page.get_by_role("list", name="Notes")).to_contain_text("Rank correlation with 3")


def test_the_page_holds_the_numbers_of_to_dict(swept, tmp_path):
    sweep = swept["units"]
    text = hl.write_page(sweep, tmp_path).read_text()
    data = data_of(text)
    values = np.full(sweep.values.size, np.nan)
    values[data["places"]] = data["numbers"]["metric"]
    assert np.array_equal(values.reshape(sweep.values.shape), sweep.values, equal_nan=True)
    assert data["numbers"]["effect"] == [row["effect"] for row in sweep.to_dict()["rows"]]


def test_a_metric_that_is_nan_is_a_cell_without_a_number(new_page, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    changes = {"0": {"nan": hl.edits.scale(float("nan")), "off": hl.edits.scale(0)}}
    effects = hl.sweep(model, torch.ones(1, 2), changes, lambda out: out.sum())
    address = hl.write_page(effects, tmp_path / "nan.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#pane-heading")).to_have_text(re.compile("nan"))
    expect(page.locator(".pane-body .numbers")).to_have_text("metricNaNeffectNaN")


@pytest.mark.parametrize(
    ("result", "texts", "said"),
    [
        ({}, None, "result must be one that has a page, got dict"),
        ("sweep", {"position": ["one"]}, "texts must have one text for each label"),
        ("comparison", {"position": WORDS}, "texts must be left out of a page without axes"),
    ],
)
def test_what_has_no_page_is_refused(swept, tmp_path, result, texts, said):
    known = {**swept, "comparison": hl.compare({"a": torch.ones(1)}, {"a": torch.ones(1)})}
    given = known[result] if isinstance(result, str) else result
    with pytest.raises(InputError, match=said):
        hl.write_page(given, tmp_path / "page.html", texts=texts)
    assert not list(tmp_path.iterdir())


@at_any_width
@pytest.mark.parametrize("name", ["units", "estimate"])
def test_axe_finds_no_fault_at_any_width(visit, scheme, width, name):
    size = {"width": width, "height": 900}
    page = visit(name, {"position": WORDS}, color_scheme=scheme, viewport=size)
    expect(page.locator("#pane-heading")).not_to_have_text("")
    assert faults_of(page) == []
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
    expect(page.locator("b")).to_have_count(0)  # a text is no markup
