"""The process that made an object."""

from __future__ import annotations

import pytest

from forked_children import child
from hookline.util.creating_process import CreatingProcess


@pytest.mark.processes
def test_a_forked_child_is_another_process():
    made = CreatingProcess()
    assert made.is_current
    assert child(lambda: made.is_current) is False
    assert made.is_current
