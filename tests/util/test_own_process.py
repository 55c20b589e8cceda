"""The process that made an object."""

from __future__ import annotations

import pytest

from forks import child
from hookline.util.own_process import OwnProcess


@pytest.mark.processes
def test_a_forked_child_is_another_process():
    made = OwnProcess()
    assert made.is_here
    assert child(lambda: made.is_here) is False
    assert made.is_here
