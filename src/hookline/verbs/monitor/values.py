"""Measure the values at modules: outputs, inputs and their gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    BlockwiseCallback,
    Bound,
    GradientCallback,
    GradInputTap,
    GradOutputTap,
    Order,
    Pass,
    Passes,
    PendingGradient,
    QueryBlocks,
    Site,
    SplitCallback,
    is_inert,
)
from hookline.engine.pytree import tree
from hookline.engine.pytree.outlines import Slot
from hookline.engine.pytree.tree import Leaf
from hookline.verbs.monitor.loss_scale import LossScale
from hookline.verbs.monitor.slots import SiteSlots, Slots, compiled_measure, group_by_leaf


@final
class ValueSites:
    """Bind the sites of modules to their slots.

    Args:
        slots: the slots of all sites.
        passes: the passes of the line.
        scaling: divides gradients by the scale of the loss.
    """

    def __init__(self, slots: Slots, passes: Passes, scaling: LossScale) -> None:
        self._slots = slots
        self._passes = passes
        self._scaling = scaling
        self._inside = compiled_measure(slots.statistics)
        self._takes_blocks = all(
            getattr(statistic, "takes_blocks", False) for statistic in slots.statistics
        )
        self._n = 0

    def bind(self, site: Site) -> Bound:
        """Return the callback or the tap for the next site."""
        at = _LeafSlots(site, self._n, self._slots)
        self._n += 1
        if site.is_gradient:
            measure = _GradientMeasure(at, self._slots, self._scaling)
            tap = _MeasuringGradOutputTap if site.port == "grad_output" else _MeasuringGradInputTap
            return tap(site, self._passes, measure, Order.GRAD_RECORD)
        halves = SplitCallback(
            _measuring_callback(at, self._slots), self._inside, _merging_callback(at, self._slots)
        )
        return BlockwiseCallback(halves) if self._takes_blocks and site.port == "output" else halves


@final
class _LeafSlots:
    """The slots of the tensors of one site's value, by leaf."""

    __slots__ = ("_by_leaf", "_number", "_site", "_slots", "whole")

    def __init__(self, site: Site, number: int, slots: Slots) -> None:
        self._site = site
        self._number = number
        self._slots = slots
        self._by_leaf: dict[Leaf, SiteSlots] = {}
        self.whole = self.slots_at(())

    def slots_at(self, leaf: Leaf) -> SiteSlots:
        slots = self._by_leaf.get(leaf)
        if slots is None:
            site = replace(self._site, leaf=self._site.leaf + leaf)
            order = self._number, len(self._by_leaf)
            slots = self._by_leaf[leaf] = self._slots.slots_of_site(site, order)
        return slots


def _measuring_callback(at: _LeafSlots, slots: Slots) -> Any:
    """Return the callback of an output or an input."""
    whole = at.whole

    def callback(current: Pass, value: Any) -> None:
        if not slots.has_run:
            slots.mark_run()
        if not slots.is_on:
            return
        add: Callable[[SiteSlots, Tensor], None] = SiteSlots.add
        if slots.is_outside_training(current):
            if slots.leaves_out:
                return
            add = SiteSlots.add_to_pass_slots
        if type(value) is Tensor:
            add(whole, value)
            return
        if isinstance(value, QueryBlocks):
            for block in value.detached():
                add(whole, block)
                del block  # frees it, before the next is made
            return
        for leaf, tensor in tree.tensors(value):
            add(at.slots_at(leaf), tensor)

    return callback


def _merging_callback(at: _LeafSlots, slots: Slots) -> Any:
    """Return the callback for the slots that compiled code has computed."""

    def callback(current: Pass, result: Any) -> None:
        if not slots.has_run:
            slots.mark_run()
        is_apart = slots.is_on and slots.is_outside_training(current)
        if not slots.is_on or (is_apart and slots.leaves_out):
            return
        merge = SiteSlots.merge_into_pass_slots if is_apart else SiteSlots.merge
        for leaf, parts in group_by_leaf(result).items():
            merge(at.slots_at(leaf), parts)

    return callback


@final
class _GradientMeasure(GradientCallback):
    """Measure the gradients at one site."""

    __slots__ = ("_at", "_scaling", "slots")
    optional = True

    def __init__(self, at: _LeafSlots, slots: Slots, scaling: LossScale) -> None:
        self._at = at
        self.slots = slots
        self._scaling = scaling

    def on_gradient(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Measure the gradient of one tensor."""
        if self.slots.is_on:
            leaf = () if pending.form is None else _leaf_of(pending.form, slot) or ()
            grad = self._scaling.unscale(grad)
            self._at.slots_at(leaf).add(grad, is_shared=self.slots.comes_from_graph)


def _leaf_of(form: Any, slot: int) -> Leaf | None:
    """Return the leaf of a slot in an outline; None if the outline does not have it."""
    if isinstance(form, Slot):
        return () if form == slot else None
    for key, part in tree.items(form) or ():
        leaf = _leaf_of(part, slot)
        if leaf is not None:
            return (key, *leaf)
    return None


@final
class _MeasuringGradOutputTap(GradOutputTap):
    """Hook gradients only in steps that are reported."""

    __slots__ = ()
    on: _GradientMeasure

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Wait for the gradients of the output: the forward hook."""
        if is_dynamo_compiling():
            return super().fire(module, args, output)
        # A copy of the tap has no `on`. It goes on, and is removed there.
        if not is_inert(self):
            slots = self.on.slots
            if not slots.has_run and self.passes.sees_this_context():
                slots.mark_run()
            if not slots.is_on:
                return None
        return self.hook_output(module, output, id(sys._getframe(1)))

    def receive_from_graph(self, number: int, call: int, slot: int, grad: Tensor) -> None:
        """Measure a gradient that has left a compiled graph, which may have another order."""
        with self.on.slots.mark_values_from_graph():
            super().receive_from_graph(number, call, slot, grad)


@final
class _MeasuringGradInputTap(GradInputTap):
    """Hook gradients only in steps that are reported."""

    __slots__ = ()
    on: _GradientMeasure

    def fire(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the gradients of the inputs: the forward-pre hook."""
        if not is_dynamo_compiling() and not is_inert(self):
            slots = self.on.slots
            if not slots.has_run and self.passes.sees_this_context():
                slots.mark_run()
            if not slots.is_on:
                return None
        return super().fire(module, args, kwargs)

    def receive_from_graph(self, number: int, call: int, slot: int, grad: Tensor) -> None:
        """Measure a gradient that has left a compiled graph, which may have another order."""
        with self.on.slots.mark_values_from_graph():
            super().receive_from_graph(number, call, slot, grad)
