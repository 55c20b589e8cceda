"""The passes of a recording, and the one place where a key is looked up in them.

Look-ups never guess: what has several answers raises.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

from torch import Tensor

from hookline.display.text import plural
from hookline.engine import (
    Pass,
    Report,
    Site,
    Untold,
    every_tensor,
    innermost,
    is_freed,
    local_shards,
    plain,
)
from hookline.engine.pytree import leaves, tree
from hookline.errors import AmbiguousError, NotRecordedError, OverwrittenError
from hookline.recordings.entries import Entry, PartialGradients
from hookline.recordings.files import Stored
from hookline.recordings.index import Index, Key, Lookup
from hookline.recordings.stamps import Beside, Unknowable, is_as_stamped, stamp

Noted = tuple[Any, ...]  # the first fields of an `Entry`
_SEARCHED = 256  # a pass of so few entries is searched: to sort it takes as long as 20 searches


@final
class Log:
    """What fired, pass by pass.

    Args:
        sites: what was selected.
        report: the recording's method that says why a site did not fire. It is not held.
        keeps_graph: whether values were recorded with their graph.
        untold: tells of memory that changes without a word; None if nobody is to care.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        report: Callable[[], Report],
        *,
        keeps_graph: bool = False,
        untold: Untold | None = None,
    ) -> None:
        self.sites = sites
        self.passes: list[Pass] = []
        # If the two held each other, every value would live until the next garbage collection.
        self._report = weakref.WeakMethod(report)
        self.keeps_graph = keeps_graph
        self.untold = untold
        self._sorted: dict[int, tuple[int, dict[int, list[Noted]]]] = {}

    @functools.cached_property
    def index(self) -> Index:
        """Finds sites; made at the first look-up: many a line is attached for each call."""
        return Index(self.sites)

    def entries(self, current: Pass, index: int) -> list[Entry]:
        """A site's entries in a pass. Values follow one another; gradients know their call."""
        log = current.log
        if len(log) <= _SEARCHED:
            noted = [one for one in tuple(log) if one[0] == index]
        else:
            noted = self._by_site(current).get(index, [])
        if self.sites[index].is_gradient:
            return [Entry(*one) for one in noted]
        return [Entry(index, one[1], one[2], call) for call, one in enumerate(noted)]

    def _by_site(self, current: Pass) -> dict[int, list[Noted]]:
        """What a pass has noted, by site; sorted anew only when the log has grown."""
        length, by_site = self._sorted.get(id(current), (-1, {}))
        if length != len(current.log):
            noted = tuple(current.log)
            by_site = {}
            for one in noted:
                by_site.setdefault(one[0], []).append(one)
            self._sorted[id(current)] = (len(noted), by_site)
        return by_site

    def backwards(self, current: Pass) -> list[int]:
        """The runs of autograd that brought gradients to a pass, in order."""
        found = (Entry(*entry).backward for entry in tuple(current.log))
        return list(dict.fromkeys(run for run in found if run is not None))

    def fired(self, current: Pass, backward: int | None) -> list[tuple[int, int, int | None]]:
        """Each site that fired, by number, with call and run of autograd, in the order of firing.

        The run is None for a value, and for a gradient that had to come from none.
        """
        seen: Counter[int] = Counter()
        found = []
        for entry in (Entry(*noted) for noted in tuple(current.log)):
            if backward is not None and entry.backward != backward:
                continue
            call = seen[entry.site] if entry.call is None else entry.call
            found.append((entry.site, call, entry.backward))
            seen[entry.site] += 1
        return found

    def find(
        self,
        current: Pass,
        asked: Lookup,
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
        entries = self._asked(current, asked, backward)
        if len(entries) > 1 and self.sites[asked.number].is_gradient:
            runs = {entry.backward for entry in entries} - {None}
            if len(runs) > 1:
                raise AmbiguousError(
                    f"{str(asked)!r} has a gradient of each of {len(runs)} backward passes."
                    f"\nWrite run.passes[{current.number}].backwards[0][{str(asked)!r}] for one."
                )
            entries.sort(key=lambda entry: entry.call or 0)
        found = []
        for entry in entries:
            value = self.outline(entry) if outline else self.check(entry, is_local=is_local)
            if asked.leaf:
                value = leaves.get(value, asked.leaf, str(asked))
            found.append((entry.call or 0, value))
        return found

    def passes_with(self, asked: Lookup) -> list[Pass]:
        """The passes in which a site has a value. No value is read.

        Raises:
            NotRecordedError: there is none.
        """
        found = [current for current in self.passes if self._asked(current, asked)]
        if not found:
            raise self.never(asked)
        return found

    def by_pass(self, asked: Lookup, *, outline: bool = False) -> list[list[Any]]:
        """A site's values, call by call, of each pass in which it has some.

        Raises:
            NotRecordedError, AmbiguousError, OverwrittenError: as in `find`.
        """
        found = [
            [value for _, value in self.find(current, asked, outline=outline)]
            for current in self.passes
        ]
        if not any(found):
            raise self.never(asked)
        return [calls for calls in found if calls]

    def has(self, key: Key, passes: Iterable[Pass], backward: int | None = None) -> bool:
        """Whether a site has a value in one of these passes. No value is read."""
        if not self.index.has(key):
            return False
        asked = self.index.find(key)
        return any(self._asked(current, asked, backward) for current in passes)

    def _asked(self, current: Pass, asked: Lookup, backward: int | None = None) -> list[Entry]:
        if asked.pass_number not in (None, current.number):
            return []
        entries = self.entries(current, asked.number)
        if asked.call is not None:
            entries = [entry for entry in entries if entry.call == asked.call]
        if backward is not None:
            entries = [entry for entry in entries if entry.backward in (None, backward)]
        if asked.backward is not None:
            runs = self.backwards(current)
            run = runs[asked.backward] if asked.backward < len(runs) else -1
            entries = [entry for entry in entries if entry.backward == run]
        return entries

    def check(self, entry: Entry, *, is_local: bool = True) -> Any:
        """The value, if nobody changed it since it was recorded."""
        value = entry.value
        if isinstance(value, Stored):
            return value.load()
        parts = [(value, entry.stamp)]
        if isinstance(value, PartialGradients):
            parts, value = list(value.parts.values()), value.load()
        for part, was in parts:
            why = self._why_changed(part, was)
            if why:
                raise OverwrittenError(f"{self.sites[entry.site]} {why}.\n{_COPY}")
        value = self.plain(value)
        return local_shards(value) if is_local else value

    def _why_changed(self, value: Any, was: Any) -> str | None:
        """Why a value cannot be given out: it has changed, or may have without a word."""
        if isinstance(was, Unknowable):
            return (
                f"holds tensors in a {was.kind}, which cannot be copied, and torch does not tell"
                " whether they have changed"
            )
        if any(is_freed(tensor) for tensor in every_tensor(value)):
            return "has no numbers any more: its memory was freed after it was recorded"
        if not is_as_stamped(value, was):
            return (
                "was overwritten in place after it was recorded (by an in-place operation such as"
                " ReLU(inplace=True) or +=)"
            )
        if self.untold is None or isinstance(was, Beside):
            return None
        if self.untold.has_now(value, len(self.passes)):
            return (
                "shares memory with a parameter or buffer of the model, and torch does not always"
                " tell when these change"
            )
        return None

    def plain(self, value: Any) -> Any:
        """The value without the wrappers that transforms of torch.func, now over, had put on it."""
        if isinstance(value, Tensor):
            return value if innermost(value) is value else self._unwrapped(value)
        if not any(innermost(tensor) is not tensor for _, tensor in tree.tensors(value)):
            return value
        return self._unwrapped(value)

    def _unwrapped(self, value: Any) -> Any:
        return tree.map_tensors(partial(plain, keeps_graph=self.keeps_graph), value)

    def outline(self, entry: Entry) -> Any:
        """The value's structure: of a folder, its tensors come on the meta device, unchecked."""
        value = entry.value
        if isinstance(value, Stored):
            return value.outline()
        return value.load() if isinstance(value, PartialGradients) else value

    def settle(self) -> None:
        """No transform runs any more: keep no wrapper, which a later one could take for its own."""
        for current in self.passes:
            current.log[:] = [
                (site, value if isinstance(value, PartialGradients) else self.plain(value), *rest)
                for site, value, *rest in current.log
            ]
        self._sorted.clear()

    def never(self, asked: Lookup, among: Pass | None = None) -> NotRecordedError:
        """Say why a site has no value."""
        site = self.sites[asked.number]
        passes = self.passes if among is None else [among]
        if asked.pass_number is not None and passes:
            passes = [one for one in passes if one.number == asked.pass_number]
            if not passes:
                return NotRecordedError(self._no_pass(asked, among))
        found = [entry for one in passes for entry in self.entries(one, asked.number)]
        if found and asked.backward is not None:
            there = max(len(self.backwards(one)) for one in passes)
            return NotRecordedError(
                f"{str(asked)!r} must name a backward pass that brought its gradient, got backward"
                f" {asked.backward} of {there}.\nWrite run.passes[{passes[0].number}].backwards for"
                " those that ran."
            )
        if found and asked.call is not None:
            last = max(entry.call or 0 for entry in found)
            where = f"in pass {passes[0].number}" if len(passes) == 1 else "at most in a pass"
            return NotRecordedError(
                f"{site} ran {_times(last + 1)} {where}, so its calls are #0 to #{last}, got"
                f" #{asked.call}.\nThe last one is {f'{site}#{last}'!r}."
            )
        report = self._report()
        why = None if report is None else report().why.get(site)
        if why is None:
            why = "it did not fire in this pass" if self.passes else "the model has not run"
        return NotRecordedError(f"{site} was selected, but has no value: {why}.")

    def _no_pass(self, asked: Lookup, among: Pass | None) -> str:
        if among is not None:
            return (
                f"{str(asked)!r} must name this pass, which is pass {among.number}."
                f"\nWrite run[{str(asked)!r}]."
            )
        ran = plural(len(self.passes), "pass", "passes")
        message = f"{str(asked)!r} must name one of the {ran} that ran, from 0 on."
        anywhere = asked._replace(pass_number=None)
        having = [one.number for one in self.passes if self._asked(one, anywhere)]
        if not having:
            return message
        last = asked._replace(pass_number=having[-1])
        return f"{message}\nWrite {str(last)!r} for the last in which it has a value."


def note_transformed(log: list[Any], keeps_graph: bool, entry: tuple[Any, ...]) -> None:
    """Note an entry while a transform of torch.func runs.

    There tensors do not say that they need gradients, nor that they were written to; what they
    stand for does.
    """
    site, value, version, *rest = entry
    if type(version) in (int, tuple):
        if not keeps_graph:
            value = tree.map_tensors(Tensor.detach, value)
        version = stamp(value)
    log.append((site, value, version, *rest))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def note_copied(note: Callable[[Any], None], entry: tuple[Any, ...]) -> None:
    """Note an entry where torch does not tell of changes: a lone tensor that a fast tap has noted
    as it is, with its bare version, is copied."""
    site, value, version, *rest = entry
    if type(version) is int:
        value = value.clone()
        version = stamp(value)
    note((site, value, version, *rest))


_COPY = "Record a copy: hl.record(..., copy=True)."
