"""Maps over the input and class scores in a real browser: seen, read by keyboard, chosen."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of

MINUS = "\N{MINUS SIGN}"


class Patches(nn.Module):
    """A class token before 4 x 4 patches of 2 x 2 pixels; the token at the end averages them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 20, 2, 2)
        self.block = nn.Linear(20, 20)
        self.act = nn.GELU()
        self.head = nn.Linear(20, 7)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
        return self.head(self.act(self.block(tokens)).mean(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model, x = Patches(), torch.rand(2, 3, 8, 8)
    place = tmp_path_factory.mktemp("over")
    with hl.record(model, ports=("input", "output", "grad_output"), copy=True) as run:
        nn.functional.cross_entropy(model(x), torch.tensor([3, 5])).backward()
    hl.write_page(run, place / "report.html")
    return run.save(place / "run")


@pytest.fixture
def visit(served, new_page, folder):  # in this order: the pages are closed before the server
    def visit(path, **options):
        server = served(folder)
        page = new_page(server.base + path, server.base, **options)
        expect(page.get_by_role("button", name=re.compile("^Measur"))).to_be_hidden()
        expect(page.locator(".over-figures").first).to_be_visible()
        return page

    return visit


@pytest.fixture
def written(new_page, folder):
    def written(path, **options):
        address = (folder.parent / "report.html").as_uri()
        return new_page(address + path, address, **options)

    return written


def number_in(locator):
    return float(locator.inner_text().split()[0].replace(MINUS, "-"))


def read_cell(page, canvas, keys):
    for key in keys:
        canvas.press(key)
    readout = page.locator("#pane .over-readout")
    expect(readout).not_to_have_text("")
    return number_in(readout)


def cam_of(run, sample):
    activation, gradient = (run[f"act:{port}"][sample, 1:] for port in ("output", "grad_output"))
    return (activation.double() * gradient.double().mean(0)).sum(1).reshape(4, 4)


def test_the_output_shows_its_classes_and_where_they_come_from(visit, folder):
    run, page = hl.open(folder), visit("#at=(root)")
    scores = page.locator("#pane .scores")
    expect(scores).to_contain_text("sample 0 of 2; 5 of 7 classes")
    expect(page.locator("#pane")).to_contain_text("At act, the last layer with a map.")
    top = run["(root)"][0].double()
    for item, index in zip(scores.locator("li").all(), top.topk(5).indices.tolist(), strict=True):
        text = item.inner_text().replace(MINUS, "-")
        number, share = map(float, re.findall(r"(-?[\d.]+) · ([\d.]+) %", text)[0])
        assert text.startswith(f"Class {index}")
        assert number == pytest.approx(float(top[index]), rel=1e-3)
        assert share == pytest.approx(100 * float(top.softmax(0)[index]), abs=0.06)
    page.get_by_label("Sample").fill("1")
    page.get_by_label("Sample").press("Tab")
    expect(scores).to_contain_text("sample 1 of 2")
    lowers = page.get_by_role("img", name=re.compile("Grad-CAM at act, lowers the scalar: 4 . 4"))
    shown = read_cell(page, lowers, ["ArrowDown", "ArrowRight", "ArrowRight"])
    assert shown == pytest.approx(max(-float(cam_of(run, 1)[1, 2]), 0), rel=2e-3, abs=1e-6)


def test_norms_of_tokens_are_read_by_keyboard(visit, folder):
    value, page = hl.open(folder)["act"][0].double(), visit("#at=act")
    page.locator("#over-map").select_option("Norm over channels")
    norm = float(value[0].norm())
    expect(page.locator("#pane")).to_contain_text(f"Before the patches: 1 token, norm {norm:.4g}")
    canvas = page.get_by_role("img", name=re.compile("^Norm over channels, norm: 4 . 4 numbers"))
    shown = read_cell(page, canvas, ["ArrowDown", "ArrowDown", "ArrowRight"])
    assert shown == pytest.approx(float(value[1 + 2 * 4 + 1].norm()), rel=1e-3)


def test_a_channel_is_laid_over_the_input_by_key_and_by_menu(visit, folder):
    value, page = hl.open(folder)["act"][0].double(), visit("#at=act")
    maps = page.get_by_role("img", name=re.compile("^Output: 16 channels"))
    for key in ("ArrowDown", "Enter"):
        maps.press(key)
    menu = page.locator("#over-map")
    expect(menu).to_have_value(re.compile(r"channel \d+"))
    channel = int(menu.input_value().split()[1])
    assert channel == int(value[1:].abs().amax(0).argmax())
    canvas = page.get_by_role("img", name=re.compile(f"^Channel {channel}, output: 4 . 4"))
    shown = read_cell(page, canvas, ["ArrowDown"])
    assert shown == pytest.approx(float(value[1 + 4, channel]), rel=1e-3, abs=1e-4)
    expect(page.get_by_role("img", name=f"Channel {channel}, gradient")).to_be_visible()
    legend = page.locator("#pane .maps-bar .colour-key")
    expect(legend).to_have_text(re.compile("below 0\\s*above 0"))  # of both maps
    page.locator("#maps-form").focus()
    page.locator("#maps-form").select_option("as a table")
    expect(page.locator("#pane")).to_contain_text(re.compile("17 . 20, rows down"))
    expect(menu).to_have_value("cam")
    expect(page.locator("#maps-form")).to_be_focused()


def test_a_value_with_fewer_samples_shows_its_first(served, new_page, tmp_path):
    model = nn.ModuleDict({"windows": nn.Identity(), "whole": nn.Identity()})
    model.forward = lambda x: model["whole"](model["windows"](x).reshape(2, 4, 4, 4))
    with hl.record(model, ["windows", "whole"]) as run:
        model(torch.rand(8, 1, 4, 4))
    base = served(run.save(tmp_path / "run")).base
    page = new_page(f"{base}#at=windows", base)
    page.get_by_label("Sample").fill("5")
    page.get_by_label("Sample").press("Tab")
    expect(page.get_by_label("Sample")).to_have_value("5")
    page.locator(".window .name", has_text="whole").click()
    expect(page.get_by_label("Sample")).to_have_value("0")
    expect(page.locator("#pane")).to_contain_text("of 2")


def test_what_is_being_typed_outlives_a_change_of_the_window(served, new_page, tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    with hl.record(model) as run:
        model(torch.rand(30, 1, 6, 6))
    base = served(run.save(tmp_path / "run")).base
    page = new_page(f"{base}#at=0", base, {"width": 1280, "height": 400})
    sample, pane, asked = page.get_by_label("Sample"), page.locator("#pane"), []
    sample.press("Control+a")
    page.keyboard.type("1")
    pane.evaluate("pane => { pane.scrollTop = 60 }")
    assert pane.evaluate("pane => pane.scrollTop") == 60
    pane.locator("canvas").last.evaluate("canvas => { canvas.dataset.old = true }")
    page.set_viewport_size({"width": 1240, "height": 400})
    expect(pane.locator("canvas[data-old]")).to_have_count(0)
    assert pane.evaluate("pane => pane.scrollTop") == 60
    with page.expect_response(lambda answer: "sample=12" in answer.url):
        page.keyboard.type("2\n")  # after the digit that was there
    expect(sample).to_have_value("12")
    page.route("**/*sample=12*", lambda request: asked.append(request))  # noqa: PLW0108 (playwright marks it)
    for name in ("1", "0"):  # another value before the maps of the first have come
        page.evaluate(f"location.hash = '#at={name}'")
        expect(page.locator("#pane-heading")).to_have_text(name)
    while len(asked) < 2:
        page.evaluate("0")
    for request in asked:
        request.continue_()
    page.unroute_all()
    expect(sample).to_be_focused()


def test_a_file_shows_the_same_of_the_first_sample(written, folder):
    run, page = hl.open(folder), written("#at=(root)")
    expect(page.locator("#pane .scores")).to_contain_text("sample 0 of 2")
    canvas = page.get_by_role("img", name=re.compile("Grad-CAM at act, raises the scalar"))
    cam = cam_of(run, 0).relu()
    assert read_cell(page, canvas, ["ArrowDown"]) == pytest.approx(
        float(cam[1, 0]), abs=float(cam.max()) / 250
    )
    page.goto(page.url.replace("(root)", "act").replace("%28root%29", "act"))
    expect(page.locator("#pane-heading")).to_have_text("act")
    expect(page.locator("#over-map").locator("option").first).to_have_text("Norm over channels")
    assert page.locator("#pane .over-figures img").first.get_attribute("alt") == "The input"


def test_a_file_shows_the_pictures_and_numbers_of_each_pass(new_page, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with hl.record(model, ports=("input", "output", "grad_output"), copy=True) as run:
        for step in range(3):
            model((1 + step) * torch.rand(1, 3, 8, 8))[:, step].sum().backward()
    address = hl.write_page(run, tmp_path / "report.html").as_uri()
    page = new_page(f"{address}#at=0&pass=0", address)
    sources = []
    for number in range(3):
        page.get_by_label("Pass").select_option(str(number))
        value = run.passes[number]["0"][0].double()
        std = page.locator("#pane .card").first.locator("dd").nth(2)
        expect(std).to_have_text(f"{float(value.std(correction=0)):.4g}")
        maps = page.get_by_role("img", name=re.compile("^Output: 4 channels"))
        maps.press("ArrowDown")
        readout = page.locator("#pane .readout").first
        channel = int(re.search(r"channel (\d+)", readout.inner_text())[1])
        expected = pytest.approx(float(value[channel, 1, 0]), abs=float(value.abs().max()) / 100)
        assert number_in(readout) == expected
        sources.append(page.locator(".over-figures img").first.get_attribute("src"))
    assert len(set(sources)) == 3


@pytest.mark.parametrize("is_served", [True, False])
def test_a_map_of_another_aspect_has_that_of_the_image(served, new_page, tmp_path, is_served):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, (2, 1), 1))
    with hl.record(model, ["0", "(root):input"]) as run:
        model(torch.rand(1, 1, 16, 16))
    assert run["0"].shape == (1, 4, 8, 16)
    if is_served:
        base = served(run.save(tmp_path / "run")).base
    else:
        base = hl.write_page(run, tmp_path / "report.html").as_uri()
    page = new_page(f"{base}#at=0", base)
    for picture in (".over-figures img", ".over-figures canvas"):
        width, height = page.wait_for_function(SIZE, arg=picture).json_value()
        assert width == height > 50


# The width and height of an element, once it is drawn: as numbers come in, it is drawn anew.
SIZE = """(selector) => {
  const box = document.querySelector(selector)?.getBoundingClientRect();
  return box?.width && [box.width, box.height];
}"""


@at_any_width
def test_axe_finds_no_fault_and_nothing_is_too_wide(visit, scheme, width):
    for at in ("(root)", "act"):
        page = visit(f"#at={at}", color_scheme=scheme, viewport={"width": width, "height": 900})
        assert faults_of(page) == []
        wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
        assert not page.locator("#pane").evaluate(wide)
