"""Recording: what a line kept, as passes x sites x calls -> values. Imports log, files, folder.

Look-ups never guess: several calls or passes, a value overwritten since, a site that did not fire
are errors that say what to write instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import Pass, Report, Site, tree
from hookline.engine.errors import AmbiguousError
from hookline.recordings.entries import Contents, Entry
from hookline.recordings.files import Stored
from hookline.recordings.folder import read, write
from hookline.recordings.gradients import GradientFlow, gradient_flow
from hookline.recordings.index import Key
from hookline.recordings.log import Log
from hookline.recordings.pass_record import PassList, PassRecord


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
    - Several backward passes over one: `run.passes[0].backwards[1]["block:grad_output"]`.

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
        self._log = Log(sites, self.report)

    # -- a sink: the line tells when passes begin and end ---------------------------------------

    def restart(self) -> None:
        """Forget what was seen so far: it was another thread's."""
        self._log.passes.clear()

    def begin_pass(self, current: Pass) -> None:
        """A pass begins: its log fills as the sites fire."""
        self._log.passes.append(current)

    def end_pass(self, current: Pass) -> None:
        """A pass has ended. One that fired nothing (an edit elsewhere) stays, empty."""

    def finish(self, report: Report) -> None:
        """The line has ended: keep its report, and no longer the line."""
        self._report = report

    # -- look-ups -------------------------------------------------------------------------------

    @property
    def passes(self) -> Sequence[PassRecord]:
        """The passes, in the order in which they began."""
        return PassList(self._log)

    def __getitem__(self, key: Key) -> Any:
        found = self._with(key)
        if len(found) > 1:
            raise AmbiguousError(
                f"{str(key)!r} has a value in each of {len(found)} passes."
                f"\nWrite run.passes[{found[0].number}][{str(key)!r}] for one of them,"
                f" or run.stack({str(key)!r}) for all."
            )
        return found[0][key]

    def __iter__(self) -> Iterator[str]:
        if len(self.passes) == 1:
            return iter(self.passes[0])
        fired = {index for current in self._log.passes for index in self._log.entries(current)}
        return iter([str(self.sites[index]) for index in sorted(fired)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        """Whether the site has a value: one or several."""
        try:
            return isinstance(key, str | Site) and bool(self._with(key))
        except LookupError:
            return False

    def calls(self, key: Key) -> list[Any]:
        """The values of every call of a site, in order, in the only pass in which it ran.

        Raises:
            NotRecordedError: it did not fire. AmbiguousError: it ran in several passes.
        """
        found = self._with(key)
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
        values = [one[key] for one in self._with(key)]
        shapes = sorted({tree.describe(value) for value in values})
        if len(shapes) > 1 or not isinstance(values[0], Tensor):
            raise ValueError(
                f"{str(key)!r} cannot be stacked: its values are {', '.join(shapes[:4])}."
                f"\nBatches of different sizes can be joined:"
                f" torch.cat([one[{str(key)!r}] for one in run.passes])."
            )
        return torch.stack(values)

    def gradients(self) -> GradientFlow:
        """How the gradients flowed: each site's norm, its ratio to the weight, what is wrong.

            >>> import hookline as hl
            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
            >>> with hl.record(model, ports="grad") as run:
            ...     model(torch.ones(4, 2)).sum().backward()
            >>> [row.site for row in run.gradients()]
            ['0.weight:grad', '0.bias:grad', '2.weight:grad', '2.bias:grad']

        Returns:
            A table: print it, or iterate over its rows; `.dead` and `.exploding` name sites.

        Raises:
            NotRecordedError: no gradient port was recorded.
        """
        return gradient_flow(self._log, self.report())

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
        for current in self._log.passes:
            entries = [Entry(*entry) for entry in current.log]
            for entry in entries:
                self._log.check(entry)
            passes.append((current.number, current.failed, entries))
        contents = Contents(self.report(), self.sites, passes, list(self.lost), self.modules)
        path = write(folder, contents)
        self.lost = contents.lost
        return path

    def release(self) -> None:
        """Close the files of the folder that this recording was opened from.

        A file that was read stays mapped until then, and counts as this process's memory. The next
        look-up opens it again; values that are held stay whole.
        """
        for current in self._log.passes:
            for entry in current.log:
                if isinstance(entry[1], Stored):
                    entry[1].release()
                    return  # all lie in one folder

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled by value; the copy's tensors have histories of their own."""
        state = {**self.__dict__, "_report": self.report(), "_log": None}
        state["copies"] = [
            (current.number, current.failed, [
                (entry.site, self._log.check(entry), None, *entry[3:])
                for entry in (Entry(*noted) for noted in current.log)
            ])
            for current in self._log.passes
        ]  # fmt: skip
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies = state.pop("copies")
        self.__dict__.update(state)
        self._log = Log(self.sites, self.report)
        for number, failed, log in copies:
            self._log.passes.append(_pass(number, failed, log))

    def __repr__(self) -> str:
        n_values = sum(len(current.log) for current in self._log.passes)
        n = len(self.passes)
        return f"Recording of {len(self.sites)} sites: {n} pass{'es' * (n != 1)}, {n_values} values"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hookline.views import recording_html

        return recording_html(self)

    def _with(self, key: Key) -> list[PassRecord]:
        return [PassRecord(self._log, current) for current in self._log.passes_with(key)]


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
        recording.begin_pass(_pass(number, failed, entries))
    return recording


def _pass(number: int, failed: bool | None, log: Sequence[Any]) -> Pass:
    current = Pass(number)
    current.failed = failed
    current.log = list(log)
    return current
