"""Run a model in many ways that should give the same results, and say which do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hookline.display.text import first_line, listed, plural
from hookline.engine import path_text, require_model
from hookline.errors import InputError
from hookline.findings import Finding
from hookline.verbs.compare.comparison import ComparedSite, Comparison
from hookline.verbs.compare.tf32 import IN_TF32
from hookline.verbs.invariance.batch import CheckNotApplicable, batch_from_inputs
from hookline.verbs.invariance.checks import CHECKS
from hookline.verbs.invariance.reasons import (
    Reason,
    differs,
    find_proven_reason,
    holds,
    output_rows,
)
from hookline.verbs.invariance.result import Checked, Invariance, Outcome
from hookline.verbs.invariance.trials import Trials, compare_runs
from hookline.verbs.shared.failing_module import find_failing_module
from hookline.verbs.shared.refused_weights import refuse_lazy_parameters, refuse_meta_tensors
from hookline.verbs.shared.run_model import Inputs, refuse_function_or_iterator, unwrap_lone_tensor
from hookline.verbs.shared.token_inputs import find_cache, n_cached_tokens

_MOST_NAMED = 3
_UNSTEADY = "the model does not repeat itself"


def invariance(
    model: nn.Module,
    inputs: Inputs,
    *,
    only: Iterable[str] | None = None,
    backend: str | Callable[..., Any] = "aot_eager",
) -> Invariance:
    """Run a batch in many ways that should not change its results, and say which do.

        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> invariance = hl.invariance(model, torch.randn(4, 3, 8, 8), only=["twice", "alone"])
        >>> invariance["twice"].outcome, invariance["alone"].outcome, invariance["alone"].first
        ('holds', 'differs', '1')
        >>> invariance["alone"].why
        'batch norm in training mode: 1; call model.eval()'

    Each run is compared with that of the batch as given, by `hl.compare`: rows and tokens are
    aligned, and differences below the noise floor of the dtype count as equal. Where the outputs
    differ, the first site beyond noise is named, and the reason as far as a further run proves it.

    | check | the changed run |
    |---|---|
    | `"twice"` | the batch once more |
    | `"alone"` | rows one by one, at most four |
    | `"reordered"` | the rows in reverse order |
    | `"padded right"`, `"padded left"` | three more tokens of padding, with a mask |
    | `"padded with positions"` | the same, with the positions of the batch as given |
    | `"without padding"` | padded rows alone, without their padding |
    | `"chunks"` | the two halves of the tokens, with a cache |
    | `"after training"` | the batch after a forward in training mode |
    | `"training mode"` | the batch in training mode, which may differ |
    | `"compiled"` | `torch.compile(model, backend=backend)` |
    | `"checkpointed"` | forward and backward in training mode, with activation checkpointing |
    | `"float64"`, `"bfloat16"` | a copy of the model in this dtype |
    | `"other device"` | a copy of the model on the accelerator, or from there on the processor |

    The model runs in its own mode. If random numbers in training mode keep it from repeating
    itself, this is told, and the other checks run with these modules in eval mode. The model is
    left as it was.

    Args:
        model: the model.
        inputs: a batch of two rows or more: a tensor, a tuple of arguments, or a dict of keyword
            arguments. Dimension 0 of a tensor has the rows.
        only: the names of the checks to make; None makes all.
        backend: the backend for "compiled". The default runs the graph that torch.compile captures
            with torch's own kernels, in seconds and without a C++ compiler; "inductor" also checks
            the kernels that it generates.

    Returns:
        The result: `ok`, `findings`, `rows`; it prints as a table.

    Raises:
        InputError: `only` has an unknown name, the model has lazy parameters or none but shapes, or
            the inputs are a function or hold a cache of earlier tokens.
    """
    require_model(model, "hl.invariance(model, inputs)")
    refuse_function_or_iterator(inputs, "the model")
    refuse_lazy_parameters(model)
    refuse_meta_tensors("hl.invariance", model, inputs)
    names = _chosen_checks(only)
    batch = batch_from_inputs(model, unwrap_lone_tensor(model, inputs))
    n_earlier = n_cached_tokens(find_cache(batch.named))
    if batch.ids and n_earlier:
        raise InputError(
            "inputs must have all tokens of each row, got a cache of"
            f" {plural(n_earlier, 'earlier token')}."
            '\nGive the whole rows without it: the check "chunks" runs them with a cache.'
        )
    if "use_cache" in batch.accepted and "use_cache" not in batch.named:
        batch = batch.with_arguments(use_cache=False)  # the cache is no result
    trials = Trials(model, batch, backend)
    rows = list(_run_checks(trials, names))
    odd = [row for row in rows if row.outcome in ("differs", "may differ", "fails")]
    findings = [Finding(row.check, _row_text(row), row.first or "(root)") for row in odd]
    return Invariance(rows, [*_training_mode_finding(model), *findings])


def _chosen_checks(only: Iterable[str] | None) -> list[str]:
    if only is None:
        return list(CHECKS)
    is_list = isinstance(only, Iterable) and not isinstance(only, str)
    names: list[Any] = list(only) if is_list else [only]
    unknown = next((name for name in names if name not in CHECKS), None)
    if unknown is not None or not names:
        known = [repr(name) for name in CHECKS]
        raise InputError(
            f"only must be names of checks, got {unknown or only!r}.\nGive some of"
            f" {listed(known, len(known))}."
        )
    return [name for name in CHECKS if name in names]


def _training_mode_finding(model: nn.Module) -> Iterator[Finding]:
    """Say that the model is in training mode."""
    paths = [path for path, module in model.named_modules() if getattr(module, "training", False)]
    if paths:
        text = f"{plural(len(paths), 'module')} in training mode: call model.eval() to leave it"
        yield Finding("modes", text)


def _row_text(row: Checked) -> str:
    where = f", first at {row.first}" * bool(row.first)
    return f"{row.check}: {row.outcome}{where}" + f" ({row.why})" * bool(row.why)


# -- rows ----------------------------------------------------------------------------------------


def _run_checks(trials: Trials, names: list[str]) -> Iterator[Checked]:
    """Yield the rows. Without a run that repeats itself, no other change can be told."""
    first, reason = _run_check("twice", trials)
    if "twice" in names:
        yield first
    others = [name for name in names if name != "twice"]
    if first.outcome in ("differs", "fails"):
        if reason is None or not reason.eval_modules:
            yield from (Checked(name, "not applicable", why=_UNSTEADY) for name in others)
            return
        trials = replace(trials, eval_modules=reason.eval_modules)
    for name in others:
        yield _run_check(name, trials)[0]


def _run_check(name: str, trials: Trials) -> tuple[Checked, Reason | None]:
    """Make a check; if it does not hold, find the first site and the reason."""
    trials.base_run  # noqa: B018  # an error of the batch as given is the caller's
    try:
        runs = CHECKS[name](trials)
    except CheckNotApplicable as error:
        return Checked(name, "not applicable", why=str(error)), None
    except Exception as error:  # whatever the user's model raises
        reason = find_proven_reason(name, trials, None)
        return Checked(name, "fails", why=_failure_text(trials, error, reason)), reason
    try:
        comparison = compare_runs(*runs)
    except InputError as error:  # no fault of the model: its tokens cannot be told apart
        return Checked(name, "not applicable", why=first_line(error)), None
    outputs = output_rows(comparison)
    if not holds(comparison) and not differs(comparison):
        texts = [f"{row.site}: {row.why}" for row in outputs if row.verdict == "not comparable"]
        why = next(iter(texts), "the model returns no tensor")
        return Checked(name, "not applicable", why=why, comparison=comparison), None
    if holds(comparison):
        why = _inner_differences_text(comparison) or _tf32_remark(comparison)
        return Checked(
            name, "holds", _largest_relative_difference(outputs), "", None, why, comparison
        ), None
    reason = find_proven_reason(name, trials, comparison)
    outcome: Outcome = "may differ" if reason is not None and reason.is_expected else "differs"
    located = (
        comparison if outcome == "may differ" else _compare_with_inputs(name, trials, comparison)
    )
    site = "" if located.first is None else located.first.site
    why = _first_non_numeric_difference(located) if reason is None else reason.text
    return Checked(
        name, outcome, _largest_relative_difference(outputs), site, located.suspect, why, comparison
    ), reason


def _first_non_numeric_difference(comparison: Comparison) -> str:
    """Say what differs at the first site where no number tells it, such as NaN."""
    first = comparison.first
    return first.why if first is not None and first.relative is None else ""


def _largest_relative_difference(rows: list[ComparedSite]) -> float | None:
    return max((row.relative for row in rows if row.relative is not None), default=None)


def _failure_text(trials: Trials, error: Exception, reason: Reason | None) -> str:
    module = find_failing_module(trials.model, error)
    where = "" if module is None else f" in {path_text(module.path)}"
    text = f"{type(error).__name__}{where}: {first_line(error)}"
    return text if reason is None else f"{reason.text}; {text}"


def _inner_differences_text(comparison: Comparison) -> str:
    """Say that sites inside differ whose differences do not reach the outputs."""
    odd = [row.site for row in comparison if row.verdict == "differs"]
    if not odd:
        return ""
    return f"the outputs agree; inside differ {listed(odd, _MOST_NAMED)}"


def _tf32_remark(comparison: Comparison) -> str:
    """Say that the outputs agree as far as TF32 goes, if float32 asks for more."""
    if not any(row.why.endswith(IN_TF32) for row in output_rows(comparison)):
        return ""
    return next((finding.text for finding in comparison.findings if finding.kind == "floor"), "")


def _compare_with_inputs(name: str, trials: Trials, comparison: Comparison) -> Comparison:
    """Compare once more with the inputs of all modules, which tell a module from what feeds it."""
    if name == "checkpointed":  # whose sites are compared with gradients
        return comparison
    try:
        return compare_runs(*CHECKS[name](replace(trials, ports=("input", "output"))))
    except Exception:  # values that cannot be copied
        return comparison
