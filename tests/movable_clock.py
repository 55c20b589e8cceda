"""A clock whose hand tests move, in place of hookline's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hookline.util import stopwatch


class Hand:
    """A clock whose hand is moved."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds

    def slowly(self, value):
        """Return a value after 500 seconds."""
        self.seconds += 500
        return value


def moved_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hand]:
    """Put a hand in the place of the stopwatch's clock: the body of a fixture."""
    hand = Hand()
    monkeypatch.setattr(stopwatch.STOPWATCH, "_clock", hand)
    monkeypatch.setattr(stopwatch.STOPWATCH, "left_out", 0.0)  # so that sums stay exact
    yield hand
    monkeypatch.undo()
