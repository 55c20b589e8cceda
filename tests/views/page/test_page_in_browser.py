"""The page in a real browser, as people use it: by mouse, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re
from xml.etree import ElementTree

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
    def open_page(**options):
        page = new_page(address, address, **options)
        expect(page.locator("body[data-ready]")).to_be_visible()
        return page

    return open_page


@pytest.fixture
def page(open_page):
    return open_page(viewport={"width": 1440, "height": 1000})


def names(page):
    """The first column as it is seen: names in the tree, whole sites where the list is flat."""
    return page.locator(".window .name").all_inner_texts()


def head(page, title):
    return page.get_by_role("columnheader", name=title, exact=True)


def row(page, name):
    """The first row whose name is this."""
    return page.locator(".window .line").filter(
        has=page.locator("b.name", has_text=re.compile(rf"^{re.escape(name)}$"))
    ).first  # fmt: skip


def chosen(page):
    return page.locator(".window [aria-selected=true] .name")


TREE = ["(root)", SCRIPT, "norm", "relu", "blocks", "0", "1", "0", "broken", "head"]


def test_it_shows_the_tree_and_asks_nothing_of_the_network(page):
    expect(page.get_by_role("heading", name="Strange")).to_be_visible()
    expect(page.locator("#status")).to_have_text("9 values")
    assert names(page) == TREE
    assert page.locator(".window small").all_inner_texts() == ["call 0", "call 1"]


def test_findings_come_first_and_lead_to_their_site(page):
    expect(page.locator("#tally")).to_contain_text("1 error")
    first = page.get_by_role("list").get_by_role("button").first
    expect(first).to_have_attribute("aria-pressed", "true")
    expect(first).to_contain_text("broken")
    expect(page.get_by_role("heading", name="broken")).to_be_visible()
    expect(page.locator("#pane .bad dd")).to_have_text("16")
    assert (
        names(page)[page.locator(".line.is-bad").first.evaluate("(e) => +e.dataset.index")]
        == "broken"
    )
    page.keyboard.press("Alt+ArrowDown")
    expect(first).to_have_attribute("aria-pressed", "false")
    expect(page.locator(".finding[aria-pressed=true]")).to_have_count(1)


def test_a_hostile_name_is_only_text(page):
    kinds = page.evaluate("[...document.scripts].map((script) => script.type)")
    assert kinds.count("") == 1  # the page's own script
    assert names(page)[1] == SCRIPT
    page.get_by_text("<b>cat</b>").first.click()
    expect(page.get_by_text("<b>cat</b>")).to_have_count(2)
    row(page, SCRIPT).click()
    expect(page.get_by_role("heading", name=SCRIPT)).to_be_visible()


def test_a_search_leaves_what_matches_by_path_or_type(page):
    search = page.get_by_role("searchbox", name="Search")
    search.fill("blocks.0")
    expect(page.locator("#status")).to_have_text("2 of 9 values")
    assert names(page) == ["blocks.0#0", "blocks.0#1"]
    search.fill("batchnorm")
    expect(page.locator("#status")).to_have_text("1 of 9 values")
    assert names(page) == ["norm"]
    search.fill("")
    expect(page.locator("#status")).to_have_text("9 values")
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
    expect(page.locator("body[data-ready]")).to_be_visible()
    search.fill("norm2")
    assert names(page) == ["norm2", "block.norm2", "norm"]
    search.press("Enter")
    expect(page.locator("#pane-heading")).to_have_text("norm2")
    head(page, "Std").get_by_role("button").click()
    search.fill("norm2")
    search.press("Enter")
    expect(page.locator("#pane-heading")).to_have_text("norm2")
    page.close()


def test_a_search_that_finds_nothing_says_so(page):
    page.get_by_role("searchbox").fill("transformer")
    expect(page.get_by_text("No path or type has “transformer” in it.")).to_be_visible()
    page.keyboard.press("Escape")
    assert names(page) == TREE


def test_a_slash_goes_to_the_search(page):
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    expect(page.get_by_role("searchbox")).to_have_value("")


def test_clicks_sort_a_column_turn_it_and_give_back_the_tree(page):
    std = head(page, "Std")
    button = std.get_by_role("button")
    button.click()
    expect(std).to_have_attribute("aria-sort", "descending")
    down = names(page)
    shown = [text for text in page.locator(".window .std").all_inner_texts() if text != "none"]
    assert list(map(float, shown)) == sorted(map(float, shown), reverse=True)
    assert "blocks" not in down  # it has no value of its own
    assert down[-1] == "norm"  # overwritten in place, so without numbers: last either way
    button.click()
    expect(std).to_have_attribute("aria-sort", "ascending")
    up = [text for text in page.locator(".window .std").all_inner_texts() if text != "none"]
    assert up == shown[::-1]
    assert names(page)[-1] == "norm"
    button.click()
    expect(std).to_have_attribute("aria-sort", "none")
    assert names(page) == TREE


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts_too_and_keeps_the_focus(page, key):
    head(page, "Module").get_by_role("button").focus()
    page.keyboard.press(key)
    expect(head(page, "Module")).to_have_attribute("aria-sort", "ascending")
    expect(head(page, "Module").get_by_role("button")).to_be_focused()
    assert names(page)[-7:] == [
        "blocks.0#0", "blocks.0#1", "blocks.1", "broken", "head", "norm", "relu",
    ]  # fmt: skip
    page.get_by_role("button", name="Back to the tree").click()
    assert names(page) == TREE
    expect(page.get_by_role("button", name="Back to the tree")).to_be_hidden()


def test_columns_are_chosen_and_each_can_be_sorted(page):
    page.get_by_text("Columns", exact=True).click()
    for box in page.locator("#column-choice input").all():
        box.check()
    page.get_by_text("Columns", exact=True).click()
    titles = page.locator("[role=columnheader]").all_inner_texts()
    assert titles == ["Module", "Type", "Shape", "Dtype", "Values", "Mean", "Std", "Min", "Max",
                      "Zeros", "NaN, inf", "Order"]  # fmt: skip
    assert row(page, "broken").locator(".bad").inner_text() == "16"
    for title in titles:
        if title == "Values":
            continue
        head(page, title).get_by_role("button").click()
        expect(head(page, title)).to_have_attribute("aria-sort", re.compile("ending$"))
        expect(page.locator("[role=columnheader][aria-sort$=ending]")).to_have_count(1)


def test_a_module_folds_away_what_it_holds(page):
    row(page, "blocks").locator(".mark").click()
    assert names(page) == ["(root)", SCRIPT, "norm", "relu", "blocks", "broken", "head"]
    expect(row(page, "blocks")).to_have_attribute("aria-expanded", "false")
    expect(row(page, "blocks")).to_contain_text("3 inside")
    page.keyboard.press("ArrowRight")
    assert names(page) == TREE


def test_all_folds_and_unfolds_at_once_and_a_search_looks_inside(page):
    page.get_by_role("button", name="Collapse all").click()
    assert names(page) == ["(root)"]
    page.get_by_role("searchbox").fill("head")
    expect(page.locator("#status")).to_have_text("1 of 9 values")
    assert names(page) == ["head"]
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Expand all").click()
    assert names(page) == TREE


def test_an_overwritten_value_says_what_to_do(page):
    expect(row(page, "norm")).to_contain_text("overwritten in place")
    row(page, "norm").click()
    expect(page.locator("#pane")).to_contain_text("copy=True")


def test_what_never_fired_is_told_with_its_reason(page):
    section = page.get_by_role("region", name="Never fired")
    expect(section).to_contain_text("unused")
    expect(section).to_contain_text("not reached in this forward")


def test_a_value_opens_with_maps_and_gives_the_focus_back(page):
    row(page, "relu").click()
    pane = page.locator("#pane")
    expect(pane.get_by_role("heading", name="relu")).to_be_visible()
    expect(pane.get_by_role("img", name=re.compile("^Histogram of 768 elements"))).to_be_visible()
    maps = pane.get_by_role("img", name=re.compile("^Output: 6 channels from"))
    maps.focus()
    page.keyboard.press("ArrowRight")
    expect(pane.locator(".readout")).to_contain_text("row 0, column 1")
    page.keyboard.press("Escape")
    expect(page.get_by_role("treegrid")).to_be_focused()
    page.keyboard.press("Enter")
    expect(pane).to_be_focused()


@pytest.mark.parametrize("key", ["at=blocks.0&pass=0&call=1", "at=blocks.0%231"])
def test_an_address_leads_straight_to_a_value(open_page, address, key):
    page = open_page()
    page.goto("about:blank")
    page.goto(f"{address}#{key}")
    expect(page.locator("#pane-heading")).to_have_text("blocks.0#1")
    expect(page).to_have_url(f"{address}#at=blocks.0%231")


def test_arrows_walk_the_lines_and_fold_them(page):
    page.get_by_role("treegrid").focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    expect(chosen(page)).to_have_text("blocks")
    page.keyboard.press("ArrowLeft")
    assert names(page) == ["(root)", SCRIPT, "norm", "relu", "blocks", "broken", "head"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(chosen(page)).to_have_text("0")
    page.keyboard.press("ArrowLeft")
    expect(chosen(page)).to_have_text("blocks")
    expect(page.get_by_role("treegrid")).to_have_attribute("aria-activedescendant", "row-4")


def test_arrows_move_along_the_strip_in_firing_order(page):
    strip = page.get_by_role("slider", name="Position in depth")
    strip.focus()
    page.keyboard.press("Home")
    expect(strip).to_have_attribute("aria-valuetext", SCRIPT)
    page.keyboard.press("ArrowRight")
    expect(strip).to_have_attribute("aria-valuetext", "norm")
    expect(page.locator("#pane-heading")).to_have_text("norm")
    page.keyboard.press("End")
    expect(chosen(page)).to_have_text("(root)")


@pytest.mark.parametrize("key", ["ArrowDown", "ArrowUp"])
def test_on_a_page_just_opened_arrows_reach_the_list(page, key):
    page.keyboard.press(key)
    expect(page.get_by_role("treegrid")).to_be_focused()
    expect(chosen(page)).to_have_text("broken")  # what is chosen at first
    page.keyboard.press("ArrowUp")
    expect(chosen(page)).to_have_text("0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_changed(open_page, scheme):
    page = open_page(color_scheme=scheme)
    toggle = page.locator("#theme")
    lightness = "+getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/)[0]"

    def is_dark():
        return page.evaluate(lightness) < 0.5

    assert is_dark() == (scheme == "dark")
    expect(toggle).to_have_text("Light" if scheme == "dark" else "Dark")
    toggle.click()
    assert is_dark() == (scheme == "light")
    expect(toggle).to_have_text("Dark" if scheme == "dark" else "Light")


def test_a_phone_scrolls_the_list_and_not_the_page(open_page):
    page = open_page(viewport={"width": 375, "height": 700})
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    expect(page.locator("#tally")).to_be_in_viewport()
    expect(page.locator("#pane")).to_be_hidden()
    assert not page.locator("html").evaluate(wide)
    row(page, "relu").click()
    expect(page.locator("#pane")).to_be_in_viewport()
    assert not page.locator("#pane").evaluate(wide)
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#pane")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(open_page, scheme):
    page = open_page(color_scheme=scheme, viewport={"width": 1440, "height": 1000})
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 50
    assert {text: ratio for text, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 800, 390])
def test_axe_finds_no_fault(open_page, scheme, width):
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    row(page, "relu").click()
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


# The contrast of each text with the nearest ground painted behind it, as WCAG defines it.
CONTRASTS = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const numbers = (text) => { // of any way to write a colour
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.json", '{"norm": -2, "head": 4, "blocks.0#1": 1.5, "gone": 1}'),
        ("mine.csv", "site,number\nnorm,-2\nhead,4\nblocks.0#1,1.5\ngone,1\n"),
    ],
)
def test_numbers_of_ones_own_are_a_column_and_colours(page, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    page.get_by_text("Columns").click()
    page.get_by_label("Your numbers").set_input_files(tmp_path / name)
    expect(page.locator("#own-about")).to_have_text(
        f"3 numbers from {name}; 1 name has no row here."
    )
    assert row(page, "head").locator(".own").inner_text() == "4"
    head(page, "Yours").get_by_role("button").click()
    assert names(page)[:3] == ["head", "blocks.0#1", "norm"]
    assert Axe().run(page).response["violations"] == []


def test_the_list_is_saved_as_an_svg(page, tmp_path):
    page.get_by_text("Columns").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save the list as SVG").click()
    saving.value.save_as(tmp_path / "tree.svg")
    root = ElementTree.parse(tmp_path / "tree.svg").getroot()
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    named = [text for text in texts if text in TREE and not text.isdecimal()]
    assert named == [name for name in TREE if not name.isdecimal()]
    assert "BatchNorm2d" in texts
    assert texts[:3] == ["Type", "Shape", "Std"]


def test_a_path_in_a_finding_breaks_at_its_dots(new_page, tmp_path):
    inner = nn.Sequential()
    inner.add_module("linear", nn.Linear(2, 2))
    nn.init.constant_(inner[0].weight, float("nan"))
    model = nn.Sequential()
    model.add_module("encoder", inner)
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    finding = run.findings()[0]
    address = hl.write_page(run, tmp_path / "report.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("body[data-ready]")).to_be_visible()
    words = f"{finding.text} {finding.why} {finding.advice}".replace("  ", " ")
    assert page.locator(".callout").first.text_content() == words
    for place in (".callout", ".finding strong", "#pane-heading"):
        assert "encoder.<wbr>linear" in page.locator(place).first.inner_html()
