"""Measure the gradients of a recording, and mark dead and exploding ones.

Norms are computed in at least float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.results import Printout, RowsResult
from hookline.display.text import listed
from hookline.display.text_table import Heading
from hookline.display.units import share
from hookline.engine import Report, has_numbers, normalize_root
from hookline.engine.pytree import tree
from hookline.errors import NotRecordedError
from hookline.recordings.log_entries import Entry
from hookline.recordings.pass_log import Log
from hookline.statistics.flat_numbers import sum_of_squares

# A gradient this many times its parameter's norm, or the median gradient norm, is exploding.
_TOO_LARGE_FOR_THE_WEIGHT = 100.0
_TOO_LARGE_AMONG_OTHERS = 1000.0

# Between these magnitudes float32 has the squares.
_SMALL, _LARGE = 1e-15, 1e15


@final
@dataclass(frozen=True)
class GradientRow:
    """The gradients at one site.

    Args:
        site: the site as text, such as `fc.weight:grad` or `layer1:grad_output`.
        count: the number of gradients over all passes, calls and backward passes.
        norm: the mean of the gradients' L2 norms.
        largest: the largest absolute element.
        zeros: the share of elements that are exactly zero, from 0 to 1.
        ratio: for parameters, the mean ratio of the gradient's norm to the parameter's norm. None
            for other sites.
        state: "dead": every element is zero, or an expected gradient did not arrive.
            "exploding": not finite, over 100 times the parameter's norm, or over 1000 times the
            median norm of its port. "none": no gradient is needed there (frozen), or it has no
            numbers (meta, or no elements). "" otherwise.
        why: the reason for "none", and for "dead" if no gradient arrived.
    """

    site: str
    count: int = 0
    norm: float = 0.0
    largest: float = 0.0
    zeros: float = 0.0
    ratio: float | None = None
    state: str = ""
    why: str = ""


@final
class GradientFlow(RowsResult[GradientRow]):
    """A table of gradients in registration order: print it, or iterate over its rows."""

    def __init__(self, rows: tuple[GradientRow, ...]) -> None:
        self.rows: tuple[GradientRow, ...] = rows

    @property
    def dead(self) -> list[str]:
        """The sites whose gradients are all zero, or whose expected gradient did not arrive."""
        return [row.site for row in self.rows if row.state == "dead"]

    @property
    def exploding(self) -> list[str]:
        """The sites whose gradients are not finite or much too large."""
        return [row.site for row in self.rows if row.state == "exploding"]

    def __getitem__(self, site: str) -> GradientRow:
        for row in self.rows:
            if row.site == normalize_root(site):
                return row
        raise NotRecordedError(
            f"the site must be a row of this table, got {site!r}.\nGive one of its sites:"
            f" {listed([row.site for row in self.rows], 8)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the rows and the sites that are dead or exploding, as plain values."""
        return {"dead": self.dead, "exploding": self.exploding, "rows": self._table_rows()}

    def _printout(self) -> Printout:
        return Printout(
            headings=_HEADINGS,
            rows=[_cells(row) for row in self.rows],
            notes=[_verdict(self)],
            more="sites: .rows",
            is_compact=True,
        )


_HEADINGS = (
    Heading("site", "path"), Heading("n", "number", 3), Heading("norm", "number"),
    Heading("grad/weight", "number"), Heading("largest", "number", 2),
    Heading("zeros", "number", 1), Heading("state", "prose"),
)  # fmt: skip


def _cells(row: GradientRow) -> tuple[str, ...]:
    if not row.count or row.why:
        why = f"{row.state}: {row.why.partition(';')[0]}"
        return (row.site, str(row.count), "-", "-", "-", "-", why)
    ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
    return (
        row.site, str(row.count), f"{row.norm:.3g}", ratio, f"{row.largest:.3g}",
        share(row.zeros), row.state,
    )  # fmt: skip


def _verdict(flow: GradientFlow) -> str:
    if flow.rows and not any(row.count for row in flow.rows):
        return "no gradient was seen: call backward() inside the block, on the model's output"
    parts = [
        f"{len(sites)} {name}: {listed(sites, 4)}"
        for name, sites in (("exploding", flow.exploding), ("dead", flow.dead))
        if sites
    ]
    return "; ".join(parts) if parts else "no gradient is dead or exploding"


