"""Keep the numbers that the user logs until their step is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from hookline.curves import StepReport

_MOST_WAITING = 1000  # entries with tensors on an accelerator


@final
@dataclass(slots=True)
class _StepNumbers:
    """Hold the numbers of one step."""

    step: int  # the number of the step
    is_given: bool  # True if the user has given this number
    seconds: float = field(default_factory=time.time)
    numbers: dict[str, float | Tensor] = field(default_factory=dict)


@final
class LoggedNumbers:
    """Keep the logged numbers that no report holds yet.

    Args:
        add: takes the report of a step.
    """

    def __init__(self, add: Callable[[StepReport], None]) -> None:
        self._add = add
        self._entries: list[_StepNumbers] = []

    def log(self, numbers: dict[str, float | Tensor], step: int, *, is_given: bool) -> None:
        """Keep numbers of a step."""
        last = self._entries[-1] if self._entries else None
        if last is None or last.step != step or last.is_given != is_given:
            last = _StepNumbers(step, is_given)
            self._entries.append(last)
        last.numbers.update(numbers)

    def renumber(self, step: int) -> None:
        """Have all numbers belong to one step, apart from those whose step the user has given."""
        for entry in self._entries:
            if not entry.is_given:
                entry.step = step

    def report_others_and_pop(self, step: int) -> dict[str, float]:
        """Report the numbers of other steps, and return those of one step."""
        self.report_other_steps(step)
        entries, self._entries = self._entries, []
        return {name: float(number) for entry in entries for name, number in entry.numbers.items()}

    def report_other_steps(self, step: int | None) -> None:
        """Report the numbers of all steps but one; None reports those of all."""
        while entries := [entry for entry in self._entries if entry.step != step]:
            entry = entries[0]
            self._entries.remove(entry)
            numbers = {name: float(number) for name, number in entry.numbers.items()}
            self._add(StepReport.from_logged(entry.step, entry.seconds, numbers))

    def report_without_waiting(self) -> None:
        """Report the numbers that can be read without waiting for an accelerator."""
        numbers = [number for entry in self._entries for number in entry.numbers.values()]
        if len(self._entries) > _MOST_WAITING or not any(
            isinstance(number, Tensor) for number in numbers
        ):
            self.report_other_steps(None)
