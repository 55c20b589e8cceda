"""The result of hl.invariance: a row for each check."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, final

from hookline.display.results import Printout, RowsResult
from hookline.display.text import listed, plural
from hookline.display.text_table import Heading
from hookline.engine import path_text
from hookline.errors import InputError
from hookline.findings import Finding
from hookline.verbs.compare.comparison import Comparison, number_text

Outcome = Literal["holds", "differs", "may differ", "fails", "not applicable"]

_HEADINGS = (
    Heading("check"), Heading("outcome"), Heading("relative", "number"),
    Heading("where and why", "prose"),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Checked:
    """Tell whether one change of a run leaves the model's outputs the same.

    Args:
        check: what was changed.
        outcome: "holds" up to noise; "differs"; "may differ", if it differs and no model could
            hold; "fails", if the changed run raises an error; or "not applicable", as where an
            output cannot be compared.
        relative: the largest relative error of the model's outputs; None without numbers.
        first: the first site beyond noise, if the check does not hold.
        suspect: the path of the module whose forward makes the first difference.
        why: the reason.
        comparison: the comparison of all sites; None if the check is not applicable.
    """

    check: str
    outcome: Outcome
    relative: float | None = None
    first: str = ""
    suspect: str | None = None
    why: str = ""
    comparison: Comparison | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the row without its comparison, as plain values."""
        names = [field.name for field in fields(self) if field.name != "comparison"]
        return {name: getattr(self, name) for name in names}


@final
@dataclass(repr=False)
class Invariance(RowsResult[Checked]):
    """The checks of a model, with an outcome each: what `hl.invariance` returns.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
        >>> invariance = hl.invariance(model, torch.randn(4, 8), only=["twice", "alone"])
        >>> invariance.ok, [row.outcome for row in invariance]
        (True, ['holds', 'holds'])

    `print(invariance)` shows a table. Iteration yields the rows, and `invariance["alone"]` is the
    row of a check. `invariance["alone"].comparison` has all sites.

    Args:
        rows: a `Checked` for each check.
        findings: what does not hold, and why. A finding has `kind`, the check; `text`; and `site`.
    """

    rows: list[Checked]
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if checks hold, and none differs or fails that should hold."""
        outcomes = {row.outcome for row in self.rows}
        return not outcomes & {"differs", "fails"} and outcomes != {"not applicable"}

    def __getitem__(self, check: str) -> Checked:
        row = next((row for row in self.rows if row.check == check), None)
        if row is not None:
            return row
        names = [repr(row.check) for row in self.rows]
        raise InputError(
            f"the check must be one of this result, got {check!r}."
            f"\nGive one of {listed(names, len(names))}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the findings and the rows, as plain values."""
        return {
            "ok": self.ok,
            "findings": [finding.to_dict() for finding in self.findings],
            "rows": self._table_rows(),
        }

    def _printout(self) -> Printout:
        made = [row for row in self.rows if row.outcome != "not applicable"]
        n_held = sum(row.outcome == "holds" for row in made)
        lines = [f"{n_held} of {plural(len(made), 'check holds', 'checks hold')}"]
        lines += [f"- {finding.text}" for finding in self.findings if not finding.site]
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row not in made:
                reasons.setdefault(row.why, []).append(row.check)
        texts = [f"{', '.join(checks)} ({why})" for why, checks in reasons.items()]
        return Printout(
            head="\n".join(lines),
            headings=_HEADINGS,
            rows=[
                (row.check, row.outcome, number_text(row.relative), _where_and_why(row))
                for row in made
            ],
            dim_rows=[number for number, row in enumerate(made) if row.outcome == "holds"],
            notes=["Not applicable: " + "; ".join(texts)] * bool(texts),
        )


def _where_and_why(row: Checked) -> str:
    where, path = row.first, row.first.partition(":")[0].partition("#")[0]
    if row.suspect is not None and path_text(row.suspect) != path:
        where += f" (made in {path_text(row.suspect)})"
    return ": ".join(text for text in (where, row.why) if text)
