"""The page of a training in a real browser: live, by mouse and by keyboard, and as a file."""

from __future__ import annotations

import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.curves import RunFolder, StepReport
from monitor_runs import Writer, layout_of, report_of

NAN = float("nan")
HOSTILE = '<img src=x onerror="alert(1)">'
SITES = ["(root)", "h.0", "h.0:grad_output", HOSTILE, "w:value", "w:update"]


def step(k, bad=False):
    return [[k + 1.0, -2.0], [NAN if bad else 1.0], [1e-4 * 10**k], [0.0], [1.0], [1e-3]]


def log(writer, step, **numbers):
    writer.folder.add(StepReport.from_logged(step, 1.0, numbers))


@pytest.fixture
def run(tmp_path):
    """A run of four steps that goes on; the last has a NaN in `h.0`."""
    writer = Writer(tmp_path / "run", SITES)
    for k in range(4):
        writer.add(*step(k, bad=k == 3))
    return writer


@pytest.fixture
def visit(served, new_page):  # in this order: the pages are closed before the server
    def visit(run, path="", **options):
        server = served(run.folder.path)
        return new_page(server.base + path, server.base, **options)

    return visit


@pytest.fixture(params=["served", "file"])
def page(request, run, visit, new_page, tmp_path):
    for k, loss in enumerate([4.0, 3.0, NAN, 1.0]):
        log(run, k, lr=0.1, loss=loss)
    if request.param == "served":
        return visit(run)
    address = hl.write_page(hl.open(run.folder.path), tmp_path / "report.html").as_uri()
    return new_page(address, address)


def is_chosen(page, site, text):
    expect(page.locator(".time-map [role=rowheader]")).to_have_text(site)
    expect(page.locator("#time-cell")).to_have_text(text)


def choose(page, label, option):
    page.get_by_label(re.compile(f"^{label}")).select_option(option)


def colours(page, row, columns):
    """The colours of the cells of a row of the map, which lies at a height in the canvas."""
    return page.evaluate(
        "([row, columns]) => {"
        " const canvas = document.querySelector('.time-map canvas');"
        " const copy = new OffscreenCanvas(canvas.width, canvas.height);"
        " const pen = copy.getContext('2d', {willReadFrequently: true});"
        " pen.drawImage(canvas, 0, 0);"
        " const scale = canvas.width / canvas.clientWidth;"
        " const left = canvas.clientWidth < 420 ? 74 : 138;"
        " const x = (k) => left + (canvas.clientWidth - left) * (k + 0.5) / columns;"
        " return [...Array(columns).keys()].map("
        " (k) => [...pen.getImageData(x(k) * scale, row * scale, 1, 1).data.slice(0, 3)]); }",
        [row, columns],
    )


BROKEN = ([226, 72, 28], [255, 214, 198])


def test_the_page_begins_at_the_worst_finding_and_its_step(page):
    first = page.locator(".finding").first
    expect(first).to_have_attribute("aria-pressed", "true")
    expect(first).to_contain_text("NaN or infinity begins at step 3, at h.0.")
    is_chosen(page, "h.0", "step 3: norm none, NaN or infinity")
    expect(page.get_by_role("heading", name="h.0", exact=True).first).to_be_visible()
    page.get_by_role("button", name="The step before").click()
    is_chosen(page, "h.0", "step 2: norm 1")
    loss = page.locator(".above canvas").first
    expect(loss).to_have_attribute(
        "aria-label", "loss, step 0 to 3: 1 to 4, NaN or infinity at 1 of 4 steps"
    )
    choose(page, "Logged", "lr")
    expect(loss).to_have_attribute("aria-label", "lr, step 0 to 3: 0.1 to 0.1")
    expect(page.locator("img[src=x]")).to_have_count(0)
    rows = page.locator(".time-map").bounding_box()  # the steps are named right below its last row
    assert rows["height"] < 6 * 14 + 4 * 24
    assert page.locator(".below").bounding_box()["y"] == rows["y"] + rows["height"]
    assert faults_of(page) == []


