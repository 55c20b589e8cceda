"""Find the value that a site in a finding or in a comparison names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import final

from hookline.views.page.value_entries import ValueEntry


@final
class ValuesBySite:
    """Values by the keys under which findings and comparisons name them.

    Args:
        entries: the values, in firing order.
    """

    def __init__(self, entries: Iterable[ValueEntry]) -> None:
        self._entries: dict[str, ValueEntry] = {}
        for entry in entries:
            key = _comparison_key(entry)
            self._entries[key] = entry
            self._entries.setdefault(_without_pass(key), entry)

    def find(self, site: str) -> ValueEntry | None:
        """Return the value that a site names, with or without its leaf and its pass; or None."""
        whole = _without_leaf(site)
        for key in (site, whole, _without_pass(site), _without_pass(whole)):
            if key in self._entries:
                return self._entries[key]
        return None


def _comparison_key(entry: ValueEntry) -> str:
    """Return the key of a value in a comparison, with its pass and its backward pass."""
    recorded = entry.recorded
    backward = "" if recorded.backward is None else f"#backward{recorded.backward}"
    return f"{recorded.key}{backward}#pass{recorded.record.number}"


def _without_pass(key: str) -> str:
    return re.sub(r"#pass\d+", "", key)


def leaf_of(site: str) -> str:
    """Return the leaf of a site: `[1]` of `attn:output[1]`."""
    parts = _LEAF.fullmatch(site)
    return "" if parts is None else parts[3]


def _without_leaf(key: str) -> str:
    """Return the key of the whole value: `attn` for `attn:output[1]`."""
    parts = _LEAF.fullmatch(key)
    if parts is None:
        return key
    path, port, _, calls = parts.groups()
    return path + port * (port != ":output") + calls


_LEAF = re.compile(r"(.*?)(:\w+)((?:\[[^\]]*\]|\.\w+)+)((?:#\w+)*)", re.DOTALL)
