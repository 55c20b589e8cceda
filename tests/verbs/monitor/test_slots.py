"""The slots of a site, filled by several threads."""

from __future__ import annotations

import threading

import torch

from hookline.engine import Site
from hookline.verbs.monitor.slots import Slots


class ToldLock:
    """A reentrant lock that tells when a thread waits for it."""

    def __init__(self, told):
        self._lock = threading.RLock()
        self._told = told

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self._told.set()
            self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


class Count:
    """Counts elements; its first empty slots are made while another thread has a value, too."""

    def __init__(self):
        self.other = None
        self.site = None

    def start(self, value):
        if self.other is None:
            told = threading.Event()

            def add():
                self.site.add(torch.ones(3))
                told.set()

            self.site._of.lock._told = told
            self.other = threading.Thread(target=add)
            self.other.start()
            assert told.wait(60)
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + value.numel()


def test_a_value_waits_while_another_thread_makes_slots():
    count = Count()
    slots = Slots((count,), 1)
    slots.lock = ToldLock(None)
    count.site = slots.site(Site("fc"), (0, 0))
    count.site.add(torch.ones(4))
    count.other.join()
    assert not count.site.is_off
    assert [one.tolist() for one in count.site.take()] == [[7.0]]
