"""The optimizers that train a model: which weights each holds, and which step together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import final

from torch import nn
from torch.optim import Optimizer

from hookline.engine import parameter_ids


@final
class Optimizers:
    """The optimizers that have stepped a model's weights.

    Optimizers may step at different rates, and then a training step has no fixed last one. Two that
    have stepped directly after each other, without a run of the model in between, are partners:
    they belong to one training step. So if the model runs between their steps, the later of them
    begins another.

    Args:
        model: the model, to which no reference is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        # The number of parameters that each optimizer has, and the ids of those of the model.
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[int, frozenset[int]]]
        self._held = weakref.WeakKeyDictionary()
        # The weights that no known optimizer holds; None is to be found. Not held weakly: torch
        # swaps no tensor that has weak references, as `model.to` does DTensors.
        self._unheld: list[nn.Parameter] | None = None
        self._partners: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Optimizer]]
        self._partners = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Optimizer] | None = None
        self._has_run = False

    # -- which weights they hold -------------------------------------------------------------------

    def ids_held_by(self, optimizer: Optimizer) -> frozenset[int]:
        """Return the ids of the model's weights that an optimizer holds."""
        n = sum(len(group["params"]) for group in optimizer.param_groups)
        entry = self._held.get(optimizer)
        if entry is None or entry[0] != n:  # a group was added
            ids = frozenset(self.weight_ids().intersection(parameter_ids(optimizer)))
            entry = self._held[optimizer] = n, ids
            self._unheld = None
        return entry[1]

    def all_held_ids(self) -> frozenset[int]:
        """Return the ids of the weights that any optimizer holds."""
        return frozenset().union(*(ids for _, ids in self._held.values()))

    def unheld_weights(self) -> list[nn.Parameter]:
        """Return the weights that no optimizer holds."""
        if self._unheld is None:
            held = self.all_held_ids()
            self._unheld = [weight for weight in self._weights() if id(weight) not in held]
        return self._unheld

    def weight_ids(self) -> set[int]:
        """Return the ids of all weights of the model."""
        return set(map(id, self._weights()))

    def _weights(self) -> list[nn.Parameter]:
        model = self._model()
        return [] if model is None else list(model.parameters())

    # -- which step together -----------------------------------------------------------------------

    def mark_run(self) -> None:
        """Note that the model runs with gradients."""
        self._has_run = True

    def partners_stepped_before_run(self, optimizer: Optimizer) -> Iterable[Optimizer]:
        """Return the partners of an optimizer whose last steps were before the present run."""
        return self._partners.get(optimizer, ()) if self._has_run else ()

    def pair_with_last(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer directly after which another steps, and note the two as a pair."""
        last = None if self._last is None or self._has_run else self._last()
        if last is None or last is optimizer:
            return None
        for member, partner in ((last, optimizer), (optimizer, last)):
            self._partners.setdefault(member, weakref.WeakSet()).add(partner)
        return last

    def mark_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self._last, self._has_run = weakref.ref(optimizer), False
