"""The page in a real browser, as people use it: by mouse, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.views.page import ImagesAndClasses, write_recording_page
from hookline.views.page.quantised_maps import quantise

SCRIPT = "<script>alert(1)<"


@pytest.fixture(scope="module")
def address(tmp_path_factory, strange, strange_run):
    path = write_recording_page(
        strange_run,
        tmp_path_factory.mktemp("page") / "report.html",
        title="Strange",
        subtitle="two random images",
        summary=hl.summary(strange),
        evidence=ImagesAndClasses(
            [Image.new("RGB", (300, 200))] * 2, [("<b>cat</b>", 0.75), ("dog", 0.25)]
        ),
    )
    return path.as_uri()


@pytest.fixture
def open_page(new_page, address):
    def open_page(**options):
        return new_page(address, address, **options)

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


def test_numbers_of_a_value_with_nan_say_that_they_leave_it_out(new_page, tmp_path):
    with hl.record(model := nn.Identity()) as run:
        model(torch.tensor([[1000.1, 1000.2, float("nan")]]))
    address = hl.write_page(run, tmp_path / "nan.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#pane .card")).to_contain_text("leave out NaN and infinity")
    expect(page.locator("#pane .card")).not_to_contain_text("elements are")  # they differ


def test_the_pane_of_a_single_number_and_of_huge_ones(new_page, tmp_path):
    model = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity()])
    with hl.record(model, "*") as run:
        model[0](torch.tensor([3.25, float("inf")]))
        model[2](torch.tensor([3 + 4j, 1j]))
        model[1](
            torch.tensor([-1.7e308, 0.0, 1.7e308], dtype=torch.float64)
        )  # the line at 0 is in the middle
    address = hl.write_page(run, tmp_path / "huge.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#pane .card")).to_contain_text("The only finite element is 3.25.")
    page = new_page(f"{address}#at=1", address)
    expect(page.locator("#pane .histogram line")).to_have_attribute("x1", "120")
    page.evaluate("location.hash = '#at=2'")  # complex numbers
    expect(page.locator("#pane .left-out")).to_have_text("Of the magnitudes.")


def test_a_finding_is_marked_in_the_passes_that_have_it(new_page, tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.record(model) as run:
        for number in (1.0, float("nan"), float("nan"), 2.0):
            model(torch.tensor([[1.0, number]]))
    address = hl.write_page(run, tmp_path / "passes.html").as_uri()
    page = new_page(address, address)
    marked = []
    expect(page.locator("#pass")).to_have_value("1")
    for number in range(4):
        page.locator("#pass").select_option(str(number))
        marks = [".callout b", ".window .glyph", ".line.also"]
        marked.append([page.locator(mark).count() > 0 for mark in marks])
    assert marked == [[False] * 3, [True] * 3, [True] * 3, [False] * 3]


def test_gradients_alone_have_a_depth_strip(new_page, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    with hl.record(model, ports="grad_output") as run:
        model(torch.ones(1, 2)).sum().backward()
    address = hl.write_page(run, tmp_path / "gradients.html").as_uri()
    page = new_page(address, address)
    strip = page.get_by_role("slider", name="Position in depth")
    strip.press("Home")
    expect(strip).to_have_attribute("aria-valuetext", "0")  # in the order of the forward
    strip.hover()
    norm = float(run["1:grad_output"].norm())
    expect(page.locator("#tip")).to_have_text(f"1 Tanhgradient norm {norm:.3g}")


def test_the_norm_of_a_row_is_of_all_its_parameters(new_page, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with hl.record(model, ["**.weight:grad", "**.bias:grad"]) as run:
        model(torch.rand(5, 4)).sum().backward()
    address = hl.write_page(run, tmp_path / "parameters.html").as_uri()
    page = new_page(address, address)
    gradients = [parameter.grad for parameter in model[2].parameters()]
    norm = f"{float(torch.nn.utils.get_total_norm(gradients)):.3g}"
    expect(row(page, "2")).to_contain_text(f"2, 2\N{MULTIPLICATION SIGN}3{norm}")
    page.get_by_role("slider", name="Position in depth").hover(position={"x": 900, "y": 30})
    expect(page.locator("#tip")).to_have_text(f"2 Lineargradient norm {norm}")


def test_maps_without_a_finite_number_say_so(new_page, tmp_path):
    values = torch.rand(1, 4, 5, 5) + 5
    values[:, 1] = float("nan")
    with hl.record(model := nn.Identity()) as run:
        model(torch.full((2, 3), float("nan")))
        model(values)  # one map of four
    address = hl.write_page(run, tmp_path / "nan.html").as_uri()
    page = new_page(f"{address}#at=(root)&pass=0", address)
    expect(page.locator(".maps-key")).to_have_text("Outputall NaN or infinity")
    page.locator("#pass").select_option("1")
    page.get_by_role("button", name="one scale").click()  # 0 is no number of theirs
    least, most = (f"{float(end):.3g}" for end in values[values.isfinite()].aminmax())
    expect(page.locator(".maps-key")).to_have_text(f"Output{least}{most}")


def test_outputs_without_spread_are_at_the_bottom_of_the_strip(new_page, tmp_path):
    model = nn.ModuleList([nn.Identity() for _ in range(3)])
    with hl.record(model, "*") as run:
        for module, size in zip(model, (1.0, 0.0, 1.0), strict=True):
            module(size * torch.tensor([1.0, 2.0]))
    address = hl.write_page(run, tmp_path / "flat.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#strip-legend")).to_contain_text("outputs of Identity")
    page.evaluate("location.hash = '#at=0'")  # its line hides nothing of the second
    reach = """() => {
        const canvas = document.querySelector("#strip canvas");
        const scale = canvas.width / canvas.clientWidth;
        const pen = canvas.getContext("2d");
        const x = 92 + (canvas.clientWidth - 100) / 2;  // of the second output
        const tall = pen.getImageData(x * scale, 16 * scale, 1, 48 * scale).data;
        const blue = (y) => tall[4 * y + 2] > tall[4 * y] + 60;
        return Array.from({length: 48}, (_, y) => y).filter((y) => blue(y * scale));
    }"""
    assert min(page.evaluate(reach)) > 40


def test_a_model_that_has_not_run_is_not_called_fine(new_page, tmp_path):
    with pytest.warns(hl.HooklineWarning), hl.record(nn.Identity()) as run:
        pass
    address = hl.write_page(run, tmp_path / "idle.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#tally")).to_have_text("Nothing was judged.")


def test_of_a_volume_the_slice_that_is_drawn_is_named(new_page, tmp_path):
    with hl.record(model := nn.Identity()) as run:
        model(torch.rand(1, 2, 9, 4, 4))
    address = hl.write_page(run, tmp_path / "volume.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#pane .maps-bar")).to_contain_text("largest first; slice D = 4 of 9")


def test_an_address_finds_a_name_with_a_colon(new_page, tmp_path):
    model = nn.Sequential()
    model.add_module("user:rates", nn.Identity())
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    address = hl.write_page(run, tmp_path / "colon.html").as_uri()
    page = new_page(f"{address}#at=user%3Arates", address)
    expect(page.locator("#pane-heading")).to_have_text("user:rates")


@pytest.mark.parametrize(
    ("number", "high", "text"),
    [(0.3241, 3000, " ± 0.02"), (0, 3000, " ± 0.02"), (2.5, 3, ""), (1e39, 1e39, "")],
)
def test_a_number_beside_an_outlier_says_its_error(page, number, high, text):
    script = "([number, hi]) => roundingErrorText(number, { lo: 0, hi }, 16)"
    assert page.evaluate(script, [number, high]) == text


def test_no_share_is_rounded_to_all_or_nothing(page):
    texts = page.evaluate("[0.0001, 0.0123, 0.5, 0.9951, 0.99951, 1].map(shareText)")
    assert texts == ["<0.1 %", "1.2 %", "50 %", "99.5 %", ">99.9 %", "100 %"]


@pytest.mark.parametrize("ends", [(-1.7e308, 1.7e308), (0.0, 1e39), (1e-50, 2e-50)])
def test_numbers_beyond_float32_are_read_from_a_map(page, ends):
    maps = quantise([("row", torch.tensor([ends], dtype=torch.float64))], 16)
    assert page.evaluate("(tile) => [...decodeNumbers(tile, 16)]", maps["tiles"][0]) == list(ends)


def test_each_cell_that_is_nan_has_both_colours_of_nan(page):
    script = """() => {
      const picture = makeMapCanvas(new Float32Array([NaN, 0.5, NaN]), 1, 3, [0, 1], "signed");
      const { width, height } = picture;
      const { data } = picture.getContext("2d").getImageData(0, 0, width, height);
      const colours = [...new Uint32Array(data.buffer)];
      const ofCell = (k) => colours.filter((_, at) => Math.floor((3 * (at % width)) / width) === k);
      return [0, 1, 2].map((k) => new Set(ofCell(k)).size); }"""
    assert page.evaluate(script) == [2, 1, 2]


def test_the_norm_of_huge_numbers_is_finite(page):
    script = "normOfStatistics({ numel: 4, bad: 0, std: 3e200, mean: 4e200 })"
    assert page.evaluate(script) == pytest.approx(1e201)


def test_what_follows_has_the_colour_of_the_legend_everywhere(new_page, tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.ReLU())
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    with torch.no_grad(), hl.record(model, copy=True) as run:
        model(torch.ones(2, 4))
    address = hl.write_page(run, tmp_path / "dead.html").as_uri()
    page = new_page(address, address)
    legend = page.locator("#strip-legend")
    expect(legend).to_contain_text("all zero")
    expect(legend).to_contain_text("outputs")
    expect(legend).not_to_contain_text("outputs of")  # its line joins modules of two types
    colour = page.locator(".key-also").evaluate("(e) => getComputedStyle(e).backgroundColor")
    shadow = page.locator(".line.also").first.evaluate("(e) => getComputedStyle(e).boxShadow")
    assert shadow.startswith(colour)
    marks, wanted = page.locator("#strip .over").evaluate(
        "(canvas, colour) => {"
        " const pen = canvas.getContext('2d');"
        " const scale = canvas.width / canvas.clientWidth;"
        " const y = Math.round((canvas.clientHeight - 18) * scale);"
        " const row = pen.getImageData(0, y, canvas.width, 1).data;"
        " const marks = new Set();"
        " for (let k = 0; k < row.length; k += 4)"
        "  if (row[k + 3] === 255) marks.add([...row.slice(k, k + 3)].join());"
        " const probe = new OffscreenCanvas(1, 1).getContext('2d');"
        " probe.fillStyle = colour;"
        " probe.fillRect(0, 0, 1, 1);"
        " return [[...marks], [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)].join()]; }",
        colour,
    )
    assert marks == [wanted]


class Block(nn.Sequential):
    """Layers with a type of their own."""


class Fading(nn.Module):
    """Blocks of many layers; from one of them on, the gradient vanishes on its way back."""

    def __init__(self):
        super().__init__()
        layers = (Block(*(nn.Identity() for _ in range(12))) for _ in range(8))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number == 5:
                x = x * 1.0
                x.register_hook(lambda grad: grad * 1e-6)
            x = block(x * 1.0)
        return x


def test_the_block_of_the_worst_finding_is_open(new_page, tmp_path):
    model = Fading()
    with hl.record(model, ports=("output", "grad_output"), copy=True) as run:
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()
    finding = run.findings()[0]
    assert (finding.kind, finding.site) == ("vanishing gradient", "blocks.5:grad_output")
    assert "1 where it enters blocks.5, and 1e-06 where it then reaches blocks.4." in finding.why
    address = hl.write_page(run, tmp_path / "fading.html").as_uri()
    page = new_page(address, address, viewport={"width": 1440, "height": 1000})
    expect(page.locator(".window [aria-selected=true]")).to_have_attribute("aria-expanded", "true")
    expect(row(page, "4")).to_have_attribute("aria-expanded", "false")


def test_where_there_are_only_notes_the_page_begins_at_one(new_page, tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 64, bias=False))
    model.add_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
    nn.init.zeros_(model[4].weight)  # a head that begins at zero
    with torch.no_grad(), hl.record(model) as run:
        model(torch.rand(16, 64))
    assert [finding.level for finding in run.findings()] == ["note", "note"]
    address = hl.write_page(run, tmp_path / "notes.html").as_uri()
    page = new_page(address, address)
    expect(page.locator("#tally")).to_have_text("No error and no warning; 1 note.")
    expect(chosen(page)).to_have_text("4")
    gaps = page.locator("#silent summary")
    expect(gaps).to_have_text("About the recording: 1 selected site without a value")


def test_the_name_of_the_chosen_row_is_never_cut(new_page, tmp_path):
    name = "a_projection_with_a_rather_long_name_of_its_own"
    model = nn.Sequential()
    model.add_module("short", nn.Linear(4, 4))
    model.add_module(name, nn.Linear(4, 4))
    with hl.record(model) as run:
        model(torch.ones(2, 4))
    address = hl.write_page(run, tmp_path / "long.html").as_uri()
    page = new_page(address, address, viewport={"width": 1200, "height": 800})
    row(page, name).click()
    assert chosen(page).evaluate("(e) => e.scrollWidth <= e.clientWidth")


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


def test_a_head_keeps_the_focus_when_it_is_drawn_anew(page):
    button = head(page, "Module").get_by_role("button")
    button.focus()
    button.evaluate("(button) => button.classList.add('old')")
    page.set_viewport_size({"width": 1100, "height": 900})
    expect(page.locator("button.old")).to_have_count(0)
    expect(button).to_be_focused()


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
    section = page.get_by_role("region", name="About the recording")
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


@at_any_width
def test_axe_finds_no_fault(open_page, scheme, width):
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    row(page, "relu").click()
    assert faults_of(page) == []


def test_axe_would_find_a_picture_without_words(browser):
    page = browser.new_page()
    page.set_content('<html lang="en"><title>t</title><main><h1>h</h1><img src="x.png"></main>')
    assert faults_of(page) == [("image-alt", '<img src="x.png">')]
    page.close()


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
        (
            "mine.json",
            '{"norm": -2, "head": "4", "blocks.0#1": 1.5, "gone": 1, "relu": null, "broken": ""}',
        ),
        ("mine.csv", "site,number\nnorm,-2\nhead,4\nblocks.0#1,1.5\ngone,1\nrelu,\nbroken,x\n"),
    ],
)
def test_numbers_of_ones_own_are_a_column_and_colours(page, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    page.get_by_text("Columns").click()
    page.get_by_label("Your numbers").set_input_files(tmp_path / name)
    expect(page.locator("#own-about")).to_have_text(
        f"3 numbers from {name}; 1 name has no row here; 2 names have no number."
    )
    assert row(page, "head").locator(".own").inner_text() == "4"
    head(page, "Yours").get_by_role("button").click()
    assert names(page)[:3] == ["head", "blocks.0#1", "norm"]
    assert faults_of(page) == []


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
    words = f"{finding.text} {finding.why} {finding.advice}".replace("  ", " ")
    assert page.locator(".callout").first.text_content() == words
    for place in (".callout", ".finding strong", "#pane-heading"):
        assert "encoder.<wbr>linear" in page.locator(place).first.inner_html()
