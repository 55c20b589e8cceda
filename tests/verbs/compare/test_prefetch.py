"""Pairs are read in turn, the next one while a large one is measured."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.compare import prefetch
from hookline.verbs.compare.prefetch import prefetch_pairs
from hookline.verbs.compare.read_sides import Entry, Side, read_side

LARGE, SMALL = torch.ones(prefetch._AHEAD_BYTES // 4), torch.ones(1)


@pytest.fixture
def run():
    with hl.record(model := nn.Identity()) as run:
        model(SMALL)
    return run


@pytest.fixture
def side(run, tmp_path):
    return read_side(run.save(tmp_path / "run"), "a")


class Reads:
    """Entries whose reading is told: the number of each, and the thread."""

    def __init__(self, values):
        self.values = values
        self.threads = {}
        self.begun = [threading.Event() for _ in values]

    def read(self, number):
        self.threads[number] = threading.current_thread()
        self.begun[number].set()
        if isinstance(self.values[number], Exception):
            raise self.values[number]
        return self.values[number]

    @property
    def pairs(self):
        entries = [
            Entry(str(number), "", lambda number=number: self.read(number))
            for number in range(len(self.values))
        ]
        return list(zip(entries, entries, strict=True))


def test_the_next_pair_is_read_while_a_large_one_is_used(side):
    reads = Reads([LARGE, LARGE, SMALL, SMALL])
    keys = []
    for (ours, _), values in prefetch_pairs(reads.pairs, side, side):
        keys.append(ours.key)
        if values[0] is LARGE:
            assert reads.begun[len(keys)].wait(60)
    assert keys == ["0", "1", "2", "3"]
    here = threading.current_thread()
    assert [reads.threads[number] is here for number in range(4)] == [True, False, False, True]
    assert not any(thread.name.startswith("hookline-reader") for thread in threading.enumerate())


@pytest.mark.parametrize("kind", ["arrays", "recording"])
def test_what_lies_in_no_folder_is_not_read_ahead(run, side, kind):
    reads, other = (
        Reads([LARGE, LARGE]),
        Side(kind, [], source=run if kind == "recording" else None),
    )
    assert len(list(prefetch_pairs(reads.pairs, side, other))) == 2
    assert set(reads.threads.values()) == {threading.current_thread()}


def test_an_error_is_raised_when_the_turn_of_its_pair_comes(side):
    reads = Reads([LARGE, hl.FolderError("gone")])
    pairs = prefetch_pairs(reads.pairs, side, side)
    assert next(pairs)[1][0] is LARGE
    with pytest.raises(hl.FolderError, match="gone"):
        next(pairs)


def test_an_overwritten_value_has_no_values(side):
    reads = Reads([LARGE, hl.OverwrittenError("written"), SMALL])
    assert [values is None for _, values in prefetch_pairs(reads.pairs, side, side)] == [
        False, True, False,
    ]  # fmt: skip


def test_files_are_closed_before_the_next_pair_is_read(side, monkeypatch):
    monkeypatch.setattr(prefetch, "_RELEASE_BYTES", LARGE.nbytes)
    events = []
    reads = Reads([LARGE, LARGE])
    told = Side("recording", [], release=lambda: events.append("closed"), source=side.source)
    for (ours, _), _ in prefetch_pairs(reads.pairs, told, side):
        events.append(ours.key)
        assert not reads.begun[1].is_set() or ours.key == "1"
    assert events == ["0", "closed", "1", "closed", "closed"]
