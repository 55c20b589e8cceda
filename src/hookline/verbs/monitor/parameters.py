"""Measure parameters around the step of their optimizer: values, gradients and updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookline.engine import (
    ParameterNode,
    Site,
    copy_all,
    local_part,
    parameter_ids,
    reduce_partial,
    subtract_from_all,
)
from hookline.verbs.monitor.loss_scale import unscale_fused
from hookline.verbs.monitor.slots import FIRST, MINE, PLAIN, SiteSlots, Slots

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
        parts: the plain tensors of which each rank has a part: by their ids, the ranks that share
            each.

    Attributes:
        slots: the slots of all sites.
        keeps_copies: whether the memory of the copies is kept between steps.
    """

    def __init__(
        self,
        places: Iterable[tuple[Site, ParameterNode]],
        slots: Slots,
        parts: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> None:
        self.keeps_copies = True
        self.slots = slots
        self._known: dict[int, _Parameter] = {}
        for number, (site, node) in enumerate(places, slots.n_modules):
            parameter = self._known.setdefault(id(node.tensor), _Parameter(node.tensor))
            over = parts.get(id(node.tensor), [])
            of_site = slots.slots_of_site(site, (number, 0), MINE if over else FIRST)
            of_site.over = over
            setattr(parameter, site.port, of_site)

    def __len__(self) -> int:
        return len(self._known)

    def parameters_held_by(self, optimizer: Optimizer) -> list[_Parameter]:
        """Return the parameters that an optimizer holds, each once."""
        return list(filter(None, map(self._known.get, dict.fromkeys(parameter_ids(optimizer)))))

    @torch.no_grad()
    def measure_before_step(self, optimizer: Optimizer, *, has_grads: bool) -> None:
        """Measure weights and gradients before a step, and copy the weights for the update.

        Args:
            optimizer: the optimizer.
            has_grads: whether the gradients are there; a closure computes them in the step.
        """
        parameters, pairs = self.parameters_held_by(optimizer), []
        for parameter in parameters:
            tensor, grad = parameter.tensor, parameter.tensor.grad
            if parameter.value is not None:
                pairs.append((parameter.value, tensor))
            if parameter.grad is not None and has_grads and grad is not None:
                pairs.append((parameter.grad, _summed_over_ranks(unscale_fused(optimizer, grad))))
        self.slots.add_many(pairs)
        copies, weights = [], []
        for parameter in parameters:
            if parameter.update is not None:
                weight, copy = _local_part(parameter.tensor), parameter.before
                if copy is None or not _has_same_form(copy, weight):
                    parameter.before = weight.clone()
                else:
                    copies.append(copy)
                    weights.append(weight)
        copy_all(copies, weights)

    @torch.no_grad()
    def measure_after_step(self, optimizer: Optimizer, *, has_grads: bool) -> None:
        """Measure updates after a step, and the gradients that a closure has computed."""
        pairs: list[tuple[SiteSlots, Tensor]] = []
        moved: list[tuple[SiteSlots, Tensor, Tensor]] = []
        for parameter in self.parameters_held_by(optimizer):
            grad = parameter.tensor.grad
            if parameter.grad is not None and has_grads and grad is not None:
                pairs.append((parameter.grad, _summed_over_ranks(grad)))
            if parameter.update is not None and parameter.before is not None:
                if type(parameter.tensor) not in PLAIN:
                    parameter.update.record_sharding(parameter.tensor)
                moved.append((parameter.update, parameter.before, _local_part(parameter.tensor)))
                if not self.keeps_copies:
                    parameter.before = None
        self.slots.add_many(pairs + _weight_updates(moved))

    @torch.no_grad()
    def measure_weights(self, tensors: Iterable[Tensor]) -> None:
        """Measure weights that no optimizer steps."""
        known = filter(None, map(self._known.get, map(id, tensors)))
        self.slots.add_many(self._weight_pairs(known))

    @torch.no_grad()
    def measure_weights_into_pass_slots(self) -> None:
        """Measure all weights, for a pass that is a step if no optimizer steps."""
        pairs = self._weight_pairs(self._known.values())
        with self.slots.use_pass_slots([site for site, _ in pairs]):
            self.slots.add_many(pairs)

    @staticmethod
    def _weight_pairs(parameters: Iterable[_Parameter]) -> list[tuple[SiteSlots, Tensor]]:
        pairs = [(parameter.value, parameter.tensor) for parameter in parameters]
        # The first run makes a lazy parameter.
        return [
            (site, weight) for site, weight in pairs if site is not None and not is_lazy(weight)
        ]


def _summed_over_ranks(grad: Tensor) -> Tensor:
    """Return a gradient as the optimizer gets it: summed where ranks have summands, as of a norm.

    This is a collective. All ranks step the optimizer, which makes the same one.
    """
    return grad if type(grad) in PLAIN else reduce_partial(grad)


def _local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    tensor = tensor.detach()
    return tensor if type(tensor) in PLAIN else local_part(tensor)


def _weight_updates(
    moved: Iterable[tuple[SiteSlots, Tensor, Tensor]],
) -> list[tuple[SiteSlots, Tensor]]:
    """Return `after - before` of weights, in float32 for narrower dtypes.

    Args:
        moved: for each weight the slots of its update, a copy from before, which may be written to,
            and the weight.
    """
    updates: list[tuple[SiteSlots, Tensor]] = []
    befores, afters = [], []
    for site, before, after in moved:
        if before.is_floating_point() and before.itemsize < 4:
            updates.append((site, after.to(torch.float32).sub_(before.to(torch.float32))))
        else:
            updates.append((site, before))
            befores.append(before)
            afters.append(after)
    subtract_from_all(afters, befores)
    return updates


def _has_same_form(copy: Tensor, weight: Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (weight.shape, weight.dtype, weight.device)
