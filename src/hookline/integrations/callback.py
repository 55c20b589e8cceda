"""Keep what a trainer's callback monitors with: its arguments, and the line of the training."""

from __future__ import annotations

from typing import Any, ClassVar

from hookline.curves import Curves
from hookline.verbs.monitor.monitor import MonitorLine


class MonitorCallback:
    """Hold the arguments of `hl.monitor` until a training begins, and then its line.

    Args:
        selector: which modules and parameters, as in `hl.monitor`.
        every: every so many steps are reported; None is as often as the trainer logs.
        to: where the numbers go; None is where the trainer logs.
        **options: the other arguments of `hl.monitor`.

    Attributes:
        begins_with: the call that begins a training, for messages.
        line: the line of the running training, or of the last one; None before.
    """

    begins_with: ClassVar[str]

    def __init__(
        self, selector: Any = None, *, every: int | None = None, to: Any = None, **options: Any
    ) -> None:
        self.line: MonitorLine | None = None
        self._selector = selector
        self._every = every
        self._to = to
        self._options = options

    @property
    def curves(self) -> Curves:
        """The numbers so far.

        Raises:
            AttributeError: no training has begun.
        """
        if self.line is None:
            raise AttributeError(
                f"the monitor has no curves before a training.\nCall {self.begins_with} first."
            )
        return self.line.curves
