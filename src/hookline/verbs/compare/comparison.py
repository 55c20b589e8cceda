"""A comparison: a verdict for each site, and what differs before any layer is blamed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, final

from hookline.display.results import Printout, RowsResult
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.engine import normalize_root
from hookline.errors import NotRecordedError
from hookline.findings import Finding
from hookline.recordings.key_index import closest_names, quote_first_names
from hookline.verbs.compare.noise_floor import Floor

Verdict = Literal["identical", "noise", "differs", "not comparable"]

VERDICTS: tuple[Verdict, ...] = ("identical", "noise", "differs", "not comparable")
QUIET = ("identical", "noise")
_MOST_LINES = 40
_HEADINGS = (
    Heading("site", "path"), Heading("verdict"), Heading("local", "number"),
    Heading("relative", "number"), Heading("floor", "number", 1),
    Heading("norm ratio", "number", 4), Heading("worst row", "number", 3),
    Heading("worst element", "number", 2), Heading("why", "prose"),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class ComparedSite:
    """Tell how far the two values of a site lie apart.

    Args:
        site: the site, as in a look-up of the first.
        other: the site as in a look-up of the second.
        verdict: "identical" to the last bit; "noise", which rounding explains; "differs"; or "not
            comparable".
        relative: the L2 norm of the difference over that of the second value; None if the values
            are not comparable, as for the other numbers.
        norm_ratio: the L2 norm of the first value over that of the second.
        worst_row: the largest relative error of a vector along the last dimension.
        worst_element: the largest relative error of an element.
        row: the number of the worst row, with the leading dimensions flattened.
        element: the index of the worst element.
        floor: what rounding explains of each of the four numbers.
        why: which numbers are above the floor, or why the values are not comparable.
        form: shape and dtype of the first value.
        other_form: shape and dtype of the second value.
        local: of `hl.shadow`, the relative error of the module on its counterpart's inputs.
    """

    site: str
    other: str
    verdict: Verdict
    relative: float | None = None
    norm_ratio: float | None = None
    worst_row: float | None = None
    worst_element: float | None = None
    row: int | None = None
    element: tuple[int, ...] | None = None
    floor: Floor = field(default_factory=Floor)
    why: str = ""
    form: str = ""
    other_form: str = ""
    local: float | None = None

    def __str__(self) -> str:
        return f"{self.site}: {self.verdict}" + f" ({self.why})" * bool(self.why)


@final
@dataclass(repr=False)
class Comparison(RowsResult[ComparedSite]):
    """The sites of two runs with a verdict each, in firing order: what `hl.compare` returns.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.rand(4, 8)
        >>> runs = []
        >>> for factor in (1.0, 1.1):
        ...     with hl.edit(model, "1", hl.edits.scale(factor)):
        ...         with hl.record(model, ["**", "(root):input"], copy=True) as run:
        ...             _ = model(x)
        ...     runs.append(run)
        >>> comparison = hl.compare(*runs)
        >>> comparison.first.site, comparison.suspect, comparison.ok
        ('1', '1', False)
        >>> comparison.counts
        {'identical': 2, 'noise': 0, 'differs': 3, 'not comparable': 0}

    `print(comparison)` shows the sites in firing order, equal stretches folded into one line.
    Iteration yields the rows, and `comparison["1"]` is the row of a site.

    Args:
        rows: a `ComparedSite` for each pair of tensors, in the firing order of the first run.
        findings: what differs, the most basic first: modes, inputs, the model, versions, seeds,
            names, dtypes, shapes, and the first site beyond noise. A finding has `kind`, `text` and
            `site`.
        suspect: the path of the module whose forward makes the first difference, as far as the
            recorded ports tell; None if nothing differs, or if no modules were recorded.
    """

    rows: list[ComparedSite]
    findings: list[Finding] = field(default_factory=list)
    suspect: str | None = None

    @property
    def first(self) -> ComparedSite | None:
        """The first site in firing order whose values differ beyond noise; None without one."""
        return next((row for row in self.rows if row.verdict == "differs"), None)

    @property
    def counts(self) -> dict[str, int]:
        """The number of sites for each verdict."""
        counts = Counter(row.verdict for row in self.rows)
        return {verdict: counts[verdict] for verdict in VERDICTS}

    @property
    def ok(self) -> bool:
        """True if every pair of values was compared, and none differs beyond noise."""
        return all(row.verdict in QUIET for row in self.rows)

    def __getitem__(self, site: str) -> ComparedSite:
        wanted = normalize_root(site)
        row = next(
            (row for row in self.rows if wanted in (row.site, normalize_root(row.site))), None
        )
        if row is not None:
            return row
        names = [row.site for row in self.rows]
        raise NotRecordedError(
            f"the site must be a row of this comparison, got {site!r}."
            f"\nGive one of its sites: {quote_first_names(closest_names(wanted, names) or names)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the findings and the rows, as plain values."""
        return {
            "ok": self.ok,
            "first": None if self.first is None else self.first.site,
            "suspect": self.suspect,
            "counts": self.counts,
            "findings": [finding.to_dict() for finding in self.findings],
            "rows": self._table_rows(),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        rows = []
        for row in self.rows:
            cells = asdict(row)
            floors = cells.pop("floor")
            cells["element"] = None if row.element is None else list(row.element)
            rows.append(cells | {f"floor_{name}": number for name, number in floors.items()})
        return rows

    def _printout(self) -> Printout:
        counts = ", ".join(f"{number} {verdict}" for verdict, number in self.counts.items())
        lines = [f"{plural(len(self.rows), 'site')}: {counts}"]
        lines += [f"- {finding.text}" for finding in self.findings]
        folded = list(_folded_lines(self.rows))
        return Printout(
            head="\n".join(lines),
            headings=_HEADINGS,
            rows=[cells for cells, _ in folded],
            dim_rows=[number for number, (_, is_quiet) in enumerate(folded) if is_quiet],
            most_lines=_MOST_LINES,
            more="lines: .rows",
        )


def _folded_lines(rows: Sequence[ComparedSite]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the cells of each line, and whether the line is of sites that are equal up to noise."""
    for is_quiet, group in groupby(rows, key=lambda row: row.verdict in QUIET):
        stretch = list(group)
        if is_quiet and len(stretch) > 1:
            yield _folded_cells(stretch), True
        else:
            yield from ((_row_cells(row), is_quiet) for row in stretch)


def _folded_cells(stretch: Sequence[ComparedSite]) -> tuple[str, ...]:
    verdicts = " or ".join(dict.fromkeys(row.verdict for row in stretch))
    largest = max(row.relative or 0.0 for row in stretch)
    relative = f"<= {number_text(largest)}" if largest else "0"
    local = max((row.local for row in stretch if row.local is not None), default=None)
    local_text = f"<= {number_text(local)}" if local else number_text(local)
    return (f"… {plural(len(stretch), 'site')}", verdicts, local_text, relative, *[""] * 5)


def _row_cells(row: ComparedSite) -> tuple[str, ...]:
    floor = row.floor.relative if row.verdict in ("noise", "differs") else None
    errors = map(number_text, (row.local, row.relative, floor))
    worst = map(number_text, (row.worst_row, row.worst_element))
    return (row.site, row.verdict, *errors, ratio_text(row.norm_ratio), *worst, row.why)


def number_text(number: float | None) -> str:
    """Format a number of a difference with three digits."""
    return "" if number is None or math.isnan(number) else f"{number:.3g}"


def ratio_text(ratio: float | None) -> str:
    """Format a ratio of norms; one close to 1 with the digits that tell it from 1."""
    if ratio is None or not 1e-7 < abs(ratio - 1) < 0.01:
        return number_text(ratio)
    return f"{round(ratio, -math.floor(math.log10(abs(ratio - 1)))):.8g}"
