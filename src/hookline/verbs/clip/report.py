"""The report of a clipping line: counts and largest norms at each site."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hookline.engine import Report, facts, has_numbers, innermost
from hookline.util.locks import fork_safe_lock

# Held while counts change: gradients may come from several threads.
_lock = fork_safe_lock()


@final
@dataclass(frozen=True)
class ClipRow:
    """The clipping at one site.

    Args:
        site: the site as written, or "total" for the norm over all sites.
        seen: the number of gradients that arrived.
        clipped: the number of gradients above the bound.
        largest: the largest norm before clipping; with `value`, the largest absolute element.
        factor: the smallest factor by which a gradient was scaled; with `value`, the smallest
            ratio of the bound to an element.
        nonfinite: the number of gradients with inf or NaN, which clipping does not mend.
    """

    site: str
    seen: int
    clipped: int
    largest: float
    factor: float
    nonfinite: int


@final
@dataclass(frozen=True)
class ClipReport:
    """The report of `line.report()`: how often, and how much, a line clipped.

    Print it, or iterate over its rows.
    """

    report: Report
    rows: tuple[ClipRow, ...]

    def __iter__(self) -> Iterator[ClipRow]:
        return iter(self.rows)

    @property
    def clipped(self) -> int:
        """The number of gradients above the bound, over all sites."""
        return sum(row.clipped for row in self.rows)

    @property
    def seen(self) -> int:
        """The number of gradients that arrived, over all sites."""
        return sum(row.seen for row in self.rows)

    def __str__(self) -> str:
        head = (
            f"hl.clip on {self.report.model_type}: clipped {self.clipped} of {self.seen} gradients;"
            f" {'; '.join(facts(self.report))}"
        )
        width = max((len(row.site) for row in self.rows), default=0)
        lines = [f"  {_text(row, width, self.report)}" for row in self.rows]
        if any(row.site == "total" for row in self.rows):  # its parameters have no rows
            lines += [f"  {site}  {event}" for site, event in self.report.replaced.items()]
        return "\n".join([head, *lines])

    __repr__ = __str__


def _text(row: ClipRow, width: int, report: Report) -> str:
    text = _numbers(row, width, report)
    event = {str(site): event for site, event in report.replaced.items()}.get(row.site)
    return text if event is None or event in text else f"{text}; {event}"


def _numbers(row: ClipRow, width: int, report: Report) -> str:
    if not row.seen:
        why = {str(site): reason for site, reason in report.why.items()}.get(row.site, "")
        return f"{row.site:{width}}  never{': ' if why else ''}{why}"
    if math.isnan(row.largest) and not row.nonfinite:
        return f"{row.site:{width}}  {row.seen} without numbers: they are meta or fake tensors"
    text = f"{row.site:{width}}  {row.clipped:>5} of {row.seen}  largest {row.largest:.4g}"
    if row.clipped:
        text += f", smallest factor {row.factor:.3g}"
    return text + (f", {row.nonfinite} not finite" if row.nonfinite else "")


@final
class Tally:
    """Count on the device of the gradients, because reading a count would wait for the device."""

    __slots__ = ("_clipped", "_largest", "_nonfinite", "seen", "site")

    def __init__(self, site: str) -> None:
        self.site = site
        self.seen = 0
        self._clipped: Tensor | int = 0
        self._largest: Tensor | None = None
        self._nonfinite: Tensor | int = 0

    def add(self, size: Tensor, bound: float) -> None:
        """Count a gradient, given its norm or its largest element."""
        sizes = innermost(size.detach())  # under vmap, one size for each example
        with _lock:
            self._add(sizes, bound)

    def _add(self, sizes: Tensor, bound: float) -> None:
        self.seen += sizes.numel()
        if not has_numbers(sizes):
            self._largest = torch.tensor(float("nan"), device="cpu")
            return
        self._clipped = self._clipped + (sizes > bound).sum()
        self._nonfinite = self._nonfinite + (~torch.isfinite(sizes)).sum()
        largest = sizes.amax()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def row(self, bound: float) -> ClipRow:
        """Return the counts as numbers."""
        largest = 0.0 if self._largest is None else float(self._largest)
        factor = min(1.0, bound / largest) if largest else 1.0
        n_clipped, n_nonfinite = int(self._clipped), int(self._nonfinite)
        return ClipRow(self.site, self.seen, n_clipped, largest, factor, n_nonfinite)
