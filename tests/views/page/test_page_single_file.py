from __future__ import annotations

import json
import re

import pytest
import torch
from PIL import Image
from torch import nn

import hookline as hl
from hookline.display.units import count
from hookline.views.page import Evidence, write_recording_page
from hookline.views.page.entries import read_values


def data_of(text: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    )


def test_it_gives_the_path_of_the_file_that_it_wrote(tmp_path, strange_run):
    path = write_recording_page(
        strange_run, tmp_path / "deep" / "here" / "page.html", title="A page"
    )
    assert path == tmp_path / "deep" / "here" / "page.html"
    assert path.read_text("utf-8").startswith("<!doctype html>")


def test_in_a_folder_it_is_called_report(tmp_path, strange_run):
    assert write_recording_page(strange_run, tmp_path, title="A page") == tmp_path / "report.html"


def test_an_older_page_is_replaced_and_nothing_else_is_left(tmp_path, strange_run):
    (tmp_path / "report.html").write_text("old")
    path = write_recording_page(strange_run, tmp_path, title="A page")
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]


def test_where_it_cannot_be_written_it_says_what_to_do(tmp_path, strange_run):
    (tmp_path / "file").write_text("")
    with pytest.raises(hl.FolderError) as caught:
        write_recording_page(strange_run, tmp_path / "file" / "report.html", title="A page")
    assert str(tmp_path / "file" / "report.html") in str(caught.value)
    assert "Name a file in a writable folder" in str(caught.value)


def test_a_failing_disk_leaves_the_older_page(tmp_path, strange_run, monkeypatch):
    path = write_recording_page(strange_run, tmp_path, title="older")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.views.page.single_file.os.replace", full)
    with pytest.raises(hl.FolderError, match="No space left on device"):
        write_recording_page(strange_run, tmp_path, title="newer")
    assert "older" in path.read_text("utf-8")
    assert len(list(tmp_path.iterdir())) == 1


def test_no_text_becomes_markup(tmp_path, strange_run):
    hostile = '</script><script>alert("&")</script>'
    path = write_recording_page(
        strange_run,
        tmp_path,
        title=hostile,
        subtitle=hostile,
        evidence=Evidence(classes=[(hostile, 0.5)]),
    )
    text = path.read_text("utf-8")
    assert hostile not in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;" in text
    # A closing tag inside the data would end the data, whatever the quotes around it say.
    assert len(re.findall("</script", text)) == 2
    assert len(data_of(text)["lines"]) > 5


def test_the_data_is_plain_json_even_with_nan(tmp_path, strange_run):
    text = write_recording_page(strange_run, tmp_path, title="A page").read_text("utf-8")
    json.loads(json.dumps(data_of(text), allow_nan=False))


def test_it_refers_to_nothing_outside(tmp_path, strange_run):
    text = write_recording_page(strange_run, tmp_path, title="A page").read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_totals_of_a_summary_stand_at_the_top(tmp_path, net, image):
    with hl.record(net, "fc") as run:
        net(image)
    summary = hl.summary(net, image)
    text = write_recording_page(run, tmp_path, title="Small", summary=summary).read_text("utf-8")
    assert f"<dt>FLOPs</dt><dd>{count(summary.flops)}</dd>" in text
    assert f"<dt>Parameters</dt><dd>{count(summary.parameters)}</dd>" in text


def test_a_failed_run_is_the_first_notice(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 9))
    x = torch.zeros(1, 2)
    with pytest.raises(RuntimeError), hl.record(model) as run:
        model(x)
    text = write_recording_page(
        run, tmp_path, title="Broken", summary=hl.summary(model, x)
    ).read_text("utf-8")
    assert "The summary&#39;s run failed: 1 (Linear), which got Tensor[1, 2]" in text
    assert "Pass 0 ended with an exception" in text


def test_more_images_than_fit_are_counted(tmp_path, strange_run):
    images = [Image.new("L", (8, 8))] * 15
    text = write_recording_page(
        strange_run, tmp_path, title="Many", evidence=Evidence(images)
    ).read_text("utf-8")
    assert text.count('alt="Input ') == 12
    assert "and 3 more" in text


