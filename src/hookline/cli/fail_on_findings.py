"""The command `findings`, and the exit code that findings give on request."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hookline.findings import Findings
from hookline.opening import open as open_folder


class FailOn(StrEnum):
    """The least level of a finding that makes the exit code 1."""

    error = "error"
    warning = "warning"
    note = "note"


FailOnOption = Annotated[
    FailOn | None,
    typer.Option("--fail-on", help="exit with 1 if a finding is of this level or a worse one"),
]


def judge_folder(folder: str | Path) -> Findings:
    """Judge the recording, the store or the run in a folder.

    Raises:
        HooklineError: the folder cannot be read.
    """
    return open_folder(folder).findings()


def exit_on_findings(findings: Findings, level: FailOn | None) -> None:
    """End the command with exit code 1 if a finding is of a level or worse."""
    if level is not None and findings.reaches(level.value):
        raise typer.Exit(1)
