"""Hand the reports of steps to memory and to writers, whose failures end no training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from hookline.curves import Reports, StepReport
from hookline.display.text import plural, type_and_line
from hookline.engine.model_fingerprint import recorded_model
from hookline.errors import FolderError, HooklineWarning, warn
from hookline.util.creating_process import CreatingProcess
from hookline.verbs.monitor.writers import ReportWriter, writer_name, writers_for
from hookline.verbs.monitor.writers.files import RunWriter

_MOST_TRIES = 3  # of one report, before later ones are tried
_MOST_REFUSED = 3  # reports in a row: then the writer is down


@final
class Reporting:
    """Keep reports in memory, and write them where the user asked.

    A forked child only keeps them: the files and the loggers are its parent's.

    Args:
        to: the argument of `hl.monitor`.
        writes: whether this rank writes.
        model: the model, which is identified in the folder of a run.

    Attributes:
        reports: all reports so far.
    """

    def __init__(self, to: Any, *, writes: bool, model: nn.Module) -> None:
        writers = writers_for(to) if writes else []
        folders = [writer for writer in writers if isinstance(writer, RunWriter)]
        identified = recorded_model(model) if folders else None
        for folder in folders:
            folder.identify(identified)
        self.reports: Reports = Reports(identified)
        self._writers = [_GuardedWriter(writer) for writer in writers]
        self._process = CreatingProcess()
        self._has_told = False

    def add(self, report: StepReport) -> None:
        """Keep and write the report of a step."""
        self.reports.add(report)
        if self._process.is_current:
            for writer in self._writers:  # all of them first: Ctrl-C may come while one writes
                writer.enqueue(report)
            for writer in self._writers:
                writer.write_waiting()
        elif self._writers and not self._has_told:
            self._has_told = True
            warn(
                "hl.monitor: a forked process runs the model. Its numbers are kept in its memory,"
                " and not written to the to= of its parent.\nTo write them, call hl.monitor in"
                " this process, with a to= of its own."
            )
        report.clear_cached_numbers()  # the numbers take more memory than the slots

    def close(self) -> None:
        """Write what could not be written before, and close the writers."""
        self.reports.has_ended = True
        if self._process.is_current:
            with contextlib.ExitStack() as stack:  # one that raises does not keep others open
                for writer in reversed(self._writers):
                    stack.callback(writer.close)


@final
@dataclass(slots=True, eq=False)
class _WaitingReport:
    """Hold a report that a writer has not taken yet, and the number of tries."""

    report: StepReport
    n_tries: int = 0
    error: Exception | None = None


@final
class _GuardedWriter:
    """Turn the errors of a writer into warnings.

    Reports that it refuses wait, and are tried again with the next report and at the end. A report
    that it has refused more than `_MOST_TRIES` times is left out once it takes a later one. A
    report whose writing was interrupted is written again only where that replaces what was written.
    """

    def __init__(self, writer: ReportWriter) -> None:
        self._writer = writer
        self._rewrites = getattr(writer, "rewrites", False)
        self._waiting: list[_WaitingReport] = []
        self._is_started = False
        self._n_left_out = 0
        self._has_told = False

    def enqueue(self, report: StepReport) -> None:
        """Have a report wait."""
        self._waiting.append(_WaitingReport(report))

    def write_waiting(self, *, is_last: bool = False) -> None:
        """Write the reports that wait, as far as the writer takes them."""
        if self._waiting:
            self._run_guarded(lambda: self._write_reports(is_last))

    def close(self) -> None:
        """Write what waits, and close the writer."""
        try:
            self.write_waiting(is_last=True)
        finally:
            self._run_guarded(self._writer.close, is_last=True)
        n_left = len(self._waiting) + max(self._n_left_out - 1, 0)
        if n_left:
            warn(
                f"hl.monitor: {plural(n_left, 'report')} never reached {writer_name(self._writer)}."
                "\nRead them from the curves that the monitor gave: seen."
            )

    def _write_reports(self, is_last: bool) -> None:
        if not self._is_started:
            self._writer.start(self._waiting[0].report)
            self._is_started = True
        refused: list[_WaitingReport] = []
        while len(refused) < len(self._waiting):
            waiting = self._waiting[len(refused)]
            if self._try_write(waiting):
                self._waiting.remove(waiting)
                refused = [report for report in refused if not self._drop_if_refused(report)]
                continue
            refused.append(waiting)
            may_go_on = not self._rewrites and (is_last or waiting.n_tries > _MOST_TRIES)
            if len(refused) == _MOST_REFUSED or not may_go_on:
                break
        if refused:
            error = refused[0].error
            assert error is not None
            raise error

    def _try_write(self, waiting: _WaitingReport) -> bool:
        """Tell whether the writer takes a report."""
        try:
            self._writer.write(waiting.report)
        except HooklineWarning:
            raise  # the user has made warnings errors
        except Exception as error:
            waiting.error = error
            waiting.n_tries += 1
            return False
        except BaseException:  # Ctrl-C: nobody knows how much of it was written
            if not self._rewrites:
                self._waiting.remove(waiting)
            raise
        return True

    def _drop_if_refused(self, refused: _WaitingReport) -> bool:
        """Leave a report out that was refused too often, and say so of the first one."""
        if refused.n_tries <= _MOST_TRIES:
            return False
        self._waiting.remove(refused)
        self._n_left_out += 1
        if self._n_left_out == 1 and refused.error is not None:
            name, step = writer_name(self._writer), refused.report.step
            warn(
                f"hl.monitor: {name} takes later steps, but has refused step {step}"
                f" {refused.n_tries} times: {type_and_line(refused.error)}. Step {step} is left out"
                " there.\nRead it from the curves that the monitor gave: seen."
            )
        return True

    def _run_guarded(self, act: Callable[[], None], *, is_last: bool = False) -> None:
        try:
            act()
        except HooklineWarning:
            raise  # the user has made warnings errors
        except Exception as error:
            # What a file of hookline's own lacks at its end is told, whatever was told before.
            if not self._has_told or (is_last and isinstance(error, FolderError)):
                self._has_told = True
                then = "" if is_last else "; each report tries again"
                warn(
                    f"hl.monitor: {writer_name(self._writer)} raised {type_and_line(error)}."
                    f" The training goes on, and the numbers are kept.\nRead them from seen{then}."
                )
