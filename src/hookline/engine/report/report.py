"""The report of a line: the sites it attached to, how often each fired, and why some never did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.engine.report.why_silent import BYPASSED, NOT_RUN, OTHER_CONTEXT
from hookline.engine.selection.site import Site

_NOTHING_RAN = (
    "the model did not run while it lasted (it does not see other processes, such as the workers of"
    " a DataLoader)"
)
_ASK = "hl.doctor(model, inputs, selector) tells which it was, and what to do."


_HEADINGS = (
    Heading("site", "path"), Heading("type", gives_way=1), Heading("fired", "number"),
    Heading("remark", "prose"),
)  # fmt: skip


@final
@dataclass(frozen=True, repr=False)
class Report(Result):
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
        sites: the selected sites.
        counts: for each site, the number of times that it fired.
        why: the reason for each site that never fired.
        excused: the sites that never fired because the value there requires no gradient. The line
            does not warn of them.
        outside_root: the number of passes in which only modules inside the model were called, and
            not the model itself.
        notes: further notes for the user.
        removed: the indices in `sites` of the hooks that their own handles removed before the line
            ended.
        replaced: for each site whose module or parameter was no longer at its path when a pass
            began, the event.
    """

    name: str
    model_type: str
    passes: int
    other_contexts: int
    ended: bool
    sites: tuple[Site, ...]
    counts: tuple[int, ...]
    why: Mapping[Site, str]
    excused: frozenset[Site] = frozenset()
    outside_root: int = 0
    notes: tuple[str, ...] = ()
    removed: tuple[int, ...] = ()
    replaced: Mapping[Site, str] = field(default_factory=dict)

    @property
    def fired(self) -> tuple[tuple[Site, int], ...]:
        """A pair for each site: the site, and the number of times that it fired."""
        return tuple(zip(self.sites, self.counts, strict=True))

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
        reasons = "; ".join(f"{site}: {self.why[site]}" for site in silent[:3])
        more = f"; and {len(silent) - 3} more" if len(silent) > 3 else ""
        share = f"{len(silent)} of {plural(len(self.sites), 'site')} never fired"
        return f"hl.{self.name}: {share}: {reasons}{more}." + "".join(
            f"\n{line}" for line in self._advice_text()
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

    def _printout(self) -> Printout:
        rows = [
            (
                str(site),
                site.module_type,
                f"{count:,}",
                f"{'' if count or not remark or remark == 'removed' else 'never: '}{remark}",
            )
            for (site, count), remark in zip(self.fired, self.remarks(), strict=True)
        ]
        notes = [f"note: {note}" for note in self.notes]
        # Silent sites come first, because readers look for them.
        return Printout(
            title=f"hl.{self.name}",
            head=f" on {self._head_text()}",
            headings=_HEADINGS,
            rows=sorted(rows, key=lambda row: row[2] != "0"),
            notes=[*notes, *self._advice_text()],
            more="sites: report.fired",
            is_compact=True,
        )

    def _head_text(self) -> str:
        """Write the class of the model and the numbers of the line: the head, after its name."""
        return (
            f"{self.model_type}: {plural(len(self.sites), 'site')},"
            f" {plural(self.passes, 'pass', 'passes')}, {self.n_fired} fired,"
            f" {len(self.silent)} never; {'; '.join(header_facts(self))}"
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

    def _advice_text(self) -> list[str]:
        """Return the last line, where a reason names more than one cause."""
        return [_ASK] if any(why.startswith(BYPASSED.why) for why in self.why.values()) else []

    @property
    def n_fired(self) -> int:
        """Return the number of sites that fired."""
        return sum(count > 0 for count in self.counts)


def header_facts(report: Report) -> list[str]:
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
