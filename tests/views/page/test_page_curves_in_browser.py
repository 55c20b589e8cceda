"""The page of a run in a real browser: live, by mouse and by keyboard, and as a file."""

from __future__ import annotations

import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from hookline.curves import RunFolder, StepReport
from hookline.views.page import write_curves_page
from runs import Writer, layout_of, report_of

NAN = float("nan")
HOSTILE = '<img src=x onerror="alert(1)">'
SITES = ["(root)", "h.0", "h.0:grad_output", HOSTILE, "w:value", "w:update"]
PHONE = {"width": 390, "height": 800}


def step(k, bad=False):
    return [[k + 1.0, -2.0], [NAN if bad else 1.0], [1e-4 * 10**k], [0.0], [1.0], [1e-3]]


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
        page = new_page(server.base + path, server.base, **options)
        page.base = server.base
        return page

    return visit


@pytest.fixture(params=["served", "file"])
def page(request, run, visit, new_page, tmp_path):
    if request.param == "served":
        return visit(run)
    address = write_curves_page(run.folder.path, tmp_path / "report.html").as_uri()
    return new_page(address, address)


def rows(page):
    return page.locator("#curves tbody tr:not([hidden])")


def names(page):
    expect(rows(page).first).to_be_visible()
    return page.locator("#curves tbody tr:not([hidden]) .path").all_inner_texts()


def faults(page):
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html']}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def pixels(page, row):
    """The colours of a row's heat map, one for each column."""
    return page.evaluate(
        "(k) => { const c = document.querySelectorAll('td.heat canvas')[k];"
        " const canvas = new OffscreenCanvas(c.width, 1);"
        " const copy = canvas.getContext('2d', {willReadFrequently: true});"
        " copy.drawImage(c, 0, 0);"
        " const d = copy.getImageData(0, 0, c.width, 1).data;"
        " return [...Array(c.width).keys()].map((at) => [...d.slice(4 * at, 4 * at + 4)]) }",
        row,
    )


def test_rows_have_a_heat_map_a_curve_and_the_last_numbers(page):
    assert names(page) == ["(root)", "h.0", "h.0", HOSTILE, "w", "w"]
    expect(page.locator("img[src=x]")).to_have_count(0)
    expect(page.locator("thead .axis")).to_contain_text("step 0")
    expect(rows(page).nth(0).locator("td.chosen")).to_have_text("3")
    expect(rows(page).nth(1)).to_contain_text("NaN")
    assert len(pixels(page, 0)) == 4
    assert pixels(page, 0)[0] != pixels(page, 0)[3]
    assert pixels(page, 1)[3] == [213, 94, 0, 255]  # NaN is vermilion
    assert rows(page).nth(0).locator("path.line").get_attribute("d").count("L") == 3


def test_another_number_is_shown_by_the_menu(page):
    expect(rows(page).first).to_be_visible()
    page.get_by_label("Number").first.select_option(label="update ÷ weight")
    expect(rows(page)).to_have_count(1)
    expect(rows(page).locator("td.chosen")).to_have_text("0.001")
    page.get_by_label("Number").first.select_option("mean")
    expect(page.locator("#key-low")).to_have_text("below 0")  # blue and red
    page.get_by_label("Colours").select_option("all")
    expect(page.locator("#key-about")).to_contain_text("of all rows")
    page.get_by_label("Values").select_option("gradients of outputs")
    expect(rows(page)).to_have_count(1)
    expect(page.locator("#status")).to_have_text("1 of 6 sites")


def test_numbers_over_decades_have_logarithmic_colours(page):
    expect(rows(page).first).to_be_visible()
    page.get_by_label("Number").first.select_option("norm")
    page.get_by_role("searchbox").fill("grad_output")
    expect(rows(page)).to_have_count(1)
    expect(page.locator("#key-about")).to_contain_text("logarithmic")
    reds = [colour[:3] for colour in pixels(page, 0)]
    assert reds[0] == [68, 1, 84]
    assert reds[3] == [253, 231, 37]
    assert len({tuple(one) for one in reds}) == 4  # each decade has its own colour


