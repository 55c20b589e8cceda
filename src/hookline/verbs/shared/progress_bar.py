"""Show a progress bar in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hookline.util.preserve_python_rng import preserve_python_rng

if TYPE_CHECKING:
    from rich.progress import Progress


def progress_bar(*, shown: bool) -> Progress:
    """Make a progress bar, which shows the field `rows` of its task; it ends without a trace.

    Args:
        shown: whether to show the bar, where stderr is a terminal.
    """
    # Imported on use: rich takes a fiftieth of the time of torch, and draws a random number.
    with preserve_python_rng():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[rows]}"), TimeRemainingColumn(),
        console=console, disable=not (shown and console.is_terminal), transient=True,
    )  # fmt: skip
