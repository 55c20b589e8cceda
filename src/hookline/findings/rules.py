"""Apply the rules to the survey of a pass, the most basic first."""

from __future__ import annotations

from hookline.findings import backward, forward
from hookline.findings.finding import Finding, in_order
from hookline.findings.spread import spreads
from hookline.findings.survey import Survey

_CAUSES = ("dead", "channels", "exploding", "vanishing", "non-finite")


def findings_of(survey: Survey) -> list[Finding]:
    """Return the findings of a pass, the worst first.

    Consequences are left out: of gradients where the forward is not finite, of spreads after it.
    """
    broken = list(forward.non_finite(survey))
    place = {reading.site: k for k, reading in reversed(list(enumerate(survey.readings)))}
    values = [
        *forward.dead(survey),
        *forward.channels(survey),
        *spreads(survey),
        *forward.saturated(survey),
        *forward.dtypes(survey),
        *forward.shared(survey),
        *forward.without_norm(survey),
    ]
    values.sort(key=lambda finding: place.get(finding.site, -1))
    never_called = list(forward.never_called(survey))
    findings = [*broken, *values, *(finding for finding in never_called if finding.level != "note")]
    is_blamed = any(f.kind in _CAUSES and f.level != "note" for f in findings)
    if not broken:
        findings += backward.non_finite(survey)
        findings += [*backward.cut(survey), *backward.frozen(survey, is_blamed)]
    if not broken and not is_blamed:
        findings += [*backward.through_depth(survey), *backward.dead_gradients(survey)]
    findings += [*forward.outliers(survey), *forward.repeats(survey)]
    findings += [finding for finding in never_called if finding.level == "note"]
    return in_order(findings)
