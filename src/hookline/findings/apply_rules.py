"""Apply the rules to the survey of a pass, the most basic first."""

from __future__ import annotations

from hookline.findings import backward_rules, forward_rules
from hookline.findings.finding import Finding, sort_by_level
from hookline.findings.spread_rules import unusual_spreads
from hookline.findings.survey import Survey

_CAUSES = ("dead", "channels", "exploding", "vanishing", "non-finite")


def judge_survey(survey: Survey) -> list[Finding]:
    """Return the findings of a pass, the worst first.

    Consequences are left out: of gradients where the forward is not finite, of spreads after it.
    """
    broken = list(forward_rules.non_finite(survey))
    place = {reading.site: k for k, reading in reversed(list(enumerate(survey.readings)))}
    values = [
        *forward_rules.dead_outputs(survey),
        *forward_rules.dead_channels(survey),
        *unusual_spreads(survey),
        *forward_rules.saturated_attention(survey),
        *forward_rules.odd_dtypes(survey),
        *forward_rules.shared_modules(survey),
        *forward_rules.missing_norms(survey),
    ]
    values.sort(key=lambda finding: place.get(finding.site, -1))
    never_called = list(forward_rules.never_called(survey))
    findings = [*broken, *values, *(finding for finding in never_called if finding.level != "note")]
    has_forward_fault = any(f.kind in _CAUSES and f.level != "note" for f in findings)
    if not broken:
        findings += backward_rules.non_finite(survey)
        findings += backward_rules.stopped_gradient(survey)
        findings += backward_rules.frozen_parameters(survey, has_forward_fault)
    if not broken and not has_forward_fault:
        findings += backward_rules.exploding_or_vanishing(survey)
        findings += backward_rules.dead_gradients(survey)
    findings += [*forward_rules.outliers(survey), *forward_rules.equal_outputs(survey)]
    findings += [finding for finding in never_called if finding.level == "note"]
    return sort_by_level(findings)
