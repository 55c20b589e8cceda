"""The report of a line: the sites it attached to, how often each fired, and why some never did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from hookline.display.data import Tabular
from hookline.display.html import MOST_ROWS, escape, table
from hookline.display.text import escape_invisible, plural
from hookline.engine.report.why_silent import BYPASSED, NOT_RUN, OTHER_CONTEXT
from hookline.engine.selection.site import Site

_NOTHING_RAN = (
    "the model did not run while it lasted (it does not see other processes, such as the workers of"
    " a DataLoader)"
)
_ASK = "hl.doctor(model, inputs, selector) tells which it was, and what to do."


@final
@dataclass(frozen=True)
class Report(Tabular):
    """The report of a line. Print it, or read its attributes.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with hl.record(model, nn.Linear) as run:
        ...     _ = model(torch.zeros(1, 2))
        >>> report = run.report()
        >>> report.passes, report.n_fired, report.silent
        (1, 1, ())

    `n_fired` is the number of sites that fired. `silent` is a tuple of the sites that never fired.
    `warning()` returns the text of the warning at the end of the line, or None.

    Args:
        name: the verb that made the line.
        model_type: the class of the model.
        passes: the number of passes that the line saw.
        other_contexts: how often the model ran in another thread or async task, unseen.
        ended: whether the line has ended.
        fired: a pair for each site: the site, and the number of times that it fired.
        why: the reason for each site that never fired.
        excused: the sites that never fired because the value there requires no gradient. The line
            does not warn of them.
        outside_root: the number of passes in which only modules inside the model were called, and
            not the model itself.
        notes: further notes for the user.
        removed: the indices in `fired` of the hooks that their own handles removed before the line
            ended.
        replaced: for each site whose module or parameter was no longer at its path when a pass
            began, the event.
    """

    name: str
    model_type: str
    passes: int
    other_contexts: int
    ended: bool
    fired: tuple[tuple[Site, int], ...]
    why: Mapping[Site, str]
    excused: frozenset[Site] = frozenset()
    outside_root: int = 0
    notes: tuple[str, ...] = ()
    removed: tuple[int, ...] = ()
    replaced: Mapping[Site, str] = field(default_factory=dict)

    @property
    def silent(self) -> tuple[Site, ...]:
        """The sites that never fired, without those whose hooks a handle removed."""
        removed = frozenset(self.removed)
        return tuple(
            site
            for place, (site, count) in enumerate(self.fired)
            if not count and place not in removed
        )

    def warning(self) -> str | None:
        """Return the warning for the end of the line; None if every site that was due has fired."""
        if not self.why:  # the common case: all sites have fired
            return None
        excused = self.excused | self.replaced.keys()
        silent = [site for site in self.silent if site not in excused]
        if not silent:
            return None
        unseen = {str(NOT_RUN), str(OTHER_CONTEXT)}
        if not self.passes and {self.why[site] for site in silent} <= unseen:
            reason = str(OTHER_CONTEXT) if self.other_contexts else _NOTHING_RAN
            return f"hl.{self.name} on {self.model_type} saw nothing: {reason}."
        shown = "; ".join(f"{site}: {self.why[site]}" for site in silent[:3])
        more = f"; and {len(silent) - 3} more" if len(silent) > 3 else ""
        share = f"{len(silent)} of {plural(len(self.fired), 'site')} never fired"
        return f"hl.{self.name}: {share}: {shown}{more}." + "".join(
            f"\n{line}" for line in self._advice()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values. `sites` has a dict for each hook's site."""
        return {
            "verb": self.name,
            "model": self.model_type,
            "passes": self.passes,
            "outside_root": self.outside_root,
            "other_contexts": self.other_contexts,
            "ended": self.ended,
            "sites": self._table_rows(),
            "notes": list(self.notes),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        return [
            {"site": str(site), "type": site.module_type, "fired": count, "why": remark}
            for (site, count), remark in zip(self.fired, self.remarks(), strict=True)
        ]

    def __str__(self) -> str:
        width = max((len(str(site)) for site, _ in self.fired), default=0)
        lines = [
            f"  {site!s:{width}}  {count:>5} x  {site.module_type}"
            + (f"  {'' if count or remark == 'removed' else 'never: '}{remark}" if remark else "")
            for (site, count), remark in zip(self.fired, self.remarks(), strict=True)
        ]
        head = f"hl.{self.name} on {self._state()}"
        notes = [f"  note: {line}" for note in self.notes for line in note.splitlines()]
        return escape_invisible("\n".join([head, *lines, *notes, *self._advice()]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show each site, how often it fired, and why it did not, in a notebook."""
        # Silent sites come first, because readers look for them.
        remarked = zip(self.fired, self.remarks(), strict=True)
        ordered = sorted(remarked, key=lambda row: row[0][1] > 0)
        rows = [
            [str(site), site.module_type, f"{n:,}", remark]
            for (site, n), remark in ordered[:MOST_ROWS]
        ]
        names = ["site", "type", ">fired", "~remark"]
        if not any(self.remarks()):
            rows, names = [row[:3] for row in rows], names[:3]
        head = f"<b>hl.{escape(self.name)}</b> on {escape(self._state())}"
        notes = [f"note: {note}" for note in self.notes]
        return table(head, names, rows, len(ordered), [*notes, *self._advice()])

    def _state(self) -> str:
        """Write the class of the model and the numbers of the line: the head, after its name."""
        return (
            f"{self.model_type}: {plural(len(self.fired), 'site')},"
            f" {plural(self.passes, 'pass', 'passes')}, {self.n_fired} fired,"
            f" {len(self.silent)} never; {'; '.join(facts(self))}"
        )

    def remarks(self) -> list[str]:
        """Return a remark for each site: that it was removed or replaced, or why it never fired."""
        removed = frozenset(self.removed)
        return [
            "removed"
            if place in removed
            else self.replaced.get(site, "")
            if count
            else self.why.get(site, "")
            for place, (site, count) in enumerate(self.fired)
        ]

    def _advice(self) -> list[str]:
        """Return the last line, where a reason names more than one cause."""
        return [_ASK] if str(BYPASSED) in self.why.values() else []

    @property
    def n_fired(self) -> int:
        """Return the number of sites that fired."""
        return sum(count > 0 for _, count in self.fired)


def facts(report: Report) -> list[str]:
    """Return the facts about a line for the head of its report, which do not count its sites."""
    texts = ["ended" if report.ended else "attached"]
    if report.removed:
        texts.append(f"{len(report.removed)} removed")
    if report.replaced:
        texts.append(f"{plural(len(report.replaced), 'site')} replaced in the model")
    if report.passes and report.outside_root == report.passes:
        texts.append("the model itself was not called, only modules inside it")
    if report.other_contexts:
        were = "was" if report.other_contexts == 1 else "were"
        runs = plural(report.other_contexts, "run")
        texts.append(f"{runs} in other threads or tasks {were} not seen")
    return texts
