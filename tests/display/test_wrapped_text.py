"""Text in the width of a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import termios

import torch
from torch import nn

import hookline as hl
from hookline.display.wrapped_text import fold_line, terminal_width


@contextlib.contextmanager
def terminal(width):
    """A file that is a terminal of this width."""
    inside, outside = os.openpty()
    termios.tcsetwinsize(outside, (24, width))
    with os.fdopen(outside, "w") as file:
        yield file
    os.close(inside)


def test_in_a_terminal_lines_of_watch_are_folded():
    line = "  0   Linear             [3, 4] -> [3, 8] float32  mean 0.03  std 0.62  ~0.15 ms"
    with terminal(60) as file:
        assert fold_line(line, file).splitlines() == [
            "  0   Linear             [3, 4] -> [3, 8] float32  mean 0.03",
            "    std 0.62  ~0.15 ms",
        ]
    assert fold_line(line, io.StringIO()) == line


def test_without_a_terminal_text_is_80_columns_wide(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert terminal_width() == 80
    with terminal(50) as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert terminal_width() == 50
        assert max(map(len, str(hl.summary(model, torch.ones(1, 2))).splitlines())) <= 50
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal_width() == 80
