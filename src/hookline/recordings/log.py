"""Log: the passes of a recording and the one place where a key is looked up in them.

Imports index, entries, files, engine. Look-ups never guess: what has several answers raises.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import Tensor

from hookline.engine import Pass, Report, Site, innermost, local, plain, tree
from hookline.engine.errors import AmbiguousError, NotRecordedError, OverwrittenError
from hookline.recordings.entries import Entry, Gathered
from hookline.recordings.files import Stored
from hookline.recordings.index import Index, Key, stamp


@final
class Log:
    """What fired, pass by pass.

    Args:
        sites: what was selected.
        report: the recording's method that says why a site did not fire. It is not held.
        keeps_graph: whether values were recorded with their graph.
    """

    def __init__(
        self, sites: tuple[Site, ...], report: Callable[[], Report], *, keeps_graph: bool = False
    ) -> None:
        self.sites = sites
        self.passes: list[Pass] = []
        # If the two held each other, every value would live until the next garbage collection.
        self._report = weakref.WeakMethod(report)
        self.keeps_graph = keeps_graph
        self._sorted: dict[int, tuple[int, dict[int, list[Entry]]]] = {}

    @functools.cached_property
    def index(self) -> Index:
        """Finds sites; made at the first look-up: many a line is attached for each call."""
        return Index(self.sites)

    def entries(self, current: Pass) -> dict[int, list[Entry]]:
        """A pass's entries by site; sorted anew only when the log has grown."""
        length, by_site = self._sorted.get(id(current), (-1, {}))
        if length != len(current.log):
            by_site = {}
            for entry in tuple(current.log):
                by_site.setdefault(entry[0], []).append(Entry(*entry))
            for index, found in by_site.items():
                if not self.sites[index].is_gradient:
                    by_site[index] = [one._replace(call=call) for call, one in enumerate(found)]
            self._sorted[id(current)] = (len(current.log), by_site)
        return by_site

    def backwards(self, current: Pass) -> list[int]:
        """The runs of autograd that brought gradients to a pass, in order."""
        found = (Entry(*entry).backward for entry in tuple(current.log))
        return list(dict.fromkeys(run for run in found if run is not None))

    def fired(self, current: Pass, backward: int | None) -> list[tuple[int, int]]:
        """Each site that fired, by number, with the call, in the order in which they fired."""
        seen: Counter[int] = Counter()
        found = []
        for entry in (Entry(*noted) for noted in tuple(current.log)):
            if backward is not None and entry.backward != backward:
                continue
            call = seen[entry.site] if entry.call is None else entry.call
            found.append((entry.site, call))
            seen[entry.site] += 1
        return found

    def find(
        self,
        current: Pass,
        key: Key,
        backward: int | None = None,
        *,
        is_local: bool = True,
        outline: bool = False,
    ) -> list[tuple[int, Any]]:
        """The values of all calls of a site in a pass, each with its call.

        Of a DTensor this rank's part, or unless `is_local` the DTensor itself. With
        `outline`, tensors of a folder come without their data, and nothing is checked.

        Raises:
            AmbiguousError: it has gradients of several runs of autograd, and none is named.
            OverwrittenError: a value was changed in place since it was recorded.
        """
        index, site = self.index.find(key)
        kept = self.sites[index]
        entries = self._of_run(current, index, backward)
        if site.call is not None and kept.call is None:
            entries = [entry for entry in entries if entry.call == site.call]
        if backward is None and kept.is_gradient:
            runs = {entry.backward for entry in entries} - {None}
            if len(runs) > 1:
                raise AmbiguousError(
                    f"{str(key)!r} has a gradient of each of {len(runs)} backward passes."
                    f"\nWrite run.passes[{current.number}].backwards[0][{str(key)!r}] for one."
                )
        deeper = site.leaf[len(kept.leaf) :]
        read = _outline if outline else partial(self.check, is_local=is_local)
        return [
            (entry.call or 0, tree.get(read(entry), deeper, str(key)))
            for entry in sorted(entries, key=lambda entry: entry.call or 0)
        ]

    def passes_with(self, key: Key) -> list[Pass]:
        """The passes in which a site has a value. No value is read.

        Raises:
            NotRecordedError: there is none.
        """
        index, site = self.index.find(key)
        call = site.call if self.sites[index].call is None else None
        found = [
            current
            for current in self.passes
            if any(call in (None, entry.call) for entry in self.entries(current).get(index, ()))
        ]
        if not found:
            raise self.never(key)
        return found

    def check(self, entry: Entry, *, is_local: bool = True) -> Any:
        """The value, if nobody changed it since it was recorded."""
        value = entry.value
        if isinstance(value, Gathered):
            changed = any(stamp(part) != was for part, was in value.parts.values())
            value = value.load()
        elif isinstance(value, Stored):
            return value.load()
        else:
            changed = entry.stamp is not None and stamp(value) != entry.stamp
        if changed:
            raise OverwrittenError(
                f"{self.sites[entry.site]} was overwritten in place after it was recorded"
                " (by an in-place operation such as ReLU(inplace=True) or +=)."
                "\nRecord a copy: hl.record(..., copy=True)."
            )
        value = self.plain(value)
        return local(value) if is_local else value

    def plain(self, value: Any) -> Any:
        """The value without the wrappers that transforms of torch.func, now over, had put on it."""
        if not any(innermost(tensor) is not tensor for _, tensor in tree.tensors(value)):
            return value
        return tree.map_tensors(partial(plain, keeps_graph=self.keeps_graph), value)

    def settle(self) -> None:
        """No transform runs any more: keep no wrapper, which a later one could take for its own."""
        for current in self.passes:
            current.log[:] = [
                (site, value if isinstance(value, Gathered) else self.plain(value), *rest)
                for site, value, *rest in current.log
            ]
        self._sorted.clear()

    def never(self, key: Key, among: Pass | None = None) -> NotRecordedError:
        """Why a site has no value."""
        index, asked = self.index.find(key)
        site = self.sites[index]
        passes = self.passes if among is None else [among]
        found = [entry for one in passes for entry in self.entries(one).get(index, ())]
        if found and asked.call is not None:
            last = max(entry.call or 0 for entry in found)
            where = f"in pass {passes[0].number}" if len(passes) == 1 else "at most in a pass"
            return NotRecordedError(
                f"{site} ran {_times(last + 1)} {where}; there is no call #{asked.call}."
                f"\nThe last one is {f'{site}#{last}'!r}."
            )
        report = self._report()
        why = None if report is None else report().why.get(site)
        if why is None:
            why = "it did not fire in this pass" if self.passes else "the model has not run"
        return NotRecordedError(f"{site} was selected, but has no value: {why}.")

    def _of_run(self, current: Pass, index: int, backward: int | None) -> list[Entry]:
        entries = self.entries(current).get(index, [])
        if backward is None:
            return entries
        return [entry for entry in entries if entry.backward in (None, backward)]


def note_transformed(log: list[Any], keeps_graph: bool, entry: tuple[Any, ...]) -> None:
    """Note an entry while a transform of torch.func runs.

    There tensors do not say that they need gradients, nor that they were written to; what they
    stand for does.
    """
    site, value, version, *rest = entry
    if version is not None:
        if not keeps_graph:
            value = tree.map_tensors(Tensor.detach, value)
        version = stamp(value)
    log.append((site, value, version, *rest))


def _outline(entry: Entry) -> Any:
    value = entry.value
    if isinstance(value, Stored):
        return value.outline()
    return value.load() if isinstance(value, Gathered) else value


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
