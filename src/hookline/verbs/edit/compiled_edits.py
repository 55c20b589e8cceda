"""Edits in compiled code, where no pass is known: change chosen tokens, or refuse the edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from hookline.engine import TracingAttachError, run_at_trace_time
from hookline.verbs.edit.indices import Indices


@run_at_trace_time
def refuse_compiled(what: str, where: str, why: str) -> NoReturn:
    """Refuse an edit while code is compiled that would call it.

    Raises:
        AttachError: always.
    """
    raise TracingAttachError(
        f"hl.edit cannot apply {what} at {where or 'the root'} in compiled code: {why}."
        "\nRun the model without compiled code, around the line:"
        " with torch.compiler.set_stance('force_eager'): ..."
    )


def change_token_columns(
    at: Indices, change: Callable[[Any], Any], value: Any, where: str, n_tokens: int | None
) -> Any:
    """Change a value, and put the result at positions that are columns of the value.

    Args:
        at: the positions.
        change: the change.
        value: the value, `(rows, tokens, features)`.
        where: the site.
        n_tokens: the number of tokens in the pass; None if it is not known.
    """
    if not isinstance(value, Tensor) or value.dim() != 3:
        refuse_compiled("at=", where, "the value is not (rows, tokens, features)")
    n_columns = value.shape[1]
    if n_tokens is not None and n_tokens != n_columns:
        refuse_compiled("at=", where, "dimension 1 of the value is not that of the tokens")
    chosen: list[Any] = [at.span]
    if at.numbers is not None:
        chosen = [number for number in at.numbers if -n_columns <= number < n_columns]
    if not chosen and n_tokens is None:
        refuse_compiled("at=", where, "the value has no such position")
    new = change(value) if chosen else None
    if new is None or new.shape != value.shape or new.dtype != value.dtype:
        return new  # which is refused
    result = value.clone()
    for column in chosen:
        result[:, column] = new[:, column]
    return result
