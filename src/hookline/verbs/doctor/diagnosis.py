"""Diagnosis: the result of `hl.doctor` about the selected sites, the model and the regime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from hookline.display.results import Printout, Result
from hookline.display.text import listed, plural
from hookline.display.text_table import Heading
from hookline.display.wrapped_text import Cell
from hookline.engine import Site, normalize_root


@final
@dataclass(frozen=True)
class SiteVerdict:
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
@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of `hl.doctor`. Print it, or read `sites`, `notes`, `failure` and `ok`.

        >>> diagnosis = hl.doctor(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2), "*")
        >>> diagnosis.ok, diagnosis["0"].verdict
        (True, 'fires')

    `ok` is True if the run raised no error and every selected site fires. `diagnosis["0"]` is the
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
        KeyError: by `diagnosis[site]`: the site was not selected.
    """

    model_type: str
    ran: str
    sites: tuple[SiteVerdict, ...]
    notes: tuple[Note, ...] = ()
    failure: Note | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Tell whether the run went through and every selected site fires."""
        return self.failure is None and all(verdict.calls for verdict in self.sites)

    def __iter__(self) -> Iterator[SiteVerdict]:
        return iter(self.sites)

    def __getitem__(self, site: str | Site) -> SiteVerdict:
        """Return the verdict on a site, as it is written.

        Raises:
            KeyError: the site was not selected.
        """
        for verdict in self.sites:
            if str(verdict.site) == normalize_root(str(site)):
                return verdict
        first = listed([verdict.site for verdict in self.sites], 6)
        raise KeyError(f"{site} must be a selected site; the sites begin {first}.")

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
                "site": str(verdict.site),
                "type": verdict.site.module_type,
                "verdict": verdict.verdict,
                "calls": verdict.calls,
                "why": verdict.why,
                "remedy": verdict.remedy,
            }
            for verdict in self.sites
        ]

    def _printout(self) -> Printout:
        """Describe the verdicts. Sites with the same verdict, reason and remedy share a row."""
        rows = _rows(self.sites)
        failure: tuple[str, ...] = ()
        if self.failure is not None:
            failure = ("The run failed", self.failure.what, f"-> {self.failure.remedy}")
        environment = "; ".join(f"{name} {value}" for name, value in self.environment.items())
        return Printout(
            title="hl.doctor",
            head=_head_text(self),
            headings=_HEADINGS,
            rows=rows[:_N_ROWS],
            totals=[(note.about, _with_remedy(note.what, note.remedy)) for note in self.notes],
            failure=failure,
            notes=[[(environment, "dim")]],
            n_rows=len(rows),
            more="rows: see .sites",
        )


_N_FEW = 24  # up to this number, each site is shown
_N_SITES = 4  # above it, this number of sites is shown of those that share a row
_N_ROWS = 24
_HEADINGS = Heading("site", "path"), Heading("verdict"), Heading("why, and what to do", "prose")


def _head_text(diagnosis: Diagnosis) -> str:
    n_never = sum(verdict.calls == 0 for verdict in diagnosis.sites)
    n_unknown = sum(verdict.calls is None for verdict in diagnosis.sites)
    n_fire = len(diagnosis.sites) - n_never - n_unknown
    unknown = f", {n_unknown} unknown" if n_unknown else ""
    return (
        f" on {diagnosis.model_type}: {plural(len(diagnosis.sites), 'site')},"
        f" {plural(n_fire, 'fires', 'fire')}, {n_never} never{unknown}; ran {diagnosis.ran}"
    )


def _rows(sites: Sequence[SiteVerdict]) -> list[list[Cell]]:
    groups: dict[tuple[str, str, str], list[SiteVerdict]] = {}
    for entry in sites:
        groups.setdefault((entry.verdict, entry.why, entry.remedy), []).append(entry)
    # Sites that do not fire come first, because the user asks about them.
    ordered = sorted(groups.items(), key=lambda group: (bool(group[1][0].calls), not group[0][1]))
    most = _N_FEW if len(sites) <= _N_FEW else _N_SITES
    rows: list[list[Cell]] = []
    for (verdict, why, remedy), members in ordered:
        n_lines = min(len(members), most) + (len(members) > most)
        # The verdict stands on each line, because a blank line would read as no verdict.
        verdicts = "\n".join([verdict] * n_lines)
        style = "" if members[0].calls else "bold yellow"
        rows.append(
            [_site_names(members, most), [(verdicts, style)], _with_remedy(why, remedy, "yellow")]
        )
    return rows


def _site_names(verdicts: Sequence[SiteVerdict], most: int) -> Cell:
    pieces = [(str(member.site), "") for member in verdicts[:most]]
    if len(verdicts) > most:
        pieces.append((f"and {len(verdicts) - most:,} more", "dim"))
    return pieces


def _with_remedy(text: str, remedy: str, style: str = "") -> Cell:
    return [(text, style), *[(f"-> {remedy}", "")] * bool(remedy)] if text or remedy else ""
