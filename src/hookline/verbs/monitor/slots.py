"""The slots of each site, for the step that runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.curves import ABSENT
from hookline.display.text import listed, type_and_line
from hookline.engine import Pass, Site, has_numbers, is_dtensor, is_partial_dtensor, local_part
from hookline.engine.pytree import describe, tree
from hookline.engine.pytree.tree import Leaf
from hookline.errors import HooklineWarning, warn
from hookline.statistics import Statistic
from hookline.statistics.batched_moments import (
    MOST_NUMEL,
    await_default_stream,
    is_on_default_stream,
)
from hookline.statistics.moments import MomentsStatistic, can_be_batched
from hookline.util.fork_safe_lock import fork_safe_lock

# Which ranks count where numbers of ranks are merged: all, as each sees values of its own; the
# first, as each holds a copy; of a tensor that is spread over ranks this rank ("mine"), or another
# that holds the same part.
ALL, FIRST, MINE, NOT_MINE = "all", "first", "mine", "not mine"
PLAIN = frozenset({Tensor, nn.Parameter})  # not spread over ranks, without a look
_MOST_DEFERRED = 2**22  # elements of the values that wait


@final
@dataclass(slots=True)
class StepSlots:
    """Hold the slots of a step, or of a part of a step."""

    # The slots of each site that had a value.
    slots: dict[str, list[Tensor]] = field(default_factory=dict)
    # When each of these sites had its first value, as `Slots.next_turn` counts.
    turns: dict[str, int] = field(default_factory=dict)


@final
@dataclass(slots=True, eq=False)
class SiteSlots:
    """The slots of one site: one tensor for each statistic."""

    site: Site
    name: str  # the site as text
    order: tuple[int, int]  # its place among the sites
    _of: Slots  # the slots of all sites
    counts: str = ALL  # which ranks count, if the value is not a DTensor
    _slots: list[Tensor] | None = None
    _is_deferred: bool = False  # whether a value, the first of this step, is not measured yet
    turn: int = 0  # when the first value of this step came, as `Slots.next_turn` counts
    # The slots and the turn of values that count only where passes are steps.
    pass_slots: tuple[list[Tensor] | None, int] = None, 0
    # The number of slots of each statistic; empty before the first value ever.
    widths: tuple[int, ...] = ()
    # The ranks over which a parameter is spread; empty for a copy, and for other values.
    over: list[int] = field(default_factory=list)
    splits_features: bool = False  # whether ranks have parts of a DTensor's last dimension
    is_off: bool = False  # whether the site is left out
    _device: torch.device | None = None
    _dtype: torch.dtype | None = None
    _empty: list[Tensor] = field(default_factory=list)

    @property
    def slots(self) -> list[Tensor] | None:
        """The slots of this step; None before the first value."""
        if self._is_deferred:
            self._of.measure_deferred()
        return self._slots

    @slots.setter
    def slots(self, slots: list[Tensor] | None) -> None:
        self._slots, self._is_deferred = slots, False

    def add(self, value: Tensor, *, is_shared: bool = False) -> None:
        """Measure one more value. Training goes on if this fails.

        Args:
            value: the value.
            is_shared: True if the value shares its turn with others, because their order is not
                known.
        """
        if self.is_off:
            return
        try:
            if type(value) not in PLAIN:
                if is_partial_dtensor(value):
                    self._turn_off("each rank has a summand of its values (the placement Partial)")
                    return
                self.record_sharding(value)
                value = local_part(value)
            if value.requires_grad:
                value = value.detach()
            # Another thread may prepare or move the slots, so the look at them is locked, too.
            with self._of.lock:
                is_same = value.dtype is self._dtype and value.device == self._device
                if not is_same or not value.numel():
                    self._prepare_for_value(value)
                if self.is_off:
                    return
                if not torch.is_autocast_enabled(value.device.type):
                    self._update_slots(value, is_shared)
                    return
                with torch.autocast(value.device.type, enabled=False):
                    self._update_slots(value, is_shared)
        except HooklineWarning:
            raise  # the user has made warnings errors
        except Exception as error:
            self._turn_off(f"its statistic raised {type_and_line(error)}")

    def record_sharding(self, value: Tensor) -> None:
        """Note which ranks count for a DTensor, and that a parameter is spread over its mesh."""
        if not is_dtensor(value):
            return
        self.counts = MINE if _is_first_holder(value) else NOT_MINE
        self.splits_features |= _splits_features(value)
        if self.is_parameter:
            self.over = value.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]

    @property
    def is_parameter(self) -> bool:
        """Tell whether the site is one of a parameter."""
        return self.order[0] >= self._of.n_modules

    def add_to_pass_slots(self, value: Tensor) -> None:
        """Measure a value that counts only where passes are steps."""
        with self._of.lock:  # as `Slots.use_pass_slots` does, in less time
            self.swap_pass_slots()
            try:
                self.add(value)
            finally:
                self.swap_pass_slots()

    def merge_into_pass_slots(self, slots: list[Tensor]) -> None:
        """Merge slots that count only where passes are steps."""
        with self._of.use_pass_slots((self,)):
            self.merge(slots)

    def swap_pass_slots(self) -> None:
        """Exchange the slots for the pass slots."""
        (self.slots, self.turn), self.pass_slots = self.pass_slots, (self.slots, self.turn)

    def include_pass_slots(self) -> None:
        """Have the values count of the pass slots."""
        if self.slots is None:
            self.swap_pass_slots()
            return
        (slots, turn), self.pass_slots = self.pass_slots, (None, 0)
        if slots is not None:
            self.merge(slots, turn)

    def can_batch(self, value: Tensor) -> bool:
        """Tell whether a value is the first of its step, and plain and like those before."""
        return (
            self.slots is None
            and not self.is_off
            and type(value) in PLAIN
            and value.dtype is self._dtype
            and value.device == self._device
            and value.numel() > 0
        )

    def _update_slots(self, value: Tensor, is_shared: bool) -> None:
        slots = self.slots
        if slots is None:
            slots, self.turn = self._empty, self._of.next_turn(is_shared=is_shared)
            if self._of.may_defer(value):
                self._is_deferred = True
                self._of.defer(self, value)
                return
        pairs = zip(self._of.statistics, slots, strict=True)
        self.slots = [statistic.update(part, value) for statistic, part in pairs]

    def set_deferred_slots(self, slots: Tensor | None, copy: Tensor) -> None:
        """Take the slots of the value that waits; without them, measure its copy."""
        if not self._is_deferred:
            return  # the site was left out meanwhile
        if slots is not None:
            self.slots = [slots]
            return
        try:
            self.slots = [self._of.statistics[0].update(self._empty[0], copy)]
        except Exception as error:
            self._turn_off(f"its statistic raised {type_and_line(error)}")

    def pop_slots(self) -> list[Tensor] | None:
        """Return the slots of this step, and begin a new step; None without a value."""
        slots, self.slots = self.slots, None
        if slots is None:
            return None
        for statistic, part, width in zip(self._of.statistics, slots, self.widths, strict=True):
            if not isinstance(part, Tensor) or part.dim() != 1 or part.numel() != width:
                name = type(statistic).__name__
                text = describe.in_words(part) if isinstance(part, Tensor) else type(part).__name__
                self._turn_off(f"{name} must keep a flat tensor of {width} slots, got {text}")
                return None
        return slots

    def _prepare_for_value(self, value: Tensor) -> None:
        """Look at the first value of a dtype or device, and at each empty one."""
        if not (value.is_floating_point() or value.is_complex()):
            dtype = str(value.dtype).removeprefix("torch.")
            self._turn_off(f"its values are {dtype}", is_told=not self._of.is_of_all)
        elif not has_numbers(value):
            self._turn_off(
                "its values have no numbers, because they are on the meta device or fake"
            )
        else:
            # A rank may have no element of a tensor that is spread over ranks.
            if not value.numel() and self.counts in (ALL, FIRST):
                self._of.add_complaint(self.name, "had an empty value, which counts as no elements")
            self._dtype = value.dtype
            if self._device != value.device:
                self._move_slots(value)

    def _turn_off(self, why: str, *, is_told: bool = True) -> None:
        with self._of.lock:
            self.is_off, self.slots, self.pass_slots = True, None, (None, 0)
            if self.widths:
                self.widths = ()
                self._of.increment_version()
            if is_told:
                self._of.add_complaint(self.name, f"is left out: {why}")

    def _move_slots(self, value: Tensor) -> None:
        """Make empty slots on the value's device; the slots so far move along."""
        self._device = value.device
        self._empty = [statistic.start(value) for statistic in self._of.statistics]
        for statistic, part in zip(self._of.statistics, self._empty, strict=True):
            if not isinstance(part, Tensor) or part.dim() != 1:
                name, text = type(statistic).__name__, describe.in_words(part)
                self._turn_off(f"{name}.start must return a flat float64 tensor, got {text}")
                return
        apart, turn = self.pass_slots
        self.slots, self.pass_slots = self._to_device(self.slots), (self._to_device(apart), turn)
        self.set_widths(self._empty)

    def _to_device(self, slots: list[Tensor] | None) -> list[Tensor] | None:
        pairs = zip(slots or (), self._empty, strict=slots is not None)
        return None if slots is None else [part.to(empty.device) for part, empty in pairs]

    def merge(self, slots: list[Tensor], turn: int | None = None) -> None:
        """Merge slots that compiled code has computed, or that were set aside.

        Training goes on if this fails.

        Args:
            slots: the slots.
            turn: when their first value came; None is now, in an order that nobody knows.
        """
        if self.is_off:
            return
        try:
            with self._of.lock:
                if self.slots is None:
                    self.set_widths(slots)
                    self.slots = slots
                    self.turn = self._of.next_turn(is_shared=True) if turn is None else turn
                else:
                    triples = zip(self._of.statistics, self.slots, slots, strict=True)
                    self.slots = [
                        statistic.merge(part, other) for statistic, part, other in triples
                    ]
                    self.turn = self.turn if turn is None else min(self.turn, turn)
        except Exception as error:
            self._turn_off(f"its statistic raised {type_and_line(error)}")

    def set_widths(self, slots: list[Tensor]) -> None:
        """Note the widths of the slots; statistics with other widths begin a new layout."""
        widths = tuple(part.numel() if isinstance(part, Tensor) else 0 for part in slots)
        if widths != self.widths:
            self.widths = widths
            self._of.increment_version()


