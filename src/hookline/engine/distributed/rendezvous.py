"""The rendezvous of the ranks, before they exchange anything.

A collective that one rank does not call hangs the other ranks for half an hour, and the error then
names no rank. So each rank first writes its question and its data into the store. All ranks read
the same verdict within a bounded time, and only then do they exchange anything.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hookline.display.text import listed
from hookline.engine.torch_private.distributed import default_store, is_grouped
from hookline.errors import RanksError

# The default time that ranks wait for one another, in seconds.
TIMEOUT_S = 60.0


def ranks_of(group: Any, question: str) -> list[int]:
    """Return the ranks of a process group; None is the group of all.

    Raises:
        RanksError: no process group is initialised, or this process is not in the group.
    """
    if not is_grouped():
        raise RanksError(
            f"{question} asks all ranks of a process group, and there is none (or no longer)."
            "\nCall it between torch.distributed.init_process_group(...) and"
            " destroy_process_group(). Read this process's own values without it: run['...']."
        )
    ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise RanksError(
            f"{question}: rank {dist.get_rank()} is not in the group of ranks {listed(ranks, 8)}."
            "\nCall it on the group's ranks only."
        )
    return ranks


def gather_json(
    question: str, data: Any, ranks: Sequence[int], timeout: float = TIMEOUT_S
) -> list[Any]:
    """Wait until every rank has asked the same question, and gather their data.

    Args:
        question: the question, as a user would write the call.
        data: this rank's data, as JSON.
        ranks: the ranks that take part.
        timeout: how long to wait for the other ranks, in seconds.

    Returns:
        Each rank's data, in the order of `ranks`; the same on all of them.

    Raises:
        RanksError: on every rank: a rank did not come, or asked another question.
    """
    if len(ranks) == 1:
        return [data]
    try:
        verdict = _verdict(question, data, ranks, timeout)
    except (RuntimeError, ConnectionError) as error:
        raise RanksError(
            f"{question}: the store over which the ranks meet is gone, and so is the process that"
            f" holds it, usually rank 0 ({str(error).splitlines()[0][:120]})."
            "\nLook at the first error in that rank's output."
        ) from error
    missing, questions = verdict["missing"], verdict["questions"]
    if missing:
        raise RanksError(
            f"{verdict['question']} waited {verdict['seconds']:g} s for {_names(missing)}, which"
            f" did not come."
            "\nCall it on every rank of the group, outside of `if rank == 0:`. A rank that died or"
            " raised never comes: look at its output. timeout= is how long to wait, in seconds."
        )
    if len(set(questions)) > 1:
        raise RanksError(
            f"the ranks ask for different things: {say_by_rank(ranks, questions)}."
            "\nCall the same on every rank, in the same order."
        )
    return [json.loads(verdict["texts"][index]) for index in verdict["answers"]]


def _verdict(question: str, data: Any, ranks: Sequence[int], timeout: float) -> dict[str, Any]:
    store, me = default_store(), dist.get_rank()
    name = f"hookline/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:12]}"
    # The store counts, not the process: the count begins again with each process group.
    number = store.add(f"{name}/{me}", 1)
    base = f"{name}/{number}"
    verdict_key = f"{base}/verdict"
    store.set(f"{base}/{me}", json.dumps([question, json.dumps(data, sort_keys=True)]))
    keys = {rank: f"{base}/{rank}" for rank in ranks}
    is_judge = me == ranks[0]
    awaited = list(keys.values()) if is_judge else [verdict_key]
    is_settled = store.check([verdict_key])  # a verdict exists, so this rank is late
    if is_settled or (_has_come(store, awaited, timeout) and not is_judge):
        text = store.get(verdict_key)
    else:
        # The first rank that sets the verdict sets it for all, late ranks included.
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        proposal = {"question": question, "seconds": timeout, "missing": missing, "questions": []}
        if not missing and not is_judge:
            proposal["missing"] = [ranks[0]]
        elif not missing:
            proposal |= _gathered(store, list(keys.values()))
        text = store.compare_set(verdict_key, "", json.dumps(proposal))
    verdict: dict[str, Any] = json.loads(text)
    if is_judge and number > 1 and not verdict["missing"]:
        for last in (*ranks, "verdict"):  # all ranks have left the previous rendezvous
            store.delete_key(f"{name}/{number - 1}/{last}")
    return verdict


def _has_come(store: Any, keys: list[str], timeout: float) -> bool:
    """Wait for keys; return False if they did not come in time."""
    until = time.monotonic() + timeout
    try:
        store.wait(keys, timedelta(seconds=max(timeout, 0.001)))
    except RuntimeError:
        if time.monotonic() < until - 0.5:
            raise  # not a timeout: the store is gone
        return False
    return True


def _gathered(store: Any, keys: list[str]) -> dict[str, Any]:
    """Collect the data of all ranks; equal data appear once."""
    posts = [json.loads(store.get(key)) for key in keys]
    texts = list(dict.fromkeys(text for _, text in posts))
    answers = [texts.index(text) for _, text in posts]
    return {"questions": [post[0] for post in posts], "texts": texts, "answers": answers}


def say_by_rank(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """Write each rank's text, with equal texts together: `rank 0: this; ranks 1, 2: that`."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"{_names(group)}: {text}" for text, group in by_text.items())


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 8)}"
