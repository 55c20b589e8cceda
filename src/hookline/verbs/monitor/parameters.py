"""Measure parameters around the step of their optimizer: values, gradients and updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline.engine import Site, local_part
from hookline.engine.selection.module_tree import ParameterNode
from hookline.verbs.monitor.loss_scale import of_parameter
from hookline.verbs.monitor.slots import FIRST, SiteSlots, Slots, counts_of

KINDS = ("value", "grad", "update")


@final
@dataclass(slots=True, eq=False)
class _Parameter:
    """One parameter, and the slots of what is measured of it."""

    tensor: Tensor
    value: SiteSlots | None = None
    grad: SiteSlots | None = None
    update: SiteSlots | None = None
    before: Tensor | None = None  # a copy of the weight before the step


@final
class Parameters:
    """Measure the parameters of a model around the steps of its optimizers.

    Args:
        places: the sites of parameters and their nodes; a site's port is the kind.
        slots: the slots of all sites.
        counts: which ranks count for a plain tensor.

    Attributes:
        keeps_copies: whether the memory of the copies is kept between steps.
    """

    def __init__(
        self,
        places: Iterable[tuple[Site, ParameterNode]],
        slots: Slots,
        counts: str = FIRST,
    ) -> None:
        self.keeps_copies = True
        self._known: dict[int, _Parameter] = {}
        for number, (site, node) in enumerate(places, slots.n_modules):
            known = self._known.setdefault(id(node.tensor), _Parameter(node.tensor))
            setattr(known, site.port, slots.site(site, (number, 0), counts))

    def __len__(self) -> int:
        return len(self._known)

    def of(self, optimizer: Optimizer) -> list[_Parameter]:
        """Return the parameters that an optimizer holds."""
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        return [known for one in held if (known := self._known.get(id(one))) is not None]

    @torch.no_grad()
    def before(self, optimizer: Optimizer, *, has_grads: bool) -> None:
        """Measure weights and gradients before a step, and copy the weights for the update.

        Args:
            optimizer: the optimizer.
            has_grads: whether the gradients are there; a closure computes them in the step.
        """
        for one in self.of(optimizer):
            tensor = one.tensor
            if one.value is not None:
                one.value.add(tensor)
            if one.grad is not None and has_grads and tensor.grad is not None:
                one.grad.add(of_parameter(optimizer, tensor.grad))
            if one.update is not None:
                mine = local_part(tensor.detach())
                if one.before is None or not _is_alike(one.before, mine):
                    one.before = mine.clone()
                else:
                    one.before.copy_(mine)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, *, has_grads: bool) -> None:
        """Measure updates after a step, and the gradients that a closure has computed."""
        for one in self.of(optimizer):
            if one.grad is not None and has_grads and one.tensor.grad is not None:
                one.grad.add(one.tensor.grad)
            if one.update is not None and one.before is not None:
                mine = local_part(one.tensor.detach())
                update = torch.sub(mine, one.before, out=one.before)
                one.update.counts = counts_of(one.tensor) or one.update.counts
                one.update.add(update)
                if not self.keeps_copies:
                    one.before = None

    @torch.no_grad()
    def values(self) -> None:
        """Measure the weights where no optimizer steps."""
        for one in self._known.values():
            if one.value is not None:
                one.value.add(one.tensor)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
