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
from hookline.verbs.invariance.checks import BATCH_NORM, CHECKS, run_without_draws
from hookline.verbs.invariance.feed import IDS, MASK, POSITIONS, Feed, NotApplicable
from hookline.verbs.invariance.trials import Run, Trials, compared, is_result

_MOST_NAMED = 3
_DROPOUT = nn.modules.dropout._DropoutNd
_PADDED = ("padded right", "padded left", "padded with positions")
_DTYPES = ("float64", "bfloat16")


class Reason(NamedTuple):
    """Explain why a check does not hold.

    Args:
        text: the reason in words, with what to do.
        is_expected: whether no model could hold, so that it counts against none.
        resting: modules that must run in eval mode for the other checks to tell anything.
    """

    text: str
    is_expected: bool = False
    resting: tuple[nn.Module, ...] = ()


def outputs_of(comparison: Comparison) -> list[ComparedSite]:
    """Return the rows of the model's outputs and gradients."""
    return [row for row in comparison if is_result(row.site)]


def holds(comparison: Comparison) -> bool:
    """Tell whether all of the model's outputs were compared, and are equal up to noise."""
    outputs = outputs_of(comparison)
    return bool(outputs) and all(row.verdict in ("identical", "noise") for row in outputs)


def differs(comparison: Comparison) -> bool:
    """Tell whether one of the model's outputs differs beyond noise."""
    return any(row.verdict == "differs" for row in outputs_of(comparison))


def reason_of(name: str, trials: Trials, comparison: Comparison | None) -> Reason | None:
    """Return the proven reason why a check does not hold; None if it is not known.

    Args:
        name: the check.
        trials: the runs.
        comparison: what was compared; None if the changed run has raised an error.
    """
    reasons: list[Callable[[], Reason | None]] = [partial(_of_modes, name, trials)]
    if name == "twice":
        reasons.append(partial(_of_repeats, trials))
    elif name == "training mode":
        reasons = [partial(_of_training, trials)]
    elif name in _PADDED:
        reasons += [
            partial(_of_mask, name, trials),
            partial(_of_positions, trials, comparison),
            partial(_of_own_positions, name, trials),
            partial(_of_column, name, trials),
        ]
    elif name == "without padding":
        reasons += [partial(_of_no_mask, trials), partial(_of_positions, trials, comparison)]
    elif name in ("alone", "reordered"):
        reasons.append(partial(_of_rows, trials))
    elif name in _DTYPES and comparison is not None:
        reasons.append(partial(_of_ties, comparison))
    proven = map(_proven, reasons)
    return next((reason for reason in proven if reason is not None), None)


def _proven(reason: Callable[[], Reason | None]) -> Reason | None:
    try:
        return reason()
    except Exception:  # whatever the model raises of the inputs of a counter-check
        return None


# -- inputs --------------------------------------------------------------------------------------


def _of_positions(trials: Trials, comparison: Comparison | None) -> Reason | None:
    """Say that the tokens have other positions."""
    texts = [remark.text for remark in comparison.findings] if comparison is not None else []
    text = next((text for text in texts if f"{POSITIONS} are" in text), None)
    if text is None:
        return None
    text = re.sub(r" in a and (\d+) in b", r" in place of \1", text)
    advice = f"; give {POSITIONS} that count from the first token"
    return Reason(text + advice * (POSITIONS in trials.feed.accepted), is_expected=True)


def _of_own_positions(name: str, trials: Trials) -> Reason | None:
    """Say that a model does not count positions from 0 itself."""
    if POSITIONS in trials.feed.named or name != "padded with positions":
        return None
    given = trials.run(trials.feed.with_named(**{POSITIONS: trials.feed.positions}))
    if not differs(compared(given, trials.base)):
        return None
    text = f"the model counts positions otherwise than {POSITIONS} 0, 1, 2 … do"
    return Reason(text, is_expected=True)


def _of_mask(name: str, trials: Trials) -> Reason | None:
    """Prove that tokens see the padding: its contents change their values.

    An output without tokens, such as a pooler's, may take a column that is padding.
    """
    other = replace(trials.feed, pad_id=_other_id(trials.feed))
    check = CHECKS[name]
    run, changed = check(trials)[0], check(replace(trials, feed=other))[0]
    rows = [row for row in outputs_of(compared(run, changed)) if row.verdict == "differs"]
    is_by_token = any(_has_tokens(run, row) for row in rows)
    if not rows or not (is_by_token or not _holds_on_the_right(name, trials)):
        return None
    return Reason(f"tokens see the padding: the {MASK} is not used there")


def _has_tokens(run: Run, row: ComparedSite) -> bool:
    ids: Tensor = run.tokens[IDS]
    return run.recording.tensor(row.site).shape[:2] == ids.shape