@final
class Slots:
    """The slots of all sites, for the step that runs.

    Args:
        statistics: the statistics of each site.
        n_modules: the number of sites of modules, which come before those of parameters.
        is_of_all: whether nobody chose sites or ports, so that it is no news if a module returns
            integers, such as indices or a mask.

    Attributes:
        is_on: whether this step is reported. Hooks look at it once, and do nothing else if not.
        leaves_out: whether values of runs without gradients are left out, and not kept apart.
        has_run: whether the model, or a part of it, has run with gradients since the last step of
            an optimizer.
        in_training: whether a trainer says that what runs now trains the model.
        of_training: the passes whose root began with gradients enabled.
        comes_from_graph: True if the present value has left a compiled graph.
        version: increases when a site appears, so that the layout of reports changes.
        lock: held while slots change, since values may come from several threads.
    """

    def __init__(
        self, statistics: tuple[Statistic[Any], ...], n_modules: int, *, is_of_all: bool = False
    ) -> None:
        self.statistics = statistics
        self.n_modules = n_modules
        self.is_of_all = is_of_all
        self.is_on = True
        self.leaves_out = False
        self.has_run = False
        self.in_training = False
        self.of_training: weakref.WeakSet[Pass] = weakref.WeakSet()
        self.comes_from_graph: bool = False
        self.version: int = 0
        self.lock: threading.RLock = fork_safe_lock()
        self._sites: dict[str, SiteSlots] = {}
        self._deferred: list[tuple[SiteSlots, Tensor]] = []  # with copies of their values
        self._n_deferred = 0  # elements
        self._turn = 0
        self._is_turn_shared = False
        self._told: set[str] = set()
        self._complaints: list[tuple[str, str]] = []

    def slots_of_site(self, site: Site, order: tuple[int, int], counts: str = ALL) -> SiteSlots:
        """Return the slots of a site, which are made on first use."""
        with self.lock:
            name = str(site)
            if name not in self._sites:
                self._sites[name] = SiteSlots(site, name, order, self, counts)
            return self._sites[name]

    def next_turn(self, *, is_shared: bool) -> int:
        """Return the number of the next value in the order of firing.

        Values that follow each other, and whose order nobody knows, share a number: those that
        compiled code hands over when it has run, and those of parameters.
        """
        if not (is_shared and self._is_turn_shared):
            self._turn += 1
        self._is_turn_shared = is_shared
        return self._turn

    @contextmanager
    def mark_values_from_graph(self) -> Iterator[None]:
        """Note that the values in the block have left a compiled graph."""
        self.comes_from_graph = True
        try:
            yield
        finally:
            self.comes_from_graph = False

    @contextmanager
    def use_pass_slots(self, sites: Collection[SiteSlots]) -> Iterator[None]:
        """Have the sites, in the block, hold the values that count only where passes are steps."""
        with self.lock:
            for site in sites:
                site.swap_pass_slots()
            try:
                yield
            finally:
                for site in sites:
                    site.swap_pass_slots()

    def add_many(self, pairs: list[tuple[SiteSlots, Tensor]]) -> None:
        """Measure values of parameters, each at its site, where possible by one call.

        They share a turn, because nobody knows the order in which they came.
        """
        with self.lock:
            measured = self._add_batched(pairs)
        for site, value in pairs:
            if id(site) not in measured:
                site.add(value, is_shared=True)

    def _add_batched(self, pairs: list[tuple[SiteSlots, Tensor]]) -> set[int]:
        """Measure the values that one call can measure. Return the ids of their sites."""
        alike = [pair for pair in pairs if pair[0].can_batch(pair[1])]
        slots = self._measure_many([value.detach() for _, value in alike])
        turn = self.next_turn(is_shared=True)
        for (site, _), part in zip(alike, slots, strict=False):
            site.slots, site.turn = [part], turn
        return {id(site) for site, _ in alike} if slots else set()

    def _measure_many(self, values: list[Tensor]) -> list[Tensor]:
        """Return the slots of each value; none where they have to be measured one by one."""
        if len(self.statistics) == 1 and isinstance(self.statistics[0], MomentsStatistic):
            with suppress(Exception):  # each alone will raise it again, and its site is left out
                return self.statistics[0].measure_many(values) or []
        return []

    def may_defer(self, value: Tensor) -> bool:
        """Tell whether a value may be measured later, together with others: a small one on a GPU.

        There the operations for one value take longer than a copy, and as long as those for many.
        """
        is_alone = len(self.statistics) == 1 and isinstance(self.statistics[0], MomentsStatistic)
        is_small = value.numel() <= MOST_NUMEL and can_be_batched(value)
        return is_alone and is_small and is_on_default_stream(value.device)

    def defer(self, site: SiteSlots, value: Tensor) -> None:
        """Copy the value of a site, because code may write to it, and measure it later."""
        self._deferred.append((site, value.clone()))
        self._n_deferred += value.numel()
        if self._n_deferred > _MOST_DEFERRED:
            self.measure_deferred()

    def measure_deferred(self) -> None:
        """Measure the values that wait."""
        with self.lock:
            waiting, self._deferred, self._n_deferred = self._deferred, [], 0
            copies = [copy for _, copy in waiting]
            await_default_stream(copies)
            slots: list[Any] = self._measure_many(copies)
            for (site, copy), part in zip(waiting, slots or [None] * len(waiting), strict=True):
                site.set_deferred_slots(part, copy)

    def is_outside_training(self, current: Pass) -> bool:
        """Tell whether a value flows without gradients, as in validation.

        A part of a training pass may disable them: a frozen backbone, or the first run of a
        reentrant checkpoint.
        """
        if torch.is_grad_enabled() or self.in_training or current.region is not None:
            return False
        return current not in self.of_training

    def mark_run(self) -> None:
        """Note that a module runs, maybe outside a run of the root."""
        self.has_run = torch.is_grad_enabled()

    def increment_version(self) -> None:
        """Note that the layout has changed."""
        self.version += 1

    def _all_sites(self) -> list[SiteSlots]:
        with self.lock:
            return list(self._sites.values())

    def selected_names(self) -> list[str]:
        """Return the names of the selected sites; the parts of a value come later."""
        return [site.name for site in self._all_sites() if site.order[1] == 0]

    def sites_and_version(self) -> tuple[list[SiteSlots], int]:
        """Return the sites that ever had a value, in order, and the version that they belong to."""
        with self.lock:
            sites = filter(attrgetter("widths"), self._sites.values())
            return sorted(sites, key=attrgetter("order")), self.version

    def pop_slots(self) -> StepSlots:
        """Return the slots of each site that had a value in this step, and begin a new step."""
        with self.lock:
            return self._pop_all()

    def pop_pass_slots(self) -> StepSlots:
        """Return the pass slots, which count only where passes are steps."""
        with self.lock, self.use_pass_slots(self._sites.values()):
            return self._pop_all()

    def _pop_all(self) -> StepSlots:
        step_slots = StepSlots()
        for site in self._sites.values():
            slots = site.pop_slots()
            if slots is not None:
                step_slots.slots[site.name], step_slots.turns[site.name] = slots, site.turn
        return step_slots

    def include_pass_slots(self) -> None:
        """Have the values of the pass slots count: passes are steps."""
        with self.lock:
            for site in self._sites.values():
                site.include_pass_slots()

    def has_module_values_in(self, slots: dict[str, list[Tensor]]) -> bool:
        """Tell whether a module had a value, if any module is selected."""
        modules = [site for site in self._all_sites() if not site.is_parameter]
        return not modules or any(site.is_off or site.name in slots for site in modules)

    def has_module_at(self, path: str) -> bool:
        """Tell whether a module has a path."""
        return any(site.site.path == path for site in self._all_sites())

    def has_module_values(self) -> bool:
        """Tell whether a module had a value in this step, if any module is selected."""
        modules = [site for site in self._all_sites() if not site.is_parameter]
        return not modules or any(site.slots is not None for site in modules)

    def merge_step(self, step_slots: StepSlots) -> None:
        """Merge slots that were taken before."""
        for name, slots in step_slots.slots.items():
            self._sites[name].merge(slots, step_slots.turns[name])

    def add_complaint(self, site: str, complaint: str) -> None:
        """Keep a warning about a site, one for each site, for `warn_of_complaints`."""
        if site not in self._told:
            self._told.add(site)
            self._complaints.append((site, complaint))

    def warn_of_complaints(self) -> None:
        """Warn of what was complained of since the last call."""
        complaints, self._complaints = self._complaints, []
        if complaints:
            sites: dict[str, list[str]] = {}
            for site, complaint in complaints:
                sites.setdefault(complaint, []).append(site)
            said = [
                f"{first} {complaint}" + f" (and {listed(others, 4)})" * bool(others)
                for complaint, (first, *others) in sites.items()
            ]
            warn(
                f"hl.monitor: {'; '.join(said[:4])}{'; …' * (len(said) > 4)}."
                "\nSelect sites with floating values, or give other stats= where these failed."
            )


