"""Counts of gradients, of several threads."""

from __future__ import annotations

import torch

from hookline.verbs.clip import report
from hookline.verbs.clip.report import Tally
from meeting import Meanwhile, ToldLock


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
    meanwhile = Meanwhile(lambda: tally.add(torch.tensor(3.0), 1.0), lock)
    monkeypatch.setattr(Bound, "meanwhile", meanwhile)
    tally.add(torch.tensor(2.0), Bound())
    meanwhile.end()
    row = tally.row(1.0)
    assert (row.seen, row.clipped, row.largest) == (2, 2, 3.0)
