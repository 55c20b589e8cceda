"""The gate of a report: ranks pass it together, or each is told why they do not."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

import hookline as hl
from hookline.engine.distributed import rendezvous
from hookline.verbs.monitor import gate as module
from hookline.verbs.monitor.gate import Gate

EACH = "every=1 from step 0"


@pytest.fixture
def gates(monkeypatch):
    """The gates of two ranks that wait for a moment only."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(module, "PATIENCE_S", 0.03)
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "default_store", lambda: store)
    return [Gate(store, "gates", (0, 1), rank) for rank in (0, 1)]


def said(gate, step=0, settings=EACH, *, is_last=False):
    with pytest.raises(hl.RanksError) as caught:
        gate.enter(step, settings, is_last=is_last)
    return str(caught.value)


def test_ranks_pass_together(gates, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    steps = 5

    def enter(gate):
        for step in range(steps):
            gate.enter(step, EACH, is_last=step == steps - 1)

    other = threading.Thread(target=enter, args=[gates[1]])
    other.start()
    enter(gates[0])
    other.join(60)
    assert not other.is_alive()


def test_a_rank_that_does_not_come_is_named_to_both(gates):
    message = "after 0.03 s, rank 1: did not come."
    assert said(gates[0]).startswith(message)
    assert said(gates[1]).startswith(message)


def test_the_failure_of_a_rank_that_does_not_come_is_said(gates):
    rendezvous.default_store().set("hookline/failed/1", "ValueError: a bad batch")
    message = "after 0.01 s, rank 1: ValueError: a bad batch."
    assert said(gates[0], is_last=True).startswith(message)


def test_a_rank_at_another_step_is_named_to_both(gates):
    waiting = threading.Thread(target=lambda: texts.append(said(gates[0], 3)))
    texts = []
    waiting.start()
    while not gates[0]._store.check(["gates/1/first"]):
        pass
    texts.append(said(gates[1], 4))
    waiting.join(60)
    message = f"rank 0: step 3 with {EACH}; rank 1: step 4 with {EACH}."
    assert all(message in text for text in texts)
    assert len(texts) == 2


def test_a_rank_that_has_other_settings_now_is_not_awaited(gates, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    gates[1].tell("every=2 from step 0")
    message = "the ranks report different steps: rank 0: every=1 from step 0; rank 1: every=2"
    assert message in said(gates[0])


def test_a_rank_that_has_left_is_not_awaited(gates, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT_S", 60.0)
    gates[1].leave("has left hl.monitor at step 0 (ValueError: a bad batch)")
    gates[1].leave("has ended hl.monitor at step 0")  # the first counts
    text = said(gates[0], is_last=True)
    assert text.startswith("rank 1 has left hl.monitor at step 0 (ValueError: a bad batch).")


def test_the_keys_of_a_gate_that_all_have_passed_are_deleted(gates):
    store = gates[0]._store
    for step in range(3):
        waiting = threading.Thread(target=gates[0].enter, args=[step, EACH], kwargs={"is_last": 0})
        waiting.start()
        gates[1].enter(step, EACH, is_last=False)
        waiting.join(60)
    assert not store.check(["gates/1/first"])
    assert not store.check(["gates/1/go"])
    assert store.check(["gates/3/go"])
