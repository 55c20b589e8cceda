"""Let ranks begin the collective of a report together, or tell each of them why they do not.

A collective that one rank does not call hangs the others, and is paired with the next one that it
calls, which may be the training's. So each rank comes to a barrier in the store first. It passes
when all have come with the same step and interval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from hookline.engine import TIMEOUT_S, failures_by_rank, format_by_rank, wait_for_keys
from hookline.errors import RanksError

# How long ranks wait for one that does not come. Its validation may take that long.
PATIENCE_S = 600.0
_OPEN = "open"


@final
class ReportBarrier:
    """The barriers of one monitor's reports, numbered.

    Args:
        store: the store over which the ranks found each other.
        base: the beginning of the keys.
        ranks: the ranks.
        me: this one.
    """

    def __init__(self, store: Any, base: str, ranks: Sequence[int], me: int) -> None:
        self._store = store
        self._base = base
        self._ranks = ranks
        self._me = me
        self._number = 0
        self._is_over = False

    def publish_settings(self, settings: str) -> None:
        """Tell the settings of this rank to those that wait for it."""
        self._store.set(f"{self._base}/at/{self._me}", json.dumps([self._number, settings]))

    def wait_for_all(self, step: int, settings: str, *, is_last: bool) -> None:
        """Wait until all ranks have come.

        Args:
            step: the step that is reported.
            settings: which steps are, in words.
            is_last: whether this rank's monitor has ended, so that others may not come.

        Raises:
            RanksError: a rank has another step or other settings, has left, or does not come.
        """
        self._number += 1
        base, at = f"{self._base}/{self._number}", f"step {step} with {settings}"
        self.publish_settings(settings)
        first = json.loads(self._store.compare_set(f"{base}/first", "", json.dumps([self._me, at])))
        if first[1] != at:
            self._set_verdict(base, _differing_settings_text({first[0]: first[1], self._me: at}))
        elif self._store.add(f"{base}/come", 1) == len(self._ranks):
            self._set_verdict(base, _OPEN)
            for name in ("first", "come", "go"):  # all ranks have passed the last barrier
                self._store.delete_key(f"{self._base}/{self._number - 1}/{name}")
        self._wait_for_verdict(base, settings, TIMEOUT_S if is_last else PATIENCE_S)
        verdict = self._store.get(f"{base}/go").decode()
        if verdict != _OPEN:
            self._is_over = True
            raise RanksError(verdict)

    def announce_leave(self, how: str) -> None:
        """Tell the ranks that wait for this one, now or later, that it does not come."""
        if not self._is_over:
            self._is_over = True
            with suppress(RuntimeError, ConnectionError):  # the store is gone, and nobody waits
                self._set_verdict(
                    f"{self._base}/{self._number + 1}",
                    f"rank {self._me} {how}.\nMake the same steps on every rank.",
                )

    def _set_verdict(self, base: str, verdict: str) -> None:
        """Set the verdict of a barrier, if no other rank has."""
        self._store.compare_set(f"{base}/go", "", verdict)

    def _wait_for_verdict(self, base: str, settings: str, patience: float) -> None:
        """Wait for the verdict. From time to time, look whether a rank has other settings now."""
        until = time.monotonic() + patience
        while not wait_for_keys(self._store, [f"{base}/go"], min(patience, TIMEOUT_S)):
            missing = [
                rank for rank in self._ranks if self._last_barrier_of(rank)[0] < self._number
            ]
            at = {rank: self._last_barrier_of(rank)[1] or settings for rank in (self._me, *missing)}
            if len(set(at.values())) > 1:
                self._set_verdict(base, _differing_settings_text(at))
            elif time.monotonic() > until:
                failed = failures_by_rank(missing)
                texts = [failed.get(rank, "did not come") for rank in missing]
                self._set_verdict(
                    base,
                    f"after {patience:g} s, {format_by_rank(missing, texts)}."
                    "\nLook at the output of that rank. Make the same steps on every rank.",
                )

    def _last_barrier_of(self, rank: int) -> tuple[int, str]:
        """Return a rank's last barrier, and its settings; "" where it has not told any."""
        key = f"{self._base}/at/{rank}"
        if not self._store.check([key]):
            return 0, ""
        number, settings = json.loads(self._store.get(key))
        return number, settings


def _differing_settings_text(at: dict[int, str]) -> str:
    at = dict(sorted(at.items()))
    return (
        f"the ranks report different steps: {format_by_rank(at, at.values())}."
        "\nMake the same steps on every rank, with the same every=, line.first and line.step."
    )
