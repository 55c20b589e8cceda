"""Hold the entries of a recording, pass by pass, and find them by key.

Look-ups never guess: a key with several values raises an error.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor

from hookline.display.text import plural
from hookline.engine import (
    Pass,
    Report,
    Site,
    UnversionedMemory,
    every_tensor,
    hidden_tensor_holder,
    is_freed,
    is_wrapped,
    local_shards,
    unwrap_all_transforms,
    unwrap_ended_transforms,
)
from hookline.engine.pytree import leaves, tree
from hookline.errors import AmbiguousError, NotRecordedError, OverwrittenError, SiteError
from hookline.recordings.key_index import Key, ParsedKey, PartSites, SiteIndex
from hookline.recordings.log_entries import (
    Entry,
    PartialGradients,
    StampWithCopies,
    UndetectableStamp,
    is_unchanged,
    version_stamp,
)
from hookline.recordings.stored_values import StoredValue

Read = Callable[[Entry], Any]
RawSettings = tuple[Any, ...]  # the first fields of an `Entry`
_SEARCHED = 256  # up to this many entries are searched: sorting costs as much as 20 searches


@final
class Log:
    """The entries of a recording, pass by pass.

    Args:
        sites: the selected sites.
        report: the recording's method that says why a site did not fire. Only a weak reference to
            it is held.
        keeps_graph: whether values were recorded with their graph.
        unversioned: detects memory that changes without a new version; None skips that check.

    Attributes:
        sites_of_part: returns the sites of a part of the model; None if the model is not known.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        report: Callable[[], Report],
        *,
        keeps_graph: bool = False,
        unversioned: UnversionedMemory | None = None,
    ) -> None:
        self.sites = sites
        self.sites_of_part: PartSites | None = None
        self.passes: list[Pass] = []
        # A strong reference would form a cycle, and every value would live until gc runs.
        self._report = weakref.WeakMethod(report)
        self.keeps_graph = keeps_graph
        self.unversioned = unversioned
        self._sorted: dict[int, _EntriesBySite] = {}

    @functools.cached_property
    def index(self) -> SiteIndex:
        """The index of the sites, built on first look-up: some lines are attached for each call."""
        has_leaf = weakref.WeakMethod(self._has_leaf)

        def has(index: int, leaf: tree.Leaf) -> bool:
            find_leaf = has_leaf()
            return find_leaf is not None and find_leaf(index, leaf)

        return SiteIndex(self.sites, has, self.sites_of_part)

    def pop_passes(self) -> list[Pass]:
        """Remove all passes and return them."""
        passes, self.passes[:] = self.passes[:], []
        for current in passes:
            self._sorted.pop(id(current), None)  # another pass may get this id
        return passes

    def cut_last_pass_at_completion(self) -> None:
        """Drop what the last pass has noted after each site had a value."""
        missing = set(range(len(self.sites)))
        log = self.passes[-1].log if self.passes else []
        for position, noted in enumerate(log):
            missing.discard(noted[0])
            if not missing:
                del log[position + 1 :]
                return

    def _has_leaf(self, index: int, leaf: tree.Leaf) -> bool:
        """Return whether the first value of a site has a leaf. No tensor data is read."""
        for current in self.passes:
            for entry in self.entries(current, index)[:1]:
                try:
                    leaves.get(self.outline(entry), leaf, "")
                except SiteError:
                    return False
                return True
        return False

    def entries(self, current: Pass, index: int, call: int | None = None) -> list[Entry]:
        """List a site's entries in a pass, or those of one call.

        Values are numbered in order; gradients have calls.
        """
        log = current.log
        if len(log) > _SEARCHED:
            grouped = self._group_by_site(current)
            return grouped.of_site(index) if call is None else grouped.of_call(index, call)
        entries = _make_entries(index, [fields for fields in tuple(log) if fields[0] == index])
        return entries if call is None else [entry for entry in entries if entry.call == call]

    def _group_by_site(self, current: Pass) -> _EntriesBySite:
        """Group the entries of a pass by site; repeated only when the log has grown."""
        grouped = self._sorted.get(id(current))
        if grouped is None or grouped.length != len(current.log):
            grouped = self._sorted[id(current)] = _EntriesBySite(tuple(current.log))
        return grouped

    def autograd_runs(self, current: Pass) -> list[int]:
        """List the autograd runs that brought gradients to a pass, in order."""
        runs = (Entry(*entry).backward for entry in tuple(current.log))
        return list(dict.fromkeys(run for run in runs if run is not None))

    def fired_sites(self, current: Pass, backward: int | None) -> list[tuple[int, int, int | None]]:
        """List the sites that fired, in firing order, as (index, call, autograd run).

        The run is None for a value, and for a gradient that no run was to bring.
        """
        n_calls: Counter[int] = Counter()
        fired = []
        for entry in (Entry(*noted) for noted in tuple(current.log)):
            if backward is not None and entry.backward != backward:
                continue
            call = n_calls[entry.site] if entry.call is None else entry.call
            fired.append((entry.site, call, entry.backward))
            n_calls[entry.site] += 1
        return fired

    def find_entries(
        self, parsed_key: ParsedKey, within: Pass | None = None, backward: int | None = None
    ) -> list[tuple[Pass, list[Entry]]]:
        """Find a site's entries in each pass that has any. No value is read.

        `within` and `backward` limit the search to one pass and to one autograd run.

        Raises:
            NotRecordedError: no pass has an entry of the site.
        """
        passes = list(
            self._search_passes(parsed_key, self.passes if within is None else [within], backward)
        )
        if not passes:
            raise self.no_value_error(parsed_key, within)
        return passes

    def values(
        self, parsed_key: ParsedKey, current: Pass, entries: list[Entry], read: Read | None = None
    ) -> list[Any]:
        """Return the values of a site's entries in a pass, in the order of the calls.

        `read` returns an entry's value: `outline`, or by default `read_local`.

        Raises:
            AmbiguousError: the site has gradients of several autograd runs, and the key names none.
            OverwrittenError: a value was changed in place after it was recorded.
        """
        if len(entries) > 1:
            runs = {entry.backward for entry in entries} - {None}
            if len(runs) > 1:
                raise AmbiguousError(
                    f"{str(parsed_key)!r} has a gradient of each of {len(runs)} backward passes."
                    f"\nWrite run.passes[{current.number}].backwards[0][{str(parsed_key)!r}] for"
                    " one."
                )
            entries = sorted(entries, key=_call_number)
        values = list(map(read or self.read_local, entries))
        if parsed_key.leaf:
            return [leaves.get(value, parsed_key.leaf, str(parsed_key)) for value in values]
        return values

    def single_value(
        self, parsed_key: ParsedKey, current: Pass, entries: list[Entry], read: Read | None = None
    ) -> Any:
        """Return the only value of a site in a pass."""
        values = self.values(parsed_key, current, entries, read)
        if len(values) > 1:
            key, calls = str(parsed_key), sorted(map(_call_number, entries))
            first, last = str(parsed_key.with_call(calls[0])), str(parsed_key.with_call(calls[-1]))
            raise AmbiguousError(
                f"{key!r} ran {len(values)} times in pass {current.number}."
                f"\nWrite {first!r} to {last!r} for one call, or .calls({key!r}) for all."
            )
        return values[0]

    def values_by_pass(self, parsed_key: ParsedKey, read: Read | None = None) -> list[list[Any]]:
        """Return a site's values, call by call, for each pass that has any.

        Raises:
            NotRecordedError, AmbiguousError, OverwrittenError: as in `find` and `values`.
        """
        # A generator, so that the entries of 100,000 passes are not held at once.
        passes = self._search_passes(parsed_key, self.passes)
        values = [self.values(parsed_key, *pass_entries, read) for pass_entries in passes]
        if not values:
            raise self.no_value_error(parsed_key)
        return values

    def key_of_first_call(self, parsed_key: ParsedKey) -> ParsedKey:
        """Return the key of the first call of a site that ran several times in a pass."""
        entries = next(
            calls for _, calls in self._search_passes(parsed_key, self.passes) if len(calls) > 1
        )
        return parsed_key.with_call(min(map(_call_number, entries)))

    def key_of_first_entry(
        self, parsed_key: ParsedKey, current: Pass, entries: list[Entry]
    ) -> ParsedKey:
        """Return a key that names the first of a site's entries in a pass."""
        runs = list(
            dict.fromkeys(entry.backward for entry in entries if entry.backward is not None)
        )
        if len(runs) > 1:
            parsed_key = parsed_key._replace(backward=self.autograd_runs(current).index(runs[0]))
            entries = [entry for entry in entries if entry.backward == runs[0]]
        return (
            parsed_key.with_call(min(map(_call_number, entries)))
            if len(entries) > 1
            else parsed_key
        )

    def has(self, key: Key, within: Pass | None = None, backward: int | None = None) -> bool:
        """Return whether a site has a value in a pass, or in any pass. No value is read."""
        parsed_key = self.index.parse_if_selected(key)
        passes = self.passes if within is None else [within]
        return parsed_key is not None and any(self._search_passes(parsed_key, passes, backward))

    def _search_passes(
        self, parsed_key: ParsedKey, passes: Iterable[Pass], backward: int | None = None
    ) -> Iterator[tuple[Pass, list[Entry]]]:
        for current in passes:
            if parsed_key.pass_number not in (None, current.number):
                continue
            entries = self.entries(current, parsed_key.number, parsed_key.call)
            if backward is not None:
                entries = [entry for entry in entries if entry.backward in (None, backward)]
            if parsed_key.backward is not None:
                run = dict(enumerate(self.autograd_runs(current))).get(parsed_key.backward, -1)
                entries = [entry for entry in entries if entry.backward == run]
            if entries:
                yield current, entries

    def read_local(self, entry: Entry) -> Any:
        """Return an entry's unchanged value, with the local shard of each DTensor.

        Raises:
            OverwrittenError: the value was changed in place after it was recorded.
        """
        value = self.read_with_dtensors(entry)
        return value if type(value) is Tensor else local_shards(value)

    def read_with_dtensors(self, entry: Entry) -> Any:
        """Return an entry's unchanged value, with DTensors as they are."""
        value = entry.value
        if isinstance(value, StoredValue):
            return value.load()
        parts = [(value, entry.stamp)]
        if isinstance(value, PartialGradients):
            parts, value = list(value.parts.values()), value.load()
        for part, was in parts:
            why = self._why_changed(part, was)
            if why:
                advice = _COPY if hidden_tensor_holder(part) is None else _TAKE_OUT
                raise OverwrittenError(f"{self.sites[entry.site]} {why}.\n{advice}")
        return (
            value
            if type(value) is Tensor and not is_wrapped(value)
            else self.unwrap_transforms(value)
        )

    def _why_changed(self, value: Any, was: Any) -> str | None:
        """Say why a value cannot be returned: it has changed, or may have changed undetected."""
        if isinstance(was, UndetectableStamp):
            return (
                f"holds tensors in a {was.kind}, which cannot be copied, and torch does not tell"
                " whether they have changed"
            )
        tensors = list(map(unwrap_all_transforms, every_tensor(value)))
        if any(map(is_freed, tensors)):
            return "has no numbers any more: its memory was freed after it was recorded"
        # A value with a copy beside it is compared with the copy.
        unversioned = None if isinstance(was, StampWithCopies) else self.unversioned
        may_change = unversioned is not None and unversioned.contains_any_now(
            tensors, len(self.passes)
        )
        if not is_unchanged(tensors, was):
            return (
                "was overwritten in place after it was recorded (by an in-place operation such as"
                " ReLU(inplace=True) or +=)"
            )
        if may_change:
            return (
                "shares memory with a parameter or buffer of the model, and torch does not always"
                " tell when these change"
            )
        return None

    def unwrap_transforms(self, value: Any) -> Any:
        """Remove the wrappers of finished torch.func transforms from a value."""
        if not any(is_wrapped(tensor) for _, tensor in tree.tensors(value)):
            return value
        return tree.map_tensors(
            partial(unwrap_ended_transforms, keeps_graph=self.keeps_graph), value
        )

    def outline(self, entry: Entry) -> Any:
        """Return a value's structure; values in a folder have meta tensors and are not verified."""
        value = entry.value
        is_plain = not isinstance(value, StoredValue | PartialGradients)
        return self.unwrap_transforms(value) if is_plain else value.outline()

    def unwrap_entries(self) -> None:
        """Remove torch.func wrappers once no transform runs; a later one could mistake them."""
        for current in self.passes:
            current.log[:] = [
                (
                    site,
                    value if isinstance(value, PartialGradients) else self.unwrap_transforms(value),
                    *rest,
                )
                for site, value, *rest in current.log
            ]
        self._sorted.clear()

    def no_value_error(self, parsed_key: ParsedKey, within: Pass | None = None) -> NotRecordedError:
        """Return the error that says why a site has no value."""
        site = self.sites[parsed_key.number]
        passes = self.passes if within is None else [within]
        if parsed_key.pass_number is not None and passes:
            passes = [current for current in passes if current.number == parsed_key.pass_number]
            if not passes:
                return NotRecordedError(self._no_such_pass_text(parsed_key, within))
        entries = [
            entry for current in passes for entry in self.entries(current, parsed_key.number)
        ]
        if entries and (parsed_key.backward is not None or parsed_key.call is not None):
            return NotRecordedError(self._no_such_run_text(parsed_key, passes, entries))
        report = self._report()
        why = None if report is None else report().why.get(site)
        if why is None:
            has_run = within is not None or bool(self.passes)
            why = "it did not fire in this pass" if has_run else "the model has not run"
        return NotRecordedError(f"{site} was selected, but has no value: {why}.")

    def _no_such_run_text(
        self, parsed_key: ParsedKey, passes: list[Pass], entries: list[Entry]
    ) -> str:
        """Say that a site has values, and none of the backward pass or call that is named."""
        if parsed_key.backward is not None:
            n_backwards = max(len(self.autograd_runs(current)) for current in passes)
            return (
                f"{str(parsed_key)!r} must name a backward pass that brought its gradient, got"
                f" backward {parsed_key.backward} of {n_backwards}.\nWrite"
                f" run.passes[{passes[0].number}].backwards for those that ran."
            )
        numbers = sorted({entry.call or 0 for entry in entries})
        site, last = self.sites[parsed_key.number], numbers[-1]
        where = f"in pass {passes[0].number}" if len(passes) == 1 else "at most in a pass"
        if parsed_key.call is not None and 0 <= parsed_key.call < last:  # as without a gradient
            kept = ", ".join(f"#{number}" for number in numbers[:5]) + ", …" * (len(numbers) > 5)
            return (
                f"{site} has no value of call #{parsed_key.call}: it has those of {kept}."
                f"\nThe last one is {f'{site}#{last}'!r}."
            )
        calls = f"its calls are #0 to #{last}" if last else "its only call is #0"
        times = f"{last + 1} times" if last else "once"
        return (
            f"{site} ran {times} {where}, so {calls}, got #{parsed_key.call}."
            f"\nThe last one is {f'{site}#{last}'!r}."
        )

    def _no_such_pass_text(self, parsed_key: ParsedKey, within: Pass | None) -> str:
        if within is not None:
            return (
                f"{str(parsed_key)!r} must name this pass, which is pass {within.number}."
                f"\nWrite run[{str(parsed_key)!r}]."
            )
        ran = plural(len(self.passes), "pass", "passes")
        message = f"{str(parsed_key)!r} must name one of the {ran} that ran, from 0 on."
        anywhere = parsed_key._replace(pass_number=None)
        having = [current.number for current, _ in self._search_passes(anywhere, self.passes)]
        if not having:
            return message
        last = parsed_key._replace(pass_number=having[-1])
        return f"{message}\nWrite {str(last)!r} for the last in which it has a value."


