from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import hookline as hl
from forked_children import child
from hookline.display.units import count
from hookline.views.page import ImagesAndClasses, write_recording_page
from hookline.views.page.value_entries import measure_values
from page_data import core_of


def drawn_in(text):
    """What is drawn in a page: `7` are the maps of value 7, `7 scores` its class scores."""
    parts = {}
    for script in re.findall(r'id="maps-\d+">(.*?)</script>', text):
        parts |= json.loads(script)
    return parts


def maps_of(text):
    """The maps in a page, by the position of their value."""
    return {name: maps for name, maps in drawn_in(text).items() if name.isdecimal()}


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


def test_values_on_the_meta_device_have_no_numbers(tmp_path):
    with hl.record(model := nn.Linear(3, 2, device="meta"), "") as run:
        model(torch.empty(4, 3, device="meta"))
    values = core_of(hl.write_page(run, tmp_path).read_text("utf-8"))["values"]
    assert values["problem"] == {"0": "[4, 2] on the meta device, which has no numbers"}
    assert values["waits"] == []


def test_where_it_cannot_be_written_it_says_what_to_do(tmp_path, strange_run):
    (tmp_path / "file").write_text("")
    with pytest.raises(hl.FolderError) as caught:
        write_recording_page(strange_run, tmp_path / "file" / "report.html", title="A page")
    assert str(tmp_path / "file" / "report.html") in str(caught.value)
    assert "its folder is a file" in str(caught.value)
    assert "Name a file in a writable folder" in str(caught.value)


def test_a_name_that_is_too_long_is_an_error_of_the_page(tmp_path, strange_run):
    for path in (tmp_path / f"{'x' * 300}.html", tmp_path / ("x" * 300) / "page.html"):
        with pytest.raises(hl.FolderError, match="File name too long"):
            write_recording_page(strange_run, path, title="A page")
    assert list(tmp_path.iterdir()) == []


def write_as_nobody(run, path):
    """Write a page as another user, and return the error that this raises."""
    write_recording_page(run, path.parent.parent, title="A page")  # all modules are imported

    def write():
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            write_recording_page(run, path, title="A page")
        except Exception as error:
            return type(error).__name__, str(error)
        return "", "nothing was raised"

    return child(write)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["page.html", "new/page.html"])
def test_a_folder_that_is_closed_to_this_user_is_named(strange_run, name):
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o777)
        (closed := Path(base) / "closed").mkdir()
        closed.chmod(0)
        kind, text = write_as_nobody(strange_run, closed / name)
    assert kind == "FolderError", text
    assert f"{closed / name}: Permission denied" in text


@pytest.fixture
def failing_disk(monkeypatch):
    """`failing_disk(error)`: each page that is written fails by this error, at its end."""

    def fail(error):
        def replace(*_):
            raise error

        monkeypatch.setattr("hookline.views.page.recording_page.os.replace", replace)

    return fail


FULL = OSError(28, "No space left on device")


def test_a_failing_disk_leaves_no_new_folder(tmp_path, strange_run, failing_disk):
    failing_disk(FULL)
    with pytest.raises(hl.FolderError, match="No space left on device"):
        write_recording_page(strange_run, tmp_path / "new" / "pages" / "a.html", title="t")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_page_is_written_leaves_nothing(tmp_path, strange_run, failing_disk):
    failing_disk(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_recording_page(strange_run, tmp_path / "new" / "a.html", title="t")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_the_older_page(tmp_path, strange_run, failing_disk):
    path = write_recording_page(strange_run, tmp_path, title="older")
    failing_disk(FULL)
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
        evidence=ImagesAndClasses(classes=[(hostile, 0.5)]),
    )
    text = path.read_text("utf-8")
    assert hostile not in text
    assert "<script>alert" not in text
    assert "<script>alert(1)<" in core_of(text)["rows"]["name"]  # packed, and put in as text
    # A closing tag inside the data would end the data, whatever the quotes around it say.
    n_maps = text.count('type="application/json" id="maps-')
    assert n_maps == 1
    assert len(maps_of(text)) > 5
    assert len(re.findall("</script", text)) == 2 + n_maps


def test_the_data_is_plain_json_even_with_nan(tmp_path, strange_run):
    text = write_recording_page(strange_run, tmp_path, title="A page").read_text("utf-8")
    json.loads(json.dumps(core_of(text), allow_nan=False))
    json.dumps(maps_of(text), allow_nan=False)


def test_it_refers_to_nothing_outside(tmp_path, strange_run):
    text = write_recording_page(strange_run, tmp_path, title="A page").read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "@import" not in text
    assert re.search(r"default-src 'none';[^\"]* script-src 'sha256-[A-Za-z0-9+/]+=*'\"", text)


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
        strange_run, tmp_path, title="Many", evidence=ImagesAndClasses(images)
    ).read_text("utf-8")
    assert text.count('alt="Input ') == 12
    assert "and 3 more" in text


def test_class_scores_say_what_they_are_and_of_which_input(tmp_path, strange_run):
    def scores(n_images):
        path = write_recording_page(
            strange_run, tmp_path, title="Cats",
            evidence=ImagesAndClasses([Image.new("L", (8, 8))] * n_images, [("cat", 0.9)]),
        )  # fmt: skip
        return path.read_text("utf-8")

    assert "Most likely classes</h2>" in scores(1)
    assert "of the first of" not in scores(1)
    assert "<p>of the first of 15 inputs</p>" in scores(15)


