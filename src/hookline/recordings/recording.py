"""Recording: what a line kept, as passes x sites x calls -> values. Imports folder and engine.

Look-ups never guess: several calls or passes, a value overwritten since, a site that did not fire
are errors that say what to write instead.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import Pass, Report, Site, parse_site, tree
from hookline.engine.errors import AmbiguousError, NotRecordedError, OverwrittenError
from hookline.recordings.folder import Contents, Entry, Stored, read, write

Key = str | Site


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
        report: Callable[[], Report],
        modules: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.sites = sites
        self.modules = modules
        self.lost: list[str] = []
        self._report = report
        self._passes: list[Pass] = []
        self._index = _Index(sites)
        self._sorted: dict[int, tuple[int, dict[int, list[Any]]]] = {}

    # -- a sink: the line tells when passes begin and end ---------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """A pass begins: its log fills as the sites fire."""
        self._passes.append(current)

    def end_pass(self, current: Pass) -> None:
        """A pass has ended. One that fired nothing (an edit elsewhere) stays, empty."""

    def finish(self, report: Report) -> None:
        """The line has ended: keep its report, and no longer the line."""
        self._report = lambda: report

    # -- look-ups -------------------------------------------------------------------------------

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """The passes, in the order in which they began."""
        return tuple(PassRecord(self, current) for current in self._passes)

    def __getitem__(self, key: Key) -> Any:
        found = [one for one in self.passes if one.calls(key, missing_ok=True)]
        if not found:
            raise self._never(key)
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
        fired = {entry[0] for current in self._passes for entry in current.log}
        return iter([str(self.sites[index]) for index in sorted(fired)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        """Whether the site has a value: one or several."""
        if not isinstance(key, str | Site):
            return False
        try:
            return any(one.calls(key, missing_ok=True) for one in self.passes)
        except LookupError:
            return False

    def calls(self, key: Key) -> list[Any]:
        """The values of every call of a site, in order, in the only pass in which it ran.

        Raises:
            NotRecordedError: it did not fire. AmbiguousError: it ran in several passes.
        """
        found = [one for one in self.passes if one.calls(key, missing_ok=True)]
        if len(found) > 1:
            raise AmbiguousError(
                f"{str(key)!r} ran in {len(found)} passes."
                f"\nWrite run.passes[{found[0].number}].calls({str(key)!r}) for one of them."
            )
        if not found:
            raise self._never(key)
        return found[0].calls(key)

    def stack(self, key: Key) -> Tensor:
        """A site's values of all passes in which it ran, stacked along a new first dimension.

        Returns:
            A tensor of shape `(passes, *shape of the value)`.

        Raises:
            NotRecordedError: it did not fire. AmbiguousError: several calls in a pass.
            ValueError: the values are not tensors of one shape.
        """
        values = [one[key] for one in self.passes if one.calls(key, missing_ok=True)]
        if not values:
            raise self._never(key)
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
        return self._report()

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
        contents = Contents(self.report(), self.sites, passes, [], self.modules)
        path = write(folder, contents)
        self.lost = contents.lost
        return path

    def __repr__(self) -> str:
        n_values = sum(len(current.log) for current in self._passes)
        n = len(self._passes)
        return f"Recording of {len(self.sites)} sites: {n} pass{'es' * (n != 1)}, {n_values} values"

    # -- inner ----------------------------------------------------------------------------------

    def _values(self, current: Pass, key: Key) -> list[Any]:
        """The values of all calls of a site in a pass; the asked leaf and call taken out."""
        index, site = self._index.find(key)
        entries = self._entries(current).get(index, [])
        kept = self.sites[index]
        if site.call is not None and kept.call is None:
            if entries and site.call >= len(entries):
                raise NotRecordedError(
                    f"{kept} ran {_times(len(entries))} in pass {current.number}; there is no call"
                    f" #{site.call}.\nThe last one is {str(kept) + f'#{len(entries) - 1}'!r}."
                )
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

    def _never(self, key: Key) -> NotRecordedError:
        index, _ = self._index.find(key)
        site = self.sites[index]
        why = self.report().why.get(site)
        if why is None:
            why = "it fired in no pass that was kept" if self._passes else "the model has not run"
        return NotRecordedError(f"{site} was selected, but has no value: {why}.")


@final
class PassRecord(Mapping[str, Any]):
    """One pass of a recording: the same look-ups, within that pass.

    Iterating gives the sites that fired, those with several calls once for each: `block#0`.
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
        """The sites in the order in which they fired, a site once for each call."""
        return [str(self._recording.sites[entry[0]]) for entry in self._pass.log]

    def __getitem__(self, key: Key) -> Any:
        values = self._recording._values(self._pass, key)
        if not values:
            raise self._recording._never(key)
        if len(values) > 1:
            raise AmbiguousError(
                f"{str(key)!r} ran {len(values)} times in pass {self.number}."
                f"\nWrite {str(key) + '#0'!r} to {str(key) + f'#{len(values) - 1}'!r} for one call,"
                f" or .calls({str(key)!r}) for all."
            )
        return values[0]

    def calls(self, key: Key, *, missing_ok: bool = False) -> list[Any]:
        """The values of every call of a site in this pass, in order.

        Raises:
            NotRecordedError: it did not fire in this pass (with `missing_ok`: an empty list).
        """
        values = self._recording._values(self._pass, key)
        if not values and not missing_ok:
            raise self._recording._never(key)
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


@final
class _Index:
    """Finds the recorded site that holds what a key asks for."""

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self._sites = sites
        self._by_place: dict[tuple[str, str], list[int]] = {}
        for index, site in enumerate(sites):
            for path in (site.path, *site.aliases):
                self._by_place.setdefault((path, site.port), []).append(index)

    def find(self, key: Key) -> tuple[int, Site]:
        """The number of the recorded site, and the asked site.

        Raises:
            NotRecordedError: no such site was selected.
        """
        if isinstance(key, str) and (key, "output") in self._by_place:
            site = Site(key)  # a path as it stands, whatever characters are in it
        else:
            site = parse_site(key) if isinstance(key, str) else key
        for index in self._by_place.get((site.path, site.port), ()):
            kept = self._sites[index]
            covers = site.leaf[: len(kept.leaf)] == kept.leaf
            if covers and kept.call in (None, site.call):
                return index, site
        raise NotRecordedError(self._not_selected(key, site))

    def _not_selected(self, key: Key, site: Site) -> str:
        same_path = [str(kept) for kept in self._sites if site.path in (kept.path, *kept.aliases)]
        if same_path:
            there = f"recorded there: {', '.join(map(repr, same_path[:4]))}"
        else:
            names = [str(kept) for kept in self._sites]
            close = difflib.get_close_matches(str(key), names, n=3, cutoff=0.5) or names[:4]
            there = f"the {len(names)} recorded sites include {', '.join(map(repr, close))}"
        return (
            f"{str(key)!r} was never selected; {there}."
            f"\nRecord it with hl.record(model, {str(key)!r}), or look up one that was."
        )


def stamp(value: Any) -> Any:
    """The version counters of a value's tensors; equal stamps mean that nobody wrote to them.

    None for inference tensors, which have no counter: who records them copies them.
    """
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    return tuple(
        None if tensor.is_inference() else tensor._version for _, tensor in tree.tensors(value)
    )


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
    recording = Recording(contents.sites, lambda: contents.report, contents.modules)
    recording.lost = contents.lost
    for number, failed, entries in contents.passes:
        current = Pass(number)
        current.failed = failed
        current.log = list(entries)
        recording.begin_pass(current)
    return recording


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
