"""The barrier of a report: ranks pass it together, or each is told why they do not."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

import hookline as hl
from hookline.engine.distributed import rendezvous
from hookline.verbs.monitor import report_barrier as module
from hookline.verbs.monitor.report_barrier import ReportBarrier

EACH = "every=1 from step 0"


@pytest.fixture
def barriers(monkeypatch):
    """The barriers of two ranks that wait for a moment only."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(module, "PATIENCE_S", 0.03)
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "default_store", lambda: store)
    return [ReportBarrier(store, "barriers", (0, 1), rank) for rank in (0, 1)]


def said(barrier, step=0, settings=EACH, *, is_last=False):
    with pytest.raises(hl.RanksError) as caught:
        barrier.wait_for_all(step, settings, is_last=is_last)
    return str(caught.value)


def test_ranks_pass_together(barriers, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    steps = 5

    def enter(barrier):
        for step in range(steps):
            barrier.wait_for_all(step, EACH, is_last=step == steps - 1)

    other = threading.Thread(target=enter, args=[barriers[1]])
    other.start()
    enter(barriers[0])
    other.join(60)
    assert not other.is_alive()


def test_a_rank_that_does_not_come_is_named_to_both(barriers):
    message = "after 0.03 s, rank 1: did not come."
    assert said(barriers[0]).startswith(message)
    assert said(barriers[1]).startswith(message)


def test_the_failure_of_a_rank_that_does_not_come_is_said(barriers):
    rendezvous.default_store().set("hookline/failed/1", "ValueError: a bad batch")
    message = "after 0.01 s, rank 1: ValueError: a bad batch."
    assert said(barriers[0], is_last=True).startswith(message)


def test_a_rank_at_another_step_is_named_to_both(barriers):
    waiting = threading.Thread(target=lambda: texts.append(said(barriers[0], 3)))
    texts = []
    waiting.start()
    while not barriers[0]._store.check(["barriers/1/first"]):
        pass
    texts.append(said(barriers[1], 4))
    waiting.join(60)
    message = f"rank 0: step 3 with {EACH}; rank 1: step 4 with {EACH}."
    assert all(message in text for text in texts)
    assert len(texts) == 2


def test_a_rank_that_has_other_settings_now_is_not_awaited(barriers, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    barriers[1].publish_settings("every=2 from step 0")
    message = "the ranks report different steps: rank 0: every=1 from step 0; rank 1: every=2"
    assert message in said(barriers[0])


def test_a_rank_that_has_left_is_not_awaited(barriers, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT_S", 60.0)
    barriers[1].announce_leave("has left hl.monitor at step 0 (ValueError: a bad batch)")
    barriers[1].announce_leave("has ended hl.monitor at step 0")  # the first counts
    text = said(barriers[0], is_last=True)
    assert text.startswith("rank 1 has left hl.monitor at step 0 (ValueError: a bad batch).")


def test_the_keys_of_a_barrier_that_all_have_passed_are_deleted(barriers):
    store = barriers[0]._store
    for step in range(3):
        waiting = threading.Thread(
            target=barriers[0].wait_for_all, args=[step, EACH], kwargs={"is_last": 0}
        )
        waiting.start()
        barriers[1].wait_for_all(step, EACH, is_last=False)
        waiting.join(60)
    assert not store.check(["barriers/1/first"])
    assert not store.check(["barriers/1/go"])
    assert store.check(["barriers/3/go"])
