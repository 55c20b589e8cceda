"""Hand the reports of steps to memory and to writers, whose failures end no training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

from hookline.curves import Curves, Reports, StepReport
from hookline.display.text import type_and_line
from hookline.engine.identity import recorded_model
from hookline.errors import HooklineWarning, warn
from hookline.util.own_process import OwnProcess
from hookline.verbs.monitor.sinks import ReportWriter, name_of, writers_for
from hookline.verbs.monitor.sinks.files import RunWriter


@final
class Reporting:
    """Keep reports in memory, and write them where the user asked.

    A forked child only keeps them: the files and the loggers are its parent's.

    Args:
        to: the argument of `hl.monitor`.
        writes: whether this rank writes.
        model: the model, which is identified in the folder of a run.
    """

    def __init__(self, to: Any, *, writes: bool, model: nn.Module) -> None:
        writers = writers_for(to) if writes else []
        folders = [writer for writer in writers if isinstance(writer, RunWriter)]
        identified = recorded_model(model) if folders else None
        for folder in folders:
            folder.identify(identified)
        self._reports = Reports(identified)
        self.curves = Curves(self._reports)
        self._writers = [_Guarded(writer) for writer in writers]
        self._process = OwnProcess()
        self._has_told = False

    def add(self, report: StepReport) -> None:
        """Keep and write the report of a step."""
        self._reports.add(report)
        if self._process.is_here:
            for writer in self._writers:
                writer.add(report)
        elif self._writers and not self._has_told:
            self._has_told = True
            warn(
                "hl.monitor: a forked process runs the model. Its numbers are kept in its memory,"
                " and not written to the to= of its parent.\nTo write them, call hl.monitor in"
                " this process, with a to= of its own."
            )
        report.forget()  # the numbers take more memory than the slots

    def close(self) -> None:
        """Write what could not be written before, and close the writers."""
        if self._process.is_here:
            for writer in self._writers:
                writer.close()


@final
class _Guarded:
    """A writer whose errors become one warning.

    Reports that it refuses wait, and are tried again with the next report and at the end.
    """

    def __init__(self, writer: ReportWriter) -> None:
        self._writer = writer
        self._waiting: list[StepReport] = []
        self._is_started = False
        self._has_told = False

    def add(self, report: StepReport) -> None:
        self._waiting.append(report)
        self._guard(self._write)

    def close(self) -> None:
        if self._waiting:
            self._guard(self._write)
        left = len(self._waiting)
        self._guard(self._writer.close)
        if left:
            warn(
                f"hl.monitor: {left} reports never reached {name_of(self._writer)}."
                "\nRead them from the curves that the monitor gave: seen."
            )

    def _write(self) -> None:
        if not self._is_started:
            self._writer.start(self._waiting[0])
            self._is_started = True
        while self._waiting:
            self._writer.write(self._waiting[0])
            del self._waiting[0]

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except HooklineWarning:
            raise  # the user has made warnings errors
        except Exception as error:
            if not self._has_told:
                self._has_told = True
                warn(
                    f"hl.monitor: {name_of(self._writer)} raised {type_and_line(error)}."
                    " The training goes on, and the numbers are kept."
                    "\nRead them from seen; each report tries again."
                )
