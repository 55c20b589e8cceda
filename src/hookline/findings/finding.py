"""A finding: one thing that is wrong or worth a look; and the findings of a run as a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, final, overload

from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.display.wrapped_text import Cell

Level = Literal["error", "warning", "note"]

LEVELS: tuple[Level, ...] = ("error", "warning", "note")
_MARKS = {"error": "●", "warning": "▲", "note": "○"}
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_MOST_ROWS = 30
_HEADINGS = (
    Heading("level"),
    Heading("site", "path"),
    Heading("number", "number"),
    Heading("what", "prose"),
)


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or worth a look, at the site where it begins.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].bias, -1e3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(4, 8))
        >>> finding = run.findings()[0]
        >>> finding.level, finding.kind, finding.site, finding.number
        ('warning', 'dead', '1', '100 % zero')

    Args:
        kind: what it is, such as "non-finite", "dead" or "exploding".
        text: what it is, in a sentence that names the site.
        site: the first site, as in a look-up; empty if the finding is about the whole run.
        level: "error" for numbers that cannot be right, "warning" for what is probably wrong, and
            "note" for what is worth a look.
        number: the evidence, such as "x120" or "37 % NaN".
        why: what was measured, and what follows from it.
        advice: what to do.
        follows: the later sites at which the same thing was seen, in firing order.
        step: the training step at which it began; None for a recording.
        passes: the passes of a recording that have it; empty if it is not of single passes.
    """

    kind: str
    text: str
    site: str = ""
    level: Level = "note"
    number: str = ""
    why: str = ""
    advice: str = ""
    follows: tuple[str, ...] = ()
    step: int | None = None
    passes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self) | {"follows": list(self.follows), "passes": list(self.passes)}


@final
@dataclass(repr=False)
class Findings(Result, Sequence[Finding]):
    """The findings of a run, the worst first: print them, index them, or iterate over them.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(4, 8))
        >>> findings = run.findings()
        >>> findings.ok, findings.counts
        (True, {'error': 0, 'warning': 0, 'note': 0})

    `findings.ok` is True without errors and warnings, and `findings.worst` the worst level.

    Args:
        rows: the findings, the worst first; among equals in firing order.
        facts: what was looked at, such as "264 values, 1 pass".
        notes: what could not be judged, and why.
    """

    rows: list[Finding]
    facts: str = ""
    notes: list[str] = field(default_factory=list)
    _row_type: ClassVar[type] = Finding

    @property
    def ok(self) -> bool:
        """True if there is neither an error nor a warning."""
        return self.worst in (None, "note")

    @property
    def worst(self) -> Level | None:
        """The level of the worst finding; None without any."""
        return self.rows[0].level if self.rows else None

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings for each level."""
        counts = Counter(finding.level for finding in self.rows)
        return {level: counts[level] for level in LEVELS}

    def reaches(self, level: Level) -> bool:
        """Tell whether a finding is of this level or a worse one."""
        worst = self.worst
        return worst is not None and LEVELS.index(worst) <= LEVELS.index(level)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> list[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | list[Finding]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings and their counts, as plain values."""
        return {
            "ok": self.ok,
            "counts": self.counts,
            "facts": self.facts,
            "findings": self._table_rows(),
            "notes": list(self.notes),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        return [finding.to_dict() for finding in self.rows]

    def _printout(self) -> Printout:
        counts = ", ".join(plural(number, level) for level, number in self.counts.items() if number)
        return Printout(
            title="Findings",
            head=f": {counts or 'none'}" + f"; {self.facts}" * bool(self.facts),
            headings=_HEADINGS if self.rows else (),
            rows=[_cells(finding) for finding in self.rows],
            notes=self.notes,
            most_lines=_MOST_ROWS,
            more="findings: .rows",
        )


def sort_by_level(rows: Sequence[Finding]) -> list[Finding]:
    """Order findings by level; among equals the order stays."""
    return sorted(rows, key=lambda finding: LEVELS.index(finding.level))


def _cells(finding: Finding) -> tuple[Cell, ...]:
    level = [(f"{_MARKS[finding.level]} {finding.level}", _STYLES[finding.level])]
    sentences = [finding.text, finding.why, finding.advice]
    return level, finding.site, finding.number, " ".join(filter(None, sentences))
