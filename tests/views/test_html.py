"""What notebooks show: every name escaped, nothing cut without a word, light and dark."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.recordings import judge_passes


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
        ["site", "type", "shape", "dtype", "calls", "passes", "remark"],
        ["stem", "Conv2d", "[2, 4, 8, 8]", "float32", "1", "2", ""],
        ["layer1.0.bn", "BatchNorm2d", "[2, 4, 8, 8]", "float32", "1", "2",
         "overwritten in place after it was recorded; a look-up says how to keep it"],
        ["fc", "Linear", "[2, 5]", "float32", "1", "2", ""],
    ]  # fmt: skip
    assert "Recording of SmallNet: 3 sites, 2 passes, 6 values" in shown.text


def test_findings_and_the_strip_stand_above_the_table():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.constant_(model[1].weight, float("nan"))
    with hl.record(model) as run:
        model(torch.ones(2, 4))
    html = run._repr_html_()
    shown = Cells(html)
    finding = run.findings()[0]
    assert html.index(finding.text) < html.index("<svg") < html.index("<table>")
    assert finding.advice in shown.text
    assert {"svg", "title"} <= shown.tags
    assert not {"script", "img", "link"} & shown.tags
    assert "the last of" not in shown.text


def test_the_strip_of_several_passes_names_its_own():
    with hl.record(model := nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))) as run:
        for _ in range(3):
            model(torch.ones(2, 4))
    assert "Over depth, in pass 2, the last of 3:" in Cells(run._repr_html_()).text


def test_the_strip_has_no_pin_of_another_pass():
    with hl.record(model := nn.Sequential(nn.Identity(), nn.Identity())) as run:
        model(torch.tensor([1.0, float("nan")]))
        assert "<circle" in run._repr_html_()
        model(torch.ones(2))
    assert "<circle" not in run._repr_html_()


def test_a_healthy_recording_says_so_and_an_empty_one_nothing(net, image):
    with torch.no_grad(), hl.record(net, nn.Conv2d) as run:
        assert "<svg" not in run._repr_html_()
        net(image)
    assert "No error and no warning." in Cells(run._repr_html_()).text


def test_a_large_recording_is_not_read_to_be_shown(net, image, monkeypatch):
    with torch.no_grad(), hl.record(net, nn.Conv2d) as run:
        net(image)
    monkeypatch.setattr(judge_passes, "_MOST_BYTES", 100)
    shown = Cells(run._repr_html_())
    assert "print(run.findings()) says what is wrong" in shown.text
    assert "svg" not in shown.tags


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
        "[3, 1]",
        "float32",
        "1",
        "1",
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


def test_a_notebook_shows_the_facts_of_the_text(looped):
    looped.unused = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning), hl.record(looped, ["block", "unused"]) as run:
        looped.block(torch.ones(1, 2))
    for shown, head in ((run, "Recording of"), (run.report(), "hl.record on")):
        text, notebook = str(shown).splitlines(), Cells(shown._repr_html_())
        assert head in notebook.text
        facts = {fact.strip() for fact in text[0].split(";")[1:]}
        assert facts
        assert all(fact in notebook.text for fact in facts)
    report = run.report()
    note = "hl.record: a note\nin two lines"
    noted = dataclasses.replace(report, notes=(note,), other_contexts=1)
    notebook = Cells(noted._repr_html_()).text
    assert "1 run in other threads or tasks was not seen" in notebook
    for line in str(noted).splitlines():
        if line.startswith(("  note: ", "hl.doctor(")):
            assert line.removeprefix("  note: ") in notebook
    assert "the model itself was not called" in notebook


def test_a_notebook_shows_all_columns_and_totals_of_a_summary():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    model.append(model[0])  # shared
    summary = hl.summary(model[:3], torch.ones(4, 2))
    text, notebook = str(summary), Cells(summary._repr_html_())
    rows, totals = text.split("\n\n")
    assert notebook.rows[0] == rows.splitlines()[0].split()
    for line in totals.splitlines():
        assert " ".join(line.split()) in notebook.text
    shared = hl.summary(nn.ModuleDict({"a": model[0], "b": model[0]}))
    assert "shared with b" in Cells(shared._repr_html_()).text


def test_a_notebook_shows_the_ranks_of_a_recording(looped):
    with hl.record(looped, "block") as run, hl.record(looped, "block") as other:
        looped(torch.ones(1, 2))
    run.ranks = (other, other)
    shown = Cells(run._repr_html_())
    assert "Recording of 2 ranks: run.ranks[0] is Recording of Looped: 1 site" in shown.text
    assert shown.rows[1:] == [["block", "Linear", "[1, 2]", "float32", "3", "1"]]
    assert " ".join(str(run).split()).startswith("Recording of 2 ranks: run.ranks[0] is Recording")


def test_a_selection_is_a_table_with_aliases(net):
    assert Cells(hl.select(net, "fc")._repr_html_()).rows == [["site", "type"], ["fc", "Linear"]]
    net.again = net.fc
    assert Cells(hl.select(net, "fc")._repr_html_()).rows[1] == ["fc", "Linear", "again"]


def test_a_summary_is_a_table_of_modules(net, image):
    shown = Cells(hl.summary(net, image)._repr_html_())
    assert shown.rows[0] == ["module", "type", "input", "output", "parameters", "FLOPs", "memory"]
    assert shown.rows[-1][:5] == ["\u2003\u2003fc", "Linear", "[2,4]", "[2,5]", "25"]
    assert "SmallNet" in shown.rows[1]
    failed = hl.summary(net, torch.zeros(1, 9, 8, 8))
    assert "The run failedstem (Conv2d), which got" in Cells(failed._repr_html_()).text


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
