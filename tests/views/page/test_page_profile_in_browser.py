"""The page of a profile in a real browser: nested bars, a table that sorts, one module's costs."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import hookline as hl
from accessibility import at_any_width, faults_of
from hookline.display.units import count, duration
from page_data import data_of


@pytest.fixture(scope="module")
def prof():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(*blocks), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.profile(model) as prof:
        for _ in range(4):
            model(torch.ones(16, 8)).square().mean().backward()
            optimizer.step()
    return prof


@pytest.fixture
def visit(new_page, tmp_path, prof):
    def visit(hash="", result=prof, **options):
        path = hl.write_page(result, tmp_path / "profile.html")
        return new_page(path.as_uri() + hash, path.as_uri(), **options)

    return visit


def bars(page):
    return page.get_by_role("img", name=re.compile("^Calls as nested bars"))


def cells(page):
    rows = page.locator(".window [role=row]")
    expect(rows.first).to_be_visible()
    return [row.get_by_role("gridcell").all_inner_texts() for row in rows.all()]


def column(page, name):
    titles = page.get_by_role("columnheader").all_inner_texts()
    return next(k for k, title in enumerate(titles) if title.split()[0] == name)


def test_the_costliest_module_is_named_first_and_chosen(visit, prof):
    page = visit()
    worst = max(prof.per_pass.rows, key=lambda row: row.self_time.all)
    first = page.locator("#findings button").first
    expect(first).to_contain_text(worst.path or "(root)")
    expect(first).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#pane-heading")).to_have_text(worst.path or "(root)")
    expect(page.locator("#totals")).to_contain_text("Optimizer")


def test_the_table_has_the_numbers_of_the_profile_and_sorts(visit, prof):
    page = visit(viewport={"width": 1900, "height": 900})
    by_path = {row.path: row for row in prof.per_pass.rows}
    shown = cells(page)
    assert [line[0] for line in shown] == [row.module.name for row in prof.rows]
    row = by_path["1.0.0"]
    line = next(line for line in shown if line[column(page, "FLOPs")] == count(row.flops.all))
    assert line[column(page, "Calls")] == "1"
    page.get_by_role("button", name="Itself").click()
    names = [line[0] for line in cells(page)]
    ranked = sorted(prof.per_pass.rows, key=lambda row: -row.self_time.all)
    assert names == [row.path or "(root)" for row in ranked if row.self_time.all] + [
        row.path for row in ranked if not row.self_time.all
    ]
    page.get_by_role("button", name="Back to the tree").click()
    assert len(cells(page)) == len(prof.rows)


def test_the_pane_has_times_with_and_without_those_inside(visit, prof):
    page = visit("#at=1.0")
    row = prof.per_pass["1.0"]
    expect(page.locator("#pane-heading")).to_have_text("1.0")
    shown = page.locator(".few tbody tr", has_text="Time, forward").locator("td")
    assert shown.first.inner_text() == duration(row.time.forward)
    assert shown.last.inner_text() == duration(row.self_time.forward)
    flops = page.locator(".few tbody tr", has_text="FLOPs, backward").locator("td")
    assert flops.first.inner_text() == count(row.flops.backward)
    page.locator("#numbers").select_option("0")  # sums over all passes
    assert flops.first.inner_text() == count(prof["1.0"].flops.backward)
    page.evaluate("location.hash = '#at=1.1'")
    expect(page.locator("#pane-heading")).to_have_text("1.1")


def test_bars_are_read_by_keyboard_and_zoomed(visit, prof):
    page = visit("#at=1.1")
    bars(page).focus()
    said = page.locator("#readout")
    expect(said).to_have_text(re.compile(r"^1\.1 \(Sequential\): .* of all, itself .*, 4 calls$"))
    page.keyboard.press("ArrowUp")
    expect(said).to_have_text(re.compile(r"^1 \(Sequential\)"))
    page.keyboard.press("ArrowDown")
    expect(said).to_have_text(re.compile(r"^1\.\d \(Sequential\)"))
    path = said.inner_text().split()[0]
    expect(page.locator("#pane-heading")).to_have_text(path)
    page.keyboard.press("Space")
    width = page.evaluate("document.querySelector('#flame canvas').getBoundingClientRect().width")
    page.locator("#flame canvas").click(position={"x": width - 3, "y": 3 * 21 + 5})
    expect(said).to_have_text(re.compile(rf"^{re.escape(path)} "))  # as wide as the whole
    expect(bars(page)).to_be_focused()


def test_bars_are_as_wide_as_another_cost(visit, prof):
    page = visit("#at=(root)")
    said = page.locator("#readout")
    expect(said).to_have_text(re.compile(re.escape(f"{duration(prof.total.time.all)}, ")))
    page.get_by_label("Width").select_option("flops")
    expect(said).to_have_text(
        re.compile(re.escape(f"(root) (Sequential): {count(prof[''].flops.all)}"))
    )
    page.get_by_label("Phase").select_option(label="backward")
    expect(said).to_have_text(re.compile(re.escape(count(prof[""].flops.backward))))
    page.get_by_label("Width").select_option("kept")
    expect(said).to_have_text(re.compile("KiB|B, 100 %"))


def test_a_search_opens_a_module_and_its_bar(visit):
    page = visit()
    page.keyboard.press("/")
    page.keyboard.type("1.2.1")
    page.keyboard.press("Enter")
    expect(page.locator("#pane-heading")).to_have_text("1.2.1")
    expect(page.locator("#readout")).to_have_text(re.compile(r"^1\.2\.1 \(GELU\)"))
    expect(page.get_by_role("treegrid")).to_be_focused()


def test_names_cannot_end_the_script_and_a_failure_is_told(tmp_path, visit):
    model = nn.Sequential()
    model.add_module("</script><b>", nn.Linear(2, 2))
    with pytest.raises(RuntimeError), hl.profile(model, flops=False) as prof:
        model(torch.ones(1, 2))
        model(torch.ones(1, 3))
    page = visit(result=prof)
    expect(page.locator("b", has_text="</script><b>").first).to_be_visible()
    expect(page.get_by_role("list", name="Notices")).to_contain_text("The block raised")


def test_a_profile_of_one_pass_has_one_table(tmp_path):
    model = nn.Linear(2, 2)
    with hl.profile(model) as prof:
        model(torch.ones(1, 2))
    data = data_of(hl.write_page(prof, tmp_path / "one.html").read_text())
    assert [table["name"] for table in data["tables"]] == ["all passes"]


@at_any_width
def test_axe_finds_no_fault_at_any_width(visit, scheme, width):
    page = visit(color_scheme=scheme, viewport={"width": width, "height": 900})
    assert faults_of(page) == []
    wide = "({scrollWidth, clientWidth}) => scrollWidth > clientWidth"
    assert not page.locator("html").evaluate(wide)
