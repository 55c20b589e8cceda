"""A dict by sites that takes each way to write a site."""

from __future__ import annotations

from typing import Any, TypeVar, final

from hookline.engine import normalize_root
from hookline.errors import NotRecordedError

V = TypeVar("V")


@final
class SiteDict(dict[str, V]):
    """A dict whose keys are sites as text, as results print them, and may be written otherwise.

    >>> means = SiteDict({"(root)": 1.0, "fc": 2.0})
    >>> means[""], means["fc:output"], "" in means, list(means)
    (1.0, 2.0, True, ['(root)', 'fc'])
    """

    def __missing__(self, site: object) -> V:
        name = self._key_of(site)
        if name is None:
            shown = ", ".join(map(repr, list(self)[:4])) or "none"
            raise NotRecordedError(
                f"the site must be one of the {len(self)} here, got {str(site)!r}."
                f"\nGive one of them, such as {shown}."
            )
        return self[name]

    def __contains__(self, site: object) -> bool:
        return self._key_of(site) is not None

    def get(self, site: Any, default: Any = None) -> Any:
        """Return the value of a site; a default where there is none."""
        name = self._key_of(site)
        return default if name is None else self[name]

    def _key_of(self, site: object) -> str | None:
        """Return the key of a site, however the site is written; None if it has none."""
        text = normalize_root(str(site))
        names = (text, text.removesuffix(":output"))
        return next((name for name in names if dict.__contains__(self, name)), None)
