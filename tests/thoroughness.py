"""How much a test tries: `make test` is quick, `make full` tries all."""

from __future__ import annotations

import os
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

# The profile of `make full`, and that of servers, with which `make mutants` runs, try all.
# The processes that a test starts do as pytest's own.
_PROFILE = os.environ.setdefault("HOOKLINE_TESTS", settings.get_current_profile_name())
IS_GATE = _PROFILE == "gate"
_MOST_EXAMPLES_OF_GATE = 15


def examples(n: int) -> int:
    """The examples that hypothesis tries: n, in the gate at most 15."""
    return min(n, _MOST_EXAMPLES_OF_GATE) if IS_GATE else n


def tries(full: T, *, gate: T) -> T:
    """What a test that takes minutes tries; in the gate less of it."""
    return gate if IS_GATE else full
