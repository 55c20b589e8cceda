"""The served page in a real browser: by mouse, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import faults_of
from benchmarks.large_recording import write as write_large

MINUS = "\N{MINUS SIGN}"
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


def names(page) -> list[str]:
    return page.locator(".window .name").all_inner_texts()


def is_measured(page):
    expect(page.locator("body[data-ready]")).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^Measur"))).to_be_hidden()


def head(page, title):
    return page.get_by_role("columnheader", name=title, exact=True).get_by_role("button")


def test_it_opens_measures_searches_sorts_and_leads_to_a_value(visit, runs):
    page = visit(runs / "a")
    expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()
    is_measured(page)
    page.get_by_role("searchbox").fill("conv2d")
    assert names(page) == ["first", "again#0", "again#1"]
    head(page, "Std").click()
    stds = page.locator(".window .std").all_inner_texts()
    assert sorted(map(float, stds), reverse=True) == list(map(float, stds))
    expect(page).to_have_url(re.compile(r"\?q=conv2d&sort=std"))
    page.reload()
    is_measured(page)
    expect(page.get_by_role("searchbox")).to_have_value("conv2d")
    assert page.locator(".window .std").all_inner_texts() == stds
    page.locator(".window .name", has_text="first").click()
    pane = page.locator("#pane")
    expect(pane.get_by_role("img", name=re.compile("^Histogram of 5,120"))).to_be_visible()
    expect(pane.get_by_role("img", name=re.compile("^Output: 16 channels"))).to_be_visible()
    assert page.locator("#pane .over-figures").count() == 0


def test_numbers_on_the_page_are_those_of_the_tensors(visit, runs):
    run = hl.open(runs / "passes")
    page = visit(runs / "passes", path="#at=first&pass=1")
    is_measured(page)
    tensor = run.passes[1]["first"].double()
    gradient = run.passes[1]["first:grad_output"].double()
    cards = page.locator("#pane .card")
    for card, value in ((cards.nth(0), tensor), (cards.nth(1), gradient)):
        facts = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(),
                         strict=True))  # fmt: skip
        expected = {
            "Mean": value.mean(), "Std": value.std(correction=0), "Min": value.min(),
            "Max": value.max(), "Norm": value.norm(),
        }  # fmt: skip
        for name, number in expected.items():
            shown = float(facts[name].replace(MINUS, "-"))
            assert shown == pytest.approx(float(number), rel=1e-3, abs=1e-9), name
        assert facts["Shape"] == "[2, 40, 8, 8]"
        assert facts["Elements"] == "5,120"


def test_findings_come_while_the_page_is_open(visit, tmp_path):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    nn.init.constant_(model[1][0].bias, -1e3)
    with hl.record(model) as run:
        model(torch.rand(4, 8))
    page = visit(run.save(tmp_path / "run"))
    expect(page.locator("#tally")).to_contain_text("warning")
    expect(page.locator("#pane-heading")).to_have_text("1.1")
    expect(page.locator("#pane .callout").first).to_contain_text("1.1 passes nothing.")


def test_the_gradient_beside_a_value_has_the_same_channels(visit, runs):
    page = visit(runs / "passes", path="#at=first")
    is_measured(page)
    maps = page.locator("#pane .maps > canvas")
    expect(maps).to_have_count(2)
    maps.nth(1).focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    readout = page.locator("#pane .readout").nth(1)
    expect(readout).to_contain_text(re.compile(r"Gradient, channel \d+, row 1, column 1"))
    channel = int(re.search(r"channel (\d+)", readout.inner_text())[1])
    value = hl.open(runs / "passes").passes[2]["first:grad_output"][0, channel, 1, 1]
    shown = float(readout.inner_text().split()[0].replace(MINUS, "-"))
    assert shown == pytest.approx(float(value), rel=1e-3, abs=1e-8)


def test_a_pass_is_chosen_and_kept_in_the_address(visit, runs):
    page, asked = visit(runs / "passes"), []
    is_measured(page)
    grid, flows = page.get_by_role("treegrid"), re.compile("--rail: (?!4px)")
    expect(grid).to_have_attribute("style", flows)
    page.route("**/flow*", lambda request: asked.append(request))  # noqa: PLW0108 (playwright marks it)
    page.get_by_label("Pass").select_option("1")
    expect(grid).not_to_have_attribute("style", flows)  # its own data flow has not come
    while not asked:
        page.evaluate("0")
    asked[0].continue_()
    expect(grid).to_have_attribute("style", flows)
    page.unroute_all()
    expect(page).to_have_url(re.compile("&pass=1$"))
    std = page.locator(".window .line").first.locator(".std").inner_text()
    value = hl.open(runs / "passes").passes[1]["(root)"].double().std(correction=0)
    assert float(std) == pytest.approx(float(value), rel=5e-3)
    page.reload()
    is_measured(page)
    expect(page.get_by_label("Pass")).to_have_value("1")
    page.evaluate("location.hash = '#at=first'")  # the link that is written of the last pass
    expect(page.get_by_label("Pass")).to_have_value("2")


def test_tokens_by_depth_are_read_by_keyboard(visit, tmp_path):
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers).eval()
    x = torch.rand(3, 6, 8)
    for name in ("a", "b"):
        with hl.record(model, ports=("output", "grad_output"), copy=True) as run:
            model(x).sum().backward()
        run.save(tmp_path / name)
        with torch.no_grad():
            model[1].linear2.weight *= 1.5
    page = visit(tmp_path / "a")
    is_measured(page)
    page.get_by_role("button", name="Tokens").press("Enter")
    grid = page.get_by_role("grid", name="Tokens")
    expect(grid).to_be_visible()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        grid.press(key)
    norm = float(hl.open(tmp_path / "a")["1"][0, 2].norm())
    expect(page.locator("#cell")).to_contain_text(f"token 2: norm {norm:.4g}")
    expect(page.locator("#pane-heading")).to_have_text("1")
    assert faults_of(page) == []
    sample, asked = page.locator("#tokens input"), []
    page.route("**/tokens*sample=1*", lambda request: asked.append(request))  # noqa: PLW0108 (playwright marks it)
    with page.expect_request("**/tokens*sample=1*"):
        sample.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    norm = float(hl.open(tmp_path / "a")["1"][2, 2].norm())
    expect(page.locator("#cell")).to_contain_text(f"token 2: norm {norm:.4g}")
    with page.expect_response("**/tokens*sample=1*"):  # the answer that was asked for first
        asked[0].continue_()
    expect(sample).to_have_value("2")
    expect(sample).to_be_focused()
    expect(page.locator("#cell")).to_contain_text(f"token 2: norm {norm:.4g}")
    page.get_by_role("button", name="Tree").click()
    expect(page.get_by_role("treegrid")).to_be_visible()
    two = visit(tmp_path / "a", tmp_path / "b")
    two.get_by_role("button", name="Tokens").click()
    grid = two.get_by_role("grid", name="Tokens")
    expect(grid).to_be_visible()
    grid.press("Control+End")
    a, b = (hl.open(tmp_path / name)["2"][0, 5].double() for name in ("a", "b"))
    error = float((a - b).norm() / b.norm())
    expect(two.locator("#cell")).to_contain_text(f"token 5: relative error {error:.4g}")
    assert faults_of(two) == []


def test_on_a_phone_the_sorted_column_is_on_the_screen(visit, runs):
    page = visit(runs / "a", path="?sort=max", viewport=PHONE)
    is_measured(page)
    column = page.locator("[role=columnheader][aria-sort=descending]")
    expect(column).to_be_in_viewport(ratio=0.99)  # asks again when the rows are drawn anew
    page.get_by_role("button", name="Back to the tree").click()
    expect(page.locator("[aria-sort=descending]")).to_have_count(0)
    assert faults_of(page) == []


def test_all_of_it_works_by_keyboard_alone(visit, runs):
    page = visit(runs / "passes")
    is_measured(page)
    page.keyboard.press("/")
    page.keyboard.type("first:grad")
    expect(page.locator("#status")).to_contain_text("9 of ")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("treegrid")).to_be_focused()
    expect(page.locator("#pane-heading")).to_have_text("first")
    page.keyboard.press("Enter")
    expect(page.locator("#pane")).to_be_focused()
    page.get_by_label("Sample").press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Sample")).to_have_value("1")
    scale = page.get_by_role("button", name="one scale")
    scale.press("Enter")
    expect(scale).to_have_attribute("aria-pressed", "true")
    expect(scale).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("treegrid")).to_be_focused()


@contextmanager
def redrawn(pane):
    """Wait until other maps are drawn in place of those that are there."""
    before = pane.locator(".maps > canvas").first.element_handle()
    yield
    before.wait_for_element_state("hidden")


def test_samples_channels_and_tensors_are_chosen_in_the_pane(visit, runs):
    page = visit(runs / "passes", path="#at=first")
    is_measured(page)
    pane = page.locator("#pane")
    readout = pane.locator(".readout").first

    def first_channel():
        pane.locator(".maps > canvas").first.press("ArrowDown")
        expect(readout).to_contain_text("row 1")
        return int(re.search(r"channel (\d+)", readout.inner_text())[1])

    expect(pane.locator(".maps > canvas")).to_have_count(2)
    pictures = pane.locator(".over-figures canvas")
    expect(pictures).to_have_count(2)
    tops = pictures.evaluate_all("all => all.map(each => each.getBoundingClientRect().y)")
    assert len(set(tops)) == 1
    with redrawn(pane):
        page.locator("#maps-order").select_option("by number")
    expect(pane.get_by_text("1 to 16")).to_be_visible()
    assert first_channel() == 0
    with redrawn(pane):
        pane.get_by_role("button", name="next channels").press("Enter")
    expect(pane.get_by_text("17 to 32")).to_be_visible()
    expect(pane.get_by_role("button", name="next channels")).to_be_focused()
    assert first_channel() == 16
    with redrawn(pane):
        pane.get_by_label("Sample").fill("1")
        pane.get_by_label("Sample").press("Tab")
    expect(pane.get_by_text("17 to 32")).to_be_visible()
    first_channel()
    value = hl.open(runs / "passes").passes[2]["first"][1, 16, 1, 0]
    shown = float(readout.inner_text().split()[0].replace(MINUS, "-"))
    assert shown == pytest.approx(float(value), rel=1e-3, abs=1e-8)
    assert faults_of(page) == []


def test_each_tensor_of_a_tuple_has_its_numbers_and_maps(visit, tmp_path):
    model = nn.LSTM(3, 4)
    with torch.no_grad(), hl.record(model) as run:
        output, (hidden, _) = model(torch.rand(5, 1, 3))
    page = visit(run.save(tmp_path / "run"))
    is_measured(page)
    cards = page.locator("#pane .card")
    expect(cards).to_have_count(3)
    means = [
        float(cards.nth(k).locator("dd").nth(1).inner_text().replace(MINUS, "-")) for k in (0, 1)
    ]
    assert means == pytest.approx([float(output.mean()), float(hidden.mean())], rel=1e-3)
    page.get_by_label("Tensor").select_option("[1][0]")
    expect(page.locator("#pane .maps-bar")).to_contain_text(re.compile("1 . 4"))


def test_an_address_shows_a_line_far_down(visit, tmp_path):
    folder = write_large(tmp_path / "large", 400, 32 * 1024)
    page = visit(folder, path="#at=layer3.block9.conv9")
    expect(page.locator("[aria-selected=true] .name")).to_have_text("conv9")
    expect(page.locator("[aria-selected=true]")).to_be_in_viewport()
    assert page.locator("*").count() < 1500


def test_what_is_chosen_and_focused_stays_as_numbers_come_in(visit, tmp_path):
    folder = write_large(tmp_path / "large", 400, 64 * 1024)
    page = visit(folder)
    grid = page.get_by_role("treegrid")
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("End")
    before = page.locator("[aria-selected=true] .name").inner_text()
    top = grid.evaluate("(grid) => grid.scrollTop")
    is_measured(page)
    expect(page.locator("#tally")).not_to_contain_text("Looking")
    expect(grid).to_be_focused()
    assert page.locator("[aria-selected=true] .name").inner_text() == before
    assert grid.evaluate("(grid) => grid.scrollTop") == top


def test_dark_and_light_are_remembered_from_page_to_page(visit, runs):
    page = visit(runs / "a", color_scheme="light")
    page.get_by_role("button", name="Dark").click()
    page.goto(page.base + "?q=first")
    expect(page.get_by_role("button", name="Light")).to_be_visible()
    light = page.evaluate("+getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/)[0]")
    assert light < 0.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(visit, runs, scheme):
    page = visit(runs / "passes", path="#at=first", color_scheme=scheme)
    is_measured(page)
    expect(page.locator("#pane .over-figures canvas")).to_have_count(2)
    assert faults_of(page) == []


def test_a_phone_never_scrolls_the_page_sideways(visit, runs):
    page = visit(runs / "passes", path="#at=first", viewport=PHONE)
    expect(page.locator("#pane .over-figures canvas")).to_have_count(2)
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
    assert faults_of(page) == []


def test_a_new_recording_is_shown_while_the_page_is_open(visit, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    page = visit(folder, path="?q=head")
    expect(page.locator("#status")).to_contain_text("1 of 5 values")
    page.keyboard.press("/")
    hl.open(runs / "passes").save(folder)
    expect(page.locator("#status")).to_contain_text("9 of ")
    expect(page.get_by_role("searchbox")).to_have_value("head")
    expect(page.get_by_role("searchbox")).to_be_focused()


def test_folds_and_focus_stay_when_a_new_recording_comes(visit, tmp_path):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(30)])

    def save():
        with torch.no_grad(), hl.record(model, copy=True) as run:
            model(torch.rand(2, 4))
        return run.save(tmp_path / "run")

    page = visit(save())
    is_measured(page)
    grid = page.get_by_role("treegrid")
    grid.focus()
    for key in ("Home", "ArrowDown", "ArrowLeft", "End"):
        page.keyboard.press(key)
    page.evaluate("document.body.dataset.old = ''")
    rows = page.locator("[role=treegrid]").get_attribute("aria-rowcount")
    top = grid.evaluate("(grid) => grid.scrollTop")
    name = page.locator("#pane-heading").inner_text()
    assert top > 0
    save()
    expect(page.locator("body[data-ready]:not([data-old])")).to_be_visible()
    expect(grid).to_be_focused()
    expect(page.locator("#pane-heading")).to_have_text(name)
    expect(grid).to_have_attribute("aria-rowcount", rows)
    assert grid.evaluate("(grid) => grid.scrollTop") == top


def test_a_deleted_folder_is_said_one_that_comes_back_is_shown(visit, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    page = visit(folder)
    is_measured(page)
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    shutil.rmtree(folder)
    expect(page.get_by_role("alert")).to_contain_text("holds no recording now")
    shutil.copytree(runs / "passes", tmp_path / "new").rename(folder)  # whole, as it is saved
    expect(page.locator(".facts")).to_contain_text("3")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_page_goes_on_after_the_server_was_away(visit, runs, tmp_path):
    folder = shutil.copytree(runs / "b", tmp_path / "live")
    page = visit(folder)
    page.evaluate(
        "() => { window.real = fetch;"
        " window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); }"
    )
    expect(page.get_by_role("alert")).to_contain_text("hookline view has ended")
    page.locator(".window .name", has_text="first").click()
    page.evaluate("() => { window.fetch = window.real; }")
    maps = page.get_by_role("img", name=re.compile("^Output: 16 channels"))
    expect(maps).to_be_visible()  # what was asked for meanwhile
    shutil.rmtree(folder)
    expect(page.get_by_role("alert")).to_contain_text("holds no recording now")


def test_large_values_are_measured_when_asked_for_on_their_page(visit, tmp_path):
    folder = write_large(tmp_path / "large", 2000, 25 * 1024**2)
    page = visit(folder)
    # All, or all but the chosen one, which is measured as it is looked at.
    name = re.compile(r"^Measure (2,000|1,999) values \(48\.7 GiB\)$")
    button = page.get_by_role("button", name=name)
    expect(button).to_be_visible()
    assert page.locator("*").count() < 1500
    page.get_by_role("searchbox").fill("layer19.block9.conv9")
    assert names(page) == ["layer19.block9.conv9"]
    button.click()
    page.get_by_role("button", name=re.compile("left: stop$")).click()
    expect(
        page.get_by_role("button", name=re.compile(r"^Stopped, 1,9\d\d left: go on$"))
    ).to_be_visible()
    page.locator(".window .name").click()
    expect(page.locator("#pane .waiting")).to_have_count(0)
    expect(page.locator("#pane")).to_contain_text("elements are 0.")
    expect(page.locator(".window .std")).to_have_text("0")  # in the list, too
