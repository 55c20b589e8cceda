"""The data of the page of a finding of `hl.check`: what was made, and how it came about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hookline.display.text import plural
from hookline.verbs.check.finding import CheckFinding, MeasuredTensor

# The kinds whose tensor was there before the operation, which only read it.
_HELD = ("parameter", "buffer", "input", "gradient", "constant")


def finding_page_data(finding: CheckFinding) -> dict[str, Any]:
    """Return what the page of a finding draws, as plain data.

        {level, kind, text, site, number, why, advice, step, facts: [[label, text]], notes: [text],
         line: {file, number, function, text} or null, keep: the file for `hookline replay`,
         chain: [{role, name, text, shape, dtype, numbers or null, isSuspect, isBroken}]}

    The chain is in the order in which the values came about: what the operation was given, the
    operation, what it made, and the sites that passed that on.
    """
    line = finding.line
    shown = finding.to_finding().to_dict()
    return shown | {
        "text": shown["text"][:1].upper() + shown["text"][1:],
        "number": "" if finding.also else _nan_and_inf_text(finding, with_total=False),
        "follows": 0,  # the chain has them
        "facts": _facts(finding),
        "notes": list(finding.notes),
        "line": line
        and {"file": line.filename, "number": line.lineno, "function": line.function}
        | {"text": line.text},
        "keep": finding.file,
        "chain": list(_causal_chain(finding)),
    }


def title_of(finding: CheckFinding) -> str:
    """Return the heading of the page of a finding."""
    what = finding.also or ("NaN" if finding.n_nan or not finding.n_inf else "Infinity")
    return f"{what} at {finding.site}"


def _facts(finding: CheckFinding) -> list[tuple[str, str]]:
    numbers = {
        "NaN": finding.n_nan, "Infinite": finding.n_inf, "Elements": finding.n_total,
    }  # fmt: skip
    facts = [(name, f"{number:,}") for name, number in numbers.items() if number]
    named = {"Step": finding.step, "Call": finding.call, "Rank": finding.rank}
    facts += [(name, str(number)) for name, number in named.items() if number is not None]
    if finding.vanished:
        facts.append(("Afterwards", "gone before the pass ended"))
    if finding.units:
        facts.append(("Units", ", ".join(map(str, finding.units))))
    return facts


def _causal_chain(finding: CheckFinding) -> Iterator[dict[str, Any]]:
    is_held = finding.kind in _HELD
    made = _chain_step(
        "held it" if is_held else "made it",
        finding.site,
        finding.observation or _nan_and_inf_text(finding),
        isBroken=finding.also is None,
        isSuspect=is_held,
    )
    if is_held:
        yield made
    for role, tensors in (("input", finding.inputs), ("of the module", finding.parameters)):
        for tensor in tensors:
            yield _tensor_step(role, tensor, finding.suspect)
    if finding.operation or finding.function:
        name = finding.function or finding.operation
        text = f"{finding.operation or ''}, in {finding.module_type or finding.site}"
        yield _chain_step("operation", name or "", text.removeprefix(", "))
    if not is_held:
        yield made
    for site in finding.passed_on:
        yield _chain_step("passed it on", site, "", isBroken=True)


def _nan_and_inf_text(finding: CheckFinding, *, with_total: bool = True) -> str:
    parts = [f"{finding.n_nan:,} NaN"] * bool(finding.n_nan)
    parts += [f"{finding.n_inf:,} infinite"] * bool(finding.n_inf)
    is_whole = with_total and finding.n_total
    of = f" of {plural(finding.n_total, 'element')}" if is_whole else ""
    return f"{' and '.join(parts)}{of}" if parts else ""


def _tensor_step(role: str, tensor: MeasuredTensor, suspect: str | None) -> dict[str, Any]:
    moments = tensor.moments
    numbers = None
    if moments is not None:
        names = ("min", "max", "mean", "std") if moments.finite else ()
        numbers = {name: getattr(moments, name) for name in names}
        numbers |= {"bad": moments.non_finite, "zeros": moments.zero_share, "count": moments.count}
    return _chain_step(
        role,
        tensor.name,
        "",
        shape=list(tensor.shape),
        dtype=tensor.dtype,
        numbers=numbers,
        isSuspect=suspect is not None and tensor.name == suspect,
        isBroken=bool(numbers and numbers["bad"]),
    )


def _chain_step(role: str, name: str, text: str, **more: Any) -> dict[str, Any]:
    step = {"shape": None, "dtype": "", "numbers": None, "isSuspect": False, "isBroken": False}
    return {"role": role, "name": name, "text": text, **step, **more}
