"""Read what is compared: recordings, stores, curves, arrays, each as named values in order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from hookline.curves import Curves
from hookline.data.array_files import open_named_arrays
from hookline.display.text import plural
from hookline.engine import ROOT, Site, format_by_rank, parse_site, path_text, paths_above
from hookline.engine.model_fingerprint import RecordedModel
from hookline.engine.run_settings import Settings
from hookline.errors import InputError, SelectionError
from hookline.models.checkpoints import ModuleState, read_state_dict
from hookline.opening import open as open_folder
from hookline.recordings import PassRecord, Recording
from hookline.recordings.figure_values import iterate_source_values
from hookline.recordings.recorded_values import RecordedValue
from hookline.recordings.recording import has_lost_model, is_read_from_folder, living_model
from hookline.stores import Store
from hookline.verbs.compare.join_ranks import Dims, UnjoinedValue, dim_of, read_whole
from hookline.verbs.compare.noise_floor import Kind
from hookline.verbs.compare.rank_groups import RankGroup, group_of_all_ranks, passes_with_values

_CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt")
FILES = (".npz", ".npy", ".safetensors", *_CHECKPOINTS)
# The names of parameters and buffers in modules of torch: `weight`, `in_proj_bias`, `weight_ih_l0`.
_STORED = re.compile(
    r"(.+\.)?((weight|bias)\d*(_[^.]*)?|[^.]*(weight|bias)|running_mean|running_var"
    r"|num_batches_tracked|parametrizations\.\w+\.original\d*)"
)
_CONVERT = (
    "Give two recordings, stores, curves or dicts of arrays, or their folders. Two models:"
    " hl.shadow(a, b, inputs), or, of weights alone, hl.compare(a.state_dict(), b.state_dict())."
)


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """A named value of a side, which is read on request."""

    # The path of the module, or the name of an array. The root's is empty.
    path: str
    rest: str  # what follows the path in the key: port, leaf, call, pass
    read: Callable[[], Any]  # reads the value
    kind: Kind = "output"  # what the value is, for its noise floor
    n_modules: int = 0  # how many modules without children come before it, as far as known
    # Returns the structure of a recorded value, without reading numbers.
    outline: Callable[[], Any] = lambda: None
    part: Callable[[], str] = str  # says which part of a DTensor the value is; empty if it is whole

    @property
    def key(self) -> str:
        """The key as in a look-up."""
        return path_text(self.path) + self.rest

    @property
    def port(self) -> str:
        """The port of a recorded value."""
        match = re.match(r":(\w+)", self.rest)
        return match[1] if match else "output"

    @property
    def is_input(self) -> bool:
        """Tell whether it is the input of the whole model."""
        return not self.path and self.port == "input"


@final
@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A number of a curve by step, which is compared at the steps that both curves have."""

    steps: NDArray[np.int64]
    numbers: NDArray[np.float64]

    def numbers_at(self, steps: NDArray[np.int64]) -> Tensor:
        """Return the numbers at some of the steps in order, float64, shape `(steps,)`.

        Of a step that comes twice, as after a resumption, the last number counts, as in
        `curves.at`.
        """
        known, from_end = np.unique(self.steps[::-1], return_index=True)
        last = len(self.steps) - 1 - from_end
        chosen = self.numbers[last[np.isin(known, steps)]]
        return torch.from_numpy(chosen.astype(np.float64))


@final
@dataclass(frozen=True, slots=True)
class Side:
    """One of the two things that are compared."""

    noun: str  # what it is: "recording", "arrays", "store" or "curves"
    entries: Sequence[Entry]  # its values, in firing order as far as known
    # Returns the model that made them, on each rank; None where it is unknown.
    identify: Callable[[], Sequence[RecordedModel | None]] = tuple
    # The type name of each module of the model, by its path; empty if unknown.
    modules: Mapping[str, str] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None  # closes the files of what was read
    source: Recording | PassRecord | None = None  # the recording or pass; None for other things
    # The settings of torch under which its passes ran, each once, in their order.
    settings: tuple[Settings, ...] = ()
    store: Store | None = None  # the store; None for other things

    @property
    def living_model(self) -> nn.Module | None:
        """Return the model that it was recorded from, if that is alive."""
        return living_model(self.source) if isinstance(self.source, Recording) else None

    @property
    def has_lost_model(self) -> bool:
        """Tell whether it was recorded in this process, from a model that is no longer there."""
        return isinstance(self.source, Recording) and has_lost_model(self.source)

    @property
    def is_read_from_folder(self) -> bool:
        """Tell whether its values are mapped from files, so that reading takes no memory."""
        return isinstance(self.source, Recording) and is_read_from_folder(self.source)

    @property
    def ranks(self) -> Sequence[Recording]:
        """The recordings of several ranks; empty for a side of one process."""
        return self.source.ranks if isinstance(self.source, Recording) else ()

    @property
    def rank_sites(self) -> list[tuple[str, str]]:
        """Path and port of each value of several ranks; empty for a side of one process."""
        return [(entry.path, entry.port) for entry in self.entries] if self.ranks else []


