"""The page of a run: what the server sends, and the file."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import RunFolder, RunReader, StepReport
from hookline.views.page.training_page import logged_data
from monitor_runs import Writer, layout_of, report_of
from page_data import data_of

NAN = float("nan")


@pytest.fixture
def run(tmp_path):
    """A run of three steps at two sites, which goes on."""
    writer = Writer(tmp_path / "run", ["a", "b:grad_output"])
    for k in range(3):
        writer.add([float(k)], [1.0, 2.0])
    return writer


def asked(server, **parameters):
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    return json.loads(server.get(f"new?{query}").text)


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_all_numbers_come_first_and_then_only_new_steps(served, run):
    server = served(run.folder.path)
    whole = asked(server, number="mean")
    assert [path for path, _, _ in whole["sites"]] == ["a", "b"]
    assert floats(whole["values"][0]).tolist() == [0.0, 1.5, 1.0, 1.5, 2.0, 1.5]
    known = len(floats(whole["now"]))
    ask = {"number": "mean", "stride": 1, "known": known}
    quiet = asked(server, steps=3, **ask, **{"from": 2})
    assert "values" not in quiet
    assert (quiet["step"], quiet["ended"]) == (2, False)
    run.add([7.0], [3.0])
    more = asked(server, steps=3, **ask, **{"from": 2})
    assert "sites" not in more
    assert more["from"] == 2
    assert more["firsts"] == [2, 3]
    assert floats(more["values"][0]).tolist() == [2.0, 1.5, 7.0, 3.0]
    run.close()
    assert asked(server, steps=4)["ended"]


def test_a_page_with_other_columns_or_sites_gets_all(served, run):
    server = served(run.folder.path)
    known = len(floats(asked(server)["now"]))
    for changed in ({"stride": 2}, {"known": known - 1}, {"from": 99}):
        answer = asked(server, **({"from": 2, "stride": 1, "known": known} | changed))
        assert (answer["from"], len(answer["firsts"]), len(answer["sites"])) == (0, 3, 2)


@pytest.mark.parametrize("query", ["from=x", "from=-1", "number=none", "known=1e9", "a=1" * 9])
def test_an_odd_request_is_answered_without_a_traceback(served, run, query):
    answer = served(run.folder.path).get(f"new?{query}")
    assert answer.status in (200, 404)
    assert "Traceback" not in answer.text


def test_a_run_of_no_steps_has_a_page(served, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "curves.bin").write_bytes(b"hlcurve1")
    server = served(tmp_path / "run")
    assert server.get().status == 200
    answer = asked(server)
    assert (answer["n_steps"], answer["sites"], answer["findings"]) == (0, [], [])


def test_a_folder_is_waited_for_until_its_first_step(served, tmp_path):
    server = served(tmp_path / "run")
    assert server.get().status == 503
    writer = Writer(tmp_path / "run", ["a"])
    assert server.get().status == 503
    writer.add([1.0])
    assert json.loads(server.get("state").text)["state"].startswith("run-")
    assert 'id="chart"' in server.get().text


def test_a_run_that_was_killed_opens_up_to_its_last_whole_step(served, run):
    path = run.folder.path / "curves.bin"
    path.write_bytes(path.read_bytes()[:-5])
    answer = asked(served(run.folder.path))
    assert (answer["n_steps"], answer["step"], answer["ended"]) == (2, 1, False)


def test_a_damaged_run_is_said(served, run):
    path = run.folder.path / "curves.bin"
    data = bytearray(path.read_bytes())
    data[-20] ^= 255
    path.write_bytes(data)
    server = served(run.folder.path)
    answer = server.get()
    assert answer.status == 503
    assert "is damaged at byte" in answer.text
    assert 'data-state=""' in answer.text  # the page waits until there is a state
    for address in ("new", "state"):  # an open page asks, and says why it shows an earlier state
        answer = json.loads(server.get(address).text)
        assert answer["state"] == ""
        assert "is damaged at byte" in answer["gone"]
    with pytest.raises(hl.FolderError, match="is damaged at byte"):
        hl.write_page(hl.open(run.folder.path), run.folder.path / "page.html")
    data[-20] ^= 255
    path.write_bytes(data)
    assert json.loads(server.get("state").text)["state"].startswith("run-")


def test_a_damaged_run_is_not_read_twice_before_the_damage(run):
    path = run.folder.path / "curves.bin"
    path.write_bytes(path.read_bytes() + b"\0" * 24)
    reader = RunReader(run.folder.path)
    said = set()
    for _ in range(2):
        with pytest.raises(hl.FolderError) as caught:
            reader.read()
        said.add(str(caught.value))
    assert len(said) == 1
    assert len(reader._reports) == 3


def test_a_replaced_or_deleted_run_is_noticed(served, run, tmp_path):
    folder = run.folder.path
    server = served(folder)
    state = asked(server)["state"]
    kept = tmp_path / "kept"
    folder.rename(kept)
    gone = asked(server, state=state, steps=3)
    assert gone["state"] == ""
    assert "deleted or being replaced" in gone["gone"]
    Writer(folder, ["c"]).add([1.0])
    assert asked(server, state=state, steps=3)["state"] not in ("", state)
    assert [path for path, _, _ in asked(server)["sites"]] == ["c"]


def test_a_run_written_over_the_older_file_is_another_run(served, run, tmp_path):
    Writer(tmp_path / "other", ["a", "b:grad_output"]).add([8.0], [9.0])
    server = served(run.folder.path)
    state = asked(server)["state"]
    shutil.copyfile(tmp_path / "other" / "curves.bin", run.folder.path / "curves.bin")
    assert asked(server, state=state, steps=3)["state"] not in ("", state)
    answer = asked(server, number="mean")
    assert answer["n_steps"] == 1
    assert floats(answer["values"][0]).tolist() == [8.0, 9.0]


def test_a_run_that_is_cut_short_shows_what_is_left(served, run):
    file = run.folder.path / "curves.bin"
    server = served(run.folder.path)
    assert asked(server)["n_steps"] == 3
    os.truncate(file, file.stat().st_size - 5)
    assert asked(server)["n_steps"] == 2


def test_a_run_that_may_not_be_read_says_so(served, run, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    server = served(run.folder.path)
    with monkeypatch.context() as patched:
        patched.setattr("hookline.curves.run_folder.open_regular", refuse)
        with pytest.raises(hl.FolderError, match="cannot be read: Permission denied"):
            _ = hl.open(run.folder.path).steps
        answer = server.get()
        assert (answer.status, "Permission denied" in answer.text) == (503, True)
        assert 'data-state=""' in answer.text
    assert json.loads(server.get("state").text)["state"].startswith("run-")


def test_a_step_that_the_statistic_cannot_read_is_left_out(served, tmp_path):
    layout = layout_of(["a"], statistics=(hl.stats.histogram(),))
    folder = RunFolder(tmp_path / "run")
    folder.add(report_of(0, layout, [[1.0]]))
    with pytest.warns(hl.HooklineWarning, match="HistogramStatistic at a are left out"):
        hl.write_page(hl.open(tmp_path / "run"), tmp_path / "page.html")


def test_ranks_have_numbers_of_their_own(served, tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    writer.add_ranks([[1.0]], [[3.0]])
    writer.add_ranks([[2.0]], [None])
    server = served(tmp_path / "run")
    assert asked(server)["n_ranks"] == 2
    assert json.loads(server.get("ranks?site=0&number=mean").text) == [[1.0, 2.0], [3.0, None]]
    assert floats(asked(server, number="mean")["values"][0]).tolist() == [2.0, 2.0]
    for site in ("9", "", "-1"):
        assert server.get(f"ranks?site={site}&number=mean").status == 404


def test_a_run_and_a_recording_are_not_compared(served, runs, run):
    answer = served(runs / "a", run.folder.path).get()
    assert answer.status == 503
    assert "Give a run alone" in answer.text


def test_the_addresses_of_recordings_and_runs_do_not_mix(served, runs, run):
    assert served(run.folder.path).get("maps?at=a").status == 503
    server = served(runs / "a")
    assert "values" not in json.loads(server.get("new").text)
    assert server.get("ranks?site=0").status == 404


def test_the_policy_lets_only_the_pages_own_script_run(served, run, runs, tmp_path):
    for folder in (run.folder.path, runs / "a"):
        answer = served(folder).get()
        script = re.search(r"<script>(.*?)</script>", answer.text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in answer.headers["content-security-policy"]
    text = hl.write_page(hl.open(str(run.folder.path)), tmp_path / "page.html").read_text()
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_no_name_becomes_markup(served, tmp_path):
    names = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\u202eevil"]
    writer = Writer(tmp_path / "<b>run", names)
    writer.add([1.0], [2.0], [3.0])
    server = served(tmp_path / "<b>run")
    file = hl.write_page(hl.open(tmp_path / "<b>run"), tmp_path / "page.html").read_text()
    for text in (server.get().text, file):
        assert "<b>run" not in text
        assert "<img" not in text
        assert text.count("</script>") == 2
    assert "\u202e" not in file
    assert "\\u202e" in asked(server)["sites"][2][0]


def test_a_page_in_a_folder_is_called_report(run, tmp_path):
    assert hl.write_page(hl.open(run.folder.path), tmp_path) == tmp_path / "report.html"
    assert hl.write_page(hl.open(run.folder.path), f"{tmp_path}/new/").name == "report.html"


def test_curves_in_memory_have_the_page_of_their_folder(tmp_path):
    model = nn.Linear(2, 2)
    with hl.monitor(model, ports="output", to=tmp_path / "run") as seen:
        for k in range(3):
            seen.log(loss=model(torch.full((4, 2), float(k))).sum())
    texts = [
        hl.write_page(curves, tmp_path / "page.html").read_text()
        for curves in (seen, hl.open(tmp_path / "run"))
    ]
    assert "<title>Training of Linear" in texts[0]
    first, second = ({**data_of(text), "age": 0.0} for text in texts)
    assert first == second
    assert first["ended"]


def test_curves_of_one_rank_have_a_page_of_their_own(tmp_path):
    writer = Writer(tmp_path / "run", ["a"])
    writer.add_ranks([[1.0]], [[3.0]])
    curves = hl.open(tmp_path / "run")
    means = [
        floats(data_of(hl.write_page(part, tmp_path / "p.html").read_text())["numbers"]["mean"][0])
        for part in (curves, curves.rank(1))
    ]
    assert [mean.tolist() for mean in means] == [[2.0], [3.0]]


def test_a_monitor_says_when_its_run_has_ended(served, tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, "", ports="output", to=str(tmp_path / "run")):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        server = served(tmp_path / "run")
        assert not asked(server)["ended"]
    assert asked(server)["ended"]
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert len(hl.open(copy)) == 3


def test_the_end_of_a_run_on_a_full_disk_closes_the_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.add(report_of(0, layout_of(["a"]), [[1.0]]))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.curves.run_folder._write_at", full)
    with pytest.raises(OSError, match="No space"):
        folder.finish()
    folder.finish()
    monkeypatch.undo()
    assert len(hl.open(tmp_path / "run")) == 1


def test_many_logged_steps_are_a_few_points_with_their_extremes():
    numbers = [float(k % 7) for k in range(5000)]
    numbers[77] = float("nan")
    reports = [StepReport.from_logged(k, 0.0, {"x": x}) for k, x in enumerate(numbers)]
    (found,) = logged_data(reports)
    assert found["each"] == 10
    assert len(found["steps"]) == len(found["last"]) == len(found["bad"]) == 500
    assert found["steps"][:2] == [9, 19]
    assert found["last"][0] == numbers[9]
    assert (found["low"][0], found["high"][0]) == (0.0, 6.0)
    assert [k for k, is_bad in enumerate(found["bad"]) if is_bad] == [7]


@pytest.mark.slow
def test_the_loss_is_the_first_of_the_user_numbers():
    reports = [StepReport.from_logged(0, 0.0, {"lr": 1.0, "eval_loss": NAN, "loss": 2.0, "a": 0.0})]
    found = logged_data(reports)
    assert [one["name"] for one in found] == ["loss", "eval_loss", "lr", "a"]
    assert found[1]["last"] == [None]
