"""One pass of a recording, or one backward over it: the same look-ups. Imports log, ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final, overload

from hookline.engine import TIMEOUT_S, Pass, Site
from hookline.engine.errors import AmbiguousError
from hookline.engine.words import plural
from hookline.recordings.index import Key
from hookline.recordings.log import Log
from hookline.recordings.ranks import Ask, full, reduced


@final
class PassRecord(Mapping[str, Any]):
    """One pass of a recording: the same look-ups, within that pass.

    Iterating gives the sites that fired, as registered, those with several calls once for each:
    `block#0`. `order` gives them as they fired.
    """

    def __init__(self, log: Log, current: Pass, backward: int | None = None) -> None:
        self._log = log
        self._pass = current
        self._backward = backward

    @property
    def number(self) -> int:
        """The pass's number, from 0."""
        return self._pass.number

    @property
    def failed(self) -> bool | None:
        """Whether the model raised in this pass; None while it still runs."""
        return self._pass.failed

    @property
    def backwards(self) -> list[PassRecord]:
        """The backward passes that came back through this pass, in order: their gradients apart."""
        runs = self._log.backwards(self._pass) if self._backward is None else [self._backward]
        return [PassRecord(self._log, self._pass, run) for run in runs]

    @property
    def order(self) -> list[str]:
        """The keys in the order in which they fired: what to search for the first NaN."""
        return [self._text(index, call) for index, call in self._fired()]

    def fired(self) -> list[tuple[Site, int]]:
        """Each site that fired, with the number of the call, in the order in which they fired."""
        return [(self._log.sites[index], call) for index, call in self._fired()]

    def __getitem__(self, key: Key) -> Any:
        return self.only(key)

    def only(self, key: Key, *, is_local: bool = True) -> Any:
        """The only value of a site; of a DTensor this rank's part, or unless `is_local` itself.

        Raises:
            NotRecordedError: it did not fire in this pass. AmbiguousError: it ran several times.
        """
        return self._only(key, self._find(key, is_local=is_local))

    def outline(self, key: Key) -> Any:
        """A value's structure: of a folder, its tensors come on the meta device, without data.

        What lies in memory comes as it is, also if it was changed in place since.

        Raises:
            NotRecordedError, AmbiguousError: as in a look-up. FolderError: the folder is gone or
                damaged.
        """
        return self._only(key, self._find(key, outline=True))

    def _only(self, key: Key, found: list[tuple[int, Any]]) -> Any:
        if len(found) > 1:
            calls = [f"{key!s}#{call}" for call, _ in found]
            raise AmbiguousError(
                f"{str(key)!r} ran {len(found)} times in pass {self.number}."
                f"\nWrite {calls[0]!r} to {calls[-1]!r} for one call, or .calls({str(key)!r}) for"
                " all."
            )
        return found[0][1]

    def calls(self, key: Key) -> list[Any]:
        """The values of every call of a site in this pass, in order.

        Raises:
            NotRecordedError: it did not fire in this pass.
        """
        return [value for _, value in self._find(key)]

    def full(
        self, key: Key, dim: int | None = None, *, group: Any = None, timeout: float = TIMEOUT_S
    ) -> Any:
        """As `Recording.full`, in this pass."""
        question = f"run.passes[{self.number}].full({str(key)!r}, dim={dim})"
        ask = Ask(question, self._log.sites, group, timeout)
        return full(ask, lambda: self.only(key, is_local=False), dim)

    def reduced(
        self, key: Key, op: str = "mean", *, group: Any = None, timeout: float = TIMEOUT_S
    ) -> Any:
        """As `Recording.reduced`, in this pass."""
        question = f"run.passes[{self.number}].reduced({str(key)!r}, op={op!r})"
        ask = Ask(question, self._log.sites, group, timeout)
        return reduced(ask, lambda: self.only(key, is_local=False), op)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self._text(*one) for one in sorted(self._fired())))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _find(
        self, key: Key, *, is_local: bool = True, outline: bool = False
    ) -> list[tuple[int, Any]]:
        found = self._log.find(self._pass, key, self._backward, is_local=is_local, outline=outline)
        if not found:
            raise self._log.never(key, self._pass)
        return found

    def _fired(self) -> list[tuple[int, int]]:
        return self._log.fired(self._pass, self._backward)

    def _text(self, index: int, call: int) -> str:
        entries = self._log.entries(self._pass)[index]
        site = self._log.sites[index]
        several = len({entry.call for entry in entries}) > 1
        return f"{site}#{call}" if several else str(site)


@final
class PassList(Sequence[PassRecord]):
    """The passes of a recording, each made when it is asked for: there may be 100,000."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __len__(self) -> int:
        return len(self._log.passes)

    @overload
    def __getitem__(self, index: int) -> PassRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[PassRecord]: ...
    def __getitem__(self, index: int | slice) -> PassRecord | list[PassRecord]:
        if isinstance(index, slice):
            return [PassRecord(self._log, current) for current in self._log.passes[index]]
        if not -len(self) <= index < len(self):
            ran = plural(len(self), "pass", "passes")
            raise IndexError(f"there is no pass {index}; {ran} ran, from 0 on.")
        return PassRecord(self._log, self._log.passes[index])

    def __repr__(self) -> str:
        passes = plural(len(self), "pass", "passes")
        return f"{passes} of a Recording of {plural(len(self._log.sites), 'site')}"


def pass_of(number: int, failed: bool | None, log: Sequence[Any]) -> Pass:
    """A pass that was seen before, with what it noted."""
    current = Pass(number)
    current.failed = failed
    current.log = list(log)
    return current
