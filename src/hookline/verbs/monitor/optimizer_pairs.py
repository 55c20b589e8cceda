"""Tell which optimizers step after one run of the model.

Optimizers may step at different rates, and then a training step has no fixed last one. Two that
have stepped directly after each other belong to one training step. So if the model runs between
their steps, the later of them begins another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import final

from torch.optim import Optimizer


@final
class OptimizerPairs:
    """Pairs of optimizers that have stepped without a run of the model in between."""

    def __init__(self) -> None:
        self._partners: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Optimizer]]
        self._partners = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Optimizer] | None = None
        self._has_run = False

    def model_runs(self) -> None:
        """Note that the model runs with gradients."""
        self._has_run = True

    def before_run(self, optimizer: Optimizer) -> Iterable[Optimizer]:
        """Return the partners of an optimizer whose last steps were before the present run."""
        return self._partners.get(optimizer, ()) if self._has_run else ()

    def follows(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer steps directly after another, and note the two as a pair."""
        last = None if self._last is None or self._has_run else self._last()
        if last is None or last is optimizer:
            return False
        for one, other in ((last, optimizer), (optimizer, last)):
            self._partners.setdefault(one, weakref.WeakSet()).add(other)
        return True

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self._last, self._has_run = weakref.ref(optimizer), False
