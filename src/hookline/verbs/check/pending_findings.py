"""Keep the findings of a check, and those that it must still raise."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import NamedTuple, final

from torch import Tensor, nn

from hookline.display.text import type_and_line
from hookline.engine import Passes, ShardingRanks, has_process_group
from hookline.errors import FolderError
from hookline.statistics.finiteness import count_nan_and_inf
from hookline.verbs.check.agree_across_ranks import (
    earliest_of_ranks,
    is_set_on_any_rank,
    rank_here,
)
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.check.nonfinite_origins import Origin
from hookline.verbs.check.replay import Replay

_MOST_KEPT = 100
_MOST_FILES = 10


class CheckedModel(NamedTuple):
    """The model that a check judges, and its passes."""

    passes: Passes
    model: weakref.ref[nn.Module]
    # Where the model's weights are sharded, so that the ranks run each pass and each backward
    # together; otherwise None.
    sharded_over: ShardingRanks | None

    def earliest(self, finding: CheckFinding | None) -> CheckFinding | None:
        """Return the earliest finding of all ranks where weights are sharded; else this rank's.

        Ranks of other groups, as those of another stage of a pipeline, make other passes.
        """
        for group, device in self.sharded_over.groups if self.sharded_over else ():
            if is_set_on_any_rank(finding is not None, group, device):
                finding = earliest_of_ranks(finding, group)
        return finding

    def earliest_at_start(self, finding: CheckFinding | None) -> CheckFinding | None:
        """Return the earliest finding before the first pass, and see that all ranks check.

        Raises:
            RanksError: one does not. The others would wait for it in their first pass.
        """
        for group, _ in self.sharded_over.groups if self.sharded_over else ():
            finding = earliest_of_ranks(finding, group, "hl.check of sharded weights")
        return finding

    @property
    def others_would_wait(self) -> bool:
        """Tell whether an error on this rank alone would let the others wait for it."""
        return has_process_group() and not (self.sharded_over and self.sharded_over.covers_job)


@final
class PendingFindings:
    """The findings of a check. `folder` keeps what is needed to run modules again."""

    def __init__(self, folder: Path | None) -> None:
        self.all: list[CheckFinding] = []  # also of values that vanished
        self.in_backward: CheckFinding | None = (
            None  # of a backward, until an optimizer steps with it
        )
        # Of a forward in a job of several ranks, until they step.
        self.until_step: CheckFinding | None = None
        self.at_end: CheckFinding | None = None  # raised when the block ends
        self.warned: list[CheckFinding] = []  # warnings, where an error would have stopped one rank
        self.is_told = False  # the end of the block has said what it had to say
        self._folder = folder
        self._n_files = 0

    def add(self, finding: CheckFinding) -> CheckFinding:
        """Note a finding, once. Keep at most 100, and at most 100 that `also=` asks for."""
        is_asked = finding.also is not None
        n_kept = sum((other.also is not None) == is_asked for other in self.all)
        if n_kept < _MOST_KEPT and finding not in self.all:
            self.all.append(finding)
        return finding

    def pop_backward_finding(self) -> CheckFinding | None:
        """Return what a backward has made, and forget it."""
        finding, self.in_backward = self.in_backward, None
        return finding

    def pop_forward_finding(self) -> CheckFinding | None:
        """Return what a forward has made in a job of several ranks, and forget it."""
        finding, self.until_step = self.until_step, None
        return finding

    def write_file(self, replay: Replay, origin: Origin, finding: CheckFinding) -> CheckFinding:
        """Write what is needed to run the module again, if that was asked for."""
        if self._folder is None or self._n_files >= _MOST_FILES:
            return finding
        self._n_files += 1
        if has_process_group():
            finding = finding.with_(rank=rank_here())
        # A full disk, or an argument that cannot be saved, must not hide the finding.
        try:
            saved = replay.saved_call(origin, finding)
            return saved.finding.with_(file=saved.write(self._folder))
        except FolderError as error:
            note = str(error)
        except Exception as error:
            note = f"no file is kept: {type_and_line(error)}"
        return finding.with_(notes=(*finding.notes, note))


def finding_of_tensor(kind: str, path: str, tensor: Tensor, step: int | None) -> CheckFinding:
    """Describe a tensor that is not finite, as a finding; the loss has no path."""
    n_nan, n_inf = count_nan_and_inf(tensor)
    return CheckFinding(
        kind, path, step=step, n_nan=n_nan, n_inf=n_inf, n_total=tensor.numel(),
        suspect=f"{kind} {path}" if path else None,
    )  # fmt: skip
