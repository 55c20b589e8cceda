"""The slots of a site, filled by several threads."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline.engine import Site
from hookline.verbs.monitor.slots import Slots
from meeting import Meanwhile, ToldLock


class Count:
    """Counts elements; another thread acts while the first empty slots are made."""

    def __init__(self):
        self.meanwhile = None

    def start(self, value):
        self.meanwhile()
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + value.numel()


def test_a_value_waits_while_another_thread_makes_slots():
    count = Count()
    slots = Slots((count,), 1)
    slots.lock = ToldLock()
    site = slots.site(Site("fc"), (0, 0))
    count.meanwhile = Meanwhile(lambda: site.add(torch.ones(3)), slots.lock)
    site.add(torch.ones(4))
    count.meanwhile.end()
    assert not site.is_off
    assert [one.tolist() for one in site.take()] == [[7.0]]


def test_a_statistic_whose_slots_are_no_flat_tensor_is_named():
    for made in ([0.0], None, torch.zeros(2, 2)):
        count = Count()
        count.meanwhile, count.start = None, lambda value, made=made: made
        slots = Slots((count,), 1)
        site = slots.site(Site("fc"), (0, 0))
        site.add(torch.ones(4))
        with pytest.warns(hl.HooklineWarning, match=r"Count\.start must return a flat float64"):
            slots.tell()
        assert site.is_off
