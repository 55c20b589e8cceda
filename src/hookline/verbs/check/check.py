"""Stop at the first value that is not finite, and say who made it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Self, final

from torch import nn

from hookline.display.text import plural
from hookline.engine import (
    Consequence,
    Line,
    ModuleNode,
    Report,
    ShardingRanks,
    Site,
    has_forward,
    has_process_group,
    hide_from_dir,
    is_uncompiled_leaf,
    module_tree,
    require_model,
    sharding_kind,
)
from hookline.errors import warn
from hookline.statistics.finiteness import (
    NonFinite,
    indices_of_non_finite,
    is_measurable,
    non_finite_kinds,
    probe_sum_of_each,
)
from hookline.verbs.check.backward import BackwardChecks
from hookline.verbs.check.finding import SINCE_START, CheckFinding
from hookline.verbs.check.forward import ForwardChecks
from hookline.verbs.check.pending_findings import CheckedModel, PendingFindings, finding_of_tensor
from hookline.verbs.check.replay import named_parameters_and_buffers
from hookline.verbs.check.replay_file import make_folder
from hookline.verbs.check.unusual_outputs import checked_names
from hookline.verbs.shared.finalizing_line import FinalizingLine


@final
@hide_from_dir("start")
class CheckLine(FinalizingLine[Line]):
    """A line that checks: a context manager, or ended by `remove()`.

    Attributes:
        findings: the first 100 findings, also those that were not raised because the NaN or
            infinity vanished; and the first 100 that `also` asks for.
    """

    def __init__(
        self, line: Line, model: nn.Module, folder: Path | None, also: frozenset[str]
    ) -> None:
        super().__init__(line)
        self._outcome = PendingFindings(folder)
        self.findings: list[CheckFinding] = self._outcome.all
        is_sharded = has_process_group() and bool(sharding_kind(model))
        over = ShardingRanks.of(model) if is_sharded else None
        self._checked = checked = CheckedModel(line.passes, weakref.ref(model), over)
        self._forward = ForwardChecks(checked, self._outcome, also)
        self._backward = BackwardChecks(
            checked, self._outcome, self._forward, warns_of_missing="missing_grad" in also
        )

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __repr__(self) -> str:
        return f"{super().__repr__()}; {plural(len(self.findings), 'finding')}"

    def start(self) -> None:
        """Refuse a model that is poisoned already, and attach the taps, all or none."""
        line = self._line
        finding = _find_bad_weight(line.nodes, None, with_buffers=True)
        finding = self._checked.earliest_at_start(finding)
        if finding is not None:
            raise self._outcome.add(finding).error()
        places = [
            (Site(node.path, aliases=node.aliases, module_type=node.type_name), node)
            for node in line.nodes
            if has_forward(node.module) and (is_uncompiled_leaf(node.module) or not node.path)
        ]
        with line.undo_on_error() as registrations:
            self._forward.attach(line, places)
            root = [(site, node) for site, node in places if not node.path]
            self._backward.attach(line, root, registrations)

    def report(self) -> Report:
        """Report the sites that were checked, and how often each fired."""
        return self._line.report()

    def remove(self) -> None:
        """End the line, and raise an error for what no optimizer has stepped with. Idempotent."""
        self._before_removal(None)
        super().remove()

    def _before_removal(self, error: BaseException | None) -> None:
        has_ended = self._line.passes.closed
        if error is None:
            self._forward.judge_dead_units()
        self._backward.report_unstepped_gradients(error)
        if error is None and not has_ended:
            self._check_final_weights()

    def _check_final_weights(self) -> None:
        """Look for weights that the last step has poisoned: no run came after it to show them."""
        outcome, root = self._outcome, self._line.root
        is_told = outcome.at_end is not None or any(finding.is_error for finding in outcome.all)
        if is_told or root is None:
            return
        finding = _find_bad_weight(
            module_tree(root).nodes, self._forward.last_step, with_buffers=False
        )
        finding = self._checked.earliest(finding)
        if finding is not None:
            outcome.at_end = outcome.add(finding.with_(notes=(SINCE_START,)))

    def _after_removal(self, error: BaseException | None) -> None:
        outcome = self._outcome
        raised, outcome.at_end = outcome.at_end, None
        if raised is not None and error is None:
            outcome.is_told = True
            raise raised.error()
        if error is None and not outcome.is_told:
            outcome.is_told = True
            self._forward.warn_if_nothing_measured()
            self._warn_of_other_contexts()
            errors = filter(attrgetter("is_error"), self.findings)
            swallowed = next((error for error in errors if error not in outcome.warned), None)
            if swallowed is not None:
                warn(
                    f"hl.check: {swallowed.message.splitlines()[0]}"
                    "\nThe error was caught on its way; line.findings has the first 100 findings."
                )

    def _warn_of_other_contexts(self) -> None:
        """Warn if the model ran in other threads alone: nothing was checked."""
        report = self._line.report()
        told = report.warning() if report.other_contexts and not report.passes else None
        if told is not None:
            warn(told)


def _find_bad_weight(
    nodes: Sequence[ModuleNode], step: int | None, *, with_buffers: bool
) -> CheckFinding | None:
    """Find a parameter that is not finite, or a buffer that holds a NaN."""
    allowed = {"parameter": NonFinite.NONE, "buffer": NonFinite.INF | NonFinite.MINUS_INF}
    entries = [
        entry for entry in named_parameters_and_buffers(nodes)
        if is_measurable(entry[2]) and (with_buffers or entry[0] == "parameter")
    ]  # fmt: skip
    probes = probe_sum_of_each(tensor for _, _, tensor in entries)
    for index in indices_of_non_finite(probes):
        kind, path, tensor = entries[index]
        if non_finite_kinds(tensor) & ~allowed[kind]:
            return finding_of_tensor(kind, path, tensor, step)
    return None


_CONSEQUENCE = Consequence(
    "the checks of {sites} no longer happen", "the checks of {sites} are at {now} now"
)


def check(
    model: nn.Module,
    *,
    also: str | Iterable[str] = (),
    keep: str | os.PathLike[str] | None = None,
    every_thread: bool = False,
) -> CheckLine:
    """Stop at the first value that is not finite, in forward or backward, and say who made it.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> try:
        ...     with hl.check(model):
        ...         _ = model(torch.tensor([[1.0, float("nan")]]))
        ... except hl.NonFiniteError as error:
        ...     print(error.finding.kind, error.finding.path, error.finding.n_nan)
        input (root):input 1

    For each output of a leaf module, and of the model, the sum of its elements is computed. A NaN
    or an infinity makes this sum non-finite. All sums are read once, at the end of each run of the
    model. If a sum is not finite, the run is repeated once, operation by operation, with the same
    inputs and random numbers. Then the model's call raises the error. `print(error.finding)` names
    the operation, the line of code, the module, the inputs and the likely cause. If the outputs of
    the repeated run differ from those of the first, the error is raised, too, and names no
    operation.

    An infinity that is meant raises no error: a mask of -inf, an infinity in a buffer, memory that
    was never written. A NaN that the model's code writes out, as in `x[0] = nan`, raises none
    either; a NaN that is computed from it does. A NaN or an infinity that does not reach the
    model's output raises none, and is kept in `line.findings`.

    A gradient raises the error when an optimizer is about to step with it, and so does a loss that
    is NaN. So a step that a `GradScaler` or the loop skips raises none. If no optimizer steps, the
    end of the block raises the error.

    Args:
        model: the model, as it is called.
        also: one or several of these, which warn and raise no error. Each takes more time. Each
            warning is also a finding in `line.findings`.

            - "magnitude": outputs whose largest magnitude is more than 10,000 times, or less than
              a 10,000th of, that in the first run
            - "dead": channels or features that were 0 in all runs, if there were at least ten.
              The finding has their indices in `units`
            - "constant": outputs whose elements are all equal
            - "shapes": outputs whose dtype, or shape beyond the first dimension, differs from that
              of the first run
            - "missing_grad": parameters without a gradient when an optimizer steps
        keep: a folder for the module that made the value: its inputs, parameters and buffers, and
            the random state. `hookline replay FILE` shows such a file and runs the module again. At
            most ten files are written.
        every_thread: True checks runs in every thread and async task. False checks those of the
            calling thread or task, and of code that runs in a copy of its context.

    Returns:
        A line. Use it in a `with` block, or end it with `line.remove()`. `line.findings` has the
        first hundred findings, also those whose error was caught on its way.

    Raises:
        AttachError: `model` is not a model, or `also` names something unknown.
        FolderError: `keep` cannot be written.
        RanksError: weights are sharded, and another rank that has shards does not check.
        NonFiniteError: a parameter is not finite, or a buffer holds a NaN. Later, the model's call,
            the optimizer's step or the end of the block raises it: a value is not finite.
    """
    require_model(model, "hl.check(model)")
    habits = checked_names(also)
    folder = None if keep is None else make_folder(keep)
    line = Line(model, name="check", every_thread=every_thread)
    line.options.lenient = True
    line.options.quiet = True
    line.originals.consequence = _CONSEQUENCE
    checking = CheckLine(line, model, folder, habits)
    checking.start()
    return checking
