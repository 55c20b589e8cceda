"""Diagnosis: what `doctor` found out about the selected sites, the model and the regime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from hookline.engine import Site, as_written


@final
@dataclass(frozen=True)
class Finding:
    """Whether one selected site fires, and if not, why.

    Args:
        site: the site.
        calls: how often it fired in one run; None where nobody can tell without one.
        why: why it does not fire; of one that does, what is to be minded there.
        remedy: what to do about that.
    """

    site: Site
    calls: int | None
    why: str = ""
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """ "fires", "fires 3 x", "never", or "unknown"."""
        if self.calls is None:
            return "unknown"
        if self.calls > 1:
            return f"fires {self.calls} x"
        return "fires" if self.calls else "never"


@final
@dataclass(frozen=True)
class Note:
    """A fact about the model, or about the regime that it runs in.

    Args:
        about: what it is about, in a word or two.
        what: the fact.
        remedy: what to do about it; empty where nothing is to be done.
    """

    about: str
    what: str
    remedy: str = ""


@final
@dataclass(frozen=True)
class Diagnosis:
    """What `hl.doctor` found. Print it, or read `sites`, `notes`, `failure` and `ok`.

    Args:
        model_type: the class of the model.
        ran: what was run: "nothing", "forward", "forward and backward".
        sites: a finding for each selected site, in registration order.
        notes: facts about the model and the regime, each with what to do about it.
        failure: if the model's run raised: the module that did, what it got, and what to do.
        environment: versions and modes, by name.
    """

    model_type: str
    ran: str
    sites: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()
    failure: Note | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the run went through and every selected site fires."""
        return self.failure is None and all(finding.calls for finding in self.sites)

    def __getitem__(self, site: str | Site) -> Finding:
        """The finding for one site, as it is written.

        Raises:
            KeyError: the site was not selected.
        """
        for finding in self.sites:
            if str(finding.site) == as_written(str(site)):
                return finding
        raise KeyError(f"{site} was not selected; the sites begin"
                       f" {', '.join(str(one.site) for one in self.sites[:6])}.")  # fmt: skip

    def __str__(self) -> str:
        from hookline.views import diagnosis_text

        return diagnosis_text(self)

    __repr__ = __str__
