"""The report of a clipping line: counts and largest norms at each site."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.results import Printout, Result
from hookline.display.text_table import Heading
from hookline.engine import Report, has_numbers, header_facts, unwrap_all_transforms
from hookline.statistics.batched_moments import await_default_stream, is_on_default_stream
from hookline.util.fork_safe_lock import fork_safe_lock

_MOST_DEFERRED = 64  # sizes of a site that are counted together

# Held while counts change: gradients may come from several threads.
_lock = fork_safe_lock()


@final
@dataclass(frozen=True)
class ClipRow:
    """The clipping at one site."""

    site: str  # the site as written, or "total" for the norm over all sites
    seen: int  # the number of gradients that arrived
    clipped: int  # the number of gradients above the bound
    largest: float  # the largest norm before clipping; with `value`, the largest absolute element
    # The smallest factor by which a gradient was scaled; with `value`, the smallest ratio of the
    # bound to an element.
    factor: float
    nonfinite: int  # the number of gradients with inf or NaN, which clipping does not mend


@final
@dataclass(frozen=True, repr=False)
class ClipReport(Result):
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

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values. `rows` has a dict for each row."""
        return {
            "model": self.report.model_type,
            "clipped": self.clipped,
            "seen": self.seen,
            "rows": self._table_rows(),
        }

    def _printout(self) -> Printout:
        events = {str(site): event for site, event in self.report.replaced.items()}
        why = {str(site): reason for site, reason in self.report.why.items()} | events
        rows = [_row_cells(row, why.get(row.site, "")) for row in self.rows]
        if any(row.site == "total" for row in self.rows):  # its parameters have no rows
            rows += [(site, "", "", "", "", "", event) for site, event in events.items()]
        return Printout(
            title="hl.clip",
            head=f" on {self.report.model_type}: clipped {self.clipped} of {self.seen} gradients;"
            f" {'; '.join(header_facts(self.report))}",
            headings=_HEADINGS,
            rows=rows,
            more="rows: .rows",
            is_compact=True,
        )


_HEADINGS = (
    Heading("site", "path"), Heading("clipped", "number"), Heading("seen", "number"),
    Heading("largest", "number"), Heading("least factor", "number", 1),
    Heading("not finite", "number", 2), Heading("remark", "prose"),
)  # fmt: skip


def _row_cells(row: ClipRow, why: str) -> tuple[str, ...]:
    if not row.seen:
        return (row.site, "", "0", "", "", "", f"never{': ' if why else ''}{why}")
    if math.isnan(row.largest) and not row.nonfinite:
        text = "without numbers: they are meta or fake tensors"
        return (row.site, "", str(row.seen), "", "", "", f"{text}; {why}" if why else text)
    factor = f"{row.factor:.3g}" if row.clipped else ""
    nonfinite = str(row.nonfinite) if row.nonfinite else ""
    counts = str(row.clipped), str(row.seen)
    return (row.site, *counts, f"{row.largest:.4g}", factor, nonfinite, why)


@final
class Tally:
    """Count on the device of the gradients, because reading a count would wait for the device."""

    __slots__ = ("_clipped", "_deferred", "_largest", "_nonfinite", "seen", "site")

    def __init__(self, site: str) -> None:
        self.site: str = site
        self.seen: int = 0
        self._clipped: Tensor | int = 0
        self._largest: Tensor | None = None
        self._nonfinite: Tensor | int = 0
        # Sizes that are not counted yet: the operations for one take as long as those for many.
        self._deferred: list[Tensor] = []

    def add(self, size: Tensor, bound: float) -> None:
        """Count a gradient, given its norm or its largest element."""
        sizes = unwrap_all_transforms(size.detach())  # under vmap, one size for each example
        with _lock:
            self.seen += sizes.numel()
            if not has_numbers(sizes):
                self._largest = torch.tensor(float("nan"), device="cpu")
            elif not is_on_default_stream(sizes.device):
                self._count(sizes, bound)
            else:
                self._defer(sizes.reshape(-1), bound)

    def _defer(self, sizes: Tensor, bound: float) -> None:
        deferred = self._deferred
        if deferred and (len(deferred) == _MOST_DEFERRED or deferred[0].device != sizes.device):
            self._count_deferred(bound)
        self._deferred.append(sizes)

    def _count_deferred(self, bound: float) -> None:
        deferred, self._deferred = self._deferred, []
        if deferred:
            await_default_stream(deferred)
            self._count(torch.cat(deferred), bound)

    def _count(self, sizes: Tensor, bound: float) -> None:
        self._clipped = self._clipped + (sizes > bound).sum()
        self._nonfinite = self._nonfinite + (~torch.isfinite(sizes)).sum()
        largest = sizes.amax()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def row(self, bound: float) -> ClipRow:
        """Return the counts as numbers."""
        with _lock:
            self._count_deferred(bound)
        largest = 0.0 if self._largest is None else float(self._largest)
        factor = min(1.0, bound / largest) if largest else 1.0
        n_clipped, n_nonfinite = int(self._clipped), int(self._nonfinite)
        return ClipRow(self.site, self.seen, n_clipped, largest, factor, n_nonfinite)
