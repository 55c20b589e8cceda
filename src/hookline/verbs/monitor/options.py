"""Check the arguments of `hl.monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor

from hookline.engine import PORTS, Line, ParameterNode, Selection, Selector, Site
from hookline.engine.pytree import describe
from hookline.errors import AttachError, SelectionError, check_positive_int
from hookline.statistics import Statistic, stats
from hookline.verbs.monitor.parameters import KINDS

MODULE_PORTS = tuple(port for port in PORTS if port != "grad")
ALL_PORTS = (*MODULE_PORTS, *KINDS)
DEFAULT_PORTS = ("output", "grad_output", *KINDS)

_LAST_STEP = 2**62


class ChosenSites(NamedTuple):
    """The sites that are monitored: those of modules, and those of parameters with their nodes."""

    modules: Selection
    parameters: list[tuple[Site, ParameterNode]]


def checked_every(every: Any) -> int:
    """Return the cadence.

    Raises:
        AttachError: it is not a positive integer.
    """
    fix = "Give every=1 to report each step, or every=100."
    check_positive_int("every=", every, fix, AttachError)
    return int(every)


def checked_step_number(name: str, number: Any, example: str) -> int:
    """Return the number of a step.

    Args:
        name: the attribute or argument that got it.
        number: the number.
        example: code that gives a number.

    Raises:
        AttachError: it is not an integer from 0 to 2**62; the files of a run hold no larger ones.
    """
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not is_whole or not 0 <= number <= _LAST_STEP:
        raise AttachError(
            f"{name} must be an integer from 0 to 2**62, got {number!r}."
            f"\nGive the number of a step: {example}."
        )
    return int(number)


def checked_statistics(statistics: Any) -> tuple[Statistic[Any], ...]:
    """Return the statistics as a tuple; None is the moments.

    Raises:
        AttachError: one of them is not a statistic.
    """
    if statistics is None:
        return (stats.moments(),)
    checked = tuple(statistics) if isinstance(statistics, list | tuple) else (statistics,)
    for statistic in checked:
        if not isinstance(statistic, Statistic) or isinstance(statistic, type):
            raise AttachError(
                f"stats= must be statistics, got {describe.in_words(statistic)}."
                "\nGive stats=hl.stats.moments(), or an object with start, update, merge, result."
            )
    if not checked:
        raise AttachError("stats= must name a statistic, got none.\nLeave it out for moments.")
    return checked


def checked_ports(ports: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the ports as a tuple; None is the default.

    Raises:
        SelectionError: a port is unknown, or no port is given.
    """
    if ports is None:
        return DEFAULT_PORTS
    names = tuple(ports) if isinstance(ports, list | tuple | set | frozenset) else (ports,)
    unknown = [name for name in names if name not in ALL_PORTS]
    if unknown or not names:
        raise SelectionError(
            f"ports must be of {', '.join(ALL_PORTS)}, got {unknown[0] if unknown else 'none'!r}."
            "\nGive ports=('output', 'grad_output'), or of parameters ports=('grad', 'update')."
        )
    return names


def choose_sites(line: Line, selector: Selector, ports: str | Sequence[str] | None) -> ChosenSites:
    """Return the selected sites: of modules, and of parameters by kind.

    Raises:
        SelectionError: the selector matches nothing at any of the ports.
    """
    names = checked_ports(ports)
    parts = selector if isinstance(selector, list | tuple | set | frozenset) else [selector]
    of_modules: list[Any] = []
    parameters: dict[Site, ParameterNode] = {}
    for part in parts:
        modules, measured = _choose_by_selector(line, part, names)
        of_modules += modules
        parameters.update(measured)
    order = {id(node.tensor): k for k, node in enumerate(line.module_tree.tensors)}

    def rank(pair: tuple[Site, ParameterNode]) -> tuple[int, int]:
        site, node = pair
        return order[id(node.tensor)], KINDS.index(site.port)

    in_order = sorted(parameters.items(), key=rank)
    return ChosenSites(Selection(line.module_tree, of_modules), in_order)


def _choose_by_selector(
    line: Line, selector: Selector, names: tuple[str, ...]
) -> tuple[list[Any], list[tuple[Site, ParameterNode]]]:
    selector, names = _split_off_kind(selector, names)
    errors: list[SelectionError] = []

    def places(ports: tuple[str, ...]) -> list[Any]:
        if not ports or (isinstance(selector, Tensor) and ports != ("grad",)):
            return []
        try:
            return line.select(selector, ports).places
        except SelectionError as error:
            errors.append(error)
            return []

    modules = places(tuple(port for port in names if port in MODULE_PORTS))
    tensors = places(("grad",) if set(names) & set(KINDS) else ())
    if not modules and not tensors and errors:
        raise errors[0]
    # A selector with a port of its own gives sites of this port at each call.
    of_modules = [place for place in modules if place[0].port != "grad"]
    kinds = [kind for kind in KINDS if kind in names]
    measured = [
        (replace(site, port=kind), node)
        for site, node in tensors
        if isinstance(node, ParameterNode)
        for kind in kinds
    ]
    return of_modules, measured


def _split_off_kind(selector: Selector, names: tuple[str, ...]) -> tuple[Selector, tuple[str, ...]]:
    """Split the kind off a text such as `fc.weight:update`."""
    if isinstance(selector, str):
        path, colon, port = selector.rpartition(":")
        if colon and port in KINDS:
            return f"{path}:grad", (port,)
        if colon and port in MODULE_PORTS:
            return selector, (port,)
    return selector, names
