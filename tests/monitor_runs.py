"""Runs as a monitor writes them, made of numbers that a test chooses."""

from __future__ import annotations

import time

import numpy as np
import torch

import hookline as hl
from hookline.curves import ABSENT, Entry, Layout, RunFolder, StepReport

MOMENTS = hl.stats.moments()


def layout_of(sites, *, statistics=(MOMENTS,), width=8, ranks=None):
    entries = [Entry(site, k, width, ranks) for site in sites for k in range(len(statistics))]
    return Layout(tuple(statistics), tuple(entries))


def slots_of(values):
    """The slots of moments of some numbers; `ABSENT` for None."""
    if values is None:
        return np.full(8, ABSENT)
    tensor = torch.as_tensor(values, dtype=torch.float32)
    return MOMENTS.update(MOMENTS.start(tensor), tensor).numpy()


def report_of(step, layout, values, seconds=None):
    """A report: for each site its numbers, or for each rank such a list."""
    ranks = values if isinstance(values, tuple) else (values,)
    slots = np.stack([np.concatenate([slots_of(one) for one in rank]) for rank in ranks])
    return StepReport(step, time.time() if seconds is None else seconds, layout, slots)


class Writer:
    """A run that grows: `add(values of each site)` reports one step."""

    def __init__(self, path, sites):
        self.folder = RunFolder(path)
        self.layout = layout_of(sites)
        self.step = 0

    def add(self, *values, times=1):
        for _ in range(times):
            self.folder.add(report_of(self.step, self.layout, list(values)))
            self.step += 1

    def add_ranks(self, *ranks):
        self.folder.add(report_of(self.step, self.layout, ranks))
        self.step += 1

    def close(self):
        self.folder.finish()
