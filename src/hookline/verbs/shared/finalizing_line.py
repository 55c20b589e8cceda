"""The base of verbs' lines that have work to do at their end."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from hookline.engine import Line

OwnLine = TypeVar("OwnLine", bound=Line)


class FinalizingLine(Generic[OwnLine]):
    """A line of a verb, with work before and after its hooks are removed."""

    def __init__(self, line: OwnLine) -> None:
        self._line = line

    def __repr__(self) -> str:
        return repr(self._line)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._before_removal(error)
        finally:
            try:
                self._line.__exit__(kind, error, traceback)
            finally:
                self._after_removal(error)

    def remove(self) -> None:
        """End the line: remove its hooks. Idempotent."""
        try:
            self._line.remove()
        finally:
            self._after_removal(None)

    def _before_removal(self, error: BaseException | None) -> None:
        """Do the verb's work before the hooks are removed; `error` is what ended the block."""

    def _after_removal(self, error: BaseException | None) -> None:
        """Do the verb's work after the hooks have been removed."""