def test_the_keyboard_reads_each_number_of_each_site(page):
    page.keyboard.press("/")
    page.keyboard.type("h.0")
    expect(page.locator("#status")).to_have_text("2 of 6 sites")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("grid")).to_be_focused()
    for key in ("ArrowDown", "Home"):
        page.keyboard.press(key)
    is_chosen(page, "h.0:grad_output", "step 0: norm 1.000e\u22124")
    page.keyboard.press("ArrowRight")
    is_chosen(page, "h.0:grad_output", "step 1: norm 0.001")
    page.keyboard.press("Enter")
    expect(page.locator("#pane")).to_be_focused()
    page.locator("#step").press("ArrowRight")
    is_chosen(page, "h.0:grad_output", "step 2: norm 0.01")
    expect(page.locator("#step")).to_be_focused()
    box = page.locator("#step").bounding_box()
    for share, act in ((0.66, page.mouse.down), (0.4, None), (0.0, page.mouse.up)):  # a drag
        page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        if act:
            act()
    is_chosen(page, "h.0:grad_output", "step 0: norm 1.000e\u22124")
    page.keyboard.press("Escape")
    expect(page.get_by_role("grid")).to_be_focused()
    page.keyboard.press("Alt+ArrowDown")
    is_chosen(page, "h.0", "step 3: norm none, NaN or infinity")


def test_another_number_is_shown_by_the_menu(page):
    choose(page, "Number", "ratio")
    expect(page.locator("#status")).to_have_text("1 of 6 sites")
    is_chosen(page, "w:update", "step 3: update ÷ weight 0.001")
    choose(page, "Number", "mean")
    expect(page.locator("#legend")).to_contain_text("below 0")
    choose(page, "Colours", "all")
    expect(page.locator("#legend")).to_contain_text("of all rows")
    choose(page, "Values", "grad_output")
    is_chosen(page, "h.0:grad_output", "step 3: mean 0.1")
    choose(page, "Values", "output")
    expect(page.locator("#status")).to_have_text("3 of 6 sites")


