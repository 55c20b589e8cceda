"""Keep what a trainer's callback monitors with: its arguments, and the line of the training."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from hookline.curves import Curves, is_single_number
from hookline.verbs.monitor.monitor import MonitorLine, monitor


class MonitorCallback:
    """Hold the arguments of `hl.monitor` until a training begins, and then its line.

    A copy has the arguments and the curves so far, and no line.

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
        self._curves: Curves | None = None
        self._training: weakref.ref[Any] | None = None
        self._selector = selector
        self._every = every
        self._to = to
        self._options = options

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "line": None, "_training": None}

    def _attach(
        self, model: nn.Module, to: Any, training: Any, *, every: int, **options: Any
    ) -> MonitorLine | None:
        """Attach the line of a training.

        Args:
            model: the model that is trained.
            to: where the numbers go if the user has not said so.
            training: the object that stands for the training.
            every: every so many steps are reported if the user has not said so.
            **options: other arguments of `hl.monitor`; those of the user come first.

        Returns:
            The line; None if the training has it already, because the callback was given twice.
        """
        if self._training is not None and self._training() is training:
            return None
        if self.line is not None:
            self.line.remove()  # of a training that raised
        self.line = line = monitor(
            model,
            self._selector,
            every=self._every or every,
            to=to if self._to is None else self._to,
            **{**options, **self._options},
        )
        self._curves, self._training = line.curves, weakref.ref(training)
        return line

    def _log(self, numbers: Mapping[str, Any], step: int) -> None:
        """Keep those of a trainer's values that are numbers, beside the measured ones."""
        single = {name: value for name, value in numbers.items() if is_single_number(value)}
        if self.line is not None and self._training is not None and single:
            self.line.curves.log(single, step=step)

    def _detach(self, error: BaseException | None = None) -> None:
        """Remove the line at the end of a training, if it has one."""
        self._training = None
        if self.line is not None:
            self.line.__exit__(type(error) if error else None, error, None)

    @property
    def curves(self) -> Curves:
        """The numbers so far.

        Raises:
            AttributeError: no training has begun.
        """
        if self._curves is None:
            raise AttributeError(
                f"the monitor has no curves before a training.\nCall {self.begins_with} first."
            )
        return self._curves
