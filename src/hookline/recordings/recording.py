"""Recording: what a line kept, as passes x sites x calls -> values. Imports index, folder, engine.

Look-ups never guess: several calls or passes, a value overwritten since, a site that did not fire
are errors that say what to write instead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final, overload

import torch
from torch import Tensor

from hookline.engine import Pass, Report, Site, tree
from hookline.engine.errors import AmbiguousError, NotRecordedError, OverwrittenError
from hookline.recordings.folder import Contents, Entry, Stored, read, write
from hookline.recordings.index import Index, Key, stamp


@final
class Recording(Mapping[str, Any]):
    """What a line kept: a mapping from sites to values.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.record(model, nn.Linear) as run:
        ...     _ = model(torch.zeros(4, 2))
        >>> run["0"].shape
        torch.Size([4, 3])

    A site is written as in `hl.select`: `run["layer4"]` is an output, `run["layer4:input"]`,
    `run["h.3:output[0]"]`, `run["block#2"]`. Where a site has one value, that is what comes back.

    - Several calls in a pass: `run["block#2"]`, or `run.calls("block")`.
    - Several passes: `run.passes[1]["block"]`, or `run.stack("block")`.

    Values are detached and share memory with the model's own, unless they were copied.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        report: Callable[[], Report] | Report,
        modules: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.sites = sites
        self.modules = modules
        self.lost: list[str] = []
        self._report: Callable[[], Report] | Report = report
        self._passes: list[Pass] = []
        self._index = Index(sites)
        self._sorted: dict[int, tuple[int, dict[int, list[Any]]]] = {}

    # -- a sink: the line tells when passes begin and end ---------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """A pass begins: its log fills as the sites fire."""
        self._passes.append(current)

    def end_pass(self, current: Pass) -> None:
        """A pass has ended. One that fired nothing (an edit elsewhere) stays, empty."""

    def finish(self, report: Report) -> None:
        """The line has ended: keep its report, and no longer the line."""
        self._report = report

    # -- look-ups -------------------------------------------------------------------------------

    @property
    def passes(self) -> Sequence[PassRecord]:
        """The passes, in the order in which they began."""
        return _PassList(self)

    def __getitem__(self, key: Key) -> Any:
        found = self._passes_with(key)
        if len(found) > 1:
            raise AmbiguousError(
                f"{str(key)!r} has a value in each of {len(found)} passes."
                f"\nWrite run.passes[{found[0].number}][{str(key)!r}] for one of them,"
                f" or run.stack({str(key)!r}) for all."
            )
        return found[0][key]

    def __iter__(self) -> Iterator[str]:
        if len(self._passes) == 1:
            return iter(self.passes[0])
        fired = {index for current in self._passes for index in self._entries(current)}
        return iter([str(self.sites[index]) for index in sorted(fired)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        """Whether the site has a value: one or several."""
        try:
            return isinstance(key, str | Site) and bool(self._passes_with(key))
        except LookupError:
            return False

    def calls(self, key: Key) -> list[Any]:
        """The values of every call of a site, in order, in the only pass in which it ran.

        Raises:
            NotRecordedError: it did not fire. AmbiguousError: it ran in several passes.
        """
        found = self._passes_with(key)
        if len(found) > 1:
            raise AmbiguousError(
                f"{str(key)!r} ran in {len(found)} passes."
                f"\nWrite run.passes[{found[0].number}].calls({str(key)!r}) for one of them."
            )
        return found[0].calls(key)

    def stack(self, key: Key) -> Tensor:
        """A site's values of all passes in which it ran, stacked along a new first dimension.

        Returns:
            A tensor of shape `(passes, *shape of the value)`.

        Raises:
            NotRecordedError: it did not fire. AmbiguousError: several calls in a pass.
            ValueError: the values are not tensors of one shape.
        """
        values = [one[key] for one in self._passes_with(key)]
        shapes = sorted({tree.describe(value) for value in values})
        if len(shapes) > 1 or not isinstance(values[0], Tensor):
            raise ValueError(
                f"{str(key)!r} cannot be stacked: its values are {', '.join(shapes[:4])}."
                f"\nBatches of different sizes can be joined:"
                f" torch.cat([one[{str(key)!r}] for one in run.passes])."
            )
        return torch.stack(values)

    def report(self) -> Report:
        """What was matched, how often each site fired, and why some never did."""
        return self._report if isinstance(self._report, Report) else self._report()

    # -- the folder -----------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the recording to a folder, whole or not at all; `hl.open(folder)` reads it.

        What cannot be saved (sparse tensors, a library's caches) is listed in `run.lost`.

        Returns:
            The folder's path.

        Raises:
            FolderError: the folder holds something else, or the disk is full or read-only.
            OverwrittenError: a value was changed in place since it was recorded.
        """
        passes = []
        for current in self._passes:
            entries = [Entry(*entry) for entry in current.log]
            for entry in entries:
                self._check(entry)
            passes.append((current.number, current.failed, entries))
        contents = Contents(self.report(), self.sites, passes, list(self.lost), self.modules)
        path = write(folder, contents)
        self.lost = contents.lost
        return path

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled by value; the copy's tensors have histories of their own."""
        state = {**self.__dict__, "_sorted": {}, "_report": self.report(), "_passes": []}
        for current in self._passes:
            copied = Pass(current.number)
            copied.failed = current.failed
            for entry in current.log:
                copied.note((entry[0], self._check(Entry(*entry)), None))
            state["_passes"].append(copied)
        return state

    def __repr__(self) -> str:
        n_values = sum(len(current.log) for current in self._passes)
        n = len(self._passes)
        return f"Recording of {len(self.sites)} sites: {n} pass{'es' * (n != 1)}, {n_values} values"

    # -- inner ----------------------------------------------------------------------------------

    def _passes_with(self, key: Key) -> list[PassRecord]:
        """The passes in which a site has a value. No value is read.

        Raises:
            NotRecordedError: there is none.
        """
        index, site = self._index.find(key)
        call = site.call if self.sites[index].call is None else None
        found = [
            PassRecord(self, current)
            for current in self._passes
            if len(self._entries(current).get(index, ())) > (call or 0)
        ]
        if not found:
            raise self._never(key)
        return found

    def _values(self, current: Pass, key: Key) -> list[Any]:
        """The values of all calls of a site in a pass; the asked leaf and call taken out."""
        index, site = self._index.find(key)
        entries = self._entries(current).get(index, [])
        kept = self.sites[index]
        if site.call is not None and kept.call is None:
            entries = entries[site.call : site.call + 1]
        deeper = site.leaf[len(kept.leaf) :]
        return [tree.get(self._check(Entry(*entry)), deeper, str(key)) for entry in entries]

    def _entries(self, current: Pass) -> dict[int, list[Any]]:
        """A pass's entries by site; sorted anew only when the log has grown."""
        length, by_site = self._sorted.get(id(current), (-1, {}))
        if length != len(current.log):
            by_site = {}
            for entry in tuple(current.log):
                by_site.setdefault(entry[0], []).append(entry)
            self._sorted[id(current)] = (len(current.log), by_site)
        return by_site

    def _check(self, entry: Entry) -> Any:
        """The value, if nobody changed it since it was recorded."""
        value = entry.value.load() if isinstance(entry.value, Stored) else entry.value
        if entry.stamp is not None and stamp(value) != entry.stamp:
            raise OverwrittenError(
                f"{self.sites[entry.site]} was overwritten in place after it was recorded"
                " (by an in-place operation such as ReLU(inplace=True) or +=)."
                "\nRecord a copy: hl.record(..., copy=True)."
            )
        return value

    def _never(self, key: Key, among: Pass | None = None) -> NotRecordedError:
        index, asked = self._index.find(key)
        site = self.sites[index]
        passes = self._passes if among is None else [among]
        most = max((len(self._entries(one).get(index, ())) for one in passes), default=0)
        if most and asked.call is not None:
            where = f"in pass {passes[0].number}" if len(passes) == 1 else "at most in a pass"
            return NotRecordedError(
                f"{site} ran {_times(most)} {where}; there is no call #{asked.call}."
                f"\nThe last one is {f'{site}#{most - 1}'!r}."
            )
        why = self.report().why.get(site)
        if why is None:
            why = "it did not fire in this pass" if self._passes else "the model has not run"
        return NotRecordedError(f"{site} was selected, but has no value: {why}.")


@final
class _PassList(Sequence["PassRecord"]):
    """The passes of a recording, each made when it is asked for: there may be 100,000."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __len__(self) -> int:
        return len(self._recording._passes)

    @overload
    def __getitem__(self, index: int) -> PassRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[PassRecord]: ...
    def __getitem__(self, index: int | slice) -> PassRecord | list[PassRecord]:
        found = self._recording._passes[index]
        if isinstance(found, list):
            return [PassRecord(self._recording, current) for current in found]
        return PassRecord(self._recording, found)

    def __repr__(self) -> str:
        return f"{len(self)} pass{'es' * (len(self) != 1)} of {self._recording!r}"


@final
class PassRecord(Mapping[str, Any]):
    """One pass of a recording: the same look-ups, within that pass.

    Iterating gives the sites that fired, as registered, those with several calls once for each:
    `block#0`. `order` gives them as they fired.
    """

    def __init__(self, recording: Recording, current: Pass) -> None:
        self._recording = recording
        self._pass = current

    @property
    def number(self) -> int:
        """The pass's number, from 0."""
        return self._pass.number

    @property
    def failed(self) -> bool | None:
        """Whether the model raised in this pass; None while it still runs."""
        return self._pass.failed

    @property
    def order(self) -> list[str]:
        """The keys in the order in which they fired: what to search for the first NaN."""
        counts = {
            index: len(found) for index, found in self._recording._entries(self._pass).items()
        }
        sites = self._recording.sites
        return [
            f"{sites[index]}#{call}" if counts[index] > 1 else str(sites[index])
            for index, call in self._fired()
        ]

    def fired(self) -> list[tuple[Site, int]]:
        """Each site that fired, with the number of the call, in the order in which they fired."""
        return [(self._recording.sites[index], call) for index, call in self._fired()]

    def _fired(self) -> list[tuple[int, int]]:
        seen: Counter[int] = Counter()
        found = []
        for entry in tuple(self._pass.log):
            found.append((entry[0], seen[entry[0]]))
            seen[entry[0]] += 1
        return found

    def __getitem__(self, key: Key) -> Any:
        values = self.calls(key)
        if len(values) > 1:
            raise AmbiguousError(
                f"{str(key)!r} ran {len(values)} times in pass {self.number}."
                f"\nWrite {str(key) + '#0'!r} to {str(key) + f'#{len(values) - 1}'!r} for one call,"
                f" or .calls({str(key)!r}) for all."
            )
        return values[0]

    def calls(self, key: Key) -> list[Any]:
        """The values of every call of a site in this pass, in order.

        Raises:
            NotRecordedError: it did not fire in this pass.
        """
        values = self._recording._values(self._pass, key)
        if not values:
            raise self._recording._never(key, self._pass)
        return values

    def __iter__(self) -> Iterator[str]:
        by_site = self._recording._entries(self._pass)
        for index in sorted(by_site):
            site, n_calls = str(self._recording.sites[index]), len(by_site[index])
            if n_calls == 1:
                yield site
            else:
                yield from (f"{site}#{call}" for call in range(n_calls))

    def __len__(self) -> int:
        return len(list(iter(self)))


def open_recording(folder: str | os.PathLike[str]) -> Recording:
    """Open a recording that was saved with `run.save(folder)`.

        >>> import hookline as hl
        >>> model = nn.Linear(2, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.zeros(1, 2))
        >>> hl.open(run.save(tmp_path / "run"))[""].shape
        torch.Size([1, 3])

    Values are memory-mapped when they are looked up, not before; dtypes are kept as they were.

    Args:
        folder: the folder that was written.

    Returns:
        The recording, with the same look-ups as the one that was saved.

    Raises:
        FolderError: there is no recording, it is of another version, or it is damaged.
    """
    contents = read(folder)
    recording = Recording(contents.sites, contents.report, contents.modules)
    recording.lost = contents.lost
    for number, failed, entries in contents.passes:
        current = Pass(number)
        current.failed = failed
        current.log = list(entries)
        recording.begin_pass(current)
    return recording


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
