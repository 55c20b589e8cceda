"""Replay the choices of a router of experts, with the scores that this model gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine import Site
from hookline.engine.pytree import describe, leaves
from hookline.errors import AttachError, StructureError
from hookline.recordings import Recording
from hookline.recordings.pass_record import PassRecord
from hookline.statistics.flat_numbers import to_float64
from hookline.verbs.edit.compiled_edits import refuse_compiled
from hookline.verbs.edit.recorded_values import (
    ChangeFromRecording,
    RecordedValues,
    missing_site_error,
)
from hookline.verbs.edit.steps_and_tokens import PassAndCall

# Below this correlation, the logits of two runs are not those of the same tokens and router.
_LEAST_CORRELATION = 0.5
# Rounding that scores and logits may differ by, in units of the last place.
_N_ROUNDINGS = 16


class _RouterOutput(NamedTuple):
    """The output of a router."""

    logits: Tensor  # `(tokens, experts)`; or the probabilities that a softmax made of them
    scores: Tensor  # the weights of the chosen experts, `(tokens, chosen)`
    indices: Tensor  # the chosen experts, `(tokens, chosen)`


def _softmax(logits: Tensor, indices: Tensor) -> Tensor:
    return logits.float().softmax(-1).gather(-1, indices)


def _softmax_renormalised(logits: Tensor, indices: Tensor) -> Tensor:
    chosen = _softmax(logits, indices)
    return chosen / chosen.sum(-1, keepdim=True)


def _softmax_over_chosen(logits: Tensor, indices: Tensor) -> Tensor:
    return logits.gather(-1, indices).softmax(-1)


def _gather_probabilities(probabilities: Tensor, indices: Tensor) -> Tensor:
    return probabilities.gather(-1, indices)


def _gather_and_renormalise(probabilities: Tensor, indices: Tensor) -> Tensor:
    chosen = _gather_probabilities(probabilities, indices)
    return chosen / chosen.sum(-1, keepdim=True)


Rule = Callable[[Tensor, Tensor], Tensor]
# The ways in which routers make scores of logits, and of probabilities (transformers 5.0).
_RULES: tuple[Rule, ...] = (_softmax, _softmax_renormalised, _softmax_over_chosen)
_RULES_OF_PROBABILITIES: tuple[Rule, ...] = (_gather_probabilities, _gather_and_renormalise)


def _candidate_score_rules(logits: Tensor) -> tuple[Rule, ...]:
    slack = torch.finfo(logits.dtype).eps * _N_ROUNDINGS
    is_distribution = (logits >= 0).all() and ((logits.sum(-1) - 1).abs() <= slack).all()
    return _RULES_OF_PROBABILITIES if bool(is_distribution) else _RULES


@final
class SiteReroute:
    """The replay of one router.

    Args:
        run: the recording, or one of its passes.
        site: the router's output.

    Raises:
        AttachError: the site is not the whole output of a module.
    """

    __slots__ = ("_recorded", "_site")
    wants_pass_and_call = True

    def __init__(self, run: Recording | PassRecord, site: Site) -> None:
        if site.port != "output" or site.leaf:
            raise AttachError(
                f"hl.edits.reroute must be given the output of a router, got {site}."
                f"\nSelect the module: hl.edit(model, {site.path!r}, hl.edits.reroute(run))."
            )
        self._recorded = RecordedValues(run, site)
        self._site = site

    def __call__(self, value: Any, pass_and_call: PassAndCall | None = None) -> Any:
        """Return the router's output with the recorded experts and their scores.

        Raises:
            StructureError: the output is not that of a known router, or the recorded choices do not
                belong to it.
        """
        where = str(self._site)
        if pass_and_call is None and not is_dynamo_compiling():
            raise missing_site_error("reroute")
        if pass_and_call is None:
            return refuse_compiled("hl.edits.reroute", where, "it cannot tell its run and call")
        now = _parse_router_output(value, f"the output of {where}")
        then = _parse_router_output(
            self._recorded.value_at(pass_and_call), f"the recorded output of {where}"
        )
        if now.logits.shape != then.logits.shape or now.indices.shape != then.indices.shape:
            raise StructureError(
                f"hl.edits.reroute must find one choice for each token at {where}: expected"
                f" {describe.in_words(value)}, got a recording of"
                f" {describe.in_words(tuple(then))}.\nRecord and replay the same tokens, with the"
                " same padding. In generate, replay the steps that were recorded."
            )
        then = _RouterOutput(*[part.to(now.logits.device) for part in then])
        _check_experts_match_logits(then, where)
        _check_correlation(now.logits, then.logits, where)
        indices = then.indices.to(now.indices.dtype)
        scores = _find_score_rule(now, indices, where)(now.logits, indices).to(now.scores.dtype)
        return leaves.put(leaves.put(value, (1,), scores, where), (2,), indices.clone(), where)


def _parse_router_output(value: Any, what: str) -> _RouterOutput:
    """Return the parts of a router's output.

    Raises:
        StructureError: the value is not (logits, scores, indices).
    """
    parts = value if isinstance(value, tuple | list) else ()
    if len(parts) == 3 and all(isinstance(part, Tensor) for part in parts):
        choice = _RouterOutput(*parts)
        logits, scores, indices = choice
        if (
            logits.dim() == indices.dim() == 2
            and logits.is_floating_point()
            and scores.is_floating_point()
            and not indices.is_floating_point()
            and scores.shape == indices.shape
            and logits.shape[0] == indices.shape[0]
            and logits.shape[1] >= indices.shape[1]
        ):
            return choice
    raise StructureError(
        f"hl.edits.reroute must be given routers that return (logits, scores, indices), got {what}:"
        f" {describe.in_words(value)}.\nSelect the module that chooses the experts, and record its"
        " whole output. For another router, give hl.edit a function of your own."
    )


def _check_experts_match_logits(recorded: _RouterOutput, where: str) -> None:
    """Refuse recorded experts that are not those of the recorded logits.

    Such are rows of padding that were filled in later, or choices of another step.
    """
    logits, _, indices = recorded
    n_experts = logits.shape[1]
    is_wrong = ((indices < 0) | (indices >= n_experts)).any(-1)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(-1, indices.long().clamp(0, n_experts - 1), True)
    is_wrong |= chosen.sum(-1) != indices.shape[1]  # an expert twice
    if indices.shape[1] < n_experts:
        least = logits.masked_fill(~chosen, torch.inf).amin(-1)
        most = logits.masked_fill(chosen, -torch.inf).amax(-1)
        slack = torch.finfo(logits.dtype).eps * _N_ROUNDINGS * logits.abs().amax(-1)
        is_wrong |= least < most - slack
    if bool(is_wrong.any()):
        rows = is_wrong.nonzero().flatten().tolist()
        raise StructureError(
            f"the experts recorded at {where} must be the best of the recorded logits, got others"
            f" in {len(rows)} of {len(logits)} tokens, first token {rows[0]}."
            "\nRecord the router's output as it is, also for padding, in a run without edits."
            " For a router that chooses by more than its logits, as by a bias of each expert, give"
            " hl.edit a function of your own."
        )


def _check_correlation(logits: Tensor, recorded: Tensor, where: str) -> None:
    """Refuse a recording of other tokens or of another router."""
    correlation = _logit_correlation(to_float64(logits.detach()), to_float64(recorded.detach()))
    if correlation < _LEAST_CORRELATION:
        raise StructureError(
            f"the logits recorded at {where} must be of the same tokens and router, got a"
            f" correlation of {correlation:.2f} with those of this run."
            "\nRecord the same inputs, and replay each router from its own recording."
        )


def _logit_correlation(logits: Tensor, recorded: Tensor) -> float:
    """Return the correlation of logits, without what all tokens have in common."""
    logits, recorded = (each - each.mean(-1, keepdim=True) for each in (logits, recorded))
    varying = [each - each.mean(0) for each in (logits, recorded)]
    if all(
        part.norm() > 0.01 * whole.norm()
        for part, whole in zip(varying, (logits, recorded), strict=True)
    ):
        logits, recorded = varying
    size = logits.norm() * recorded.norm()
    return float((logits * recorded).sum() / size) if size > 0 else 1.0


def _find_score_rule(output: _RouterOutput, indices: Tensor, where: str) -> Rule:
    """Find the rule that makes the router's own scores.

    Raises:
        StructureError: no known rule makes them, or two do that differ for the recorded experts.
    """
    logits, scores, own = output.logits.detach(), output.scores.detach(), output.indices
    eps = max(torch.finfo(dtype).eps for dtype in (logits.dtype, scores.dtype))
    errors = {
        rule: float((rule(logits, own).to(scores.dtype) - scores).abs().max())
        for rule in _candidate_score_rules(logits)
    }
    fits = sorted(
        (error, k, rule)
        for k, (rule, error) in enumerate(errors.items())
        if error <= _N_ROUNDINGS * eps
    )
    if not fits:
        nearest = min(errors.values())
        raise StructureError(
            f"hl.edits.reroute must know how {where} makes its scores: a softmax, a softmax"
            " renormalised over the chosen experts, or a softmax over them, got others, which"
            f" differ by {nearest:.2g}.\nGive hl.edit a function that puts the recorded indices and"
            " their scores."
        )
    best = fits[0][2]
    for _, _, other in fits[1:]:
        difference = (best(logits, indices) - other(logits, indices)).abs().max()
        if float(difference) > 2 * _N_ROUNDINGS * eps:
            raise StructureError(
                f"hl.edits.reroute must know how {where} makes its scores, got scores of these"
                " tokens that two rules make, which differ for the recorded experts."
                "\nReplay more tokens at once."
            )
    return best


def reroute(run: Recording | PassRecord) -> ChangeFromRecording:
    """Send each token to the experts that the router chose in a recorded run.

        >>> class Router(nn.Linear):
        ...     def forward(self, x):
        ...         logits = super().forward(x)
        ...         scores, indices = logits.softmax(-1).topk(2)
        ...         return logits, scores, indices
        >>> router, x = Router(4, 8), torch.randn(5, 4)
        >>> with hl.record(router) as run:
        ...     _, _, chosen = router(x)
        >>> with hl.edit(router, "(root)", hl.edits.reroute(run)):
        ...     _, _, replayed = router(x + 0.01)
        >>> torch.equal(chosen, replayed)
        True

    Rounding moves tokens to other experts, which hides all other differences between two runs of a
    mixture of experts. The replay keeps the logits of this model, and computes from them the scores
    of the recorded experts, through which gradients flow. The rule of the scores is found: a
    softmax, a softmax renormalised over the chosen experts, or a softmax over them. Routers that
    return probabilities in place of logits are replayed, too.

    Args:
        run: what `hl.record` returned for the routers, with their whole outputs `(logits, scores,
            indices)`; or one of its `passes`. Runs and calls are counted as in `patch`.

    Returns:
        A change for `hl.edit`, for routers of the same form.

    Raises:
        AttachError: `run` is not a recording, or (by `hl.edit`) the site is not a whole output.
        NotRecordedError: the recording lacks the router, the run or the call.
        StructureError: (when the model runs) the output is not that of a router; no known rule
            makes its scores; or the recorded experts are not those of the recorded logits, or are
            of other tokens or another router.
    """
    return ChangeFromRecording("reroute", run, SiteReroute)
