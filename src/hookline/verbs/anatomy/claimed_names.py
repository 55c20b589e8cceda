"""The names of one block, or of what lies around the blocks, with the identities to prove them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

NO_SITE = "no module gets or returns it, and no function of torch makes it of the input"


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """One identity between values, which some names need.

    Attributes:
        text: the identity, for people.
        names: the names that it proves.
        sites: the sites of its values.
        measure: returns the error from the values of these sites.
    """

    text: str
    names: tuple[str, ...]
    sites: tuple[str, ...]
    measure: Callable[..., float]


@final
@dataclass(slots=True)
class Names:
    """The names of one block, or those that belong to no block.

    Attributes:
        sites: the sites by name.
        refused: the reason for each name without a site.
        claims: the identities that the names need.
    """

    sites: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    def put(self, name: str, site: str | None, why: str = NO_SITE) -> bool:
        """Add a site; a value without a site is refused for a reason."""
        if site is None:
            self.refused[name] = why
        else:
            self.sites[name] = site
        return site is not None

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Refuse names for one reason."""
        self.refused.update(dict.fromkeys(names, why))

    def claim(
        self,
        text: str,
        names: Iterable[str],
        sites: Sequence[str | None],
        measure: Callable[..., float],
    ) -> None:
        """Claim an identity; it fails if one of the values has no site."""
        known = tuple(site for site in sites if site is not None)
        is_whole = len(known) == len(sites)
        of_known = measure if is_whole else lambda *_: math.inf
        self.claims.append(Claim(text, tuple(names), known, of_known))
