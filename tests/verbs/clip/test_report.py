"""Counts of gradients, of several threads."""

from __future__ import annotations

import torch

from hookline.verbs.clip import report
from hookline.verbs.clip.report import _MOST_DEFERRED, Tally
from second_thread import Meanwhile, ToldLock


class Bound:
    """A bound of 1; the first comparison takes so long that another thread counts, too."""

    meanwhile = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.meanwhile()
        return function(*(1.0 if isinstance(one, cls) else one for one in args))


def test_gradients_of_two_threads_at_once_all_count(monkeypatch):
    lock = ToldLock()
    monkeypatch.setattr(report, "_lock", lock, raising=False)
    tally = Tally("fc")

    def add_many(size, bound):
        for _ in range(_MOST_DEFERRED):
            tally.add(torch.tensor(size), 1.0)
        tally.add(torch.tensor(size), bound)  # those that are deferred are counted first

    meanwhile = Meanwhile(lambda: add_many(3.0, 1.0), lock)
    monkeypatch.setattr(Bound, "meanwhile", meanwhile)
    add_many(2.0, Bound())
    meanwhile.end()
    row = tally.row(1.0)
    n_added = 2 * (_MOST_DEFERRED + 1)
    assert (row.seen, row.clipped, row.largest) == (n_added, n_added, 3.0)


def test_sizes_of_several_shapes_and_types_are_counted():
    tally = Tally("fc")
    sizes = [torch.tensor(2.0), torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor(4.0)]
    for size in [*sizes, torch.tensor(float("nan"))]:
        tally.add(size, 1.0)
    assert tally.row(1.0).clipped == 3
    assert (tally.row(1.0).seen, tally.row(1.0).nonfinite) == (5, 1)
    tally.add(torch.tensor(9.0), 1.0)  # after a report, counting goes on
    assert (tally.row(1.0).seen, tally.row(1.0).clipped) == (6, 4)
