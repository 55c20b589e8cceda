"""The page of a finding of `hl.check`: the line of code, and the chain of values, in a browser."""

from __future__ import annotations

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.cli.view_command import write_folder_page


class Root(nn.Module):
    """A square root that is given negative numbers."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor([0.0, -3.0]))

    def forward(self, x):
        return (x + self.shift).sqrt()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    model = nn.Sequential(nn.Flatten(), Root(), nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model, keep=folder):
        model(torch.ones(3, 2))
    return caught.value.finding


@pytest.fixture(params=["served", "file"])
def page(request, kept, served, new_page, tmp_path):
    if request.param == "served":
        base = served(kept.file).base
        return new_page(base, base)
    path = hl.write_page(kept, tmp_path / "finding.html")
    return new_page(path.as_uri(), path.as_uri())


def chain(page):
    rows = page.locator(".window [role=row]")
    return [row.get_by_role("gridcell").all_inner_texts() for row in rows.all()]


def test_the_finding_its_line_and_its_numbers_are_shown(page, kept):
    expect(page.get_by_role("heading", name="NaN at 1")).to_be_visible()
    expect(page.locator(".finding")).to_contain_text(kept.to_finding().text[1:])
    expect(page.locator("#where")).to_contain_text(f"{kept.line.filename}:{kept.line.lineno}")
    expect(page.locator("#where pre")).to_have_text("return (x + self.shift).sqrt()")
    expect(page.locator("#where")).to_contain_text(f"hookline replay {kept.file}")
    expect(page.locator("#facts")).to_contain_text("NaN3Elements6Step0")


def test_the_chain_leads_from_the_inputs_to_what_followed(page, kept):
    shown = chain(page)
    roles = [line[1] for line in shown]
    made = roles.index("made it")
    assert roles.index("operation") == made - 1
    assert set(roles[: made - 1]) == {"input", "of the module"}
    assert shown[made][0] == "1"
    passed = [line[0] for line in shown[made + 1 :]]
    assert tuple(passed) == kept.passed_on
    weight = next(line for line in shown if line[0].startswith("shift"))
    assert "float32 [2]" in weight
    assert "\N{MINUS SIGN}3" in weight
    expect(page.locator("[aria-selected=true]")).to_contain_text("made it")


def test_the_keyboard_moves_through_the_chain(page):
    page.get_by_role("treegrid").focus()
    page.keyboard.press("End")
    expect(page.locator("[aria-selected=true]")).to_contain_text("passed it on")


def test_an_observation_and_a_held_value_have_pages(new_page, tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(torch.ones(1, 2))
    held = hl.write_page(caught.value.finding, tmp_path / "held.html").as_uri()
    page = new_page(held, held)
    assert chain(page)[0][:2] == ["weightsuspect", "held it"]
    expect(page.locator("#where")).not_to_contain_text("replay")


def test_the_command_writes_the_page_of_a_kept_file(kept, tmp_path):
    path, findings = write_folder_page([type(tmp_path)(kept.file)], None, tmp_path / "page.html")
    assert findings is None
    assert "NaN at 1" in path.read_text()


@pytest.mark.slow
def test_another_file_is_refused(tmp_path, served):
    (tmp_path / "other.safetensors").write_bytes(b"nothing")
    answer = served(tmp_path / "other.safetensors").get()
    assert answer.status == 503
    assert "must be a file that hl.check(model, keep=folder) wrote" in answer.text


@at_any_width
def test_axe_finds_no_fault_at_any_width(kept, tmp_path, new_page, scheme, width):
    path = hl.write_page(kept, tmp_path / "finding.html")
    size = {"width": width, "height": 900}
    page = new_page(path.as_uri(), path.as_uri(), color_scheme=scheme, viewport=size)
    assert faults_of(page) == []
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
