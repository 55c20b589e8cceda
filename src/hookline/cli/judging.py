"""The command `findings`, and the exit code that findings give on request."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hookline.curves import Curves
from hookline.errors import InputError
from hookline.findings import Findings
from hookline.opening import open as open_folder
from hookline.recordings import Recording


class FailOn(StrEnum):
    """The least level of a finding that makes the exit code 1."""

    error = "error"
    warning = "warning"
    note = "note"


FailOnOption = Annotated[
    FailOn | None,
    typer.Option("--fail-on", help="exit with 1 if a finding is of this level or a worse one"),
]


def findings_in(folder: Path) -> Findings:
    """Judge the recording or the run in a folder.

    Raises:
        HooklineError: the folder holds neither, or cannot be read.
    """
    opened = open_folder(folder)
    if not isinstance(opened, Recording | Curves):
        raise InputError(
            f"DIR must hold a recording or a run, got a {type(opened).__name__}: {folder}."
            "\nGive a folder that run.save or hl.monitor(to=...) wrote."
        )
    return opened.findings()


def fail_on(findings: Findings, level: FailOn | None) -> None:
    """End the command with exit code 1 if a finding is of a level or worse."""
    if level is not None and findings.reaches(level.value):
        raise typer.Exit(1)