def read_both_sides(a: Any, b: Any, dims: Dims | None, names: Any) -> tuple[Side, Side]:
    """Return the named values of what a user gave; raise as `read_side` does.

    The names of arrays are those of sites where the other side is a recording. Those that the
    user's `names` has stay whole.
    """
    sides = read_side(a, "a", dims), read_side(b, "b", dims)
    kept = names if isinstance(names, Mapping) else {}
    return _names_to_sites(sides[0], sides[1], kept), _names_to_sites(sides[1], sides[0], kept)


def read_side(given: Any, name: str, dims: Dims | None = None) -> Side:
    """Return the named values of what a user gave.

    Raises:
        InputError: it is nothing that can be compared, or it is empty.
        FolderError, ModelError: a folder or a file cannot be read.
    """
    if isinstance(given, str | os.PathLike):
        given = _open_place(given)
    if isinstance(given, Recording | PassRecord):
        side = _side_from_recording(given, dims)
    elif isinstance(given, Store):
        entries = [
            Entry(_array_path(site), "", partial(given.__getitem__, site)) for site in given.sites
        ]
        side = Side("store", _sort_children_first(entries), store=given)
    elif isinstance(given, Curves):
        side = Side("curves", list(_curve_entries(given)), lambda: [given.model])
    elif isinstance(given, Mapping):
        side = Side("arrays", _array_entries(given, name))
    else:
        raise InputError(
            f"{name} must be a recording, a store, curves, a dict of arrays, or a folder, got"
            f" {type(given).__name__}.\n{_CONVERT}"
        )
    if not side.entries:
        raise InputError(
            f"{name} must hold values, got none.\nRecord while the model runs; print"
            f" {name}.report() of a recording to learn what did not fire."
        )
    return side


def _open_place(place: str | os.PathLike[str]) -> Any:
    suffix = Path(place).suffix.lower()
    if suffix not in FILES or os.path.isdir(place) or not os.path.exists(place):
        return open_folder(place)
    if suffix in _CHECKPOINTS:
        return read_state_dict(place)
    if suffix == ".safetensors":
        return _lazy_safetensors(Path(place))
    content = open_named_arrays(Path(place))
    return content if isinstance(content, dict) else {"array": content}