def test_maps_say_how_many_channels_and_samples_there_are(tmp_path):
    model = nn.ModuleDict({"many": nn.Conv2d(1, 20, 1), "all": nn.Conv2d(20, 3, 1)})
    model.forward = lambda x: model["all"](model["many"](x))

    def shown(run):
        text = write_recording_page(run, tmp_path, title="Maps").read_text("utf-8")
        maps = maps_of(text).values()
        counts = [(len(m["tiles"]), m["of"], m["sample"], m["samples"]) for m in maps]
        return counts, core_of(text)["view"]

    with hl.record(model, ["many", "all"]) as run:
        model(torch.rand(8, 1, 4, 4))
    counts, view = shown(run)
    assert counts == [(8, 20, 0, 8), (3, 3, 0, 8)]
    assert view == "run.save('DIR'), then hookline view DIR"
    run.save(tmp_path)
    assert shown(run)[1] == f"hookline view {tmp_path}"


def test_pictures_beyond_their_share_of_the_file_are_left_out(tmp_path, monkeypatch, net, image):
    monkeypatch.setattr("hookline.views.page.recording_page._PICTURE_BYTES", 6000)
    with hl.record(net, copy=True) as run:
        for _ in range(2):
            net(image)
    text = write_recording_page(run, tmp_path, title="Few").read_text("utf-8")
    shown = list(map(int, maps_of(text)))
    assert 0 < len(shown) < len(run)
    assert max(shown) >= len(run) // 2  # each pass has some


def test_names_that_utf8_refuses_are_written_escaped(tmp_path):
    model = nn.Sequential()
    model.add_module("\udcff", nn.ReLU())
    with hl.record(model) as run:
        model(torch.zeros(1))
    text = write_recording_page(run, tmp_path, title="Odd").read_text("utf-8")
    assert core_of(text)["rows"]["name"] == ["(root)", "\\udcff"]


def test_a_recording_without_values_is_still_a_page(tmp_path, net):
    with pytest.warns(hl.HooklineWarning), hl.record(net, "fc") as run:
        pass
    text = write_recording_page(run, tmp_path, title="Empty").read_text("utf-8")
    core = core_of(text)
    assert core["rows"]["name"] == []
    assert "the model has not run" in core["silent"][0][2]


@pytest.mark.slow
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
    values = core_of(text)["values"]
    # The root gives on what the pair gives.
    assert values["leaves"] == {"1": "3 in output[1].sums", "2": "3 in output[1].sums"}
    assert values["bad"] == {"1": 3, "2": 3}


def test_many_leaves_with_nan_are_counted():
    model = nn.Identity()
    with hl.record(model) as run:
        model([torch.full((n,), float("inf")) for n in (1, 2, 3, 4)])
    (seen,) = measure_values(run)
    assert seen.non_finite == 10
    assert seen.non_finite_text == "10 in output[0], output[1], output[2] and 1 more"


def test_the_output_of_an_image_model_has_scores_and_a_class_map(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with hl.record(model, ports=("input", "output", "grad_output"), copy=True) as run:
        for _ in range(2):
            model(torch.rand(2, 3, 8, 8))[:, 1].sum().backward()
    text = write_recording_page(run, tmp_path, title="Images").read_text("utf-8")
    parts, core = drawn_in(text), core_of(text)
    assert len([name for name in parts if name.endswith(" scores")]) == 2
    maps = [sets for name, sets in parts.items() if name.endswith(" over")]
    assert [[part["at"] for part in sets] for sets in maps] == [["0"], ["0"]]
    assert sorted(core["images"]) == ["0", "1"]
    for order in core["images"].values():
        drawn = parts[f"{order} image"]
        assert drawn["image"].startswith("data:image/png;base64,")
        assert drawn["size"] == [8, 8]


@pytest.mark.slow
def test_maps_of_gradients_have_the_channels_of_their_own_value(tmp_path):
    # The gradient of an input has the input's channels, also where the output has more.
    model = nn.Sequential(nn.Conv2d(1, 20, 1))
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    with hl.record(model, "0", ports=("input", "output", "grad_input")) as run:
        model(x)[:, 10:].square().sum().backward()
    text = write_recording_page(run, tmp_path, title="Gradients").read_text("utf-8")
    assert [len(maps["tiles"]) for maps in maps_of(text).values()] == [1, 8, 1]


def test_tokens_are_measured_in_each_pass_that_fits(tmp_path, monkeypatch):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with hl.record(model, copy=True) as run:
        for step in range(3):
            model(torch.rand(1, 5, 4) + step)
    norms = core_of(hl.write_page(run, tmp_path / "report.html").read_text("utf-8"))["norms"]
    for number, record in enumerate(run.passes):
        expected = record["1"][0].double().norm(dim=-1).tolist()
        assert norms[str(number)]["output"][1] == pytest.approx(expected, rel=1e-3)
    monkeypatch.setattr("hookline.views.page.recording_page._MOST_NORMS", 2 * 15)
    norms = core_of(hl.write_page(run, tmp_path / "report.html").read_text("utf-8"))["norms"]
    assert sorted(norms) == ["1", "2"]


def test_a_total_of_one_has_a_singular_label(tmp_path):
    model = nn.Linear(2, 2)
    with hl.record(model, "") as run:
        model(torch.zeros(1, 2))
    text = hl.write_page(run, tmp_path / "page.html").read_text()
    labels = re.findall(r"<dt>(\w+)</dt><dd>1</dd>", text)
    assert labels == ["Site", "Value", "Pass"]
