"""Recording: what a line kept, as passes x sites x calls -> values. Imports log, files, folder.

Look-ups never guess: several calls or passes, a value overwritten since, a site that did not fire
are errors that say what to write instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import TIMEOUT_S, Pass, Report, Site, is_transformed, tree
from hookline.engine.errors import AmbiguousError
from hookline.engine.words import plural
from hookline.recordings.entries import Contents, Entry
from hookline.recordings.files import Stored
from hookline.recordings.folder import write
from hookline.recordings.gradients import GradientFlow, gradient_flow
from hookline.recordings.index import Key
from hookline.recordings.log import Log, note_transformed
from hookline.recordings.pass_record import PassList, PassRecord, pass_of
from hookline.recordings.rank_folder import is_one_of_many, write_ranks
from hookline.recordings.ranks import Ask, combined, full, joined, reduced


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

    Values are detached and share memory with the model's own, unless they were copied. In a
    distributed job they are this rank's; `full` and `reduced` ask the other ranks. Where all ranks
    saved one folder, `hl.open` gives a recording that has each of them in `ranks`.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        report: Callable[[], Report] | Report,
        modules: tuple[tuple[str, str], ...] = (),
        *,
        keeps_graph: bool = False,
    ) -> None:
        self.sites = sites
        self.modules = modules
        self.lost: list[str] = []
        self.ranks: tuple[Recording, ...] = ()
        self._report: Callable[[], Report] | Report = report
        self._log = Log(sites, self.report, keeps_graph=keeps_graph)
        self._is_transformed = False

    # -- a sink: the line tells when passes begin and end ---------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """A pass begins: its log fills as the sites fire."""
        self._log.passes.append(current)
        if is_transformed():
            current.note = partial(note_transformed, current.log, self._log.keeps_graph)
            self._is_transformed = True

    def end_pass(self, current: Pass) -> None:
        """A pass has ended. One that fired nothing (an edit elsewhere) stays, empty."""

    def finish(self, report: Report) -> None:
        """The line has ended: keep its report, and no longer the line."""
        self._report = report
        if self._is_transformed and not is_transformed():
            self._log.settle()

    # -- look-ups -------------------------------------------------------------------------------

    @property
    def passes(self) -> Sequence[PassRecord]:
        """The passes, in the order in which they began."""
        self._refuse_of_ranks("passes")
        return PassList(self._log)

    def __getitem__(self, key: Key) -> Any:
        return self._only(key) if not self.ranks else self._of_rank(key)[key]

    def _only(self, key: Key, *, is_local: bool = True) -> Any:
        found = self._with(key)
        if len(found) > 1:
            raise AmbiguousError(
                f"{str(key)!r} has a value in each of {len(found)} passes."
                f"\nWrite run.passes[{found[0].number}][{str(key)!r}] for one of them,"
                f" or run.stack({str(key)!r}) for all."
            )
        return found[0].only(key, is_local=is_local)

    def __iter__(self) -> Iterator[str]:
        if self.ranks:
            return iter(dict.fromkeys(key for one in self.ranks for key in one))
        if len(self.passes) == 1:
            return iter(self.passes[0])
        fired = {index for current in self._log.passes for index in self._log.entries(current)}
        return iter([str(self.sites[index]) for index in sorted(fired)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        """Whether the site has a value: one or several."""
        try:
            if self.ranks:
                return any(key in one for one in self.ranks)
            return isinstance(key, str | Site) and bool(self._with(key))
        except LookupError:
            return False

    def calls(self, key: Key) -> list[Any]:
        """The values of every call of a site, in order, in the only pass in which it ran.

        Raises:
            NotRecordedError: it did not fire. AmbiguousError: it ran in several passes.
        """
        if self.ranks:
            return self._of_rank(key).calls(key)
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
        if self.ranks:
            return self._of_rank(key).stack(key)
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
        self._refuse_of_ranks("gradients()")
        return gradient_flow(self._log, self.report())

    def report(self) -> Report:
        """What was matched, how often each site fired, and why some never did."""
        return self._report if isinstance(self._report, Report) else self._report()

    # -- other ranks ----------------------------------------------------------------------------

    def full(
        self, key: Key, dim: int | None = None, *, group: Any = None, timeout: float = TIMEOUT_S
    ) -> Any:
        """The whole of a value of which each rank of a distributed job has a part.

        All ranks have to call it; each gets the whole. A DTensor knows how its parts lie. Of plain
        tensors nobody knows, so `dim` says it: they are joined along it, in the order of the ranks.

            >>> import hookline as hl
            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> try:
            ...     run.full("", dim=0)
            ... except hl.RanksError as error:
            ...     print(str(error)[:60])
            run.full('', dim=0) asks all ranks of a process group, and t

        Args:
            key: the site, as in a look-up.
            dim: the dimension along which plain tensors are joined: 0 where each rank has a part of
                the batch (DDP, FSDP), the one that tensor parallelism splits otherwise.
            group: the process group that has the parts; None is all ranks.
            timeout: how long ranks wait for one another, in seconds.

        Returns:
            The whole value, on this rank's device.

        Raises:
            RanksError: on every rank: one did not call it in time, has no such value, or one of
                another kind; or there is no process group.
            AmbiguousError: plain tensors and no `dim`; or several calls or passes.
        """
        question = f"run.full({str(key)!r}, dim={dim})"
        if self.ranks:
            return joined([one[key] for one in self.ranks], dim, question)
        ask = Ask(question, self.sites, group, timeout)
        return full(ask, lambda: self._only(key, is_local=False), dim)

    def reduced(
        self, key: Key, op: str = "mean", *, group: Any = None, timeout: float = TIMEOUT_S
    ) -> Any:
        """A value reduced over the ranks of a distributed job, element by element.

        For statistics (`keep=lambda t: t.float().mean()`), and for the gradients of parameters
        under DDP, which are each rank's own. All ranks have to call it; each gets the same.

            >>> import hookline as hl
            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model, keep=lambda t: t.mean()) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> try:
            ...     run.reduced("")
            ... except hl.RanksError as error:
            ...     print(str(error)[:26])
            run.reduced('', op='mean')

        Args:
            key: the site, as in a look-up.
            op: "mean", "sum", "max" or "min".
            group: the process group; None is all ranks.
            timeout: how long ranks wait for one another, in seconds.

        Returns:
            The value; sums and means in at least float32.

        Raises:
            RanksError: on every rank: one did not call it in time, has no such value, or one of
                another shape; it is a DTensor; or there is no process group.
            ValueError: op is none of the four.
        """
        if self.ranks:
            return combined([one[key] for one in self.ranks], op)
        ask = Ask(f"run.reduced({str(key)!r}, op={op!r})", self.sites, group, timeout)
        return reduced(ask, lambda: self._only(key, is_local=False), op)

    # -- the folder -----------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        alone: bool = False,
        group: Any = None,
        timeout: float = TIMEOUT_S,
    ) -> Path:
        """Write the recording to a folder, whole or not at all; `hl.open(folder)` reads it.

        In a distributed job all ranks write into one folder, and have to call this.
        What cannot be saved (sparse tensors, a library's caches) is listed in `run.lost`.

        Args:
            folder: the folder; of all ranks, on a disk that all of them see.
            alone: write this rank's recording only, and wait for nobody.
            group: the process group whose ranks save together; None is all ranks.
            timeout: how long ranks wait for one another, in seconds.

        Returns:
            The folder's path.

        Raises:
            FolderError: the folder holds something else, or the disk is full or read-only.
            OverwrittenError: a value was changed in place since it was recorded.
            RanksError: a rank did not come in time, or has other sites of the same model.
        """
        self._refuse_of_ranks("save(...)")
        if not alone and is_one_of_many(group):
            path, contents = write_ranks(folder, self._contents, self.sites, group, timeout)
        else:
            contents = self._contents()
            path = write(folder, contents)
        self.lost = contents.lost
        return path

    def _contents(self) -> Contents:
        passes = []
        for current in self._log.passes:
            entries = [Entry(*entry) for entry in current.log]
            for entry in entries:
                self._log.check(entry)
            passes.append((current.number, current.failed, entries))
        return Contents(self.report(), self.sites, passes, list(self.lost), self.modules)

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
            self._log.passes.append(pass_of(number, failed, log))

    def __repr__(self) -> str:
        if self.ranks:
            return f"Recording of {len(self.ranks)} ranks: run.ranks[0] is {self.ranks[0]!r}"
        n_values = sum(len(current.log) for current in self._log.passes)
        sites, passes = plural(len(self.sites), "site"), plural(len(self.passes), "pass", "passes")
        return f"Recording of {sites}: {passes}, {plural(n_values, 'value')}"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hookline.views import recording_html

        return recording_html(self)

    def _with(self, key: Key) -> list[PassRecord]:
        return [PassRecord(self._log, current) for current in self._log.passes_with(key)]

    def _of_rank(self, key: Key) -> Recording:
        """The only rank's recording in which a site has a value."""
        having = [rank for rank, one in enumerate(self.ranks) if key in one]
        if len(having) > 1:
            raise AmbiguousError(
                f"{str(key)!r} has a value on each of {len(having)} ranks."
                f"\nWrite run.ranks[{having[0]}][{str(key)!r}] for one of them; for all in one,"
                f" run.full({str(key)!r}, dim=0) or run.reduced({str(key)!r}, op='mean')."
            )
        return self.ranks[having[0] if having else 0]

    def _refuse_of_ranks(self, what: str) -> None:
        if self.ranks:
            raise AmbiguousError(
                f"this recording is of {len(self.ranks)} ranks, and each has its own {what}."
                f"\nWrite run.ranks[0].{what} for one of them."
            )