def pack_slots(sites: list[SiteSlots], slots_by_site: dict[str, list[Tensor]]) -> Tensor:
    """Pack the slots of all sites into one float64 tensor; `ABSENT` stands for missing values."""
    if not sites:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    device = next((slots[0].device for slots in slots_by_site.values()), torch.device("cpu"))
    parts = []
    for site in sites:
        slots = slots_by_site.get(site.name)
        if slots is None:
            parts.append(absent_slots(sum(site.widths), device))
        else:
            parts += [part.to(device, torch.float64) for part in slots]
    return torch.cat(parts)


def absent_slots(width: int, device: torch.device | str) -> Tensor:
    """Return slots that stand for missing values."""
    return torch.full((width,), ABSENT, dtype=torch.float64, device=device)


def compiled_measure(statistics: tuple[Statistic[Any], ...]) -> Callable[[Any], Any]:
    """Return the function that measures a value inside compiled code.

    All sites share the function, so that they need one graph.
    """

    def measure(tensor: Tensor) -> Any:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return ()
        value = tensor.detach()
        return tuple([statistic.update(statistic.start(value), value) for statistic in statistics])

    def inside(value: Any) -> Any:
        return tree.map_tensors(measure, value)

    return inside


def group_by_leaf(result: Any) -> dict[Leaf, list[Tensor]]:
    """Return the slots of each tensor of a value, from the result of `compiled_measure`."""
    slots_by_leaf: dict[Leaf, list[Tensor]] = {}
    for leaf, slots in tree.tensors(result):
        slots_by_leaf.setdefault(leaf[:-1], []).append(slots)
    return slots_by_leaf


def _splits_features(tensor: Any) -> bool:
    """Tell whether ranks have parts of the last dimension of a DTensor."""
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return any(
        n > 1 and placement.is_shard() and placement.dim in (-1, tensor.ndim - 1)
        for n, placement in pairs
    )


def _is_first_holder(tensor: Any) -> bool:
    """Tell whether this rank counts for a DTensor: the first rank that holds a part does."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(position == 0 for position, placement in pairs if placement.is_replicate())
