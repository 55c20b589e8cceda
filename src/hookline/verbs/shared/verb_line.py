"""VerbLine: how the line of a verb ends."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeVar

from hookline.engine import Line

OwnLine = TypeVar("OwnLine", bound=Line)


class VerbLine(Generic[OwnLine]):
    """The line of a verb that has more to do than the line when it ends; the verb enters it."""

    def __init__(self, line: OwnLine) -> None:
        self._line = line

    def __repr__(self) -> str:
        return repr(self._line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._ending(error)
        finally:
            try:
                self._line.__exit__(kind, error, traceback)
            finally:
                self._ended(error)

    def remove(self) -> None:
        """End the line: take its hooks off. Idempotent."""
        try:
            self._line.remove()
        finally:
            self._ended(None)

    def _ending(self, error: BaseException | None) -> None:
        """A block is about to end; `error` is what ends it, if it is no normal end."""

    def _ended(self, error: BaseException | None) -> None:
        """The hooks are off."""
