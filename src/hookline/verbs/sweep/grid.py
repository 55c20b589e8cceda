"""Lay out the changes of a sweep as an array with named axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from hookline.engine import (
    PARTS,
    ModuleNode,
    ModuleTree,
    Operation,
    Selector,
    Site,
    bind_own_defaults,
    select_in,
)
from hookline.engine.pytree import describe
from hookline.errors import InputError, check_one_of
from hookline.verbs.sweep.site_change import CleanValuePatch, SiteChange, Values

Label = str | int | float
Each = Mapping[str, int | tuple[int, int]]
Changes = Mapping[Any, Any] | Sequence[Any]

_FORMS = (
    "Give {site: change}, {site: {label: change}}, or a list of (label, {site: change}), and each"
    " change as a function of the value such as hl.edits.scale(0)."
)


class _DividedDim(NamedTuple):
    """A dimension of a value in equal parts."""

    dim: int
    n_parts: int
    size: int


@final
@dataclass(slots=True, eq=False)
class GridPoint:
    """One change of a sweep: what is changed at each of its sites, and its place in the array."""

    index: tuple[int, ...]
    changes: tuple[SiteChange, ...]

    @property
    def has_moved(self) -> bool:
        """Tell whether a value that was put in differs from the one that was there."""
        return any(change.has_moved for change in self.changes)


@final
@dataclass(frozen=True, slots=True)
class SiteGroup:
    """The changes at the same sites, each with its module, which may share a forward."""

    places: tuple[tuple[Site, nn.Module], ...]
    points: list[GridPoint]

    @property
    def sites(self) -> list[Site]:
        """Return the sites."""
        return [site for site, _ in self.places]


@final
@dataclass(frozen=True, slots=True)
class ChangeEntry:
    """Changes at the same sites, as the user has given them."""

    label: Label  # what the sites are called on the first axis
    places: tuple[tuple[Site, nn.Module], ...]  # the sites with their modules
    # For each label of the axis `change`, the change at each site.
    changes: dict[Label, tuple[Any, ...]]
    is_labelled: bool = False  # whether the labels were given
    # Whether changes are made together, and so have a label other than their site.
    is_joint: bool = False


def parse_changes(modules: ModuleTree, changes: Changes) -> list[ChangeEntry]:
    """Read the changes as the user gives them.

    Raises:
        InputError: they have another form, or change a gradient.
        SelectionError: a selector matches nothing.
    """
    if isinstance(changes, Mapping) and changes:
        pairs = changes.items()
        return [entry for pair in pairs for entry in _entries_at(modules, *pair)]
    if not isinstance(changes, list | tuple) or not changes:
        hint = f" To put clean values back at {changes!r}, give clean=." * isinstance(changes, str)
        raise InputError(
            f"changes must be changes by site, got {describe.in_words(changes)}.\n{_FORMS}{hint}"
        )
    return [_joint_entry(modules, number, item) for number, item in enumerate(changes)]


def clean_patches(modules: ModuleTree, selector: Selector, values: Values) -> list[ChangeEntry]:
    """Return the changes that put back the values of another run at the sites of a selector."""
    return [
        ChangeEntry(str(place[0]), (place,), {0: (CleanValuePatch(values, place[0]),)})
        for place in _select_sites(modules, selector)
    ]


def _entries_at(modules: ModuleTree, selector: Selector, given: Any) -> list[ChangeEntry]:
    """Return the changes at each site of a selector."""
    by_label = {label: (change,) for label, change in _changes_by_label(given).items()}
    is_labelled = isinstance(given, Mapping)
    places = _select_sites(modules, selector)
    return [ChangeEntry(str(place[0]), (place,), by_label, is_labelled) for place in places]


def entry_sites(entries: list[ChangeEntry], *, outside: bool = False) -> list[str]:
    """Return all sites of the changes, each once.

    Args:
        entries: the changes.
        outside: leave out the sites inside a module's own forward, where hooks slow each run.
    """
    sites = [
        str(site)
        for entry in entries
        for site, module in entry.places
        if not (outside and isinstance(module, Operation))
    ]
    return list(dict.fromkeys(sites))


def _joint_entry(modules: ModuleTree, number: int, item: Any) -> ChangeEntry:
    """Read changes that are made together, in one forward."""
    label, by_site = item if isinstance(item, tuple) and len(item) == 2 else (number, item)
    if isinstance(by_site, Mapping) and not isinstance(label, str | int | float):
        raise InputError(
            f"the label of a change must be text or a number, got {describe.in_words(label)}."
            '\nGive ("layer 0, head 1", {site: change}) or the like.'
        )
    if not isinstance(by_site, Mapping) or not by_site:
        raise InputError(
            f"each of changes must be {{site: change}}, got {describe.in_words(item)}.\n{_FORMS}"
        )
    for change in by_site.values():
        _check_change(change)
    pairs = [
        (place, change) for selector, change in by_site.items()
        for place in _select_sites(modules, selector)
    ]  # fmt: skip
    places, changes = zip(*pairs, strict=True)
    return ChangeEntry(label, places, {0: changes}, is_joint=True)


def _changes_by_label(given: Any) -> dict[Label, Any]:
    """Return the changes at one site by their labels."""
    if isinstance(given, Mapping):
        changes = dict(given)
    else:
        changes = dict(enumerate(given)) if isinstance(given, list | tuple) else {0: given}
    for change in changes.values():
        _check_change(change)
    if not changes:
        raise InputError(f"changes must have a change for each site, got none.\n{_FORMS}")
    return changes


def _check_change(change: Any) -> None:
    if not callable(change):
        raise InputError(
            f"a change must be a function of the value, got {describe.in_words(change)}.\n{_FORMS}"
        )


def _select_sites(modules: ModuleTree, selector: Selector) -> list[tuple[Site, nn.Module]]:
    """Return the sites that a selector matches, each with its module."""
    places = []
    for site, node in select_in(modules, selector, ("output",)).places:
        if site.is_gradient or not isinstance(node, ModuleNode):
            raise InputError(
                f"a sweep changes values of the forward, got {site}.\nName an output or an input."
            )
        places.append((site, node.module))
    return places


@final
class Grid:
    """The axes of a sweep, and its changes by site.

    Args:
        entries: the changes.
        each: for each further axis the dimension of the value that it runs along; with a number,
            into how many equal parts the dimension is cut.
        known: the value at each site in the unchanged run.

    Attributes:
        axes: the names of the axes, each with its labels.
        groups: the changes, by the sites that they change.
    """

    def __init__(self, entries: list[ChangeEntry], each: Each, known: Mapping[str, Any]) -> None:
        labels = list(dict.fromkeys(label for entry in entries for label in entry.changes))
        self._has_labels = labels != [0] or any(entry.is_labelled for entry in entries)
        first = "change" if any(entry.is_joint for entry in entries) else "site"
        self.axes: dict[str, tuple[Label, ...]] = {
            first: tuple(dict.fromkeys(entry.label for entry in entries))
        }
        if len(self.axes[first]) != len(entries):
            raise InputError(
                "each change must have a label of its own, got two of the same."
                "\nGive (label, {site: change}), or select each site once."
            )
        cuts = [
            [_divide_dims(str(site), known[str(site)], each) for site, _ in entry.places]
            for entry in entries
        ]
        for axis, name in enumerate(each):
            longest = max(at_site[axis].n_parts for by_site in cuts for at_site in by_site)
            self.axes[self._require_new_axis(name)] = tuple(range(longest))
        if self._has_labels:
            self.axes[self._require_new_axis("change")] = tuple(labels)
        self._part = cache(_part_slices)  # most sites are cut alike
        self.groups: list[SiteGroup] = [
            SiteGroup(entry.places, list(self._points(number, entry, by_site)))
            for number, (entry, by_site) in enumerate(zip(entries, cuts, strict=True))
        ]

    def _require_new_axis(self, name: str) -> str:
        if name in self.axes:
            raise InputError(
                f"each axis must have a name of its own, got {name!r} twice."
                "\nName the dimensions in each= otherwise than 'site' and 'change'."
            )
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple([len(labels) for labels in self.axes.values()])

    @property
    def n_points(self) -> int:
        """The number of changes."""
        return sum(len(group.points) for group in self.groups)

    def _points(
        self, number: int, entry: ChangeEntry, cuts: list[tuple[_DividedDim, ...]]
    ) -> Iterator[GridPoint]:
        """Yield the changes of an entry, in the order of the array."""
        sizes = [range(min(cut.n_parts for cut in axis)) for axis in zip(*cuts, strict=True)]
        last = list(self.axes.values())[-1]
        sites = [site for site, _ in entry.places]
        functions = {
            label: [bind_change(change, site) for change, site in zip(changes, sites, strict=True)]
            for label, changes in entry.changes.items()
        }
        for index in product(*sizes):
            parts = [self._part(at_site, index) for at_site in cuts]
            for label in entry.changes:
                at_label = (last.index(label),) if self._has_labels else ()
                changed = map(SiteChange, functions[label], sites, parts)
                yield GridPoint((number, *index, *at_label), tuple(changed))


def bind_change(change: Any, site: Site) -> Callable[..., Any]:
    """Return a change as a function of the value at a site."""
    at = getattr(change, "at", None)
    return bind_own_defaults(at(site) if callable(at) else change, 1)


def _divide_dims(site: str, value: Any, each: Each) -> tuple[_DividedDim, ...]:
    """Cut the dimensions of a value, as `each` names them.

    Returns:
        For each further axis, how its dimension is cut.

    Raises:
        InputError: the value has no such dimension, or cannot be cut so.
    """
    if each and not isinstance(value, Tensor):
        raise InputError(
            f"each= must name dimensions of a tensor, and {site} has {describe.in_words(value)}."
            f"\nSelect a leaf of it, such as {site + ('[0]' if ':' in site else ':output[0]')!r}."
        )
    cuts: list[_DividedDim] = []
    for name, given in each.items():
        dim, n = given if isinstance(given, tuple) else (given, None)
        if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
            raise InputError(
                f"each[{name!r}] must be a dimension of the value at {site}, got {dim!r}, and the"
                f" value has the shape {describe.shape(value)}."
                f"\nGive one of 0 to {value.dim() - 1}, or leave the site out."
            )
        size = value.shape[dim]
        if n is not None and (not isinstance(n, int) or n < 1 or size % n):
            raise InputError(
                f"each[{name!r}] must cut dimension {dim} into equal parts, got {n!r} parts of"
                f" {size} at {site}.\nGive a divisor of {size}."
            )
        dim %= value.dim()
        _check_attention_dim(site, name, dim)
        if dim in {cut.dim for cut in cuts}:
            raise InputError(
                f"each axis must have a dimension of its own, got dimension {dim} twice at {site}."
                "\nGive one of them, or sweep twice."
            )
        step = size // n if n else 1
        cuts.append(_DividedDim(dim, size // step if step else 0, step))
    return tuple(cuts)


def _check_attention_dim(site: str, name: str, dim: int) -> None:
    """Refuse an axis whose name says another dimension of a value of attention."""
    part = re.split("[:#[]", site.rpartition("@")[2])[0]
    usual = {"head": 1, "position": 2}.get(name, dim)
    if "@" in site and part in PARTS and dim != usual:
        raise InputError(
            f"each[{name!r}] must be dimension {usual} at {site}, got {dim}: values of attention"
            f" have heads in dimension 1, and positions in 2.\nGive each={{{name!r}: {usual}}}, or"
            " give the axis another name."
        )


def _part_slices(cuts: tuple[_DividedDim, ...], index: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the part of a value at an index of the further axes."""
    part = [slice(None)] * (max([cut.dim for cut in cuts], default=-1) + 1)
    for cut, number in zip(cuts, index, strict=True):
        part[cut.dim] = slice(number * cut.size, (number + 1) * cut.size)
    return tuple(part)


def check_each(each: Any) -> Each:
    """Refuse an `each` that is not a mapping of names to dimensions."""
    if each is None:
        return {}
    if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
        raise InputError(
            f"each must be a dict of names and dimensions, got {describe.in_words(each)}."
            "\nGive {'position': 1}, or {'head': (2, n_heads)} for equal parts."
        )
    for name in each:
        check_one_of("the type of each[...]", type(each[name]).__name__, ("int", "tuple"),
               f"Give {name!r}: 1, or {name!r}: (1, n_parts).")  # fmt: skip
    return each
