"""The served page in a real browser: by mouse, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

import hookline as hl
from benchmarks.large_recording import write as write_large

PHONE = {"width": 390, "height": 800}


@pytest.fixture
def visit(served, new_page):  # in this order: the pages are closed before the server
    """`visit(*folders)`: their page, served."""

    def visit(*folders, path="", **options):
        server = served(*folders)
        page = new_page(server.base + path, server.base, **options)
        page.base = server.base
        return page

    return visit


def faults(page) -> list[str]:
    """What axe finds of serious or critical weight."""
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html']}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def labels(page) -> list[str]:
    return page.locator("#modules tbody tr:not([hidden]) th .label").all_inner_texts()


def is_measured(page):
    expect(page.get_by_role("button", name=re.compile("^Measur"))).to_be_hidden()


def test_it_opens_measures_searches_sorts_and_leads_to_a_value(visit, runs):
    page = visit(runs / "a")
    expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()
    is_measured(page)
    page.get_by_role("searchbox").fill("conv2d")
    assert labels(page) == ["first", "again", "again#0", "again#1"]
    page.get_by_role("button", name="Std").click()
    stds = page.locator("#modules tbody tr:not([hidden]) td.std").all_inner_texts()
    assert sorted(map(float, stds), reverse=True) == list(map(float, stds))
    expect(page).to_have_url(re.compile(r"\?q=conv2d&sort=std$"))
    page.reload()
    expect(page.get_by_role("searchbox")).to_have_value("conv2d")
    assert sorted(labels(page)) == ["again#0", "again#1", "first"]
    page.locator("tbody th a").filter(has_text="first").click()
    expect(page.get_by_role("heading", name="first")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Histogram of 5,120"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Channel "))).to_have_count(32)


def test_every_picture_is_there(visit, runs):
    page = visit(runs / "passes", path="site?at=first")
    assert page.evaluate("[...document.images].filter((i) => !i.naturalWidth).length") == 0
    assert page.locator("img").count() == 66
    page.goto(page.base)
    page.locator("tbody img").first.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    assert page.locator("tbody img").first.evaluate("(image) => image.naturalWidth") > 0


def test_passes_calls_and_channels_are_stepped_through(visit, runs):
    page = visit(runs / "passes", path="site?at=again")
    page.get_by_role("link", name="Call after").click()
    expect(page).to_have_url(re.compile("at=again&pass=0&call=1$"))
    page.get_by_role("link", name="Pass after").click()
    expect(page).to_have_url(re.compile("pass=1&call=1$"))
    page.get_by_role("spinbutton", name="Pass").fill("2")
    page.get_by_role("spinbutton", name="Pass").press("Enter")
    expect(page.get_by_role("spinbutton", name="Pass")).to_have_value("2")
    page.get_by_role("link", name="Channels after").click()
    expect(page.get_by_text("Channels 33 to 40 of 40")).to_be_visible()
    page.get_by_role("link", name="by deviation").click()
    expect(page.get_by_role("link", name="by deviation")).to_have_attribute("aria-current", "true")


def test_most_feature_maps_are_in_view_on_a_laptop(visit, runs):
    page = visit(runs / "a", viewport={"width": 1280, "height": 800})
    is_measured(page)
    box = page.locator("tbody img[style*='--tiles: 8']").first.bounding_box()
    frame = page.locator(".scroller").bounding_box()
    assert (frame["x"] + frame["width"] - box["x"]) / (box["width"] / 8) > 6


def test_a_shadow_shows_columns_beyond_the_edge_until_in_view(visit, runs):
    page = visit(runs / "passes", viewport=PHONE)
    edge = "(one) => getComputedStyle(one, '::after').opacity"
    is_measured(page)
    frame = page.locator(".frame.more")
    assert frame.evaluate(edge) == "1"
    page.locator(".scroller").evaluate("(one) => one.scrollTo(10_000, 0)")
    expect(frame).to_have_count(0)
    assert page.locator(".frame").evaluate(edge) == "0"
    page.locator(".scroller").evaluate("(one) => one.scrollTo(0, 0)")
    expect(frame).to_have_count(1)
    page.set_viewport_size({"width": 2400, "height": 800})
    expect(frame).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 390])
def test_class_maps_are_alike_in_size_and_their_captions_level(visit, runs, width):
    page = visit(runs / "passes", path="site?at=first", viewport={"width": width, "height": 800})
    for part in ("img", "figcaption"):
        one, other = (page.locator(f".cams {part}").nth(k).bounding_box() for k in (0, 1))
        assert [one[key] for key in ("y", "width", "height")] == [
            other[key] for key in ("y", "width", "height")
        ]
    assert page.locator(".cams img").first.bounding_box()["width"] > 120


def test_on_a_phone_the_sorted_column_stays_on_the_screen(visit, runs):
    page = visit(runs / "a", path="?sort=max", viewport=PHONE)
    for left in (0, 150, 10_000):
        page.locator(".scroller").evaluate("(one, left) => one.scrollTo(left, 0)", left)
        for cell in (page.locator("thead [aria-sort=descending]"), page.locator("td.sorted").first):
            box = cell.bounding_box()
            name = page.locator("thead th").first.bounding_box()
            assert name["x"] + name["width"] <= box["x"] + 1
            assert box["x"] + box["width"] <= PHONE["width"]
    page.get_by_role("button", name="Back to the tree").click()
    expect(page.locator(".sorted")).to_have_count(0)
    assert faults(page) == []


def test_all_of_it_works_by_keyboard_alone(visit, runs):
    page = visit(runs / "passes")
    page.keyboard.press("/")
    page.keyboard.type("first:grad")
    expect(page.get_by_role("status")).to_contain_text("3 of ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"at=first%3Agrad_output&pass=1&call=0$"))
    number = int(re.search(r"number (\d+)", page.locator(".subtitle").inner_text())[1])
    page.keyboard.press("ArrowRight")
    expect(page.locator(".subtitle")).to_contain_text(f"number {number + 1}")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".subtitle")).to_contain_text(f"number {number}")
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Values")).to_be_visible()


def test_escape_leads_back_to_the_line_and_table_that_were_left(visit, runs):
    page = visit(runs / "passes", path="?q=grad&sort=std")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    line = page.locator("tbody th a:focus .label").inner_text()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=line)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page).to_have_url(f"{page.base}?q=grad&sort=std")
    expect(page.locator("tbody th a:focus .label")).to_have_text(line)
    page.keyboard.press("ArrowUp")
    expect(page.locator("tbody tr:not([hidden]) th a").first).to_be_focused()


def test_a_line_that_was_left_far_down_is_laid_out_again(visit, tmp_path):
    folder = write_large(tmp_path / "large", 400, 32 * 1024)
    page = visit(folder, path="site?at=layer3.block9.conv9")
    page.keyboard.press("Escape")
    expect(page.locator("tbody th a:focus")).to_have_attribute("href", re.compile("layer3.block9"))


def test_a_line_that_is_focused_stays_so_while_numbers_come_in(visit, runs):
    page = visit(runs / "a", path="?sort=mean")
    page.locator("tbody th a").first.focus()
    is_measured(page)
    assert page.evaluate("document.activeElement.tagName") == "A"


def test_dark_and_light_are_remembered_from_page_to_page(visit, runs):
    page = visit(runs / "a", color_scheme="light")
    page.get_by_role("button", name="Dark").click()
    page.goto(page.base + "site?at=first")
    expect(page.get_by_role("button", name="Light")).to_be_visible()
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert int(colour) < 128


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", "site?at=again&pass=1", "site?at=head%3Ainput"])
def test_axe_finds_no_serious_fault(visit, runs, scheme, path):
    page = visit(runs / "passes", path=path, color_scheme=scheme)
    assert faults(page) == []


def test_axe_finds_no_serious_fault_in_a_value_of_two(visit, runs):
    assert faults(visit(runs / "a", runs / "b", path="site?at=head", color_scheme="dark")) == []


@pytest.mark.parametrize("path", ["", "site?at=again&pass=1&call=1"])
def test_a_phone_never_scrolls_the_page_sideways(visit, runs, path):
    page = visit(runs / "passes", path=path, viewport=PHONE)
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
    assert faults(page) == []


def test_a_new_recording_is_shown_while_the_page_is_open(visit, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    page = visit(folder, path="?q=head")
    expect(page.get_by_role("status")).to_contain_text("1 of 5 values")
    hl.open(runs / "passes").save(folder)
    expect(page.get_by_role("status")).to_contain_text("9 of ")
    expect(page.get_by_role("searchbox")).to_have_value("head")


def test_a_deleted_folder_is_said_one_that_comes_back_is_shown(visit, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    page = visit(folder)
    is_measured(page)
    page.wait_for_load_state("networkidle")  # its pictures, too
    shutil.rmtree(folder)
    expect(page.get_by_role("alert")).to_contain_text("holds no recording now")
    shutil.copytree(runs / "passes", tmp_path / "new").rename(folder)  # whole, as it is saved
    expect(page.locator(".facts")).to_contain_text("3")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_page_goes_on_after_the_server_was_away(visit, runs, tmp_path):
    folder = shutil.copytree(runs / "b", tmp_path / "live")
    page = visit(folder)
    page.evaluate(
        "() => { const real = fetch; window.fetch = () => {"
        " window.fetch = real; return Promise.reject(new TypeError('Failed to fetch')); }; }"
    )
    expect(page.get_by_role("alert")).to_contain_text("hookline view has ended")
    shutil.rmtree(folder)
    expect(page.get_by_role("alert")).to_contain_text("holds no recording now")


def test_large_values_are_measured_when_asked_for_on_their_page(visit, tmp_path):
    folder = write_large(tmp_path / "large", 2000, 25 * 1024**2)
    page = visit(folder)
    button = page.get_by_role("button", name="Measure 2000 values (48.7 GiB)")
    expect(button).to_be_visible()
    assert len(labels(page)) == 150
    page.locator("#more").scroll_into_view_if_needed()
    expect(page.locator("#modules tbody tr:not([hidden])")).not_to_have_count(150)
    page.get_by_role("searchbox").fill("layer19.block9.conv9")
    assert labels(page) == ["layer19.block9.conv9"]
    button.click()
    page.get_by_role("button", name=re.compile("left: stop$")).click()
    expect(page.get_by_role("button", name=re.compile(r"^Measure 19\d\d values"))).to_be_visible()
    page.get_by_role("link", name="layer19.block9.conv9", exact=True).click()
    expect(page.get_by_text("Measuring…")).to_be_hidden()
    expect(page.get_by_role("img", name=re.compile("^Histogram of"))).to_be_visible()
