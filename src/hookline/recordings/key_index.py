"""Find the recorded site that a key names."""

from __future__ import annotations

import difflib
import heapq
import itertools
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

from torch import nn

from hookline.display.text import plural
from hookline.engine import ROOT, Selection, Site, parse_site, path_text
from hookline.engine.pytree.tree import Leaf
from hookline.errors import AmbiguousError, NotRecordedError

Key = str | Site | Selection
# Returns the texts of the sites that a text such as `.resid_post.3` names.
PartSites = Callable[[str], list[str]]

# The suffixes that pick a run. Selectors have calls only; passes and backwards are a recording's.
_RUN = re.compile(r"(?P<rest>.*)#(?P<kind>pass|backward|)(?P<number>[0-9]{1,9})", re.DOTALL)
_MOST_COMPARED = 200


class ParsedKey(NamedTuple):
    """A parsed key."""

    number: int  # the index of the recorded site
    site: Site  # the site as the key writes it
    leaf: tuple[str | int, ...] = ()  # the path from the recorded value to the leaf of the key
    call: int | None = None  # the call in the key; None means every recorded call
    pass_number: int | None = None  # the pass in the key, or None
    # The index, within its pass, of the backward pass in the key, or None.
    backward: int | None = None

    def __str__(self) -> str:
        return f"{self.site}{run_suffix(self.backward, self.pass_number)}"

    def key_of_leaf(self, leaf: tuple[str | int, ...]) -> str:
        """Return the key of a leaf of the value."""
        return str(self._replace(site=replace(self.site, leaf=self.site.leaf + leaf)))

    def with_call(self, call: int) -> ParsedKey:
        """Return the key of one call."""
        return self._replace(site=replace(self.site, call=call), call=call)


def run_suffix(backward: int | None, pass_number: int | None) -> str:
    """Return the suffix of a key for a backward pass and a pass: `#backward1#pass0`."""
    return ("" if backward is None else f"#backward{backward}") + (
        "" if pass_number is None else f"#pass{pass_number}"
    )


