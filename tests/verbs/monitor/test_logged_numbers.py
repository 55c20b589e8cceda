"""The user's own numbers beside the measured ones: of which step they are, and where they go."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
from torch import nn

import hookline as hl

X = torch.ones(3, 4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(n_steps=6, *, log, n_parts=1, **options):
    """Train, and call `log(seen, place, step)` at each place of each step."""
    model = net()
    optimizer = sgd(model)
    with hl.monitor(model, "0", ports="output", **options) as seen:
        for step in range(n_steps):
            for _ in range(n_parts):
                log(seen, "forward", step, model(X).square().mean())
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            log(seen, "after", step, None)
    return seen


def logged(seen, name="x"):
    curve = seen.logged[name]
    return curve.steps.tolist(), curve.values.tolist()


@pytest.mark.parametrize("place", ["forward", "after"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_number_is_of_its_step_before_and_after_the_optimizer(place, every):
    def log(seen, at, step, loss):
        if at == place:
            seen.log(x=step)

    seen = train(log=log, every=every)
    assert logged(seen) == ([*range(6)], [*range(6)])
    assert seen.steps.tolist() == [*range(0, 6, every)]


def test_of_several_parts_of_a_step_the_last_is_kept():
    parts = iter(range(100))
    seen = train(3, log=lambda seen, at, *_: at == "forward" and seen.log(x=next(parts)), n_parts=4)
    assert logged(seen) == ([0, 1, 2], [3, 7, 11])


def test_without_an_optimizer_a_number_is_of_its_pass():
    model = net()
    with hl.monitor(model, ports="output") as seen:
        for step in range(4):
            model(X)
            seen.log(x=step)
    assert logged(seen) == ([0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("step", [-1, 1.5, 10**30])
def test_a_step_that_no_file_holds_is_refused(step):
    message = (
        rf"^step= must be an integer from 0 to 2\*\*62, got {step}\."
        r"\nGive the number of a step: seen.log\(loss=loss, step=12\)\.$"
    )
    model = net()
    with hl.monitor(model, ports="output") as seen:
        model(X)
        with pytest.raises(hl.AttachError, match=message):
            seen.log(loss=1, step=step)
    assert seen.logged == {}


def test_a_step_may_be_given_and_numbered():
    model = net()
    optimizer = sgd(model)
    line = hl.monitor(model, ports="output")
    with line as seen:
        line.step = 1000
        for _ in range(2):
            seen.log(x=model(X).sum())
            optimizer.step()
        seen.log({"a b": 3}, step=7)
    assert seen.logged["x"].steps.tolist() == [1000, 1001]
    assert logged(seen, "a b") == ([7], [3])


def test_nan_and_infinity_are_kept():
    values = [math.nan, math.inf, 1.0]
    seen = train(
        3, log=lambda seen, at, step, _: at == "forward" and seen.log(x=torch.tensor(values[step]))
    )
    assert math.isnan(seen.logged["x"].values[0])
    assert seen.logged["x"].values[1:].tolist() == [math.inf, 1.0]


def test_every_sink_gets_them_with_the_step_or_after_it(tmp_path):
    rows = []

    def log(seen, at, step, loss):
        if at == "forward":
            seen.log(loss=loss)
        elif step == 1:
            seen.log(late=5)

    to = [
        tmp_path / "run",
        tmp_path / "run.jsonl",
        lambda step, numbers: rows.append((step, numbers)),
    ]
    seen = train(3, log=log, to=to)
    found = hl.open(tmp_path / "run")
    assert found.sites == seen.sites
    assert found.steps.tolist() == [0, 1, 2]
    for curves in (seen, found):
        assert logged(curves, "late") == ([1], [5])
        assert curves.logged["loss"].steps.tolist() == [0, 1, 2]
    assert logged(found, "loss") == logged(seen, "loss")
    assert found.at(2)["logged/loss"] == seen.logged["loss"].values[2]
    assert [step for step, _ in rows] == [0, 1, 1, 2]
    assert rows[2][1] == {"logged/late": 5}
    assert {"0/mean", "logged/loss"} <= rows[0][1].keys()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(one["step"], "0/mean" in one) for one in lines] == [
        (0, True), (1, True), (1, False), (2, True),
    ]  # fmt: skip


def test_they_are_written_as_a_training_goes_on(tmp_path):
    read = []

    def log(seen, at, step, loss):
        if at == "forward":
            seen.log(x=step)
        elif step == 3:
            read.append(hl.open(tmp_path / "run").logged["x"].steps.tolist())

    train(8, log=log, every=100, to=tmp_path / "run")
    assert read == [[0, 1, 2, 3]]


def test_a_run_of_user_numbers_alone_is_read(tmp_path):
    model = net()
    with pytest.warns(hl.HooklineWarning, match="reported no step"):
        with hl.monitor(model, to=tmp_path / "run") as seen:
            seen.log(x=2)
    assert logged(hl.open(tmp_path / "run")) == logged(seen) == ([0], [2])


def test_a_module_of_the_name_of_user_numbers_is_refused():
    model = nn.ModuleDict({"logged": nn.Linear(4, 2)})
    line = hl.monitor(model, "logged", ports="output")
    with line as seen:
        model["logged"](X)
        with pytest.raises(hl.InputError, match="got a model with a module of this name"):
            seen.log(x=1)


def test_curves_are_copied_and_pickled_without_their_monitor():
    seen = train(2, log=lambda seen, at, step, _: at == "forward" and seen.log(x=step))
    for other in (copy.deepcopy(seen), pickle.loads(pickle.dumps(seen))):
        assert logged(other) == logged(seen)
        assert other["0"].mean.tolist() == seen["0"].mean.tolist()


def test_a_logged_loss_changes_nothing_of_the_training():
    model, other = net(), net()
    for one, logs in ((model, True), (other, False)):
        optimizer = sgd(one)
        with hl.monitor(one) as seen:
            for _ in range(3):
                loss = one(X).square().mean()
                if logs:
                    seen.log(loss=loss)
                loss.backward()
                optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