def gradient_flow(log: Log, report: Report) -> GradientFlow:
    """Make the table of the gradients in a log."""
    numbers = [number for number, site in enumerate(log.sites) if site.is_gradient]
    if not numbers:
        raise NotRecordedError(
            "no gradients were recorded.\nRecord those of the parameters, hl.record(model,"
            " ports='grad'), or of the activations, ports=('grad_output', 'grad_input')."
        )
    by_site: dict[int, list[Entry]] = {number: [] for number in numbers}
    for current in log.passes:
        for number, entries in by_site.items():
            entries += [
                entry for entry in log.entries(current, number) if entry.backward is not None
            ]
    ran = any(by_site.values())
    rows = [_make_row(log, number, by_site[number], report, ran) for number in numbers]
    ports = [log.sites[number].port for number in numbers]
    norms: dict[str, list[float]] = {port: [] for port in ports}
    for row, port in zip(rows, ports, strict=True):
        if 0 < row.norm < math.inf:
            norms[port].append(row.norm)
    usual = {port: median_high(of_port or [0.0]) for port, of_port in norms.items()}
    return GradientFlow(
        tuple(_judge_row(row, usual[port]) for row, port in zip(rows, ports, strict=True))
    )


def _make_row(log: Log, index: int, entries: list[Entry], report: Report, ran: bool) -> GradientRow:
    site = log.sites[index]
    if not entries:
        why = report.why.get(site, "it needs no gradient")
        frozen = "frozen" in why or "needs no gradient" in why or not ran
        return GradientRow(str(site), state="none" if frozen else "dead", why=why)
    values = [log.read_local(entry) for entry in entries]
    tensors = [tensor for value in values for _, tensor in tree.tensors(value)]
    why = ""
    if not all(map(has_numbers, tensors)):
        why = "the gradients are meta or fake tensors, which have no numbers"
    elif not any(map(Tensor.numel, tensors)):
        why = "no elements here"
    if why:
        return GradientRow(str(site), count=len(entries), state="none", why=why)
    norms, maxima, zeros, sizes = zip(*map(_measure_gradient, values), strict=True)
    ratios = [
        norm / float(entry.weight)
        for entry, norm in zip(entries, norms, strict=True)
        if entry.weight is not None and float(entry.weight) > 0
    ]
    return GradientRow(
        str(site),
        count=len(entries),
        norm=sum(norms) / len(norms),
        largest=max(maxima, key=_nan_as_inf),
        zeros=sum(zeros) / max(sum(sizes), 1),
        ratio=sum(ratios) / len(ratios) if ratios else None,
    )


def _nan_as_inf(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _measure_gradient(value: Any) -> tuple[float, float, int, int]:
    """Return a gradient's L2 norm, largest absolute element, number of zeros and of elements."""
    tensors = [
        _magnitudes(part)
        for _, tensor in tree.tensors(value)
        for part in (tensor.unbind() if tensor.is_nested else (tensor,))
        if part.numel()
    ]
    if not tensors:
        return 0.0, 0.0, 0, 0
    maxima = [float(tensor.max()) for tensor in tensors]
    norm = math.hypot(*map(_safe_norm, tensors, maxima))
    largest = max(maxima, key=_nan_as_inf)
    zeros = sum(int((tensor == 0).sum()) for tensor in tensors)
    return norm, largest, zeros, sum(tensor.numel() for tensor in tensors)


def _safe_norm(magnitudes: Tensor, largest: float) -> float:
    """Return the norm of absolute values, also where their squares overflow or vanish."""
    if not 0 < largest < math.inf or _SMALL < largest < _LARGE:
        return math.sqrt(float(sum_of_squares(magnitudes)))
    # On the CPU: a GPU divides by a number as it multiplies by the reciprocal, which may overflow.
    return largest * math.sqrt(float(sum_of_squares(magnitudes.cpu().double() / largest)))


def _magnitudes(tensor: Tensor) -> Tensor:
    """Return a tensor's absolute values, dense, in at least float32."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    wide = dense.abs()
    return wide if wide.dtype is torch.float64 else wide.float()


def _judge_row(row: GradientRow, usual_norm: float) -> GradientRow:
    if not row.count or row.why:
        return row
    if row.largest == 0:
        return replace(row, state="dead")
    is_exploding = (
        not math.isfinite(row.norm)
        or not math.isfinite(row.largest)
        or (row.ratio or 0) > _TOO_LARGE_FOR_THE_WEIGHT
        or 0 < _TOO_LARGE_AMONG_OTHERS * usual_norm < row.norm
    )
    return replace(row, state="exploding") if is_exploding else row