@final
class SiteIndex:
    """An index of the recorded sites by key.

    Args:
        sites: the recorded sites.
        has_leaf: returns whether the value of a site, by its index, has a leaf; for messages.
        sites_of_part: returns the sites of a part of the model; None if the model is not known.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        has_leaf: Callable[[int, Leaf], bool],
        sites_of_part: PartSites | None,
    ) -> None:
        self._sites = sites
        self._has_leaf = has_leaf
        self._sites_of_part = sites_of_part
        self._by_place: dict[tuple[str, str], list[int]] = {}
        for index, site in enumerate(sites):
            for path in (site.path, *site.aliases):
                self._by_place.setdefault((path, site.port), []).append(index)
        self._paths = {path for path, _ in self._by_place}
        # The text of each site, which is its key.
        self.keys: list[str] = list(map(str, sites))
        if ROOT in self._paths:  # a module has the root's name, so the root is written `:output`
            for index in (index for index, site in enumerate(sites) if not site.path):
                self.keys[index] = self.keys[index].removeprefix(ROOT) or ":output"
        self._by_text = {key: index for index, key in enumerate(self.keys)}

    def parse(self, key: Key) -> ParsedKey:
        """Parse a key: `PATH[:PORT][LEAF][#CALL][#backwardN][#passN]`, a `Site`, or a selection.

        Raises:
            NotRecordedError: the site was not selected. SelectionError: the key is malformed.
            AmbiguousError: the key names several sites.
        """
        if not isinstance(key, str | Site | Selection):
            raise NotRecordedError(self._not_a_site_text(key))
        parsed_key = self.parse_if_selected(key)
        if parsed_key is None:
            raise NotRecordedError(self._not_selected_text(key))
        return parsed_key

    def parse_if_selected(self, key: Key) -> ParsedKey | None:
        """Parse a key; return None if its site was not selected.

        Raises:
            SelectionError: the key is malformed. AmbiguousError: it names several sites.
        """
        index, site, runs = self._split_key(key)
        if index is None:
            index = self._find_covering_site(site, runs)
        return None if index is None else self._make_parsed_key(index, site, runs)

    def _split_key(self, key: Key) -> tuple[int | None, Site, dict[str, int]]:
        """Split a key into a site, with its index if it is written as recorded, and the runs."""
        if isinstance(key, Selection):
            key = only_site(key)
        if isinstance(key, Site):
            return None, key, {}
        text, runs = key, dict[str, int]()
        # The text is first tried as it is, because a module's name may contain `#`.
        while text not in self._by_text:
            match = _RUN.fullmatch(text)
            if match is None or match["kind"] in runs:
                return None, parse_site(self._part_to_site(text), self._paths), runs
            text, runs[match["kind"]] = match["rest"], int(match["number"])
        index = self._by_text[text]
        return index, self._sites[index], runs

    def _part_to_site(self, text: str) -> str:
        """Return the site that a text such as `.resid_post.3` names; other texts themselves."""
        if not text.startswith(".") or self._sites_of_part is None:
            return text
        sites = self._sites_of_part(text)
        if len(sites) > 1:
            raise AmbiguousError(
                f"{text!r} names {len(sites)} sites.\nWrite {text + '.0'!r} for layer 0, or"
                f" {sites[0]!r}."
            )
        return sites[0]

    def _find_covering_site(self, site: Site, runs: dict[str, int]) -> int | None:
        call = runs.get("", site.call)
        for index in self._by_place.get((site.path, site.port), ()):
            recorded = self._sites[index]
            covers = site.leaf[: len(recorded.leaf)] == recorded.leaf
            if covers and recorded.call in (None, call):
                return index
        # A tensor that was given by name has a single port, so the key may omit it.
        at_grad = self._by_place.get((site.path, "grad"), ())
        return at_grad[0] if at_grad and site == Site(site.path) else None

    def _make_parsed_key(self, index: int, site: Site, runs: dict[str, int]) -> ParsedKey:
        recorded = self._sites[index]
        if "" in runs:
            site = replace(site, call=runs[""])
        if site.port != recorded.port:  # a tensor by name, whose key omits the port
            site = replace(site, port=recorded.port)
        leaf = site.leaf[len(recorded.leaf) :]
        call = site.call if recorded.call is None else None
        return ParsedKey(index, site, leaf, call, runs.get("pass"), runs.get("backward"))

    def _find_leaf_by_path(self, named: Site, runs: dict[str, int]) -> ParsedKey | None:
        """Parse a path such as `block.logits` as a leaf of the value of `block`, if it has one."""
        names = named.path.split(".")
        for n_names in range(len(names) - 1, -1, -1):
            path = ".".join(names[:n_names])
            leaf = (*map(_parse_leaf_key, names[n_names:]), *named.leaf)
            site = replace(named, path="" if path == ROOT else path, leaf=leaf)
            index = self._find_covering_site(site, runs)
            if index is None:
                continue
            parsed_key = self._make_parsed_key(index, site, runs)
            if self._has_leaf(index, parsed_key.leaf):
                return parsed_key
        return None

    def _not_a_site_text(self, key: Any) -> str:
        got, site = repr(key), f"the site itself, such as {next(iter(self._by_text), 'layer1')!r}"
        if isinstance(key, nn.Module):
            got = f"a module ({type(key).__name__})"
            alike = [str(known) for known in self._sites if known.module_type == type(key).__name__]
            site = f"its site, such as {alike[0]!r}" if alike else site
        if isinstance(key, tuple) and list(map(type, key)) == [str, int]:  # a part and its layer
            site = f"a text such as {f'.{key[0]}.{key[1]}'!r}, after hl.anatomy(model)"
        if isinstance(key, int) and -len(self._sites) <= key < len(self._sites):
            site = f"run.sites[{key}], which is {str(self._sites[key])!r}"
        return (
            f"a key must be a site, got {got}.\nGive as the key {site}; passes are in run.passes."
        )

    def _not_selected_text(self, key: Key) -> str:
        text = str(only_site(key) if isinstance(key, Selection) else key)
        _, named, runs = self._split_key(key)
        part = self._find_leaf_by_path(named, runs)
        if part is not None:
            return (
                f"{text!r} was never selected, but {path_text(part.site.path)} has a part of this"
                f" name in its {part.site.port}.\nWrite {str(part)!r}."
            )
        same_path = [
            recorded_key
            for recorded_key, recorded in zip(self.keys, self._sites, strict=True)
            if named.path in (recorded.path, *recorded.aliases)
        ]
        hint = suggestion_text(text, same_path, list(self._by_text), "recorded")
        return (
            f"{text!r} was never selected{hint}"
            "\nLook up one that was, or select this one too when recording."
        )


def only_site(selection: Selection) -> Site:
    """Return the only site of a selection."""
    if len(selection) != 1:
        sites = [str(site) for site in selection]
        raise AmbiguousError(
            f"a key must be one site, got a selection of {plural(len(selection), 'site')}."
            "\nLook up one of them, such as"
            f" {quote_first_names(sites[:1]) or 'a site that was selected'}, or"
            " each: for site in selection."
        )
    return selection.sites[0]


def suggestion_text(text: str, same_path: list[str], names: list[str], kept: str) -> str:
    """Continue "... was never selected" by the sites that may be meant.

    `same_path` are those of the same module, `names` all, and `kept` says how they are there.
    """
    if same_path:
        return f"; {kept} there: {quote_first_names(same_path)}."
    if "*" not in text and (close := closest_names(text, names)):
        return f". Did you mean {quote_first_names(close)}?"
    why = ", because a key is one site, not a pattern" * ("*" in text)
    return f"{why}; {kept}: {plural(len(names), 'site')}, such as {quote_first_names(names)}."


def _parse_leaf_key(name: str) -> str | int:
    return int(name) if name.isdecimal() else name


def closest_names(text: str, names: list[str]) -> list[str]:
    """List the names closest to a text, the closest first."""
    # Comparing all of 20,000 names with difflib would take seconds.
    likely = heapq.nlargest(_MOST_COMPARED, names, key=partial(_n_shared_characters, text))
    ends = [name for name in names if name.endswith("." + text)]
    return [*dict.fromkeys([*ends, *difflib.get_close_matches(text, likely, n=4, cutoff=0.5)])]


def _n_shared_characters(text: str, name: str) -> int:
    """Count the characters that two texts share at their beginnings and at their ends."""

    def first(a: Iterable[str], b: Iterable[str]) -> int:
        return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, a, b)))

    return first(text, name) + first(reversed(text), reversed(name))


def quote_first_names(names: list[str]) -> str:
    """Write the first names of a list, quoted."""
    return ", ".join(map(repr, names[:4]))
