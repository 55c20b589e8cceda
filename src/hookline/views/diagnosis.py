"""A diagnosis for the terminal: verdicts, reasons and remedies, facts. Imports tables, units.

Sites of which the same is to be said share a row; `diagnosis.sites` has them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hookline.engine import Site
from hookline.engine.words import plural, visible
from hookline.views.tables import ASCII_RULE, table_of, text_of

_N_FEW = 24  # of so many sites each is shown
_N_SITES = 4  # of more, so many of those that share a row
_N_ROWS = 24


class FindingLike(Protocol):
    """What `hl.doctor` says of one site."""

    @property
    def site(self) -> Site:
        """The site."""

    @property
    def calls(self) -> int | None:
        """How often it fired; None where that is unknown."""

    @property
    def verdict(self) -> str:
        """In words."""

    @property
    def why(self) -> str:
        """Why not, or what to mind."""

    @property
    def remedy(self) -> str:
        """What to do about it."""


class NoteLike(Protocol):
    """A fact, and what to do about it."""

    @property
    def about(self) -> str:
        """What it is about."""

    @property
    def what(self) -> str:
        """The fact."""

    @property
    def remedy(self) -> str:
        """What to do about it."""


class DiagnosisLike(Protocol):
    """What `hl.doctor` gives."""

    @property
    def model_type(self) -> str:
        """The class of the model."""

    @property
    def ran(self) -> str:
        """What was run."""

    @property
    def sites(self) -> Sequence[FindingLike]:
        """A finding for each selected site."""

    @property
    def notes(self) -> Sequence[NoteLike]:
        """Facts about the model and the regime."""

    @property
    def failure(self) -> NoteLike | None:
        """What the run raised."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Versions and modes."""

    @property
    def ok(self) -> bool:
        """Whether every site fires."""


def diagnosis_table(diagnosis: DiagnosisLike) -> Group:
    """Lay a diagnosis out for a terminal.

        >>> import hookline as hl
        >>> shown = diagnosis_table(hl.doctor(nn.Linear(2, 3), torch.zeros(1, 2)))

    Args:
        diagnosis: what `hl.doctor` gave.

    Returns:
        A renderable: print it with `rich.console.Console().print`.
    """
    return _laid_out(diagnosis, box.SIMPLE_HEAD)


def diagnosis_text(diagnosis: DiagnosisLike) -> str:
    """A diagnosis as plain text, for `print(diagnosis)`.

        >>> import hookline as hl
        >>> print(diagnosis_text(hl.doctor(nn.Linear(2, 3), torch.zeros(1, 2))).splitlines()[0])
        hl.doctor on Linear: 1 site, 1 fires, 0 never; ran forward

    Args:
        diagnosis: what `hl.doctor` gave.

    Returns:
        Lines of at most 100 characters, without colour and without a final line break.
    """
    # In ASCII: print must not fail where stdout is a file in an old code page.
    return text_of(_laid_out(diagnosis, ASCII_RULE))


def diagnosis_data(diagnosis: DiagnosisLike) -> dict[str, Any]:
    """A diagnosis as plain data, for JSON: every site by itself."""
    return {
        "model": diagnosis.model_type,
        "ok": diagnosis.ok,
        "ran": diagnosis.ran,
        "sites": [
            {
                "site": str(one.site),
                "type": one.site.module_type,
                "verdict": one.verdict,
                "calls": one.calls,
                "why": one.why,
                "remedy": one.remedy,
            }
            for one in diagnosis.sites
        ],
        "notes": [_note_data(note) for note in diagnosis.notes],
        "failure": None if diagnosis.failure is None else _note_data(diagnosis.failure),
        "environment": dict(diagnosis.environment),
    }


def _note_data(note: NoteLike) -> dict[str, str]:
    return {"about": note.about, "what": note.what, "remedy": note.remedy}


def _laid_out(diagnosis: DiagnosisLike, rule: box.Box) -> Group:
    parts: list[RenderableType] = [_head(diagnosis), Text(), _sites(diagnosis, rule)]
    if diagnosis.failure is not None:
        failure = Text("The run failed", style="bold red")
        failure.append(f"\n{diagnosis.failure.what}", style="not bold red")
        failure.append(f"\n-> {diagnosis.failure.remedy}", style="not bold default")
        parts += [Text(), failure]
    if diagnosis.notes:
        parts += [Text(), _notes(diagnosis.notes)]
    known = "; ".join(f"{name} {value}" for name, value in diagnosis.environment.items())
    return Group(*parts, Text(), Text(known, style="dim"))


def _head(diagnosis: DiagnosisLike) -> Text:
    n_never = sum(one.calls == 0 for one in diagnosis.sites)
    n_unknown = sum(one.calls is None for one in diagnosis.sites)
    n_fire = len(diagnosis.sites) - n_never - n_unknown
    head = Text.assemble(
        ("hl.doctor", "bold"),
        f" on {diagnosis.model_type}: {plural(len(diagnosis.sites), 'site')},"
        f" {plural(n_fire, 'fires', 'fire')}, ",
        (f"{n_never} never", "bold yellow" if n_never else ""),
    )
    if n_unknown:
        head.append(f", {n_unknown} unknown", style="bold yellow")
    return head.append(f"; ran {diagnosis.ran}")


def _sites(diagnosis: DiagnosisLike, rule: box.Box) -> Table:
    groups: dict[tuple[str, str, str], list[FindingLike]] = {}
    for one in diagnosis.sites:
        groups.setdefault((one.verdict, one.why, one.remedy), []).append(one)
    table = table_of(rule, "site", "verdict")
    has_reasons = any(why for _, why, _ in groups)
    if has_reasons:
        table.add_column("why, and what to do")
    # What does not fire is what was asked for; the rest stands below.
    rows = sorted(groups.items(), key=lambda group: (bool(group[1][0].calls), not group[0][1]))
    most = _N_FEW if len(diagnosis.sites) <= _N_FEW else _N_SITES
    for (verdict, why, remedy), members in rows[:_N_ROWS]:
        said = Text(visible(why), style="yellow")
        if remedy:
            said.append(f"\n-> {remedy}", style="default")
        names = _names(members, most)
        # On each line: one that is blank would read as none.
        verdicts = "\n".join([verdict] * (names.plain.count("\n") + 1))
        cells = [names, Text(verdicts, style="" if members[0].calls else "bold yellow")]
        table.add_row(*cells, *[said] * has_reasons)
    if len(rows) > _N_ROWS:
        table.add_row(Text(f"and {len(rows) - _N_ROWS} more rows: see .sites", style="dim"))
    return table


def _names(members: Sequence[FindingLike], most: int) -> Text:
    names = [str(one.site) for one in members]
    more = len(names) - most
    text = Text(visible("\n".join(names[:most])))
    if more > 0:
        text.append(f"\nand {more:,} more", style="dim")
    return text


def _notes(notes: Sequence[NoteLike]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for note in notes:
        text = Text(visible(note.what))
        if note.remedy:
            text.append(f"\n-> {note.remedy}")
        grid.add_row(Text(note.about, style="bold"), text)
    return grid
