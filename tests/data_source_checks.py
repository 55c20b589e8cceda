"""Data sets and checks for the tests of sources."""

from __future__ import annotations

import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import hookline as hl
from hookline.data import make_source
from hookline.data.data_source import LoadOptions
from hookline.data.fingerprints import fingerprint


class Squares(Dataset):
    """Item i is the row (i, i * i); the items in `bad` fail to load."""

    def __init__(self, n, bad=()):
        self.n = n
        self.bad = frozenset(bad)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"cannot read item {index}.\nmore")
        return torch.tensor([index, index * index])


class Counting(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.arange(self.n).float().unsqueeze(1))


class Random(Dataset):
    """Items that are augmented at random, by the three generators that people use."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def source_of(data, **options):
    return make_source.make_source(data, LoadOptions(**options))


def said(action) -> str:
    """The message of an InputError: three lines at most, of short sentences."""
    with pytest.raises(hl.InputError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    assert all(len(part.split()) <= 30 for part in re.split(r"[.:]\s", message))
    return message


def run(source, numbers) -> list:
    return list(source.batches(numbers))


def all_numbers(source) -> range:
    return range(-(-source.n_items // source.batch_size))


def alike(one, other) -> bool:
    return (one.number, one.items, one.skipped, fingerprint(one.data)) == (
        other.number, other.items, other.skipped, fingerprint(other.data)
    )  # fmt: skip


def whole(source) -> list:
    """All batches; and every item is in one of them, whichever were asked for, and elsewhere."""
    batches = run(source, all_numbers(source))
    found = [item for one in batches for item in [*one.items, *(i for i, _ in one.skipped)]]
    assert sorted(found) == list(range(source.n_items))
    there = pickle.loads(pickle.dumps(source))
    assert there.identity() == source.identity()
    assert all(map(alike, run(there, [*all_numbers(there)][::-2]), batches[::-2]))
    return batches