def _holds_on_the_right(name: str, trials: Trials) -> bool:
    return name != "padded right" and holds(compared(*CHECKS["padded right"](trials)))


def _of_column(name: str, trials: Trials) -> Reason | None:
    """Say that padding on the left alone is seen, such as by a pooler of the first token."""
    if not _holds_on_the_right(name, trials):
        return None
    text = "a fixed column of tokens is taken, such as the first, which is padding here"
    return Reason(text, is_expected=True)


def _other_id(feed: Feed) -> int:
    """Return an id of the batch that is not the one for padding."""
    ids: Tensor = feed.named[feed.ids]
    others = ids[ids != (feed.pad_id or 0)]
    return int(others[0]) if len(others) else 1


def _of_no_mask(trials: Trials) -> Reason | None:
    """Prove that a mask is missing: with one, the check holds."""
    feed = trials.feed
    if isinstance(feed.named.get(MASK), Tensor) or MASK not in feed.accepted:
        return None
    masked = replace(trials, feed=feed.with_mask())
    if not holds(compared(*CHECKS["without padding"](masked))):
        return None
    return Reason(f"no {MASK} is given: give {MASK}=({feed.ids} != {feed.pad_id}).long()")


def _of_rows(trials: Trials) -> Reason | None:
    """Prove that rows see each other: the contents of the others change the first row."""
    changed = trials.run(trials.feed.with_others_changed())
    return Reason("rows see each other") if differs(compared(changed, trials.base)) else None


# -- modes and random numbers --------------------------------------------------------------------


def _of_modes(name: str, trials: Trials) -> Reason | None:
    """Prove that training mode is the reason: in eval mode, the check holds."""
    modes = _modules_in_training(trials)
    norms = {path: module for path, module in modes.items() if _is_batch_norm(module)}
    drops = {path: module for path, module in modes.items() if _is_dropout(module)}
    others = {path: module for path, module in modes.items() if path not in norms}
    if not modes or name == "checkpointed":
        return None
    for noun, modules, resting in (
        ("batch norm", norms, norms), ("dropout", drops, others), ("", others, others),
        ("", modes, modes),
    ):  # fmt: skip
        if modules and _holds_with(name, trials, modules):
            paths = listed([path_text(path) for path in modules], _MOST_NAMED)
            what = f"{noun} in training mode" if noun else "training mode"
            text = f"{what}: {paths}; call model.eval()"
            return Reason(text, resting=tuple(resting.values()))
    return None


def _modules_in_training(trials: Trials) -> dict[str, nn.Module]:
    resting = set(map(id, trials.resting))
    return {
        path: module
        for path, module in trials.model.named_modules()
        if getattr(module, "training", False) and id(module) not in resting
    }


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUT) and module.p > 0


def _holds_with(name: str, trials: Trials, resting: dict[str, nn.Module]) -> bool:
    """Tell whether a check holds with some more modules in eval mode."""
    rested = replace(trials, resting=(*trials.resting, *resting.values()))
    try:
        return holds(compared(*CHECKS[name](rested)))
    except NotApplicable:
        return False


def _of_training(trials: Trials) -> Reason:
    """Name the modules that training mode changes."""
    kinds = []
    for noun, is_of in (("dropout", _is_dropout), ("batch norm", _is_batch_norm)):
        n_modules = sum(map(is_of, trials.model.modules()))
        kinds += [f"{noun} ({n_modules} modules)"] * (n_modules > 0)
    text = f"training mode switches on {' and '.join(kinds)}" if kinds else "training mode differs"
    return Reason(text, is_expected=True)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORM)


def _of_repeats(trials: Trials) -> Reason:
    """Tell random numbers from a state that is kept, and both from an unsteady device."""
    feed = trials.feed
    if differs(compared(trials.run(feed), trials.base)):
        return Reason(
            "the model does not repeat itself from one state: an operation is unsteady, or keeps a"
            " state that hookline does not put back"
        )

    once = partial(run_without_draws, trials)
    if holds(compared(trials.run(feed, before=once), trials.base)):
        return Reason("the model draws random numbers in each run")
    return Reason("the model keeps a state from run to run, in buffers or attributes")


# -- dtypes --------------------------------------------------------------------------------------


def _of_ties(comparison: Comparison) -> Reason | None:
    """Say that rounding has flipped a choice, such as that of an expert."""
    odd = [row for row in comparison if row.verdict == "differs"]
    choices = [row for row in odd if _is_choice(row)]
    if not choices or not odd:
        return None
    module = choices[0].site.partition(":")[0]
    if not odd[0].site.startswith(module):
        return None
    return Reason(f"rounding flips a near tie: another choice at {choices[0].site}", True)


def _is_choice(row: ComparedSite) -> bool:
    return any(kind in row.form for kind in ("int", "bool"))
