"""The rendezvous where a rank dies or comes late; the ranks run one after another."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hookline.engine.distributed import rendezvous
from hookline.errors import RanksError


class Dying:
    """A store whose process dies when it waits for the other ranks."""

    def __init__(self, store) -> None:
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, keys, timeout):
        raise ConnectionError("gone")


@pytest.fixture
def ask(monkeypatch):
    store = dist.HashStore()

    def ask(
        rank, ranks=(0, 1), *, dies=False, said="here", question="run.full('fc')", timeout=0.01
    ):
        mine = Dying(store) if dies else store
        monkeypatch.setattr(rendezvous, "default_store", lambda: mine)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return rendezvous.gather_json(question, said, list(ranks), timeout)

    return ask


def test_the_first_rank_is_named_if_it_died_before_it_judged(ask):
    with pytest.raises(RanksError, match="the store over which the ranks meet is gone"):
        ask(0, dies=True)
    with pytest.raises(RanksError, match=r"waited 0.01 s for rank 0, which did not come"):
        ask(1)


def test_a_rank_that_comes_late_reads_the_same_verdict(ask):
    with pytest.raises(RanksError, match=r"waited 0.01 s for ranks 1, 2"):
        ask(0, (0, 1, 2))
    for rank in (1, 2):
        with pytest.raises(RanksError, match=r"waited 0.01 s for ranks 1, 2"):
            ask(rank, (0, 1, 2))


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_calls_name_timeout_only_if_they_have_it(ask, monkeypatch, timeout):
    monkeypatch.setattr(rendezvous, "TIMEOUT_S", 0.01)
    with pytest.raises(RanksError, match=r"waited 0\.01 s") as error:
        ask(0, timeout=timeout)
    assert ("timeout=" in str(error.value)) == (timeout is not None)


def test_a_rank_alone_waits_for_nobody(ask):
    assert ask(3, (3,), dies=True, said={"rows": 2}) == [{"rows": 2}]


@pytest.mark.parametrize(("n", "listed"), [(9, "1, 2, 3, 4, 5, 6, 7, 8,"), (10, "7, 8, …,")])
def test_at_most_eight_ranks_that_are_missing_are_listed(ask, n, listed):
    with pytest.raises(RanksError, match=f"{listed} which did not come"):
        ask(0, range(n))


def test_a_rank_that_missed_another_call_joins_the_next(ask):
    with pytest.raises(RanksError, match=r"full\('fc'\) waited 0.01 s for rank 1"):
        ask(0)
    with pytest.raises(RanksError, match=r"reduced\('fc'\) waited 0.01 s for rank 0"):
        ask(1, question="run.reduced('fc')")
    with pytest.raises(RanksError, match=r"reduced\('fc'\) waited 0.01 s for rank 0"):
        ask(0, question="run.reduced('fc')")  # too late: it is told so at once
