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
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hookline.display.text import listed
from hookline.engine.torch_private.distributed import default_store, has_process_group
from hookline.errors import RanksError, warn

# The default time that ranks wait for one another, in seconds.
TIMEOUT_S = 60.0
_MOST_OF_A_NOTE = 200


def group_ranks(group: Any, question: str) -> list[int]:
    """Return the ranks of a process group; None is the group of all.

    Raises:
        RanksError: no process group is initialised, or this process is not in the group.
    """
    if not has_process_group():
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


def publish_failure(how: str) -> None:
    """Note how this rank has failed. A rank that waits for it in vain says so.

    The note is kept until the ranks have met: until then, this rank may have missed a call.
    """
    if has_process_group() and dist.get_world_size() > 1:
        with suppress(RuntimeError, ConnectionError):  # the store is gone, and nobody waits
            default_store().set(_failure_key(dist.get_rank()), how[:_MOST_OF_A_NOTE])


def failures_by_rank(ranks: Iterable[int]) -> dict[int, str]:
    """Return how ranks have failed since they last met, by rank; none if the store is gone."""
    store, texts = default_store(), dict[int, str]()
    with suppress(RuntimeError, ConnectionError):
        for rank in ranks:
            if store.check([_failure_key(rank)]):
                texts[rank] = store.get(_failure_key(rank)).decode()
    return texts


def _failure_key(rank: int) -> str:
    return f"hookline/failed/{rank}"


def gather_json(
    question: str,
    data: Any,
    ranks: Sequence[int],
    timeout: float | None = None,
    *,
    is_of_a_step: bool = False,
) -> list[Any]:
    """Wait until every rank has asked the same question, and gather their data.

    Ranks are paired by the order of their calls.

    Args:
        question: the question, as a user would write the call.
        data: this rank's data, as JSON.
        ranks: the ranks that take part.
        timeout: how long to wait for the other ranks, in seconds. None: `TIMEOUT_S`, which no
            argument of the user's call changes.
        is_of_a_step: whether the data are of a step of a training, which nothing in them tells.
            Then a warning says if a rank may have missed the call of an earlier step.

    Returns:
        Each rank's data, in the order of `ranks`; the same on all of them.

    Raises:
        RanksError: on every rank: a rank did not come, or asked another question.
    """
    if len(ranks) == 1:
        return [data]
    try:
        verdict = _reach_verdict(question, data, ranks, TIMEOUT_S if timeout is None else timeout)
    except (RuntimeError, ConnectionError) as error:
        raise RanksError(
            f"{question}: the store over which the ranks meet is gone, and so is the process that"
            f" holds it, usually rank 0 ({str(error).splitlines()[0][:120]})."
            "\nLook at the first error in that rank's output."
        ) from error
    missing, questions = verdict["missing"], verdict["questions"]
    if missing:
        hint = "" if timeout is None else " timeout= is how long to wait, in seconds."
        raise RanksError(
            f"{verdict['question']} waited {verdict['seconds']:g} s for {_ranks_text(missing)},"
            f" which did not come{_failure_text(verdict['failed'])}."
            "\nCall it on every rank of the group, outside of `if rank == 0:`. A rank that died or"
            f" raised never comes: look at its output.{hint}"
        )
    if len(set(questions)) > 1:
        raise RanksError(
            f"the ranks ask for different things: {format_by_rank(ranks, questions)}."
            "\nCall the same on every rank, in the same order."
        )
    if is_of_a_step and (doubts := _step_doubts(verdict, ranks)):
        warn(
            f"{question} may combine values of different steps: {' and '.join(doubts)}."
            "\nLeave a step out on all ranks or on none: their calls are paired in order."
        )
    return [json.loads(verdict["texts"][index]) for index in verdict["answers"]]


def _step_doubts(verdict: dict[str, Any], ranks: Sequence[int]) -> list[str]:
    """Return why it is not sure that the ranks are at the same step."""
    doubts = []
    failed = {rank: note for rank, note in zip(ranks, verdict["notes"], strict=True) if note}
    if 0 < len(failed) < len(ranks):
        said = format_by_rank(failed, failed.values())
        doubts.append(f"since they last met, not all ranks have failed ({said})")
    if verdict["missed"]:
        doubts.append(f"{_ranks_text(verdict['missed'])} missed this call before, or came too late")
    return doubts


def _failure_text(failed: dict[str, str]) -> str:
    return f" ({format_by_rank(map(int, failed), failed.values())})" if failed else ""


