"""Checks of arguments that all figures share."""

from __future__ import annotations

from typing import Any

from hookline.errors import InputError
from hookline.recordings import PassRecord, Recording

Source = Recording | PassRecord


def check_source(source: Any) -> None:
    """Refuse a source that is not a recording: a model, a tensor, a folder's name.

    Raises:
        InputError: the source is neither a recording nor a pass, or it holds several ranks.
    """
    if not isinstance(source, Recording | PassRecord):
        raise InputError(
            f"hl.plots must be given a recording or a pass, got {type(source).__name__}."
            "\nRecord first, with hl.record(model) as run: model(x), and give run or one of"
            " run.passes. Open a folder with hl.open(path)."
        )
    if isinstance(source, Recording) and source.ranks:
        raise InputError(
            f"a figure must be of one rank's recording, got {len(source.ranks)} ranks."
            "\nGive one of them: run.ranks[0]."
        )


def check_count(name: str, count: Any, most: int | None = None) -> None:
    """Check a count: of sites, channels or bins.

    Raises:
        InputError: the count is not an integer >= 1, or exceeds `most`.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(
            f"{name} must be a whole number from 1 up, got {count!r}."
            f"\nGive {name}=16, for instance."
        )
    if most is not None and count > most:
        raise InputError(
            f"{name} must be at most {most} for a figure, got {count}.\nGive {name}={most}."
        )


def check_sample(sample: Any) -> None:
    """Check the index of a sample.

    Raises:
        InputError: the index is not an integer.
    """
    if isinstance(sample, bool) or not isinstance(sample, int):
        raise InputError(
            f"sample must be the number of a row of the batch, got {sample!r}."
            "\nGive sample=0 for the first."
        )
