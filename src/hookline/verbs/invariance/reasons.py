"""Find the reason why a check does not hold, and prove it by a counter-check."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from hookline.display.text import listed
from hookline.engine import path_text
from hookline.verbs.compare.comparison import ComparedSite, Comparison
from hookline.verbs.invariance.batch import IDS, MASK, POSITIONS, Batch, CheckNotApplicable
from hookline.verbs.invariance.checks import BATCH_NORM, CHECKS, run_restoring_rng
from hookline.verbs.invariance.trials import Run, Trials, compare_runs, is_model_result

_MOST_NAMED = 3
_DROPOUT = nn.modules.dropout._DropoutNd


class Reason(NamedTuple):
    """Explain why a check does not hold."""

    text: str  # the reason in words, with what to do
    is_expected: bool = False  # whether no model could hold, so that it counts against none
    # Modules that must run in eval mode for the other checks to tell anything.
    eval_modules: tuple[nn.Module, ...] = ()


class FailedCheck(NamedTuple):
    """A check that does not hold."""

    name: str  # the check
    trials: Trials  # the runs
    comparison: Comparison | None  # what was compared; None if the changed run has raised an error

    @property
    def batch(self) -> Batch:
        """The arguments of the model as given."""
        return self.trials.batch


def output_rows(comparison: Comparison) -> list[ComparedSite]:
    """Return the rows of the model's outputs and gradients."""
    return [row for row in comparison if is_model_result(row.site)]


def holds(comparison: Comparison) -> bool:
    """Tell whether all of the model's outputs were compared, and are equal up to noise."""
    outputs = output_rows(comparison)
    return bool(outputs) and all(row.verdict in ("identical", "noise") for row in outputs)


def differs(comparison: Comparison) -> bool:
    """Tell whether one of the model's outputs differs beyond noise."""
    return any(row.verdict == "differs" for row in output_rows(comparison))


def find_proven_reason(name: str, trials: Trials, comparison: Comparison | None) -> Reason | None:
    """Return the proven reason why a check does not hold; None if it is not known."""
    case = FailedCheck(name, trials, comparison)
    for reason in _REASONS.get(name, (_explain_by_training_mode,)):
        try:
            proven = reason(case)
        except Exception:  # whatever the model raises of the inputs of a counter-check
            continue
        if proven is not None:
            return proven
    return None


# -- inputs --------------------------------------------------------------------------------------


def _explain_by_other_positions(case: FailedCheck) -> Reason | None:
    """Say that the tokens have other positions."""
    texts = (
        [remark.text for remark in case.comparison.findings] if case.comparison is not None else []
    )
    text = next((text for text in texts if f"{POSITIONS} are" in text), None)
    if text is None:
        return None
    text = re.sub(r" in a and (\d+) in b", r" in place of \1", text)
    advice = f"; give {POSITIONS} that count from the first token"
    return Reason(text + advice * (POSITIONS in case.batch.accepted), is_expected=True)


def _explain_by_own_positions(case: FailedCheck) -> Reason | None:
    """Say that a model does not count positions from 0 itself."""
    if POSITIONS in case.batch.named:
        return None
    given = case.trials.run(case.batch.with_arguments(**{POSITIONS: case.batch.positions}))
    if not differs(compare_runs(given, case.trials.base_run)):
        return None
    text = f"the model counts positions otherwise than {POSITIONS} 0, 1, 2 … do"
    return Reason(text, is_expected=True)


def _explain_by_unused_mask(case: FailedCheck) -> Reason | None:
    """Prove that tokens see the padding: its contents change their values.

    An output without tokens, such as a pooler's, may take a column that is padding.
    """
    other = replace(case.batch, pad_id=_non_pad_id(case.batch))
    check = CHECKS[case.name]
    run, changed = check(case.trials)[0], check(replace(case.trials, batch=other))[0]
    rows = [row for row in output_rows(compare_runs(run, changed)) if row.verdict == "differs"]
    is_by_token = any(_is_by_token(run, row) for row in rows)
    if not rows or not (is_by_token or not _holds_when_padded_right(case)):
        return None
    return Reason(f"tokens see the padding: the {MASK} is not used there")


def _is_by_token(run: Run, row: ComparedSite) -> bool:
    ids: Tensor = run.tokens[IDS]
    return run.recording.tensor(row.site).shape[:2] == ids.shape


def _holds_when_padded_right(case: FailedCheck) -> bool:
    check = CHECKS["padded right"]
    return case.name != "padded right" and holds(compare_runs(*check(case.trials)))


def _explain_by_fixed_column(case: FailedCheck) -> Reason | None:
    """Say that padding on the left alone is seen, such as by a pooler of the first token."""
    if not _holds_when_padded_right(case):
        return None
    text = "a fixed column of tokens is taken, such as the first, which is padding here"
    return Reason(text, is_expected=True)


def _non_pad_id(batch: Batch) -> int:
    """Return an id of the batch that is not the one for padding."""
    ids: Tensor = batch.named[batch.ids]
    others = ids[ids != (batch.pad_id or 0)]
    return int(others[0]) if len(others) else 1


