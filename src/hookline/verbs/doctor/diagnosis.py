"""Diagnosis: the result of `hl.doctor` about the selected sites, the model and the regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from hookline.display.data import Tabular
from hookline.display.terminal import Grid, Part, Table, Words, text_of
from hookline.display.text import plural
from hookline.engine import Site, as_written


@final
@dataclass(frozen=True)
class Finding:
    """The verdict on one selected site: whether it fires, and if not, why.

    Args:
        site: the site.
        calls: how often it fired in one run; None where only a run could tell.
        why: the reason why it does not fire. For a site that fires, a warning, or empty.
        remedy: what to do about the reason or the warning.
    """

    site: Site
    calls: int | None
    why: str = ""
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """The verdict: "fires", "fires 3 x", "never", or "unknown"."""
        if self.calls is None:
            return "unknown"
        if self.calls > 1:
            return f"fires {self.calls} x"
        return "fires" if self.calls else "never"


@final
@dataclass(frozen=True)
class Note:
    """A fact about the model, or about the regime in which it runs.

    Args:
        about: the subject, in a word or two.
        what: the fact.
        remedy: what to do about the fact; empty where nothing needs to be done.
    """

    about: str
    what: str
    remedy: str = ""


@final
@dataclass(frozen=True)
class Diagnosis(Tabular):
    """The result of `hl.doctor`. Print it, or read `sites`, `notes`, `failure` and `ok`.

        >>> found = hl.doctor(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2), "*")
        >>> found.ok, found["0"].verdict
        (True, 'fires')

    `ok` is True if the run raised no error and every selected site fires. `found["0"]` is the
    verdict on the site `0`.

    Args:
        model_type: the class of the model.
        ran: what was run: "nothing", "forward", "forward and backward".
        sites: the verdict on each selected site, in registration order. It has `site`, `calls`,
            `verdict` ("fires", "fires 3 x", "never" or "unknown"), `why` and `remedy`.
        notes: facts about the model and about how it runs. Each has `about`, `what` and `remedy`.
        failure: if the run raised, the module that raised, its inputs, and a remedy; else None.
        environment: the versions and modes, by name, such as the version of torch.

    Raises:
        KeyError: by `found[site]`: the site was not selected.
    """

    model_type: str
    ran: str
    sites: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()
    failure: Note | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Tell whether the run went through and every selected site fires."""
        return self.failure is None and all(finding.calls for finding in self.sites)

    def __getitem__(self, site: str | Site) -> Finding:
        """Return the finding for a site, as it is written.

        Raises:
            KeyError: the site was not selected.
        """
        for finding in self.sites:
            if str(finding.site) == as_written(str(site)):
                return finding
        raise KeyError(f"{site} must be a selected site; the sites begin"
                       f" {', '.join(str(one.site) for one in self.sites[:6])}.")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain values, with every site by itself."""
        return {
            "model": self.model_type,
            "ok": self.ok,
            "ran": self.ran,
            "sites": self._table_rows(),
            "notes": [asdict(note) for note in self.notes],
            "failure": None if self.failure is None else asdict(self.failure),
            "environment": dict(self.environment),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "site": str(finding.site),
                "type": finding.site.module_type,
                "verdict": finding.verdict,
                "calls": finding.calls,
                "why": finding.why,
                "remedy": finding.remedy,
            }
            for finding in self.sites
        ]

    def __str__(self) -> str:
        return text_of(diagnosis_parts(self))

    __repr__ = __str__


_N_FEW = 24  # up to this number, each site is shown
_N_SITES = 4  # above it, this number of sites is shown of those that share a row
_N_ROWS = 24


def diagnosis_parts(found: Diagnosis) -> list[Part]:
    """Describe a diagnosis for the terminal: verdicts, reasons and remedies, facts.

    Sites with the same verdict, reason and remedy share a row; `found.sites` lists them singly.

    >>> finding = Finding(Site("fc", "output", module_type="Linear"), 1)
    >>> print(text_of(diagnosis_parts(Diagnosis("Net", "forward", (finding,)))).splitlines()[0])
    hl.doctor on Net: 1 site, 1 fires, 0 never; ran forward
    """
    parts: list[Part] = [_head(found), _sites(found)]
    if found.failure is not None:
        parts.append([
            ("The run failed", "bold red"),
            (f"\n{found.failure.what}", "red"),
            (f"\n-> {found.failure.remedy}", ""),
        ])  # fmt: skip
    if found.notes:
        parts.append(
            Grid([(note.about, _with_remedy(note.what, note.remedy)) for note in found.notes])
        )
    known = "; ".join(f"{name} {value}" for name, value in found.environment.items())
    return [*parts, [(known, "dim")]]


def _head(found: Diagnosis) -> Words:
    n_never = sum(one.calls == 0 for one in found.sites)
    n_unknown = sum(one.calls is None for one in found.sites)
    n_fire = len(found.sites) - n_never - n_unknown
    pieces = [
        ("hl.doctor", "bold"),
        (
            f" on {found.model_type}: {plural(len(found.sites), 'site')},"
            f" {plural(n_fire, 'fires', 'fire')}, ",
            "",
        ),
        (f"{n_never} never", "bold yellow" if n_never else ""),
    ]
    if n_unknown:
        pieces.append((f", {n_unknown} unknown", "bold yellow"))
    return [*pieces, (f"; ran {found.ran}", "")]


def _sites(found: Diagnosis) -> Table:
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for one in found.sites:
        groups.setdefault((one.verdict, one.why, one.remedy), []).append(one)
    has_reasons = any(why for _, why, _ in groups)
    # Sites that do not fire come first, because the user asks about them.
    ordered = sorted(groups.items(), key=lambda group: (bool(group[1][0].calls), not group[0][1]))
    most = _N_FEW if len(found.sites) <= _N_FEW else _N_SITES
    rows: list[list[Words]] = []
    for (verdict, why, remedy), members in ordered[:_N_ROWS]:
        n_lines = min(len(members), most) + (len(members) > most)
        # The verdict stands on each line, because a blank line would read as no verdict.
        verdicts = "\n".join([verdict] * n_lines)
        cells = [_names(members, most), [(verdicts, "" if members[0].calls else "bold yellow")]]
        rows.append([*cells, *[_with_remedy(why, remedy, "yellow")] * has_reasons])
    if len(ordered) > _N_ROWS:
        more = f"and {len(ordered) - _N_ROWS} more rows: see .sites"
        rows.append([[(more, "dim")], "", *[""] * has_reasons])
    return Table(["site", "verdict", *["^why, and what to do"] * has_reasons], rows)


def _names(members: Sequence[Finding], most: int) -> Words:
    pieces = [("\n".join(str(one.site) for one in members[:most]), "")]
    if len(members) > most:
        pieces.append((f"\nand {len(members) - most:,} more", "dim"))
    return pieces


def _with_remedy(what: str, remedy: str, style: str = "") -> Words:
    return [(what, style), (f"\n-> {remedy}" if remedy else "", "")]