def append_in_transform(log: list[Any], keeps_graph: bool, entry: tuple[Any, ...]) -> None:
    """Append an entry while a torch.func transform runs.

    A wrapped tensor shows neither `requires_grad` nor its version. The innermost tensor does.
    """
    site, value, version, *rest = entry
    if type(version) in (int, tuple):
        if not keeps_graph:
            value = tree.map_tensors(Tensor.detach, value)
        version = version_stamp(value)
    log.append((site, value, version, *rest))


def _make_entries(index: int, noted: Sequence[RawSettings]) -> list[Entry]:
    return [
        Entry(index, fields[1], fields[2], call)
        if len(fields) < 4 or fields[3] is None
        else Entry(*fields)
        for call, fields in enumerate(noted)
    ]


@final
class _EntriesBySite:
    """The entries of a pass, grouped by site, and by call where one call is asked for."""

    def __init__(self, log: Sequence[RawSettings]) -> None:
        self.length = len(log)
        self._by_site: dict[int, list[RawSettings]] = {}
        for fields in log:
            self._by_site.setdefault(fields[0], []).append(fields)
        self._by_call: dict[int, dict[int | None, list[Entry]]] = {}

    def of_site(self, index: int) -> list[Entry]:
        """List a site's entries."""
        return _make_entries(index, self._by_site.get(index, []))

    def of_call(self, index: int, call: int) -> list[Entry]:
        """List the entries of one call of a site."""
        calls = self._by_call.get(index)
        if calls is None:
            calls = self._by_call[index] = {}
            for entry in self.of_site(index):
                calls.setdefault(entry.call, []).append(entry)
        return calls.get(call, [])


def _call_number(entry: Entry) -> int:
    return entry.call or 0


def append_with_copy(append: Callable[[Any], None], entry: tuple[Any, ...]) -> None:
    """Append an entry, and copy a lone tensor whose version does not show changes.

    A fast tap notes such a tensor without a copy, with its bare version as the stamp.
    """
    site, value, version, *rest = entry
    if type(version) is int:
        value = value.clone()
        version = version_stamp(value)
    append((site, value, version, *rest))


_COPY = "Record a copy: hl.record(..., copy=True)."
# For objects such as iterators, which copy=True refuses.
_TAKE_OUT = "Record with keep=, a function that takes the tensors out and copies them."
