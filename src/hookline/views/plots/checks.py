"""What every figure refuses before it looks at a value."""

from __future__ import annotations

from typing import Any

from hookline.errors import InputError
from hookline.recordings import PassRecord, Recording

Source = Recording | PassRecord


def check_source(source: Any) -> None:
    """Refuse what holds no recorded values: a model, a tensor, a folder's name.

    Raises:
        InputError: it is no recording, nor a pass of one; or it is a recording of several ranks.
    """
    if not isinstance(source, Recording | PassRecord):
        raise InputError(
            f"hl.plots draws recordings, and got {type(source).__name__}."
            "\nRecord first: with hl.record(model) as run: model(x), and give run, or one of"
            " run.passes; a folder is opened by hl.open(path)."
        )
    if isinstance(source, Recording) and source.ranks:
        raise InputError(
            f"a figure must be of one rank's recording, got {len(source.ranks)} ranks."
            "\nGive one of them: run.ranks[0]."
        )


def check_count(name: str, count: Any, most: int | None = None) -> None:
    """Check the number of things to draw.

    Raises:
        InputError: it is not a whole number from 1 up, or more than can be told apart.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(
            f"{name} must be a whole number from 1 up, got {count!r}."
            f"\nGive {name}=16, for instance."
        )
    if most is not None and count > most:
        raise InputError(
            f"{name}={count} is more than a figure can show apart.\nGive {most} at most."
        )


def check_sample(sample: Any) -> None:
    """Check the number of a row of a batch.

    Raises:
        InputError: it is not a whole number.
    """
    if isinstance(sample, bool) or not isinstance(sample, int):
        raise InputError(
            f"sample must be the number of a row of the batch, got {sample!r}."
            "\nGive sample=0 for the first."
        )