def test_class_scores_say_what_they_are_and_of_which_input(tmp_path, strange_run):
    def scores(n_images):
        path = write_recording_page(
            strange_run, tmp_path, title="Cats",
            evidence=Evidence([Image.new("L", (8, 8))] * n_images, [("cat", 0.9)]),
        )  # fmt: skip
        return path.read_text("utf-8")

    assert "Most likely classes</h2>" in scores(1)
    assert "of the first of" not in scores(1)
    assert "<p>of the first of 15 inputs</p>" in scores(15)


def test_a_value_says_how_many_channels_and_samples_are_left_out(tmp_path):
    model = nn.ModuleDict({"many": nn.Conv2d(1, 20, 1), "all": nn.Conv2d(20, 3, 1)})
    model.forward = lambda x: model["all"](model["many"](x))

    def remarks(run):
        text = write_recording_page(run, tmp_path, title="Maps").read_text("utf-8")
        return re.findall('<p class="remark">(.*?)</p>', text)

    with hl.record(model, ["many", "all"]) as run:
        model(torch.rand(8, 1, 4, 4))
    not_saved = "all of them: <code>run.save(&#39;DIR&#39;), then hookline view DIR</code>"
    assert remarks(run)[0] == f"8 of 20 channels, sample 0 of 8; {not_saved}"
    run.save(tmp_path)
    view = f"all of them: <code>hookline view {tmp_path}</code>"
    assert remarks(run) == [
        f"8 of 20 channels, sample 0 of 8; {view}", f"3 channels, sample 0 of 8; {view}",
    ]  # fmt: skip
    with hl.record(model, ["many", "all"]) as run:
        model(torch.rand(1, 1, 4, 4))
    assert remarks(run) == [f"8 of 20 channels; {view}"]


def test_names_that_utf8_refuses_are_written_escaped(tmp_path):
    model = nn.Sequential()
    model.add_module("\udcff", nn.ReLU())
    with hl.record(model) as run:
        model(torch.zeros(1))
    assert "\\udcff" in write_recording_page(run, tmp_path, title="Odd").read_text("utf-8")


def test_a_recording_without_values_is_still_a_page(tmp_path, net):
    with pytest.warns(hl.HooklineWarning), hl.record(net, "fc") as run:
        pass
    text = write_recording_page(run, tmp_path, title="Empty").read_text("utf-8")
    assert "Nothing was recorded." in text
    assert "the model has not run" in text


def test_a_deep_network_stays_small(tmp_path, net):
    with hl.record(net, copy=True) as run:
        for _ in range(6):
            net(torch.rand(1, 3, 64, 64))
    assert write_recording_page(run, tmp_path, title="Deep").stat().st_size < 3_000_000


class Pair(nn.Module):
    """Gives two tensors, the second with NaN."""

    def forward(self, x):
        return x, {"sums": x.sum(1) * float("nan"), "n": 3}


def test_nan_in_any_leaf_is_counted_and_its_leaf_named(tmp_path):
    model = nn.Sequential(nn.Identity())
    model.add_module("pair", Pair())
    with hl.record(model) as run:
        model(torch.ones(3, 4))
    text = write_recording_page(run, tmp_path, title="A page").read_text("utf-8")
    cells = re.findall(r'<td class="non-finite number( bad)?">(.*?)</td>', text)
    # The root gives on what the pair gives.
    assert cells == [(" bad", "3 in output[1].sums"), ("", "0"), (" bad", "3 in output[1].sums")]
    assert "2 values hold NaN or infinity" in text
    chosen = re.findall(r"<dt>NaN, inf</dt>\s*<dd[^>]*>(.*?)</dd>", text)
    assert chosen == [text for _, text in cells]  # the page of each site says it, too


def test_many_leaves_with_nan_are_counted():
    model = nn.Identity()
    with hl.record(model) as run:
        model([torch.full((n,), float("inf")) for n in (1, 2, 3, 4)])
    (seen,) = read_values(run)
    assert seen.non_finite == 10
    assert seen.non_finite_text == "10 in output[0], output[1], output[2] and 1 more"
