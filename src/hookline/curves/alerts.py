"""Alerts of a run: few and simple rules, which the page prints beside what they find."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline.curves.layout import NO_TURN
from hookline.curves.step_reports import StepReport
from hookline.curves.table import RECENT, CurveTable
from hookline.display.text import escape_invisible, listed, plural
from hookline.statistics.covariance import Covariance, CovarianceStatistic

_TIMES = 100.0  # the norm, by its median
_LEAST_SHARE = 1e-6  # the greatest gradient, by the greatest of its kind
_LEAST_RATIO, _GREATEST_RATIO = 1e-5, 1e-1
_MOST_UNITS = 4  # whose numbers are printed

# The ports in the order in which a step reaches them.
PORTS = ("value", "input", "output", "grad_output", "grad_input", "grad", "update")
_GRADIENTS = ("grad_output", "grad_input", "grad")
_SITE = re.compile(rf"(?P<path>.*?)(?::(?P<port>{'|'.join(PORTS)})(?P<leaf>[.\[#].*)?)?", re.DOTALL)


class Alert(NamedTuple):
    """Hold what a rule has found."""

    title: str  # the kind, such as "Exploding"
    text: str  # what was found
    rule: str  # the definition
    sites: list[tuple[int, str]]  # the index of each site with a short text, the worst first


def path_and_port(site: str) -> tuple[str, str]:
    """Split a site into its path and its port.

    >>> path_and_port("h.0:output[1]"), path_and_port("fc")
    (('h.0', 'output'), ('fc', 'output'))
    """
    match = _SITE.fullmatch(site)
    assert match is not None
    return match["path"], match["port"] or "output"


def alerts_of(table: CurveTable, reports: Sequence[StepReport] = ()) -> list[Alert]:
    """Return the alerts of the steps so far.

    Args:
        table: the numbers of the steps.
        reports: the reports of the steps, from which statistics of single units are read.
    """
    ports = np.array([path_and_port(site)[1] for site in table.sites], dtype=object)
    alerts = [
        _non_finite(table),
        _exploding(table),
        _vanishing(table, ports),
        _dead(table, ports),
        _dead_units(table, reports[-RECENT:]),
        _ratio(table),
    ]
    return [alert for alert in alerts if alert is not None and alert.sites]


def _non_finite(table: CurveTable) -> Alert | None:
    bad = [int(k) for k in np.flatnonzero(table.bad_since >= 0)]
    if not bad:
        return None
    ordered = _likely_order(table, bad)
    source, rule = "", _WITHOUT_ORDER
    if (table.bad_turn[bad] != NO_TURN).all():
        ordered.sort(key=lambda k: _time_of(table, k))  # stable: as likely, where equal
        source, rule = _source_of(table, ordered), _IN_ORDER
    steps = {k: f"step {table.bad_since[k]:,}" for k in ordered}
    text = f"first at {steps[ordered[0]]}, at {plural(len(bad), 'site')} so far{source}"
    return Alert("NaN or infinity", text, rule, [(k, steps[k]) for k in ordered])


# The parts of a step, in turn. The weights are those before the forward.
STAGES = {
    "value": 0, "input": 1, "output": 1, "grad_output": 2, "grad_input": 2, "grad": 3, "update": 4,
}  # fmt: skip
_IN_ORDER = (
    "The first reported step with any. Within a step: weights, outputs and inputs as the modules"
    " ran, gradients at modules as backward reached them, gradients of weights, updates. hl.check"
    " names the operation."
)
_WITHOUT_ORDER = (
    "The first reported step with any. The run does not say in which order its modules ran, so the"
    " first site of the list need not be the source. hl.check names the operation."
)


def _time_of(table: CurveTable, site: int) -> tuple[int, int, int]:
    """Return the step, the part of the step and the turn at which a site was first non-finite."""
    _, port = path_and_port(table.sites[site])
    return int(table.bad_since[site]), STAGES[port], int(table.bad_turn[site])


def _source_of(table: CurveTable, ordered: list[int]) -> str:
    """Name the first site, unless another one may have come before it."""
    times = [_time_of(table, k) for k in ordered[:2]]
    if len(times) == 2 and times[0] == times[1]:
        return ""
    return f"; {escape_invisible(table.sites[ordered[0]])} is the probable source"


def _likely_order(table: CurveTable, bad: list[int]) -> list[int]:
    """Order sites by step and port, and by the likely order of modules within them."""
    parts = {k: path_and_port(table.sites[k]) for k in bad}
    groups: dict[tuple[int, int], list[int]] = {}
    for k in bad:
        groups.setdefault((int(table.bad_since[k]), PORTS.index(parts[k][1])), []).append(k)
    ordered: list[int] = []
    for (_, port), group in sorted(groups.items()):
        ordered += _in_causal_order(group, PORTS[port], {k: parts[k][0] for k in group})
    return ordered


def _in_causal_order(group: list[int], port: str, paths: dict[int, str]) -> list[int]:
    """Order sites of one step and port by when they had their values: the likely maker first."""
    paths = {k: "" if path == "(root)" else path for k, path in paths.items()}
    holders = {k: _holders_of(path) for k, path in paths.items()}
    if port == "grad_output":  # the gradient reaches a module before what is inside it
        later = {k for k in group if not holders[k].isdisjoint(paths.values())}
    elif port in ("value", "grad", "update"):
        later = set()
    else:
        all_holders = set().union(*holders.values())
        later = {k for k in group if paths[k] in all_holders}
    sign = -1 if port in _GRADIENTS else 1
    return sorted(group, key=lambda k: (k in later, sign * k))


def _holders_of(path: str) -> set[str]:
    """Return the paths of the modules that hold a module: those of `a.b` are "" and `a`."""
    parts = path.split(".") if path else []
    return {".".join(parts[:k]) for k in range(len(parts))}


def _exploding(table: CurveTable) -> Alert | None:
    if "norm" not in table.names or table.n_reports < RECENT:
        return None
    now = table.now[table.names.index("norm")]
    usual = median(table.values("norm")[0])
    with np.errstate(all="ignore"):
        times = np.where(usual > 0, now / usual, np.nan)
    worst = [k for k in np.argsort(-times) if times[k] >= _TIMES]
    return Alert(
        "Exploding",
        f"{plural(len(worst), 'site')}",
        f"The norm of the last step is at least {_TIMES:g} times the median of the columns' norms.",
        [(int(k), f"{times[k]:.3g} times") for k in worst],
    )


def _vanishing(table: CurveTable, ports: NDArray[Any]) -> Alert | None:
    if not {"min", "max"} <= set(table.names):
        return None
    extremes = np.abs([table.now[table.names.index(name)] for name in ("min", "max")])
    greatest = np.fmax(*extremes)
    shares: list[tuple[float, int]] = []
    for port in _GRADIENTS:
        of_port = np.flatnonzero(ports == port)
        top = float(np.nanmax(greatest[of_port], initial=0.0))
        small = of_port[(greatest[of_port] > 0) & (greatest[of_port] < _LEAST_SHARE * top)]
        shares += [(greatest[k] / top, int(k)) for k in small]
    return Alert(
        "Vanishing",
        f"{plural(len(shares), 'gradient')}",
        f"The largest magnitude of the last step is below {_LEAST_SHARE:g} of the largest gradient"
        " of the same kind.",
        [(k, f"{share:.1e}") for share, k in sorted(shares)],
    )


def _dead(table: CurveTable, ports: NDArray[Any]) -> Alert | None:
    dead = np.flatnonzero((table.n_zero >= RECENT) & (ports != "update"))
    return Alert(
        "Dead",
        f"{plural(len(dead), 'site')}",
        f"Every number was 0 at each of the last {RECENT} reported steps, or more.",
        [(int(k), f"since step {table.zero_since[k]:,}") for k in dead],
    )


def _dead_units(table: CurveTable, recent: Sequence[StepReport]) -> Alert | None:
    """Name units by index, at the sites whose covariance is measured."""
    if len(recent) < RECENT:
        return None
    n_units, sites = 0, []
    for at, site in enumerate(table.sites):
        masks = [mask for report in recent if (mask := _is_dead(report, site)) is not None]
        if len(masks) == RECENT and len({mask.shape for mask in masks}) == 1:
            units = np.flatnonzero(np.all(masks, axis=0)).tolist()
            n_units += len(units)
            text = listed(units, _MOST_UNITS)
            sites += [(at, text)] * bool(units)
    return Alert(
        "Dead units",
        f"{plural(n_units, 'unit')} at {plural(len(sites), 'site')}",
        f"Mean and variance of the unit were 0 at each of the last {RECENT} reported steps. Units"
        " are counted from 0 in the last dimension, where hl.stats.covariance() is measured.",
        sites,
    )


def _is_dead(report: StepReport, site: str) -> NDArray[np.bool_] | None:
    """Tell which units of a site were 0 in all rows of a step; None where that is not measured."""
    layout = report.layout
    if not any(
        isinstance(layout.statistics[entry.statistic], CovarianceStatistic)
        for entry, _ in layout.by_site.get(site, ())
    ):
        return None
    for result in layout.results(site, report.slots, None, is_lenient=True):
        if isinstance(result, Covariance) and result.count > result.non_finite:
            is_zero = (result.mean == 0) & (result.matrix.diagonal() == 0)
            return np.asarray(is_zero.numpy())
    return None


def _ratio(table: CurveTable) -> Alert | None:
    if "ratio" not in table.names or len(table.recent) < RECENT:
        return None
    ratio = median(np.stack([row[table.names.index("ratio")] for row in table.recent]))
    far = [
        int(k)
        for k in np.flatnonzero((ratio < _LEAST_RATIO) | (ratio > _GREATEST_RATIO))
        if not table.sites[k].endswith("bias:update")
    ]
    with np.errstate(divide="ignore"):
        off = np.abs(np.log10(ratio / 1e-3))
    return Alert(
        "Update ratio",
        f"{plural(len(far), 'weight')} far off 0.001",
        "The update's norm by the weight's, the median of the last"
        f" {RECENT} reported steps, is below {_LEAST_RATIO:g} or above {_GREATEST_RATIO:g}. Biases"
        " are left out.",
        [(k, f"{ratio[k]:.1e}") for k in sorted(far, key=lambda k: -off[k])],
    )


def median(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the median over the first axis without NaN; NaN where nothing else is."""
    ordered = np.sort(numbers, axis=0)  # NaN comes last
    counts = np.count_nonzero(~np.isnan(numbers), axis=0)
    at = np.maximum(counts - 1, 0) // 2
    return np.where(counts > 0, np.take_along_axis(ordered, at[None], axis=0)[0], np.nan)
