"""Index: which recorded site holds what a key asks for. Stamp: has a value been written to since?

Imports engine.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from hookline.engine import Site, innermost, parse_site, tree
from hookline.engine.errors import NotRecordedError
from hookline.engine.words import plural

Key = str | Site


@final
class Index:
    """Finds the recorded site that holds what a key asks for."""

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self._sites = sites
        self._by_text = {str(site): index for index, site in enumerate(sites)}
        self._by_place: dict[tuple[str, str], list[int]] = {}
        for index, site in enumerate(sites):
            for path in (site.path, *site.aliases):
                self._by_place.setdefault((path, site.port), []).append(index)

    def find(self, key: Key) -> tuple[int, Site]:
        """The number of the recorded site, and the asked site.

        Raises:
            NotRecordedError: no such site was selected.
        """
        # First as it stands, whatever signs of the grammar a module's name may hold.
        if isinstance(key, str):
            head, sign, call = key.rpartition("#")
            if key in self._by_text:
                return self._by_text[key], self._sites[self._by_text[key]]
            if sign and head in self._by_text and call.isdecimal() and len(call) < 10:
                index = self._by_text[head]
                return index, replace(self._sites[index], call=int(call))
        if not isinstance(key, str | Site):
            raise NotRecordedError(
                f"{key!r} is no site.\nValues are looked up by their sites, such as"
                f" run[{next(iter(self._by_text), 'layer1')!r}]; passes by their numbers:"
                " run.passes[0]."
            )
        site = parse_site(key) if isinstance(key, str) else key
        for index in self._by_place.get((site.path, site.port), ()):
            kept = self._sites[index]
            covers = site.leaf[: len(kept.leaf)] == kept.leaf
            if covers and kept.call in (None, site.call):
                return index, site
        # A tensor that was given by name has but one thing to record.
        at_grad = self._by_place.get((site.path, "grad"), ())
        if at_grad and site == Site(site.path):
            return at_grad[0], replace(site, port="grad")
        raise NotRecordedError(self._not_selected(key, site))

    def _not_selected(self, key: Key, site: Site) -> str:
        same_path = [str(kept) for kept in self._sites if site.path in (kept.path, *kept.aliases)]
        if same_path:
            there = f"recorded there: {', '.join(map(repr, same_path[:4]))}"
        else:
            names = [str(kept) for kept in self._sites]
            close = difflib.get_close_matches(str(key), names, n=3, cutoff=0.5) or names[:4]
            sites = plural(len(names), "site")
            there = f"recorded: {sites}, such as {', '.join(map(repr, close))}"
        return (
            f"{str(key)!r} was never selected; {there}."
            "\nLook up one that was, or select this one too when recording."
        )


def stamp(value: Any) -> Any:
    """The version counters of a value's tensors; equal stamps mean that nobody wrote to them.

    None for inference tensors, which have no counter: who records them copies them.
    """
    if isinstance(value, Tensor):
        return _version(value)
    return tuple(_version(tensor) for _, tensor in tree.tensors(value))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else innermost(tensor)._version
