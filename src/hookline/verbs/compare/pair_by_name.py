"""Pair the values of two sides by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hookline.display.text import listed
from hookline.engine import ROOT, paths_above
from hookline.errors import InputError
from hookline.recordings.key_index import closest_names
from hookline.verbs.compare.read_sides import Entry, Side

# A function from names of the second side to names of the first, or a dict of them.
Names = Callable[[str], str] | Mapping[str, str]

_MOST_SHOWN = 3


class Pairing(NamedTuple):
    """The values of two sides, paired."""

    # The pairs, in the firing order of the first side; of the second, if the first has none, as a
    # recording of compiled code and arrays have none.
    pairs: list[tuple[Entry, Entry]]
    only_a: list[Entry]  # the values of the first side alone
    only_b: list[Entry]  # the values of the second side alone, under their names in the first


def pair_entries(a: Side, b: Side, names: Names | None) -> Pairing:
    """Pair the values that have one name.

    Raises:
        InputError: no name is on both sides; `names` is no function or dict, gives two values one
            name, or names a value that is not there.
    """
    if isinstance(names, Mapping):
        names = {key or ROOT: name or ROOT for key, name in names.items()}
    kept, displaced = _split_off_root(b, names)
    theirs = _renamed_entries(kept, _renamer(a, b, names))
    ours = {(entry.path, entry.rest): entry for entry in a.entries}
    are_given = (a.noun, b.noun) == ("arrays", "recording")
    is_unordered = are_given or not _inner_outputs_come_first(a.entries)
    is_by_b = is_unordered and _inner_outputs_come_first(b.entries)
    order = theirs if is_by_b else ours
    pairs = [(ours[key], theirs[key]) for key in order if key in ours and key in theirs]
    if not pairs:
        raise InputError(_no_pairs_message(a.entries, b.entries))
    return Pairing(
        pairs,
        [entry for key, entry in ours.items() if key not in theirs],
        [*displaced, *(entry for key, entry in theirs.items() if key not in ours)],
    )


def _split_off_root(b: Side, names: Names | None) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Split off the values of b's root where names compare another module of b with a's root."""
    if not isinstance(names, Mapping) or ROOT in names or ROOT not in names.values():
        return b.entries, ()
    return (
        [entry for entry in b.entries if entry.path],
        [entry for entry in b.entries if not entry.path],
    )


def _inner_outputs_come_first(entries: Sequence[Entry]) -> bool:
    """Tell whether no module returns before one inside it does."""
    ended: set[tuple[str, str]] = set()
    for entry in entries:
        if entry.port != "output" or entry.kind != "output":
            continue
        if any((path, entry.rest) in ended for path in paths_above(entry.path)):
            return False
        ended.add((entry.path, entry.rest))
    return True


def _renamed_entries(
    entries: Sequence[Entry], rename: Callable[[str], str]
) -> dict[tuple[str, str], Entry]:
    by_name: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        path = rename(entry.path)
        if not isinstance(path, str):
            raise InputError(
                f"names must return a name, got {path!r} for {entry.key!r}."
                "\nReturn the name as it is where it stays."
            )
        key = "" if path == ROOT else path, entry.rest
        if key in by_name:
            raise InputError(
                f"names must give each name of b another one, got {path or ROOT!r} for"
                f" {by_name[key].key!r} and {entry.key!r}.\nLet names keep them apart."
            )
        by_name[key] = entry
    return by_name


def _renamer(a: Side, b: Side, names: Names | None) -> Callable[[str], str]:
    if names is None:
        return lambda path: path
    if isinstance(names, Mapping):
        _check_names_exist(names, a, b)
        return lambda path: _rename_path(path, names)
    if not callable(names):
        raise InputError(
            f"names must be a function or a dict, got {type(names).__name__}."
            "\nGive names={'their.name': 'our.name'}, from names of b to names of a."
        )
    return names


def _rename_path(path: str, names: Mapping[str, str]) -> str:
    """Replace the longest beginning of a path that the dict names."""
    parts = path.split(".")
    for n_parts in range(len(parts), -1, -1):
        new = names.get(".".join(parts[:n_parts]) or ROOT)
        if new is not None:
            return ".".join(["" if new == ROOT else new, *parts[n_parts:]]).removeprefix(".")
    return path


def _check_names_exist(names: Mapping[str, str], a: Side, b: Side) -> None:
    """Refuse a dict with a name that is on neither side.

    Raises:
        InputError: a key begins no name of b, or a value begins no name of a.
    """
    for side, label, given in ((b, "b", list(names)), (a, "a", list(names.values()))):
        paths = {*side.modules, *(entry.path for entry in side.entries)}
        known = {start or ROOT for path in paths for start in (path, *paths_above(path))}
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            near = closest_names(str(unknown), sorted(known))[:_MOST_SHOWN]
            raise InputError(
                f"names must have {'keys' if label == 'b' else 'values'} that are names of"
                f" {label}, got {unknown!r}.\nGive names={{name of b: name of a}};"
                f" {label} has {listed(list(map(repr, near or sorted(known))), _MOST_SHOWN)}."
            )


def _no_pairs_message(ours: Sequence[Entry], theirs: Sequence[Entry]) -> str:
    """Return the message for two sides without a common name, with the closest pairs."""
    keys = [[entry.key for entry in entries] for entries in (ours, theirs)]
    has_passes = [any("#pass" in entry.rest for entry in side) for side in (ours, theirs)]
    if has_passes[0] != has_passes[1]:
        several = "a" if has_passes[0] else "b"
        return (
            f"a and b must have as many passes, got several in {several} alone."
            f"\nGive one of them: {several}.passes[0]."
        )
    paths = [list({entry.path or ROOT: None for entry in side}) for side in (ours, theirs)]
    near = {path: match[0] for path in paths[1] if (match := closest_names(path, paths[0]))}
    pairs = dict(list(near.items())[:_MOST_SHOWN]) or {paths[1][0]: paths[0][0]}
    return (
        f"a and b must have names in common, got none: a has {listed(keys[0], _MOST_SHOWN)}; b has"
        f" {listed(keys[1], _MOST_SHOWN)}."
        f"\nMap the names of b to those of a, such as names={pairs!r}."
    )