def _lazy_safetensors(path: Path) -> Mapping[str, Any]:
    """Return the tensors of a file, read one at a time.

    Raises:
        InputError: the file is broken.
    """
    try:
        file: Any = safe_open(path, framework="pt")
        return {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the library's own class, OSError
        raise InputError(
            f"{path} must be a safetensors file, got {error}.\nWrite it anew."
        ) from error


# -- recordings ----------------------------------------------------------------------------------


def _side_from_recording(source: Recording | PassRecord, dims: Dims | None) -> Side:
    if isinstance(source, PassRecord):
        of_pass = [_recorded_entry(value, "", {}) for value in iterate_source_values(source)]
        return Side("recording", of_pass, source=source, settings=_distinct_settings([source]))
    ranks = source.ranks or (source,)
    modules = {path: kind for rank in ranks for path, kind in rank.modules.items()}
    depths = _count_leaf_modules_until(list(modules))
    entries: dict[str, Entry] = {}  # of several ranks, those of each in its firing order
    for rank in ranks:
        has_passes = len(passes_with_values(rank)) > 1
        for value in iterate_source_values(rank):
            entry = _recorded_entry(value, f"#pass{value.record.number}" * has_passes, depths)
            if source.ranks:
                read = partial(
                    read_whole, group_of_all_ranks(source), value, entry.key, dim_of(value, dims)
                )
                entry = replace(entry, read=read, part=str)
            entries.setdefault(entry.key, entry)
    return Side(
        "recording", list(entries.values()), lambda: [rank.model for rank in ranks], modules,
        source.release, source,
        _distinct_settings(record for rank in ranks for record in rank.passes),
    )  # fmt: skip


def check_passes_of_ranks(side: Side, name: str) -> None:
    """Refuse ranks with different numbers of passes, whose values are to be joined.

    Raises:
        InputError: they have, and nothing tells which passes belong together.
    """
    counts = [len(passes_with_values(rank)) for rank in side.ranks]
    is_pipeline = any(rank.modules != side.ranks[0].modules for rank in side.ranks)
    if len(set(counts)) < 2 or is_pipeline:
        return
    said = format_by_rank(range(len(counts)), [plural(count, "pass", "passes") for count in counts])
    raise InputError(
        f"{name} must have the same passes on all ranks, got {said}.\nGive one pass of one rank,"
        f" hl.open(folder).ranks[{counts.index(max(counts))}].passes[0]; or record the inputs, so"
        ' that the rows of all passes are matched: hl.record(model, ["**", "(root):input"]).'
    )


def groups_as_passes(side: Side, groups: Sequence[RankGroup], dims: Dims | None) -> Side:
    """Return a side of several groups of ranks, each with rows of its own: the groups are passes.

    Values that are joined otherwise than along the rows are the same in all passes if each rank has
    rows of its own. Those of parameters have no rows.
    """
    if len(groups) < 2 or not isinstance(side.source, Recording):
        return side
    joined = {(entry.path, entry.rest): entry for entry in side.entries}
    entries = {key: entry for key, entry in joined.items() if entry.port == "grad"}
    for number, (group, value, suffix) in _values_with_pass_numbers(groups):
        base = _recorded_entry(value, "", {})
        rest = f"{base.rest}#pass{number}"
        if base.port == "grad" or (base.path, rest) in entries:
            continue
        read = partial(_read_group_value, side.source, group, value, base.key + suffix, dims)
        entries[base.path, rest] = replace(
            joined[base.path, base.rest + suffix], rest=rest, read=read, outline=value.outline
        )
    return replace(side, entries=list(entries.values()))


def _values_with_pass_numbers(
    groups: Sequence[RankGroup],
) -> Iterator[tuple[int, tuple[RankGroup, RecordedValue, str]]]:
    """Yield the values of all ranks, each with the number of its pass among those of all groups.

    With it come the group, and the end of the value's key in a look-up.
    """
    number = 0
    for group in groups:
        n_passes = len(group.passes)
        passes = [passes_with_values(rank) for rank in group.recording.ranks]
        for records in zip(*passes, strict=False):
            for record in records:
                suffix = f"#pass{record.number}" * (n_passes > 1)
                yield from (
                    (number, (group, value, suffix)) for value in iterate_source_values(record)
                )
            number += 1


def _read_group_value(
    source: Recording, group: RankGroup, value: RecordedValue, key: str, dims: Dims | None
) -> Any:
    """Read a value of ranks with the same rows; `dims` along the rows says that it has rows."""
    dim = dim_of(value, dims)
    if dim not in (None, 0) and len(group.numbers) == 1:  # such as the mean of a loss
        return read_whole(group_of_all_ranks(source), value, key, dim)
    joined = read_whole(group, value, key, dim or None)
    if isinstance(joined, UnjoinedValue) and value.holds_shard():  # in a mesh beyond the group
        return read_whole(group_of_all_ranks(source), value, key, dim)
    return joined


def _distinct_settings(records: Iterable[PassRecord]) -> tuple[Settings, ...]:
    distinct: list[Settings] = []
    for record in records:
        if record.settings is not None and record.settings not in distinct and len(record):
            distinct.append(record.settings)
    return tuple(distinct)


def _recorded_entry(value: RecordedValue, suffix: str, depths: Mapping[str, int]) -> Entry:
    site = value.site
    rest = value.key.removeprefix(path_text(site.path))
    rest += "" if value.backward is None else f"#backward{value.backward}"
    # A gradient has come through the whole forward, and back to its module.
    depth = depths.get(site.path, 0)
    n_modules = 2 * depths.get("", 0) - depth if site.is_gradient else depth
    return Entry(
        site.path,
        rest + suffix,
        value.read,
        _kind_at(site),
        n_modules,
        value.outline,
        value.part_text,
    )


def _kind_at(site: Site) -> Kind:
    is_input = not site.path and site.port == "input"
    return "gradient" if site.is_gradient else "stored" if is_input else "output"


def _count_leaf_modules_until(paths: Sequence[str]) -> dict[str, int]:
    """Return for each path how many modules without children come up to its end."""
    counts: dict[str, int] = {}
    n_leaves = 0
    for path, following in zip(paths, [*paths[1:], ""], strict=True):
        n_leaves += not following.startswith(f"{path}." if path else "")
        counts |= dict.fromkeys((path, *paths_above(path)), n_leaves)
    return counts


# -- arrays and curves ---------------------------------------------------------------------------


def _array_entries(arrays: Mapping[Any, Any], name: str) -> list[Entry]:
    odd = next((key for key in arrays if not isinstance(key, str)), None)
    if odd is not None:
        raise InputError(
            f"the keys of {name} must be names, got {odd!r}.\nGive a dict of names to arrays."
        )
    is_stored = _are_weights(arrays)
    entries = [
        Entry(
            _array_path(key),
            "",
            value if isinstance(value, partial) else partial(_read_array, arrays, key),
            "stored" if is_stored[key] else "output",
        )
        for key, value in arrays.items()
    ]
    return entries if all(is_stored.values()) else _sort_children_first(entries)


def _read_array(arrays: Mapping[Any, Any], key: str) -> Any:
    """Return a value of a dict; nested lists of numbers, as JSON holds an array, as one."""
    value = number = arrays[key]
    while isinstance(number, list) and number:
        number = number[0]
    if number is value or not isinstance(number, bool | int | float):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # rows of different lengths
        return value


def _names_to_sites(arrays: Side, recording: Side, names: Container[str]) -> Side:
    """Read the names of arrays as sites; what modules are called stays as it is."""
    if (arrays.noun, recording.noun) != ("arrays", "recording"):
        return arrays
    paths = {*recording.modules, *(entry.path for entry in recording.entries)}
    entries = [
        replace(entry, kind="output")
        if entry.path in paths or entry.path in names
        else _place_at_named_site(entry, paths)
        for entry in arrays.entries
    ]
    return replace(arrays, entries=entries)


def _place_at_named_site(entry: Entry, paths: Container[str]) -> Entry:
    """Return an array at the site that its name spells."""
    number = re.search(r"(#backward\d+)?(#pass\d+)?$", entry.path)
    suffix = number[0] if number else ""
    name = entry.path.removesuffix(suffix)
    try:
        site = parse_site(name, paths)
    except SelectionError:
        site = Site(name)
    if site.leaf:  # values are recorded as a whole
        return replace(entry, kind="output")
    rest = str(site).removeprefix(path_text(site.path)) + suffix
    return replace(entry, path=site.path, rest=rest, kind=_kind_at(site))


def _array_path(name: str) -> str:
    return "" if name == ROOT else name


def _are_weights(arrays: Mapping[str, Any]) -> dict[str, bool]:
    """Tell which arrays are weights, which are rounded once and not by each layer.

    Beside a majority of weights, the others are parameters with names of their own.
    """
    by_name = {key: bool(_STORED.fullmatch(key)) for key in arrays}
    is_state = isinstance(arrays, ModuleState) or hasattr(arrays, "_metadata")
    if is_state or 2 * sum(by_name.values()) > len(arrays):
        return dict.fromkeys(arrays, True)
    return by_name


def _sort_children_first(entries: list[Entry]) -> list[Entry]:
    """Order values as modules fire: each after those of its descendants."""
    last: dict[str, int] = {}
    for number, entry in enumerate(entries):
        last |= dict.fromkeys((entry.path, *paths_above(entry.path)), number)
    return sorted(
        entries, key=lambda entry: (last[entry.path], -entry.path.count(".") - bool(entry.path))
    )


def _curve_entries(curves: Curves) -> Iterator[Entry]:
    def numbers_at(site: str, name: str) -> StepNumbers:
        curve = curves[site]
        return StepNumbers(curve.steps, getattr(curve, name))

    def logged_numbers(name: str) -> StepNumbers:
        return StepNumbers(*curves.logged[name])

    for site in curves.sites:
        for name in curves[site].names:
            yield Entry(f"{site}/{name}", "", partial(numbers_at, site, name))
    for name in curves.logged:
        yield Entry(f"logged/{name}", "", partial(logged_numbers, name))
