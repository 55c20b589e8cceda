"""Hold what a check has found, and what it must still raise."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.display.text import type_and_line
from hookline.engine import Passes, is_grouped
from hookline.errors import FolderError
from hookline.verbs.check.finding import Finding
from hookline.verbs.check.finiteness import counted
from hookline.verbs.check.loss import Fault
from hookline.verbs.check.origins import Origin
from hookline.verbs.check.ranks import rank_here
from hookline.verbs.check.replay import Replay

_MOST_KEPT = 100
_MOST_FILES = 10


class Checked(NamedTuple):
    """Name the model that a check judges, and its passes.

    Attributes:
        passes: the line's passes.
        model: the model, by weak reference.
        sharded_on: the device of the model's weights where they are sharded, so that the ranks run
            each pass and each backward together; otherwise None.
    """

    passes: Passes
    model: weakref.ref[nn.Module]
    sharded_on: torch.device | None


@final
class Outcome:
    """Hold what a check has found.

    Args:
        folder: the folder that keeps what is needed to run modules again, or None.

    Attributes:
        all: everything that was found, also what vanished.
        in_backward: what a backward has made, until an optimizer steps with it.
        until_step: what a forward has made in a job of several ranks, until they step.
        at_end: what is raised when the block ends.
        warned: the findings of warnings: an error would have stopped this rank alone.
        is_told: whether the end of the block has said what it had to say.
    """

    def __init__(self, folder: Path | None) -> None:
        self.all: list[Finding] = []
        self.in_backward: Finding | None = None
        self.until_step: Finding | None = None
        self.at_end: Finding | None = None
        self.warned: list[Finding] = []
        self.is_told = False
        self._folder = folder
        self._n_files = 0

    def add(self, finding: Finding) -> Finding:
        """Note a finding, once. Keep at most 100, and at most 100 that `also=` asks for."""
        is_asked = finding.also is not None
        n_kept = sum((kept_finding.also is not None) == is_asked for kept_finding in self.all)
        if n_kept < _MOST_KEPT and finding not in self.all:
            self.all.append(finding)
        return finding

    def take_backward(self) -> Finding | None:
        """Return what a backward has made, and forget it."""
        found, self.in_backward = self.in_backward, None
        return found

    def take_until_step(self) -> Finding | None:
        """Return what a forward has made in a job of several ranks, and forget it."""
        found, self.until_step = self.until_step, None
        return found

    def keep(self, replay: Replay, origin: Origin, finding: Finding) -> Finding:
        """Write what is needed to run the module again, if that was asked for."""
        if self._folder is None or self._n_files >= _MOST_FILES:
            return finding
        self._n_files += 1
        if is_grouped():
            finding = finding.with_(rank=rank_here())
        # A full disk, or an argument that cannot be saved, must not hide the finding.
        try:
            situation = replay.situation(origin, finding)
            return situation.finding.with_(file=situation.write(self._folder))
        except FolderError as error:
            note = str(error)
        except Exception as error:
            note = f"no file is kept: {type_and_line(error)}"
        return finding.with_(notes=(*finding.notes, note))


def of_fault(finding: Finding, fault: Fault) -> Finding:
    """Add the operation of a loss to a finding."""
    return finding.with_(
        operation=fault.operation,
        function=fault.function,
        line=fault.line,
        inputs=(*finding.inputs, *fault.inputs),
        notes=(*finding.notes, *fault.notes),
    )


def of_tensor(kind: str, path: str, tensor: Tensor, step: int | None) -> Finding:
    """Describe a tensor that is not finite, as a finding.

    Args:
        kind: "parameter", "buffer", "gradient" or "loss".
        path: the tensor's path; empty for a loss.
        tensor: the tensor.
        step: the number of the run; None before the first.
    """
    n_nan, n_inf = counted(tensor)
    return Finding(
        kind, path, step=step, n_nan=n_nan, n_inf=n_inf, n_total=tensor.numel(),
        suspect=f"{kind} {path}" if path else None,
    )  # fmt: skip
