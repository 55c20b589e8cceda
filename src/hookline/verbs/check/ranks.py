"""Agree with the other ranks of a job on who made a value that is not finite.

A rank that stops alone leaves the others in a collective that it never joins. But the gradients
that DDP reduces are the same on all ranks: what one rank made, all have. So a rank goes on until
the optimizer steps. There all ranks find their gradients not finite, meet over the store, and
raise the same error. While all is well, nothing is exchanged.

Where weights are sharded, each rank has other gradients, and a forward is a collective already. So
the ranks meet at the end of each pass, of each backward and of the block, and before each step, to
exchange one number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hookline.display.text import first_line
from hookline.engine import TIMEOUT_S, gather_json, ranks_of
from hookline.errors import RanksError
from hookline.verbs.check.finding import Finding

_QUESTION = "hl.check, before a step with gradients that are not finite"
# The kinds of findings that do not tell which rank made them.
_OF_ALL = ("gradient", "parameter")
_UNKNOWN = "holds it; the rank that made it is not known"


def is_on_any(mine: bool, device: torch.device) -> bool:
    """Tell whether something is so on any rank. A collective."""
    flag = torch.tensor(int(mine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def shared(mine: Finding | None, device: torch.device) -> Finding | None:
    """Return the earliest finding of all ranks; None if no rank has one. A collective."""
    if not is_on_any(mine is not None, device):
        return None
    return earliest(mine, is_known=mine is not None and mine.kind != "gradient")


def earliest(mine: Finding | None, *, is_known: bool, timeout: float = TIMEOUT_S) -> Finding | None:
    """Return the earliest finding of all ranks, the same on each of them.

    Args:
        mine: this rank's finding, if it has one.
        is_known: whether this rank knows who made the value.
        timeout: how long to wait for the other ranks, in seconds.
    """
    ranks = ranks_of(None, _QUESTION)
    if len(ranks) < 2:
        return mine
    said: list[Any]
    try:
        data = None if mine is None else mine.as_json()
        said = gather_json(_QUESTION, [is_known, data], ranks, timeout)
    except RanksError as error:
        if mine is None:
            raise
        note = f"the ranks did not meet: {first_line(error)}"
        return mine.with_(rank=rank_here(), notes=(*mine.notes, note))
    found = [
        (not known, finding.step, finding.kind == "backward", rank, finding)
        for rank, (known, data) in zip(ranks, said, strict=True)
        if data is not None
        for finding in (Finding.from_json(data),)
    ]
    *_, rank, finding = min(found, key=lambda one: one[:4])
    if finding.rank is not None or any(note.endswith(_UNKNOWN) for note in finding.notes):
        return finding  # the ranks have agreed on it before
    if finding.kind in _OF_ALL:
        # All ranks have made the gradients and the weights together.
        return finding.with_(notes=(*finding.notes, f"rank {rank} {_UNKNOWN}"))
    return finding.with_(rank=rank)


def rank_here() -> int:
    """Return this process's rank."""
    return dist.get_rank()
