"""Consoles, exit codes and progress bars that all commands share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from enum import StrEnum
from threading import Timer
from typing import Annotated, Any, final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hookline.cli.python_to_commands import python_to_commands
from hookline.display.json_text import json_text
from hookline.display.results import Printout, Result, printout_of
from hookline.display.text import escape_invisible
from hookline.display.wrapped_text import terminal_width
from hookline.errors import HooklineError, HooklineWarning
from hookline.findings import Findings
from hookline.models import Batch

AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON, and only that")]


class FailOn(StrEnum):
    """The least level of a finding that makes the exit code 1."""

    error = "error"
    warning = "warning"
    note = "note"


FailOnOption = Annotated[
    FailOn | None,
    typer.Option("--fail-on", help="exit with 1 if a finding is of this level or a worse one"),
]

BAD_INPUT = 2  # the exit code for a mistake in the arguments; 1 is for a model that fails
CLOSED_PIPE = 141  # 128 + SIGPIPE, which Windows lacks: a shell's code of what the signal ends

# Piped into a file, a table must not be folded at the 80 columns that rich would assume.
_WIDTH = None if sys.stdout is not None and sys.stdout.isatty() else 160
out: Console = Console(width=_WIDTH, highlight=False, emoji=False)
err: Console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


@contextmanager
def exit_on_errors(as_json: bool = False) -> Iterator[None]:
    """Turn a hookline error into one to three lines and exit code 2; an interrupt into 130.

    A model that calls `sys.exit` has failed: exit code 1.

    Args:
        as_json: whether stdout is kept for JSON: what your code prints goes to stderr.
    """
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield
    except HooklineError as error:
        print_to_stderr(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print_to_stderr("interrupted.")
        raise typer.Exit(130) from None
    except SystemExit as error:
        if error.code == CLOSED_PIPE:
            raise
        print_to_stderr(
            f"the model's code must not end the process, got sys.exit({error.code!r}) in its run."
            "\nTake the exit out, or raise an error in its place."
        )
        raise typer.Exit(1) from None


def exit_on_findings(findings: Findings, level: FailOn | None) -> None:
    """End the command with exit code 1 if a finding is of a level or worse."""
    if level is not None and findings.reaches(level.value):
        raise typer.Exit(1)


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print hookline's warnings as messages, without the line of code that caused them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", HooklineWarning)
        showwarning = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, HooklineWarning):
                print_to_stderr(str(message))
            else:
                showwarning(message, category, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def print_result(result: Result | Printout, *, with_failure: bool = True) -> None:
    """Print a result as wide as the terminal, or 80 characters wide.

    Args:
        result: the result.
        with_failure: whether to print its failure; False where a caller does so itself.
    """
    printout = printout_of(result) if isinstance(result, Result) else result
    printout = printout if with_failure else replace(printout, failure=())
    for line in printout.lines(out.width if out.is_terminal else terminal_width()):
        text = Text.assemble(*line)
        text.rstrip()
        out.print(text, soft_wrap=True)


def print_result_or_json(
    result: Result, as_json: bool, batch: Batch | None = None, *, with_failure: bool = True
) -> None:
    """Print a result, or it alone as JSON, which begins with the input that it is of."""
    if as_json:
        about = {} if batch is None else {"input": batch.description}
        print_json(about | result.to_dict())
    else:
        print_result(result, with_failure=with_failure)


def print_json(data: Mapping[str, Any]) -> None:
    """Print data as JSON to stdout, which then holds nothing else."""
    typer.echo(json_text(data))


def print_to_stderr(message: str) -> None:
    """Print a message to stderr, in the command line's words, without markup and folding."""
    err.print(f"hookline: {escape_invisible(python_to_commands(message))}", markup=False)


@final
class ProgressBar:
    """A progress bar that appears only if the work takes longer than a second.

    Args:
        text: the label of the bar.
        total: the number of steps; None if it is unknown.
    """

    def __init__(self, text: str, total: int | None = None) -> None:
        columns = [TextColumn("{task.description}"), BarColumn()]
        counts = [MofNCompleteColumn()] if total is not None else []
        self._progress = Progress(*columns, *counts, TimeElapsedColumn(), console=err,
                                  transient=True)  # fmt: skip
        self._task = self._progress.add_task(text, total=total)
        self._timer = Timer(1.0, self._progress.start)
        self._timer.daemon = True

    def __enter__(self) -> ProgressBar:
        if err.is_terminal:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._progress.live.is_started:  # stop() on an unstarted bar prints a blank line
            self._progress.stop()

    def step(self) -> None:
        """Advance the bar by one step."""
        self._progress.advance(self._task)
