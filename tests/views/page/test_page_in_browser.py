"""The page in a real browser, as people use it: by mouse, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from hookline.views.page import Evidence, write_recording_page

SCRIPT = "<script>alert(1)<"


@pytest.fixture(scope="module")
def address(tmp_path_factory, strange, strange_run):
    path = write_recording_page(
        strange_run,
        tmp_path_factory.mktemp("page") / "report.html",
        title="Strange",
        subtitle="two random images",
        summary=hl.summary(strange),
        evidence=Evidence(
            [Image.new("RGB", (300, 200))] * 2, [("<b>cat</b>", 0.75), ("dog", 0.25)]
        ),
    )
    return path.as_uri()


@pytest.fixture
def open_page(new_page, address):
    return lambda **options: new_page(address, address, **options)


@pytest.fixture
def page(open_page):
    return open_page(viewport={"width": 1440, "height": 1000})


def names(page):
    """The first column as it is seen: names in the tree, whole sites where the table is flat."""
    kind = (
        ".label" if "flat" in (page.locator("#modules").get_attribute("class") or "") else ".name"
    )
    return page.locator(f"#modules tbody tr:not([hidden]) th {kind}").all_inner_texts()


def head(page, title):
    return page.locator("#modules thead th").filter(
        has=page.get_by_role("button", name=title, exact=True)
    )


TREE = [
    "(root)", SCRIPT, "norm", "relu", "blocks", "0", "call 0", "call 1", "1", "broken", "head",
]  # fmt: skip


def test_it_shows_the_tree_and_asks_nothing_of_the_network(page):
    expect(page.get_by_role("heading", name="Strange")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("9 values")
    assert names(page) == TREE


def test_a_hostile_name_is_only_text(page):
    assert page.locator("script").count() == 2
    expect(page.locator("tbody th .name").nth(1)).to_have_text(SCRIPT)
    expect(page.get_by_text("<b>cat</b>")).to_be_visible()
    assert page.locator("b").count() == 0


def test_a_search_leaves_what_matches_by_path_or_type(page):
    search = page.get_by_role("searchbox", name="Search")
    search.fill("blocks.0")
    expect(page.get_by_role("status")).to_have_text("2 of 9 values")
    assert names(page) == ["blocks.0", "blocks.0#0", "blocks.0#1"]
    search.fill("batchnorm")
    expect(page.get_by_role("status")).to_have_text("1 of 9 values")
    assert names(page) == ["norm"]
    search.fill("")
    expect(page.get_by_role("status")).to_have_text("9 values")
    assert names(page) == TREE


def test_matches_of_the_path_come_before_those_of_the_type_alone(browser, tmp_path):
    norms = {"norm": nn.BatchNorm2d(1), "block": nn.ModuleDict({"norm2": nn.BatchNorm2d(1)})}
    model = nn.ModuleDict(norms | {"norm2": nn.BatchNorm2d(1)}).eval()
    model.forward = lambda x: model["norm2"](model["block"]["norm2"](model["norm"](x)))
    with hl.record(model, nn.BatchNorm2d) as run:
        model(torch.rand(2, 1, 4, 4))
    page = browser.new_page()
    page.goto(write_recording_page(run, tmp_path, title="Norms").as_uri())
    search = page.get_by_role("searchbox")
    search.fill("norm2")
    assert names(page) == ["norm2", "block.norm2", "norm"]
    search.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("norm2")
    page.keyboard.press("Escape")
    head(page, "Order").get_by_role("button").click()
    head(page, "Order").get_by_role("button").click()
    assert names(page)[0] == "norm"
    search.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("norm2")
    page.close()


def test_a_search_that_finds_nothing_says_so(page):
    page.get_by_role("searchbox").fill("transformer")
    expect(page.get_by_text("No path or type has “transformer” in it.")).to_be_visible()


def test_a_slash_goes_to_the_search(page):
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    expect(page.get_by_role("searchbox")).to_have_value("")


def test_clicks_sort_a_column_turn_it_and_give_back_the_tree(page):
    order = head(page, "Order")
    button = order.get_by_role("button")
    button.click()
    expect(order).to_have_attribute("aria-sort", "descending")
    down = names(page)
    assert down[0] == "(root)"
    assert down[-1] == SCRIPT
    assert "blocks" not in down  # it has no value of its own
    button.click()
    expect(order).to_have_attribute("aria-sort", "ascending")
    assert names(page) == down[::-1]
    button.click()
    expect(order).to_have_attribute("aria-sort", "none")
    assert names(page) == TREE


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts_too(page, key):
    head(page, "Module").get_by_role("button").focus()
    page.keyboard.press(key)
    expect(head(page, "Module")).to_have_attribute("aria-sort", "ascending")
    assert names(page)[-7:] == [
        "blocks.0#0", "blocks.0#1", "blocks.1", "broken", "head", "norm", "relu",
    ]  # fmt: skip


def test_a_button_leads_back_to_the_tree(page):
    expect(page.get_by_role("button", name="Back to the tree")).to_be_hidden()
    head(page, "Type").get_by_role("button").click()
    page.get_by_role("button", name="Back to the tree").click()
    expect(head(page, "Type")).to_have_attribute("aria-sort", "none")
    assert names(page) == TREE


def test_every_column_can_be_sorted(page):
    for number in range(page.locator("thead th").count()):
        column = page.locator("thead th").nth(number)
        column.get_by_role("button").click()
        expect(column).to_have_attribute("aria-sort", re.compile("ending$"))
        expect(page.locator("thead th[aria-sort$=ending]")).to_have_count(1)


def test_lines_without_a_number_come_last_either_way(page):
    button = head(page, "Mean").get_by_role("button")
    button.click()
    assert names(page)[-1] == "norm"  # overwritten in place
    button.click()
    assert names(page)[-1] == "norm"


def test_a_module_folds_away_what_it_holds(page):
    fold = page.get_by_role("button", name="What blocks holds")
    expect(fold).to_have_attribute("aria-expanded", "true")
    fold.press("Enter")
    expect(fold).to_have_attribute("aria-expanded", "false")
    assert names(page) == ["(root)", SCRIPT, "norm", "relu", "blocks", "broken", "head"]
    fold.click()
    assert names(page) == TREE


def test_all_folds_and_unfolds_at_once(page):
    page.get_by_role("button", name="Collapse all").click()
    assert names(page) == ["(root)"]
    page.get_by_role("button", name="Expand all").click()
    assert names(page) == TREE


def test_a_search_looks_into_what_is_folded(page):
    page.get_by_role("button", name="Collapse all").click()
    page.get_by_role("searchbox").fill("head")
    expect(page.get_by_role("status")).to_have_text("1 of 9 values")
    assert names(page) == ["head"]


def test_nan_stands_out_and_its_first_place_is_a_click_away(page):
    expect(page.locator("td.bad")).to_have_text(["16"])
    notice = page.get_by_role("list", name="Notices").get_by_role("listitem").first
    expect(notice).to_contain_text("1 value holds NaN or infinity")
    notice.get_by_role("button", name="broken").click()
    expect(page.get_by_role("status")).to_have_text("1 of 9 values")
    assert names(page) == ["broken"]


def test_an_overwritten_value_says_what_to_do(page):
    row = page.get_by_role("row", name="norm")
    expect(row).to_contain_text("overwritten in place")
    expect(row).to_contain_text("copy=True")


def test_what_never_fired_stands_at_the_end_with_its_reason(page):
    section = page.get_by_role("region", name="Never fired")
    expect(section).to_contain_text("unused")
    expect(section).to_contain_text("not reached in this forward")


def test_a_value_opens_large_and_gives_the_focus_back(page):
    link = page.get_by_role("link", name="Feature maps of relu")
    link.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text("relu")
    expect(dialog.get_by_role("img", name=re.compile("^Histogram of 768 elements"))).to_be_visible()
    expect(dialog.locator("figure:not(.histogram)")).to_have_count(6)
    page.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("heading")).to_have_text("blocks.0#0")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("tbody tr th a").filter(has_text="blocks.0#0")).to_be_focused()


def test_an_address_leads_straight_to_a_value(open_page, address):
    page = open_page()
    page.goto("about:blank")
    page.goto(f"{address}#at=blocks.0&pass=0&call=1")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("blocks.0#1")
    page.get_by_role("button", name="Close").click()
    expect(page).to_have_url(address)


def test_arrows_walk_the_lines_and_fold_them(page):
    page.locator("tbody th a").first.focus()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="What blocks holds")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    assert names(page) == ["(root)", SCRIPT, "norm", "relu", "blocks", "broken", "head"]
    page.keyboard.press("ArrowRight")
    assert names(page) == TREE


@pytest.mark.parametrize("key", ["ArrowDown", "ArrowUp"])
def test_on_a_page_just_opened_arrows_begin_at_the_first_line(page, key):
    page.keyboard.press(key)
    expect(page.get_by_role("button", name="What (root) holds")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("tbody tr").nth(1).locator("th a")).to_be_focused()


def test_arrows_scroll_a_page_without_lines_sparing_fields(page):
    page.get_by_role("searchbox").fill("transformer")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement === document.body")
    head(page, "Type").get_by_role("button").focus()
    page.keyboard.press("ArrowDown")
    expect(head(page, "Type").get_by_role("button")).to_be_focused()


def test_every_picture_is_there(page):
    page.locator("tbody img").last.scroll_into_view_if_needed()
    broken = "[...document.images].filter((i) => i.complete && !i.naturalWidth).length"
    assert page.locator("tbody img").count() == 6
    assert page.evaluate(broken) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_changed(open_page, scheme):
    page = open_page(color_scheme=scheme)
    toggle = page.locator("#theme")

    def is_dark():
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
        return int(red) < 128

    assert is_dark() == (scheme == "dark")
    expect(toggle).to_have_text("Light" if scheme == "dark" else "Dark")
    toggle.click()
    assert is_dark() == (scheme == "light")
    expect(toggle).to_have_text("Dark" if scheme == "dark" else "Light")


def test_a_phone_scrolls_the_table_and_not_the_page(open_page):
    page = open_page(viewport={"width": 375, "height": 700})
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
    assert page.locator(".scroller").evaluate(wide)
    page.get_by_role("link", name="Feature maps of relu").click()
    assert not page.locator("dialog").evaluate(wide)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(open_page, scheme):
    page = open_page(color_scheme=scheme)
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 50
    assert {text: ratio for text, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_the_table_or_a_value(open_page, scheme):
    page = open_page(color_scheme=scheme)
    for name in ("Feature maps of relu", "Close"):
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        page.get_by_role("link" if "maps" in name else "button", name=name).click()


# The contrast of each text with the nearest ground painted behind it, as WCAG defines it.
CONTRASTS = """() => {
  const numbers = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    const text = own.map((node) => node.data).join("").trim();
    if (!text || !element.checkVisibility()) continue;
    let behind = element;
    const ground = () => numbers(getComputedStyle(behind).backgroundColor);
    while (behind !== document.body && ground()[3] === 0) behind = behind.parentElement;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(ground())];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found[`${element.tagName}.${element.className}: ${text.slice(0, 30)}`] = ratio;
  }
  return found;
}"""