def test_a_click_shows_a_site_large_and_keys_the_next(page):
    rows(page).nth(2).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text("h.0:grad_output")
    dialog.get_by_label("Number").select_option("norm")
    plot = page.locator("#plot")
    expect(plot).to_have_attribute("aria-label", re.compile("^norm of h.0:grad_output, step 0 to"))
    assert "1e-4" in plot.locator("text").all_inner_texts() or plot.inner_html().count("1e-4")
    expect(page.locator("#readout")).to_have_text("step 3: 0.1")
    page.get_by_role("slider", name="Step").press("ArrowLeft")
    expect(page.locator("#readout")).to_have_text("step 2: 0.01")
    dialog.get_by_role("button", name="Close").focus()
    page.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("heading")).to_have_text(HOSTILE)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(rows(page).nth(3).locator("button")).to_be_focused()


def test_the_keyboard_moves_from_site_to_site(page):
    expect(rows(page).first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("h.0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(rows(page).nth(1).locator("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("h.0:grad_output")


def test_an_alert_has_its_rule_and_leads_to_the_site(page):
    alert = page.locator(".alerts > li").first
    expect(alert).to_contain_text("NaN or infinity first at step 3, at 1 site so far")
    expect(alert.locator(".rule")).to_contain_text("The first reported step with any.")
    alert.get_by_role("button", name="h.0").click()
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("h.0")
    expect(page.locator("#readout")).to_have_text(re.compile("^step 3: ., NaN or infinity$"))


def test_new_steps_appear_and_choices_stay(visit, run):
    page = visit(run, path="?number=mean&kind=output")
    expect(page.locator("#pulse-text")).to_contain_text("last step 3, ")
    page.get_by_role("searchbox").fill("root")
    expect(rows(page)).to_have_count(1)
    rows(page).first.locator("button").focus()
    run.add(*step(10))
    expect(page.locator("#pulse-text")).to_contain_text("last step 4, ")
    expect(page.locator("#pulse.live")).to_be_visible()
    expect(rows(page).locator("td.chosen")).to_have_text("4.5")
    assert len(pixels(page, 0)) == 5
    expect(page.get_by_label("Number").first).to_have_value("mean")
    expect(page.get_by_role("searchbox")).to_have_value("root")
    expect(rows(page).first.locator("button")).to_be_focused()
    run.close()
    expect(page.locator("#pulse-text")).to_contain_text("ended after step 4")


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
    expect(page.locator("#pulse-text")).to_contain_text("last step 3, ")
    run.add(*step(10))
    page.evaluate(GATE)
    page.evaluate("hold()")
    expect(page.locator("body[data-held]")).to_be_visible()
    page.get_by_label("Number").first.select_option("mean")
    page.evaluate("release()")
    expect(rows(page).first.locator("td.chosen")).to_have_text("4.5")
    expect(page).to_have_url(re.compile("number=mean"))
    expect(page.get_by_label("Number").first).to_have_value("mean")
    assert pixels(page, 0)[4] == [103, 0, 31, 255]  # the first mean is negative: blue and red


def test_a_number_chosen_while_the_run_is_away_is_shown(visit, run, tmp_path):
    page = visit(run, path="?number=max")
    expect(rows(page).first.locator("td.chosen")).to_have_text("4")
    run.folder.path.rename(tmp_path / "away")
    expect(page.get_by_role("alert")).to_contain_text("deleted or being replaced")
    with page.expect_response(lambda one: "number=min" in one.url):
        page.get_by_label("Number").first.select_option("min")
    (tmp_path / "away").rename(run.folder.path)
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(rows(page).first.locator("td.chosen")).to_have_text("-2")
    run.add(*step(10))
    expect(page.locator("#pulse-text")).to_contain_text("last step 4, ")
    assert len({tuple(one) for one in pixels(page, 0)}) == 1  # the least number was always -2


def test_a_run_in_the_place_of_another_is_shown_alone(visit, run, tmp_path):
    page = visit(run)
    expect(rows(page)).to_have_count(6)
    shutil.rmtree(run.folder.path)
    other = Writer(run.folder.path, ["other"])
    other.add([1.0], times=2)
    expect(rows(page)).to_have_count(1)
    assert len(pixels(page, 0)) == 2


def test_a_damaged_run_says_so_until_it_is_whole(visit, run):
    file = run.folder.path / "curves.bin"
    size = file.stat().st_size
    page = visit(run)
    expect(rows(page)).to_have_count(6)
    with file.open("ab") as grown:
        grown.write(b"junk" * 10)
    expect(page.get_by_role("alert")).to_contain_text(f"is damaged at byte {size}")
    os.truncate(file, size)
    run.add(*step(10))
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#pulse-text")).to_contain_text("last step 4, ")


def test_ranks_are_drawn_each_time_a_site_is_opened(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    writer.add_ranks([[1.0]], [[2.0]])
    writer.close()
    page = visit(writer, path="?number=mean")
    for _ in range(2):
        rows(page).first.click()
        expect(page.locator("#plot .rank")).to_have_count(2)
        page.keyboard.press("Escape")


def test_steps_beyond_the_integers_of_javascript_are_drawn(visit, tmp_path):
    folder, layout = RunFolder(tmp_path / "run"), layout_of(["a"])
    for k in range(5):
        folder.add(report_of(2**63 - 5000 + 256 * k, layout, [[float(k)]]))
    folder.close()
    page = visit(SimpleNamespace(folder=folder), path="?number=mean")
    rows(page).first.click()
    expect(page.locator("#readout")).to_contain_text(": 4")


def test_a_number_beyond_float32_is_shown_as_such(visit, tmp_path):
    folder, layout = RunFolder(tmp_path / "run"), layout_of(["a"])
    slots = np.array([[2.0, 0, 0, 0, 2e300, 0, 1e150, 1e150]])
    folder.add(StepReport(0, 1.0, layout, slots))
    page = visit(SimpleNamespace(folder=folder), path="?number=max")
    expect(rows(page).locator("td.chosen")).to_have_text("> 3.4e38")
    expect(rows(page)).to_contain_text("< -3.4e38")


def test_each_poll_asks_for_new_steps_alone_and_scroll_stays(visit, tmp_path):
    sites = [f"h.{k}" for k in range(60)]
    writer = Writer(tmp_path / "many", sites)
    writer.add(*[[1.0, 3.0]] * 60, times=20)
    page = visit(writer)
    expect(page.locator("#status")).to_have_text("60 of 60 sites")
    page.locator("#scroller").evaluate("(one) => one.scrollTo(0, 500)")
    with page.expect_response(lambda one: "steps=20" in one.url) as found:
        writer.add(*[[1.0, 5.0]] * 60)
        expect(page.locator("#pulse-text")).to_contain_text("last step 20, ")
    with page.expect_response(lambda one: "steps=21" in one.url) as quiet:
        pass
    assert len(found.value.body()) < 12_000
    assert len(quiet.value.body()) < 400
    assert page.locator("#scroller").evaluate("(one) => one.scrollTop") == 500


def test_a_run_without_steps_waits_and_sites_may_come_later(visit, tmp_path):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "curves.bin"
    other = Writer(tmp_path / "other", ["a"])
    other.add([1.0, 2.0])
    file.write_bytes(b"hlcurve1")
    page = visit(type("Run", (), {"folder": type("F", (), {"path": tmp_path / "run"})}))
    expect(page.locator("#pulse-text")).to_have_text("no step yet")
    expect(page.get_by_text("No step was reported yet.")).to_be_visible()
    assert faults(page) == []
    with open(file, "ab") as grown:
        grown.write((tmp_path / "other" / "curves.bin").read_bytes()[8:])
    expect(rows(page)).to_have_count(1)
    assert names(page) == ["a"]


def test_ranks_have_curves_of_their_own(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    for k in range(3):
        writer.add_ranks([[k + 1.0]], [[k + 2.0]])
    page = visit(writer, path="?number=mean")
    rows(page).first.click()
    expect(page.locator("#plot .rank")).to_have_count(2)
    expect(page.locator("#readout")).to_have_text("step 2: 3.5 · rank 0: 3, rank 1: 4")
    assert faults(page) == []


def test_a_site_of_nan_alone_has_its_row_and_the_key(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    writer.add([NAN], times=3)
    page = visit(writer)
    expect(rows(page)).to_have_count(1)
    assert pixels(page, 0) == [[213, 94, 0, 255]] * 3
    expect(page.locator("#key-bad")).to_be_visible()
    expect(page.locator("#key-bar")).to_be_hidden()
    rows(page).first.click()
    expect(page.locator("#plot")).to_contain_text("no numbers")


def test_choices_are_in_the_address(visit, run):
    page = visit(run)
    expect(rows(page).first).to_be_visible()
    page.get_by_label("Number").first.select_option("max")
    page.get_by_label("Order").select_option("last")
    expect(page).to_have_url(re.compile(r"number=max&order=last$"))
    expected = names(page)
    page.reload()
    assert names(page) == expected
    expect(page.get_by_label("Number").first).to_have_value("max")


def test_each_heat_map_says_what_it_shows_also_out_of_view(visit, tmp_path):
    sites = [f"h.{k}" for k in range(60)]
    writer = Writer(tmp_path / "many", sites)
    writer.add(*[[1.0, 3.0]] * 59, [NAN, 2.0])
    writer.add(*[[1.0, 5.0]] * 60)
    page = visit(writer, path="?number=max")
    expect(page.locator("#status")).to_have_text("60 of 60 sites")
    said = page.locator("td.heat canvas").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('aria-label'))"
    )
    assert said[0] == "h.0: maximum, step 0 to 1: 3 to 5"
    assert said[59] == "h.59: maximum, step 0 to 1: 2 to 5, NaN or infinity in 1 of 2 columns"
    assert len(set(said)) == 60
    assert faults(page) == []
    page.get_by_label("Number").first.select_option("min")
    expect(page.locator("td.heat canvas").first).to_have_attribute(
        "aria-label", "h.0: minimum, step 0 to 1: 1 to 1"
    )


def log(writer, step, **numbers):
    writer.folder.add(StepReport.of_logged(step, 1.0, numbers))


@pytest.fixture(params=["served", "file"])
def logged_page(request, run, visit, new_page, tmp_path):
    """The page of a run with two numbers of the user's own, the first of them NaN once."""
    for k, loss in enumerate([4.0, 3.0, NAN, 1.0]):
        log(run, k, lr=0.1, loss=loss)
    if request.param == "served":
        return visit(run)
    address = write_curves_page(run.folder.path, tmp_path / "report.html").as_uri()
    return new_page(address, address)


def test_the_loss_is_a_line_at_the_top(logged_page):
    page, plot = logged_page, logged_page.locator("#logged-plot")
    expect(page.get_by_role("heading", name="loss")).to_be_visible()
    expect(plot).to_have_attribute(
        "aria-label", "loss, step 0 to 3: 1 to 4, NaN or infinity at 1 of 4 steps"
    )
    expect(page.locator("#logged-about")).to_contain_text("1 at step 3; 1 to 4.")
    expect(plot.locator(".badstep")).to_have_count(1)
    assert plot.locator("path.line").get_attribute("d").count("M") == 2  # a gap at the NaN
    assert faults(page) == []
    page.get_by_label("Logged").select_option("lr")
    expect(plot).to_have_attribute("aria-label", "lr, step 0 to 3: 0.1 to 0.1")
    expect(plot.locator(".badstep")).to_have_count(0)


def test_a_loss_that_is_logged_later_appears(visit, run):
    page = visit(run)
    expect(rows(page).first).to_be_visible()
    expect(page.locator("#logged")).to_be_hidden()
    log(run, 3, loss=2.0)
    expect(page.get_by_role("heading", name="loss")).to_be_visible()
    log(run, 4, loss=NAN)
    expect(page.locator("#logged-about")).to_contain_text("NaN or infinity at step 4; 2 to 2.")
    expect(page.locator("#logged-label")).to_be_hidden()  # there is nothing to choose


def test_a_logged_name_is_text(visit, run):
    log(run, 0, **{HOSTILE: 1.0})
    page = visit(run)
    expect(page.locator("#logged-heading")).to_have_text(HOSTILE)
    expect(page.locator("img[src=x]")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(visit, run, scheme):
    page = visit(run, color_scheme=scheme)
    expect(rows(page).first).to_be_visible()
    assert faults(page) == []
    rows(page).first.click()
    assert faults(page) == []


def test_steps_that_go_back_are_named_under_their_columns(visit, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    writer.add([1.0, 2.0], times=8)
    writer.step = 2
    writer.add([1.0, 2.0], times=3)
    page = visit(writer)
    rows(page).first.click()
    ticks = page.locator("#plot text[text-anchor=middle]").evaluate_all(
        "(all) => all.map((one) => one.textContent)"
    )
    assert ticks == ["0", "2", "4", "6", "2", "4"]


def test_a_site_that_is_opened_as_another_closes_stays_open(visit, run):
    page = visit(run)
    expect(rows(page).first).to_be_visible()
    page.evaluate(
        "() => { const [one, two] = document.querySelectorAll('#curves tbody tr');"
        " two.click(); document.getElementById('site').close(); one.click(); }"
    )
    page.locator("#site-axis").select_option("linear")
    page.keyboard.press("Escape")
    expect(rows(page).first.locator("button")).to_be_focused()


@pytest.mark.parametrize("width", [320, 1280])
def test_the_texts_of_a_plot_can_be_read_at_any_width(visit, run, width):
    page = visit(run, viewport={"width": width, "height": 700})
    rows(page).first.click()
    plot = page.locator("#plot").bounding_box()
    texts = page.locator("#plot text")
    expect(texts.first).to_be_visible()
    for box in (one.bounding_box() for one in texts.all()):
        assert box["height"] > 11
        assert plot["x"] <= box["x"]
        assert box["x"] + box["width"] <= plot["x"] + plot["width"] + 12
    page.mouse.move(plot["x"] + plot["width"] - 12, plot["y"] + 50)
    expect(page.locator("#readout")).to_have_text(re.compile("^step 3: "))
    page.mouse.move(plot["x"] + 64, plot["y"] + 50)
    expect(page.locator("#readout")).to_have_text(re.compile("^step 0: "))


def test_a_long_name_stays_in_its_column(visit, tmp_path):
    sites = ["x" * 300, f"h.0:output.{'k' * 200}", f"{'y' * 300}:grad_output", "a:grad_output"]
    writer = Writer(tmp_path / "run", sites)
    writer.add(*[[1.0, 2.0]] * 4)
    page = visit(writer)
    expect(rows(page)).to_have_count(4)
    cut = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not any(rows(page).nth(k).locator(".port").evaluate(cut) for k in (2, 3))
    for row in rows(page).all():
        name, heat = row.locator("th").bounding_box(), row.locator("td.heat").bounding_box()
        for part in row.locator(".path, .port").all():
            box = part.bounding_box()
            assert 0 < box["width"] <= name["width"]
            assert box["x"] + box["width"] <= heat["x"]


def test_a_phone_never_scrolls_the_page_sideways(visit, run):
    page = visit(run, viewport=PHONE)
    expect(rows(page).first).to_be_visible()
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
    rows(page).first.click()
    assert not page.locator("html").evaluate(wide)