def _explain_by_missing_mask(case: FailedCheck) -> Reason | None:
    """Prove that a mask is missing: with one, the check holds."""
    batch = case.batch
    if isinstance(batch.named.get(MASK), Tensor) or MASK not in batch.accepted:
        return None
    masked = replace(case.trials, batch=batch.with_mask())
    if not holds(compare_runs(*CHECKS[case.name](masked))):
        return None
    return Reason(f"no {MASK} is given: give {MASK}=({batch.ids} != {batch.pad_id}).long()")


def _explain_by_other_rows(case: FailedCheck) -> Reason | None:
    """Prove that rows see each other: the contents of the others change the first row."""
    other = case.trials.run(case.batch.with_other_rows_changed())
    return (
        Reason("rows see each other")
        if differs(compare_runs(other, case.trials.base_run))
        else None
    )


# -- modes and random numbers --------------------------------------------------------------------


def _explain_by_training_mode(case: FailedCheck) -> Reason | None:
    """Prove that training mode is the reason: in eval mode, the check holds."""
    modes = _modules_in_training(case.trials)
    norms = {path: module for path, module in modes.items() if _is_batch_norm(module)}
    drops = {path: module for path, module in modes.items() if _is_dropout(module)}
    others = {path: module for path, module in modes.items() if path not in norms}
    for noun, modules, eval_modules in (
        ("batch norm", norms, norms), ("dropout", drops, others), ("", others, others),
        ("", modes, modes),
    ):  # fmt: skip
        if modules and _holds_in_eval_mode(case, modules):
            paths = listed([path_text(path) for path in modules], _MOST_NAMED)
            what = f"{noun} in training mode" if noun else "training mode"
            text = f"{what}: {paths}; call model.eval()"
            return Reason(text, eval_modules=tuple(eval_modules.values()))
    return None


def _modules_in_training(trials: Trials) -> dict[str, nn.Module]:
    eval_modules = set(map(id, trials.eval_modules))
    return {
        path: module
        for path, module in trials.model.named_modules()
        if getattr(module, "training", False) and id(module) not in eval_modules
    }


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUT) and module.p > 0


def _holds_in_eval_mode(case: FailedCheck, eval_modules: dict[str, nn.Module]) -> bool:
    """Tell whether a check holds with some more modules in eval mode."""
    rested = replace(case.trials, eval_modules=(*case.trials.eval_modules, *eval_modules.values()))
    try:
        return holds(compare_runs(*CHECKS[case.name](rested)))
    except CheckNotApplicable:
        return False


def _explain_by_training_layers(case: FailedCheck) -> Reason:
    """Name the modules that training mode changes."""
    kinds = []
    for noun, is_of in (("dropout", _is_dropout), ("batch norm", _is_batch_norm)):
        n_modules = sum(map(is_of, case.trials.model.modules()))
        kinds += [f"{noun} ({n_modules} modules)"] * (n_modules > 0)
    text = f"training mode switches on {' and '.join(kinds)}" if kinds else "training mode differs"
    return Reason(text, is_expected=True)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORM)


def _explain_by_randomness_or_state(case: FailedCheck) -> Reason:
    """Tell random numbers from a state that is kept, and both from an unsteady device."""
    trials = case.trials
    if differs(compare_runs(trials.run(case.batch), trials.base_run)):
        return Reason(
            "the model does not repeat itself from one state: an operation is unsteady, or keeps a"
            " state that hookline does not put back"
        )

    once = partial(run_restoring_rng, trials)
    if holds(compare_runs(trials.run(case.batch, before=once), trials.base_run)):
        return Reason("the model draws random numbers in each run")
    return Reason("the model keeps a state from run to run, in buffers or attributes")


# -- dtypes --------------------------------------------------------------------------------------


def _explain_by_flipped_choice(case: FailedCheck) -> Reason | None:
    """Say that rounding has flipped a choice, such as that of an expert."""
    odd = [row for row in case.comparison or () if row.verdict == "differs"]
    choice = next((row.site for row in odd if "int" in row.form or "bool" in row.form), None)
    if choice is None or not odd[0].site.startswith(choice.partition(":")[0]):
        return None
    return Reason(f"rounding flips a near tie: another choice at {choice}", is_expected=True)


_OF_PADDING = _explain_by_training_mode, _explain_by_unused_mask, _explain_by_other_positions
_OF_ROWS = _explain_by_training_mode, _explain_by_other_rows
_OF_DTYPES = _explain_by_training_mode, _explain_by_flipped_choice
# What may be the reason, by the name of the check; of others, a mode may.
_REASONS: dict[str, tuple[Callable[[FailedCheck], Reason | None], ...]] = {
    "twice": (_explain_by_training_mode, _explain_by_randomness_or_state),
    "alone": _OF_ROWS,
    "reordered": _OF_ROWS,
    "padded right": (*_OF_PADDING, _explain_by_fixed_column),
    "padded left": (*_OF_PADDING, _explain_by_fixed_column),
    "padded with positions": (*_OF_PADDING, _explain_by_own_positions, _explain_by_fixed_column),
    "without padding": (
        _explain_by_training_mode,
        _explain_by_missing_mask,
        _explain_by_other_positions,
    ),
    "training mode": (_explain_by_training_layers,),
    "checkpointed": (),
    "float64": _OF_DTYPES,
    "bfloat16": _OF_DTYPES,
}