def _reach_verdict(
    question: str, data: Any, ranks: Sequence[int], timeout: float
) -> dict[str, Any]:
    store, me = default_store(), dist.get_rank()
    name = f"hookline/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:12]}"
    number = _next_rendezvous_number(store, name, ranks, question)
    base = f"{name}/{number}"
    verdict_key = f"{base}/verdict"
    note = failures_by_rank([me]).get(me, "")
    store.set(f"{base}/{me}", json.dumps([question, json.dumps(data, sort_keys=True), note]))
    is_judge = me == ranks[0]
    awaited = [f"{base}/{rank}" for rank in ranks] if is_judge else [verdict_key]
    is_settled = store.check([verdict_key])  # a verdict exists, so this rank is late
    if is_settled or (wait_for_keys(store, awaited, timeout) and not is_judge):
        text = store.get(verdict_key)
    else:
        # The first rank that sets the verdict sets it for all, late ranks included.
        proposal = _propose_verdict(store, base, ranks, question)
        text = store.compare_set(verdict_key, "", json.dumps({**proposal, "seconds": timeout}))
    verdict: dict[str, Any] = json.loads(text)
    if note and not verdict["missing"]:
        store.delete_key(_failure_key(me))
    if is_judge and number > 1 and not verdict["missing"]:
        for last in (*ranks, "verdict"):  # all ranks have left the previous rendezvous
            store.delete_key(f"{name}/{number - 1}/{last}")
    return verdict


def _propose_verdict(store: Any, base: str, ranks: Sequence[int], question: str) -> dict[str, Any]:
    """Return the verdict as this rank sees it: who is missing, or else what all have said."""
    keys = {rank: f"{base}/{rank}" for rank in ranks}
    missing = [rank for rank, key in keys.items() if not store.check([key])]
    if not missing and dist.get_rank() != ranks[0]:
        missing = [ranks[0]]  # the judge has not judged
    if missing:
        failed = failures_by_rank(missing)
        return {"question": question, "questions": [], "missing": missing, "failed": failed}
    name, _, number = base.rpartition("/")
    before = _read_verdict(store, f"{name}/{int(number) - 1}") or {}
    missed = before["missing"] if before.get("question") == question else []
    gathered = _collect_posts(store, list(keys.values()))
    return {"question": question, "missing": [], "missed": missed, **gathered}


def _next_rendezvous_number(store: Any, name: str, ranks: Sequence[int], question: str) -> int:
    """Return the number of this rank's rendezvous, past those that it is known to have missed.

    Of a call with the same question, this rank does not know whether it has missed it or comes too
    late. It is told so, unless another rank has gone on already, and waits for it.
    """
    me = dist.get_rank()
    while True:
        # The store counts, not the process: the count begins again with each process group.
        number: int = store.add(f"{name}/{me}", 1)
        verdict = _read_verdict(store, f"{name}/{number}")
        if verdict is None or me not in verdict["missing"]:
            return number
        is_behind = any(store.add(f"{name}/{rank}", 0) > number for rank in ranks)
        if verdict["question"] == question and not is_behind:
            return number


def _read_verdict(store: Any, base: str) -> dict[str, Any] | None:
    """Return the verdict of a rendezvous; None where there is none (any more)."""
    key = f"{base}/verdict"
    verdict: dict[str, Any] | None = json.loads(store.get(key)) if store.check([key]) else None
    return verdict


def wait_for_keys(store: Any, keys: list[str], timeout: float) -> bool:
    """Wait for keys; return False if they did not come in time."""
    until = time.monotonic() + timeout
    try:
        store.wait(keys, timedelta(seconds=max(timeout, 0.001)))
    except RuntimeError:
        if time.monotonic() < until - 0.5:
            raise  # not a timeout: the store is gone
        return False
    return True


def _collect_posts(store: Any, keys: list[str]) -> dict[str, Any]:
    """Collect the data of all ranks; equal data appear once."""
    posts = [json.loads(store.get(key)) for key in keys]
    texts = list(dict.fromkeys(text for _, text, _ in posts))
    answers = [texts.index(text) for _, text, _ in posts]
    return {
        "questions": [post[0] for post in posts], "texts": texts, "answers": answers,
        "notes": [post[2] for post in posts],
    }  # fmt: skip


def format_by_rank(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """Write each rank's text, with equal texts together: `rank 0: this; ranks 1, 2: that`."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks_text(group)}: {text}" for text, group in by_text.items())


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 8)}"
