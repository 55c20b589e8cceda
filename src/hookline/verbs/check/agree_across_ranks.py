"""Agree with the other ranks of a job on who made a value that is not finite.

A rank that stops alone leaves the others in a collective that it never joins. But the gradients
that DDP reduces are the same on all ranks: what one rank made, all have. So a rank goes on until
the optimizer steps, or the block ends. There all ranks know that gradients were not finite, meet
over the store, and raise the same error. While all is well, nothing is exchanged.

Where weights are sharded, each rank has other gradients, and a forward is a collective already. So
the ranks over which they are sharded meet at the end of each pass, of each backward and of the
block, and before each step, to exchange one number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hookline.display.text import first_line
from hookline.engine import gather_json, group_ranks
from hookline.errors import RanksError
from hookline.verbs.check.finding import CheckFinding

_QUESTION = "hl.check, with gradients that are not finite"
# The kinds of findings that do not tell which rank made them.
_OF_ALL = ("gradient", "parameter")
_UNKNOWN = "holds it; the rank that made it is not known"


def is_set_on_any_rank(flag: bool, group: Any, device: torch.device) -> bool:
    """Tell whether a flag is set on any rank of a group. A collective."""
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return bool(flags)


def earliest_of_ranks(
    finding: CheckFinding | None, group: Any = None, question: str = _QUESTION
) -> CheckFinding | None:
    """Return the earliest finding of all ranks, the same on each of them; None if none has one.

    All ranks must call this. Findings that know who made the value come first.

    Args:
        finding: this rank's finding, if it has one.
        group: the process group; None is all ranks.
        question: what the ranks ask, for messages.
    """
    ranks = group_ranks(group, question)
    if len(ranks) < 2:
        return finding
    try:
        data = None if finding is None else finding.as_json()
        answers = gather_json(question, data, ranks)
    except RanksError as error:
        if finding is None:
            raise
        note = f"the ranks did not meet: {first_line(error)}"
        return finding.with_(rank=rank_here(), notes=(*finding.notes, note))
    pairs = zip(ranks, answers, strict=True)
    findings = {rank: CheckFinding.from_json(data) for rank, data in pairs if data is not None}
    if not findings:
        return None

    def place(rank: int) -> tuple[Any, ...]:
        kind = findings[rank].kind
        return kind == "gradient", findings[rank].step, kind == "backward", rank

    rank = min(findings, key=place)
    first = findings[rank]
    if first.rank is not None or any(note.endswith(_UNKNOWN) for note in first.notes):
        return first  # the ranks have agreed on it before
    if first.kind in _OF_ALL:
        # All ranks have made the gradients and the weights together.
        return first.with_(notes=(*first.notes, f"rank {rank} {_UNKNOWN}"))
    return first.with_(rank=rank)


def rank_here() -> int:
    """Return this process's rank."""
    return dist.get_rank()
