"""Reports on their way to writers: refused ones, and an interrupt while one is written."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import run_folder
from hookline.verbs.monitor.writers import files

N_STEPS = 5


class Writer:
    """A writer that keeps the steps it took, and calls a function before each."""

    name = "a server"

    def __init__(self, before=lambda step: None):
        self.before = before
        self.steps = []
        self.is_closed = False

    def start(self, first):
        pass

    def write(self, report):
        self.before(report.step)
        self.steps.append(report.step)

    def close(self):
        self.is_closed = True


def train(to, n_steps=N_STEPS, *, optimizer=True):
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, to=to) as seen:
        train.seen = seen
        for _ in range(n_steps):
            model(torch.randn(3, 4)).sum().backward()
            if optimizer:
                sgd.step()
    return seen


def interrupt_at(step):
    def before(number):
        if number == step:
            raise KeyboardInterrupt

    return before


def test_an_interrupt_at_a_step_leaves_each_step_once():
    interrupted, other = Writer(interrupt_at(2)), Writer()
    with pytest.raises(KeyboardInterrupt):
        train([interrupted, other])
    assert train.seen.steps.tolist() == other.steps == [0, 1, 2]
    assert not torch.tensor(train.seen["(root)"].mean).isnan().any()
    assert interrupted.steps == [0, 1]  # nobody knows what a logger did with the third
    assert interrupted.is_closed
    assert other.is_closed


@pytest.mark.slow
def test_an_interrupt_at_a_pass_leaves_each_step_once():
    writer = Writer(interrupt_at(258))
    with pytest.raises(KeyboardInterrupt):
        train(writer, 300, optimizer=False)
    assert train.seen.steps.tolist() == list(range(259))
    assert not torch.tensor(train.seen["(root)"].mean).isnan().any()


def test_a_warning_made_an_error_leaves_each_step_once():
    writer = Writer()
    model, away = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.HooklineWarning, match="no value came"), hl.monitor(model, to=writer):
        away(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert writer.steps == [0]


class Interrupting:
    """A call that is made, and at which Ctrl-C then comes, once."""

    def __init__(self, call, count):
        self.call, self.count = call, count

    def __call__(self, *args):
        done = self.call(*args)
        self.count -= 1
        if not self.count:
            raise KeyboardInterrupt
        return done


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8])
def test_a_run_has_each_step_once_after_an_interrupt(tmp_path, monkeypatch, count):
    write = Interrupting(run_folder._write_at, count)
    monkeypatch.setattr(run_folder, "_write_at", write)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    found = hl.open(tmp_path / "run")
    assert found.steps.tolist() == train.seen.steps.tolist() == list(range(len(found)))
    assert found["(root)"].mean.tolist() == train.seen["(root)"].mean.tolist()


@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet"])
def test_a_file_has_each_step_once_after_an_interrupt(tmp_path, monkeypatch, name):
    numbers = files.StepReport.numbers_by_site_and_name
    by_site = Interrupting(numbers, 3)
    monkeypatch.setattr(files.StepReport, "numbers_by_site_and_name", lambda *args: by_site(*args))  # noqa: PLW0108  (a method)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / name)
    if name == "run.jsonl":
        lines = (tmp_path / name).read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
    else:
        pytest.importorskip("pyarrow")
        from pyarrow.parquet import read_table

        steps = read_table(tmp_path / name)["step"].to_pylist()
        assert len(steps) == 3 * len(train.seen.at(0))
        steps = list(dict.fromkeys(steps))
    assert steps == [0, 1, 2]


def test_half_a_line_is_written_anew(tmp_path):
    writer, model = files.JsonLinesWriter(tmp_path / "run.jsonl"), nn.Linear(2, 2)
    with hl.monitor(model, ports="output") as seen:
        model(torch.ones(1, 2))
    (report,) = seen._source.read()
    writer.start(report)
    writer._begun = report, 0
    writer._file.write(b'{"step": 0, "sec')  # an interrupt came here
    writer.write(report)
    writer.write(report)
    writer.close()
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 0


def test_a_report_refused_for_ever_is_left_out_alone():
    def refuse(step):
        if step == 1:
            raise ValueError("no infinity, please")

    writer, other = Writer(refuse), Writer()
    with pytest.warns(hl.HooklineWarning) as told:
        seen = train([writer, other], 9)
    assert writer.steps == [0, 2, 3, 4, 5, 6, 7, 8]
    assert other.steps == seen.steps.tolist() == list(range(9))
    first, second = (str(one.message) for one in told)
    assert first.startswith("hl.monitor: a server raised ValueError: no infinity, please.")
    assert second == (
        "hl.monitor: a server takes later steps, but has refused step 1 4 times: ValueError: no"
        " infinity, please. Step 1 is left out there."
        "\nRead it from the curves that the monitor gave: seen."
    )


def test_a_short_run_has_every_step_but_the_refused_one():
    def refuse(step):
        if step == 0:
            raise ValueError("no")

    writer = Writer(refuse)
    with pytest.warns(hl.HooklineWarning) as told:
        train(writer, 2)
    assert writer.steps == [1]
    assert "1 report never reached a server" in str(told[-1].message)


def test_a_writer_that_is_down_is_not_tried_for_each_report():
    tries = []

    def refuse(step):
        tries.append(step)
        raise ConnectionError("down")

    with pytest.warns(hl.HooklineWarning):
        train(Writer(refuse), 30)
    assert len(tries) <= 4 + 3 * 27
