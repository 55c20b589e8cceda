"""Steps of a training that several threads run, and pairs of optimizers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine import Site
from hookline.engine.passes import passes
from hookline.verbs.monitor import steps
from hookline.verbs.monitor.slots import Slots
from hookline.verbs.monitor.steps import OptimizerPairs
from meeting import Meanwhile, ToldLock

X = torch.ones(1, 2)


@pytest.fixture(autouse=True)
def told_locks(monkeypatch):
    monkeypatch.setattr(passes, "fork_safe_lock", ToldLock)
    monkeypatch.setattr(steps, "fork_safe_lock", ToldLock, raising=False)


def test_a_new_optimizer_is_looked_at_between_steps():
    model, found = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    line = hl.monitor(model, every_thread=True)
    lock = line._steps._lock
    meanwhile = Meanwhile(lambda: found.append(line._steps.trains(optimizer)), lock)
    with lock:
        meanwhile()
        assert not found
    meanwhile.end()
    assert found == [True]
    with pytest.warns(hl.HooklineWarning, match="reported no step"):
        line.remove()


def test_a_reader_runs_the_model_while_a_pass_begins():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def read(step, numbers):
        begins()
        with torch.no_grad():
            model(X)

    def train():
        model(X).sum().backward()
        optimizer.step()

    line = hl.monitor(model, to=read, every_thread=True)
    begins, trains = Meanwhile(lambda: model(X), line._steps._lock), Meanwhile(train)
    trains()
    trains.end()
    begins.end()
    line.remove()
    assert line.curves.steps.tolist() == [0]


class Appears:
    """A site without a value, at which is looked while another site appears."""

    order = 0, 0

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    @property
    def widths(self):
        self.meanwhile()
        return ()


def with_a_site_that_appears():
    slots = Slots((hl.stats.moments(),), 2)
    slots.lock = ToldLock()

    def appear():
        slots.site(Site("late"), (1, 0)).merge([torch.zeros(8)])

    slots._sites["slow"] = Appears(Meanwhile(appear, slots.lock))
    return slots, slots._sites["slow"].meanwhile


def test_a_site_may_appear_while_sites_are_listed():
    slots, meanwhile = with_a_site_that_appears()
    assert slots.sites() == []
    meanwhile.end()
    assert [one.name for one in slots.sites()] == ["late"]


def test_a_site_that_appears_meanwhile_has_a_later_version():
    slots, meanwhile = with_a_site_that_appears()
    _, version = slots.layout()
    meanwhile.end()
    sites, later = slots.layout()
    assert [one.name for one in sites] == ["late"]
    assert later > version


def optimizers(n):
    return [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(n)]


def test_optimizers_without_a_run_in_between_are_a_pair():
    pairs, (one, other) = OptimizerPairs(), optimizers(2)
    pairs.model_runs()
    assert not pairs.follows(one)
    pairs.stepped(one)
    assert pairs.follows(other)
    pairs.stepped(other)
    assert not list(pairs.before_run(one))  # no run since
    pairs.model_runs()
    assert list(pairs.before_run(one)) == [other]
    assert list(pairs.before_run(other)) == [one]


def test_a_run_in_between_or_the_same_optimizer_makes_no_pair():
    pairs, (one, other) = OptimizerPairs(), optimizers(2)
    pairs.stepped(one)
    assert not pairs.follows(one)
    pairs.model_runs()
    assert not pairs.follows(other)
    assert not list(pairs.before_run(one))


def test_an_optimizer_that_is_gone_is_no_partner():
    pairs, (one, other) = OptimizerPairs(), optimizers(2)
    pairs.stepped(other)
    assert pairs.follows(one)
    pairs.model_runs()
    del other
    gc.collect()
    assert not list(pairs.before_run(one))
