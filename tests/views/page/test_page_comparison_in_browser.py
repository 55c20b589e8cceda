"""The page of a comparison in a real browser: served and as a file, by mouse and by keyboard."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.views.page import write_comparison_page

MINUS = "\N{MINUS SIGN}"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def models():
    """Three blocks, and their port, whose second block has another GELU."""
    torch.manual_seed(0)

    def build(kind):
        def block(act):
            return nn.Sequential(nn.Linear(8, 8), act)

        return nn.Sequential(block(nn.GELU()), block(kind), block(nn.GELU()))

    model, port = build(nn.GELU()), build(nn.GELU("tanh"))
    port.load_state_dict(model.state_dict())
    return model.eval(), port.eval()


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    x = torch.randn(4, 8)
    for model, name in zip(models, ("original", "port"), strict=True):
        with torch.no_grad(), hl.record(model, ports=("input", "output"), copy=True) as run:
            model(x)
        run.save(place / name)
    return place / "port", place / "original"


@pytest.fixture(scope="module")
def comparison(folders):
    return hl.compare(*folders)


@pytest.fixture
def open_file(new_page, tmp_path):
    def open_file(comparison, hash="", **options):
        path = write_comparison_page(comparison, tmp_path / "report.html", ("port", "original"))
        return new_page(path.as_uri() + hash, path.as_uri(), **options)

    return open_file


@pytest.fixture(params=["served", "file"])
def page(request, folders, comparison, served, new_page, open_file):
    if request.param == "file":
        return open_file(comparison)
    server = served(*folders)
    return new_page(server.base, server.base)


def lines(page):
    """The cells of each row that is laid out."""
    rows = page.locator(".window [role=row]")
    expect(rows.first).to_be_visible()
    return [row.get_by_role("gridcell").all_inner_texts() for row in rows.all()]


def chosen(page):
    return page.locator("#pane-heading")


def test_findings_come_first_then_the_difference_and_its_suspect(page, comparison):
    findings = page.locator("#findings li")
    *others, first = comparison.findings
    expect(findings).to_have_count(len(others))
    for item, finding in zip(findings.all(), others, strict=True):
        expect(item).to_contain_text(finding.text)
    assert first.text.startswith("first beyond noise: 1.1 ")  # the verdict tells it, once
    expect(page.locator("#verdict")).to_contain_text("first value beyond noise is 1.1")
    expect(page.locator("#verdict")).to_contain_text("Suspect: 1.1")
    hint = first.text.partition("; ")[2]
    expect(page.locator("#verdict")).to_contain_text(f"Suspect: 1.1; {hint}.")
    expect(chosen(page)).to_have_text("1.1")


def test_sites_stand_in_firing_order_and_equal_ones_are_folded(page, comparison):
    texts = [cells[0] for cells in lines(page)]
    first = next(n for n, row in enumerate(comparison) if row.verdict == "differs")
    assert texts[0] == f"{first} sites"
    assert texts[1] == "1.1suspect"
    assert texts[2:] == [row.site for row in comparison.rows[first + 1 :]]
    page.locator(".window [role=row]").first.click()
    assert [cells[0] for cells in lines(page)][1] == comparison.rows[0].site
    expect(page.locator(".window [role=row]").first).to_have_attribute("aria-expanded", "true")


def test_its_numbers_are_those_of_the_comparison(page, comparison):
    row = comparison["1.1"]
    cells = lines(page)[1]
    assert cells[1] == "differs"
    numbers = page.locator("#pane > .pane-body > .few tbody tr td:first-of-type").all_inner_texts()
    floors = page.locator("#pane > .pane-body > .few tbody tr td:last-of-type").all_inner_texts()
    assert float(cells[2].replace(MINUS, "-")) == pytest.approx(row.relative, rel=5e-3)
    for number, text in zip((row.relative, row.worst_row, row.worst_element),
                            (numbers[0], *numbers[2:]), strict=True):  # fmt: skip
        assert float(text.replace(MINUS, "-")) == pytest.approx(number, rel=5e-3)
    assert float(numbers[1]) - 1 == pytest.approx(row.norm_ratio - 1, rel=0.5)
    assert float(floors[0].replace(MINUS, "-")) == pytest.approx(row.floor.relative, rel=5e-3)


def test_the_keyboard_alone_reaches_every_site(page, comparison):
    grid = page.get_by_role("treegrid", name="Sites in firing order")
    grid.focus()
    page.keyboard.press("ArrowDown")
    after = comparison.rows[comparison.rows.index(comparison["1.1"]) + 1].site
    expect(chosen(page)).to_have_text(after)
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("[aria-selected=true]")).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowDown")
    expect(chosen(page)).to_have_text(comparison.rows[0].site)
    for row in comparison.rows[1:]:
        page.keyboard.press("ArrowDown")
        expect(chosen(page)).to_have_text(row.site)
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("[aria-selected=true]")).to_have_attribute("aria-expanded", "false")


def test_the_curve_over_depth_is_stepped_through(page, comparison):
    slider = page.get_by_role("slider", name="Site in firing order")
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r": 1\.1, differs, relative"))
    slider.focus()
    page.keyboard.press("Home")
    expect(chosen(page)).to_have_text(comparison.rows[0].site)
    expect(page.locator("[aria-selected=true]")).to_contain_text(comparison.rows[0].site)
    page.keyboard.press("End")
    expect(chosen(page)).to_have_text("(root)")
    box = slider.bounding_box()
    slider.click(position={"x": 48, "y": box["height"] / 2})
    expect(chosen(page)).to_have_text(comparison.rows[0].site)


def test_a_search_finds_a_site_in_a_folded_stretch(page):
    expect(chosen(page)).to_have_text("1.1")
    page.keyboard.press("/")
    page.keyboard.type("0.1")
    assert [cells[0] for cells in lines(page)] == ["0.1:input", "0.1"]
    page.keyboard.press("Enter")
    expect(chosen(page)).to_have_text("0.1:input")
    expect(page.get_by_role("treegrid")).to_be_focused()
    page.get_by_role("searchbox").fill("attention")
    expect(page.get_by_text("No site has this in its name.")).to_be_visible()


def test_a_site_shows_both_values_and_their_difference(folders, served, new_page):
    server = served(*folders)
    page = new_page(server.base, server.base)
    page.get_by_role("slider").press("End")
    panel = page.locator("#pane")
    expect(panel.locator(".maps > canvas")).to_have_count(3)
    a, b = (float(hl.open(folder)["(root)"].double().max()) for folder in folders)
    cells = panel.get_by_role("row", name="Max").locator("td").all_inner_texts()
    assert [float(cell.replace("\u2212", "-")) for cell in cells] == pytest.approx([a, b], rel=1e-2)
    assert faults_of(page) == []


def test_an_address_names_the_site_that_it_shows(open_file, comparison):
    page = open_file(comparison, "#at=0.1")
    expect(chosen(page)).to_have_text("0.1")
    page.get_by_role("slider").press("ArrowRight")
    expect(page).to_have_url(re.compile(r"#at=0$"))
    page.evaluate("location.hash = '#at=0.1'")
    expect(chosen(page)).to_have_text("0.1")


def test_local_errors_stand_beside_those_of_all_before(models, open_file):
    comparison = hl.shadow(*models, torch.randn(4, 8))
    page = open_file(comparison)
    expect(page.get_by_role("columnheader", name="Local")).to_be_visible()
    expect(page.locator("#local-key")).to_be_visible()
    row = next(cells for cells in lines(page) if cells[0].startswith("1.1"))
    assert float(row[2].replace(MINUS, "-")) == pytest.approx(comparison["1.1"].local, rel=5e-3)
    expect(page.locator("#findings li").last).to_contain_text("1.1 computes otherwise")
    expect(page.locator("#findings .number").last).to_have_text("at fault")


def test_equal_runs_are_said_to_be_equal(folders, open_file):
    page = open_file(hl.compare(folders[0], folders[0]))
    expect(page.locator("#verdict")).to_have_text("No value differs beyond noise.")
    expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", re.compile("identical"))
    assert len(lines(page)) == 1


def test_values_that_are_nan_or_of_other_shapes_are_told(open_file):
    nan = torch.tensor([1.0, float("nan")])
    a = {HOSTILE: nan, "shape": torch.ones(2), "zero": torch.ones(2)}
    b = {HOSTILE: torch.ones(2), "shape": torch.ones(3), "zero": torch.zeros(2)}
    comparison = hl.compare(a, b)
    page = open_file(comparison)
    assert [cells[:2] for cells in lines(page)] == [
        [row.site + "suspect" * (row.site == comparison.suspect), row.verdict] for row in comparison
    ]
    expect(page.locator("img")).to_have_count(0)
    page.get_by_role("slider").press("End")
    expect(page.locator(".pane-body").first).to_contain_text("infinite")
    page.get_by_role("slider").press("ArrowLeft")
    expect(page.locator(".pane-body").first).to_contain_text("not comparable: shapes [2] and [3]")


def test_what_cannot_be_compared_is_said_on_the_page(served, new_page, tmp_path):
    for name in "ab":
        model = nn.Sequential()
        model.add_module(name, nn.ReLU())
        with hl.record(model, name) as run:
            model(torch.ones(1, 2))
        run.save(tmp_path / name)
    server = served(tmp_path / "a", tmp_path / "b")
    page = new_page(server.base, server.base)
    expect(page.get_by_role("status")).to_have_text("These two cannot be compared.")
    expect(page.locator("#main")).to_contain_text("must have names in common")


def test_a_page_of_2000_sites_has_few_nodes_and_scrolls(open_file):
    names = [f"h.{k // 10}.m{k % 10}" for k in range(2000)]
    a = {name: torch.ones(2) for name in names}
    b = {name: torch.ones(2) * (1 if k < 100 else 2) for k, name in enumerate(names)}
    page = open_file(hl.compare(a, b))
    expect(chosen(page)).to_have_text("h.10.m0")
    assert page.evaluate("document.querySelectorAll('*').length") < 1500
    page.get_by_role("treegrid").press("End")
    expect(page.locator("[aria-selected=true]")).to_contain_text("h.199.m9")
    assert page.evaluate("document.querySelectorAll('*').length") < 1500


@at_any_width
def test_axe_finds_no_fault_at_any_width(open_file, comparison, scheme, width):
    page = open_file(comparison, color_scheme=scheme, viewport={"width": width, "height": 900})
    expect(chosen(page)).to_have_text("1.1")
    assert faults_of(page) == []
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
    suspect = page.locator("#verdict").bounding_box()
    assert suspect["y"] + suspect["height"] < 900  # on the first screen