def test_colours_tell_nan_zero_and_numbers_against_their_median(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a", "b"])
    for k in range(8):
        writer.add([10.0 ** (k - 3)], [NAN if k == 7 else 0.0])
    page = visit(writer)
    choose(page, "Values", "output")
    expect(page.locator("#legend")).to_contain_text("of its median")
    moving, still = (colours(page, row, 8) for row in (24, 38))  # under the name of their kind
    assert len({tuple(shade) for shade in moving[:7]}) == 7  # each decade has its own colour
    assert moving[0][2] > moving[0][0]  # blue below the median
    assert moving[6][0] > moving[6][2]
    assert still[2] == [168, 172, 180]
    assert still[7] in BROKEN


def test_new_steps_appear_and_what_is_chosen_stays(visit, tmp_path):
    sites = [f"h.{k}" for k in range(400)]
    writer = Writer(tmp_path / "many", sites)
    writer.add(*[[1.0, 3.0]] * 400, times=20)
    page = visit(writer, path="?number=mean&kind=output")
    expect(page.locator("#pulse-text")).to_contain_text("last step 19, ")
    grid = page.get_by_role("grid")
    grid.focus()
    for key in ("Control+End", "ArrowLeft"):
        page.keyboard.press(key)
    is_chosen(page, "h.399", "step 18: mean 2")
    top = grid.evaluate("(node) => node.scrollTop")
    assert top > 0
    with page.expect_response(lambda answer: "steps=20" in answer.url) as grown:
        writer.add(*[[1.0, 5.0]] * 400)
        expect(page.locator("#pulse-text")).to_contain_text("last step 20, ")
    with page.expect_response(lambda answer: "steps=21" in answer.url) as quiet:
        pass
    assert len(grown.value.body()) < 50_000
    assert len(quiet.value.body()) < 400
    is_chosen(page, "h.399", "step 18: mean 2")
    expect(grid).to_be_focused()
    assert grid.evaluate("(node) => node.scrollTop") == top
    page.keyboard.press("End")
    is_chosen(page, "h.399", "step 20: mean 3")
    writer.add(*[[1.0, 7.0]] * 400)
    is_chosen(page, "h.399", "step 21: mean 4")  # the last step stays the last
    log(writer, 21, loss=2.0)
    expect(page.locator(".above canvas").first).to_have_attribute(
        "aria-label", "loss, step 21 to 21: 2 to 2"
    )
    writer.close()
    expect(page.locator("#pulse-text")).to_contain_text("ended after step 21")
    page.set_viewport_size({"width": 800, "height": 700})  # less than the top bar needs
    expect(page.locator("#pulse-text")).to_have_css("text-overflow", "ellipsis")
    expect(page.locator("#pulse-text")).to_have_css("overflow", "hidden")
    expect(page.locator("#pulse")).to_have_attribute("title", re.compile("ended after step 21, "))
    expect(page).to_have_url(re.compile(r"\?number=mean&kind=output#at=h.399$"))


# Between the server and the page: `hold()` keeps answers back until `release()`.
GATE = """() => {
  const real = window.fetch;
  window.hold = () => { window.gate = new Promise((done) => { window.release = done; }); };
  window.fetch = async (...asked) => {
    const answer = await real(...asked);
    document.body.dataset.held = "";
    await window.gate;
    return answer;
  };
}"""


def test_a_number_chosen_while_steps_come_in_is_shown(visit, run):
    page = visit(run, path="?number=std")
    run.add(*step(10))
    page.evaluate(GATE)
    page.evaluate("hold()")
    expect(page.locator("body[data-held]")).to_be_visible()
    choose(page, "Number", "mean")
    page.evaluate("release()")
    expect(page.locator("#time-cell")).to_have_text(re.compile("^step 3: mean"))
    expect(page).to_have_url(re.compile("number=mean"))


def test_what_is_pressed_or_focused_stays_as_steps_come_in(visit, run):
    page = visit(run, path="?number=mean#at=h.0&step=3")
    link = page.locator("#pane .curve .link").first
    link.focus()
    run.add(*step(10))
    expect(page.locator("#pulse-text")).to_contain_text("last step 4, ")
    expect(link).to_be_focused()
    page.evaluate(GATE)
    page.evaluate("hold()")
    box = page.locator(".stuck canvas").first.bounding_box()
    run.add(*step(11))
    expect(page.locator("body[data-held]")).to_be_visible()
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 30)
    page.mouse.down()
    page.evaluate("release()")
    page.mouse.up()
    is_chosen(page, "(root)", re.compile("^step 5: mean"))
    expect(page.locator("#pulse-text")).to_contain_text("last step 5, ")


def test_a_run_that_is_away_damaged_or_replaced_is_followed(visit, run, tmp_path):
    page = visit(run, path="?number=max")
    run.folder.path.rename(tmp_path / "away")
    expect(page.get_by_role("alert")).to_contain_text("deleted or being replaced")
    with page.expect_response(lambda answer: "number=min" in answer.url):
        choose(page, "Number", "min")
    (tmp_path / "away").rename(run.folder.path)
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#time-cell")).to_have_text(re.compile("^step 3: minimum"))
    file = run.folder.path / "curves.bin"
    size = file.stat().st_size
    with file.open("ab") as grown:
        grown.write(b"junk" * 10)
    expect(page.get_by_role("alert")).to_contain_text(f"is damaged at byte {size}")
    os.truncate(file, size)
    expect(page.get_by_role("alert")).to_be_hidden()
    shutil.rmtree(run.folder.path)
    other = Writer(run.folder.path, ["other"])
    other.add([1.0], times=2)
    expect(page.get_by_role("heading", name="other", exact=True)).to_be_visible()


