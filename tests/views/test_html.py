"""What notebooks show: every name escaped, nothing cut without a word, light and dark."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import hookline as hl


class Cells(HTMLParser):
    """The rows of a page's tables, as text, and the tags that were used."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.tags, self.text, self._in = [], set(), "", False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._in = tag in ("td", "th")

    def handle_endtag(self, tag):
        self._in = False

    def handle_data(self, data):
        self.text += data
        if self._in:
            self.rows[-1][-1] += data


def test_a_recording_is_a_table_of_its_sites(net, image):
    with torch.no_grad(), hl.record(net, ["stem", "layer1.0.bn", "fc"]) as run:
        net(image)
        net(image)
    shown = Cells(run._repr_html_())
    assert shown.rows == [
        ["site", "type", "values", "first value"],
        ["stem", "Conv2d", "2", "[2, 4, 8, 8] float32"],
        ["layer1.0.bn", "BatchNorm2d", "2",
         "overwritten in place after it was recorded; a look-up says how to keep it"],
        ["fc", "Linear", "2", "[2, 5] float32"],
    ]  # fmt: skip
    assert "Recording of SmallNet: 3 sites, 2 passes, 6 values" in shown.text


def test_a_recording_from_a_folder_shows_the_same(net_run_folder):
    run, folder = net_run_folder
    assert hl.open(folder)._repr_html_() == run._repr_html_()


@pytest.fixture
def net_run_folder(net, image, tmp_path):
    with torch.no_grad(), hl.record(net, nn.Conv2d) as run:
        net(image)
    return run, run.save(tmp_path / "run")


def test_gradients_of_several_backward_passes_are_shown():
    net = nn.Linear(2, 1)
    with hl.record(net, ports="grad_output") as run:
        loss = net(torch.ones(3, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert Cells(run._repr_html_()).rows[1] == [
        "(root):grad_output",
        "Linear",
        "2",
        "[3, 1] float32",
    ]


def test_a_site_without_a_value_is_pointed_out(looped):
    looped.unused = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning), hl.record(looped, ["head", "unused"]) as run:
        looped(torch.ones(1, 2))
    assert "1 without a value: print(run.report()) says why" in Cells(run._repr_html_()).text
    report = Cells(run.report()._repr_html_())
    assert report.rows[1][:3] == ["unused", "Linear", "0"]
    assert "not reached" in report.rows[1][3]
    assert report.rows[2] == ["head", "Linear", "1", ""]


def test_a_selection_is_a_table_with_aliases(net):
    assert Cells(hl.select(net, "fc")._repr_html_()).rows == [["site", "type"], ["fc", "Linear"]]
    net.again = net.fc
    assert Cells(hl.select(net, "fc")._repr_html_()).rows[1] == ["fc", "Linear", "again"]


def test_a_summary_is_a_table_of_modules(net, image):
    shown = Cells(hl.summary(net, image)._repr_html_())
    assert shown.rows[0] == ["module", "type", "parameters", "input", "output", "FLOPs", "memory"]
    assert shown.rows[-1][:3] == ["\u2003\u2003fc", "Linear", "25"]
    assert "SmallNet: " in shown.text
    failed = hl.summary(net, torch.zeros(1, 9, 8, 8))
    assert "the run failed in stem" in Cells(failed._repr_html_()).text


def test_long_tables_end_with_how_many_more():
    model = nn.Sequential(*[nn.Identity() for _ in range(100)])
    shown = Cells(hl.select(model, "*")._repr_html_())
    assert len(shown.rows) == 61
    assert "… and 40 more" in shown.text


def test_hostile_names_stay_text(strange, strange_run):
    x = torch.rand(2, 1, 8, 8)
    for thing in (strange_run, hl.select(strange), hl.summary(strange, x), strange_run.report()):
        shown = Cells(thing._repr_html_())
        assert "script" not in shown.tags
        assert any("<script>alert(1)<" in row[0] for row in shown.rows)


def test_it_can_be_read_on_light_and_on_dark_ground(net, image, browser):
    html = hl.summary(net, image)._repr_html_()
    page = browser.new_page()
    for ground, ink in (("white", "rgb(0, 0, 0)"), ("black", "rgb(255, 255, 255)")):
        page.set_content(f"<body style='background: {ground}; color: {ink}'>{html}")
        for cell in ("thead th", "td"):
            style = "element => [getComputedStyle(element).color,"
            style += " getComputedStyle(element.parentElement).backgroundColor]"
            assert page.locator(cell).first.evaluate(style) == [ink, "rgba(0, 0, 0, 0)"]
    page.close()