def test_ranks_have_curves_and_numbers_of_their_own(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    for k in range(3):
        writer.add_ranks([[k + 1.0]], [[k + 2.0]])
    page = visit(writer, path="?number=mean")
    expect(page.locator(".curve .rank")).to_have_count(2)
    expect(page.locator("#pane dl.numbers").first).to_contain_text("rank 1")
    assert page.locator("#pane dl.numbers").first.inner_text().split()[-6:] == (
        ["rank", "0", "3", "rank", "1", "4"]
    )
    assert faults_of(page) == []


def test_numbers_beyond_javascript_are_said_as_such(visit, tmp_path):
    folder, layout = RunFolder(tmp_path / "run"), layout_of(["a"])
    for k in range(5):
        folder.add(report_of(2**63 - 5000 + 256 * k, layout, [[float(k)]]))
    slots = np.array([[2.0, 0, 0, 0, 2e300, 0, 1e150, 1e150]])
    folder.add(StepReport(2**63 - 1, 1.0, layout, slots))
    page = visit(SimpleNamespace(folder=folder), path="?number=max")
    expect(page.locator("#time-cell")).to_contain_text("maximum > 3.4e38")
    expect(page.locator("#pane")).to_contain_text("< \u22123.4e38")
    page.get_by_role("grid").press("ArrowLeft")
    expect(page.locator("#time-cell")).to_contain_text("maximum 4")


def test_a_run_without_steps_waits_and_sites_may_come_later(visit, tmp_path):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "curves.bin"
    other = Writer(tmp_path / "other", ["a"])
    other.add([NAN], times=3)
    file.write_bytes(b"hlcurve1")
    page = visit(SimpleNamespace(folder=SimpleNamespace(path=tmp_path / "run")))
    expect(page.locator("#pulse-text")).to_have_text("no step yet")
    expect(page.get_by_text("No step was reported yet.", exact=True)).to_be_visible()
    assert faults_of(page) == []
    with open(file, "ab") as grown:
        grown.write((tmp_path / "other" / "curves.bin").read_bytes()[8:])
    is_chosen(page, "a", "step 0: norm none, NaN or infinity")
    expect(page.locator(".curve")).to_contain_text("no numbers")


def test_steps_that_go_back_keep_their_columns(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    writer.add([1.0, 2.0], times=8)
    writer.step = 2
    writer.add([1.0, 4.0], times=3)
    page = visit(writer, path="?number=mean")
    is_chosen(page, "a", "step 4: mean 2.5")
    for _ in range(3):
        page.get_by_role("grid").press("ArrowLeft")
    is_chosen(page, "a", "step 7: mean 1.5")


def test_a_jump_has_its_factor_in_the_finding_alone(new_page, tmp_path):
    model = nn.Linear(4, 4)
    with hl.monitor(model, ports="output", to=tmp_path / "run") as seen:
        for k in range(40):
            seen.log(loss=model(torch.ones(2, 4) * (1e4 if k > 29 else 1.0)).square().mean())
    address = hl.write_page(hl.open(tmp_path / "run"), tmp_path / "report.html").as_uri()
    page = new_page(address, address)
    numbers = page.locator("#pane dl.numbers").first
    expect(numbers).to_contain_text("median of all steps")
    assert "of the median" not in numbers.inner_text()
    page.get_by_role("grid").press("ArrowLeft")
    expect(numbers).to_contain_text("of the median")


@at_any_width
def test_each_window_is_accessible_and_never_scrolls_sideways(visit, run, width, scheme):
    page = visit(run, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert faults_of(page) == []
    page.locator(".finding").first.click()
    page.locator(".finding").first.click()
    expect(page.locator("#pane")).to_be_visible()
    assert faults_of(page) == []
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
