"""Selecting, attaching and detaching on models of up to 20,000 modules: is it linear, and how dear?

One measurement is seconds a module of the model: what is looked at, whether it is selected or not.
"""

from __future__ import annotations

import torch

import hookline as hl
from benchmarks.models import many_modules
from benchmarks.timing import Clock, Contender, Measure, Plan, Result, run_rounds

_SIZES = (2_500, 5_000, 10_000, 20_000)


def select_row(name: str, plan: Plan) -> Result:
    """The row of the table: select and attach at 20,000 modules, the rest beside it."""
    title = "select modules of a model of 20,000 and attach hooks; time per module of the model"
    result = Result(name, title, None, 10e-6, unit="s a module")
    contenders = [
        Contender(
            "bare",
            "list(model.named_modules()) at 20,000: torch's own walk",
            _walk(_SIZES[-1]),
        )
    ]
    for n_modules in reversed(_SIZES):
        largest = n_modules == _SIZES[-1]
        suffix = "" if largest else f" at {n_modules:,}"
        contenders += [
            Contender(f"hookline{suffix}", 'hl.record(model, "**.fc"): a tenth is selected',
                      _attach(n_modules, "**.fc")),
            Contender(f"hookline select{suffix}", 'hl.select(model, "**.fc")',
                      _select(n_modules, "**.fc")),
            Contender(f"hookline detach{suffix}", 'line.remove(), of hl.record(model, "**.fc")',
                      _detach(n_modules, "**.fc")),
        ]  # fmt: skip
    contenders += [
        Contender("hookline, all", "hl.record(model): all are selected", _attach(_SIZES[-1], None)),
        Contender("hookline detach, all", "line.remove() of it", _detach(_SIZES[-1], None)),
    ]
    run_rounds(result, contenders, plan)
    best = min(second for second in result.seconds["hookline"] if second is not None)
    result.notes.append(
        f"bare is torch's own named_modules(); the quickest round of hookline {1e6 * best:.2f} µs"
    )
    for what in ("hookline", "hookline select", "hookline detach"):
        growth = result.ratio(what, f"{what} at {_SIZES[0]:,}")
        assert growth is not None
        result.notes.append(
            f"{what}: a module costs {growth.median:.2f} times at {_SIZES[-1]:,} what it costs at"
            f" {_SIZES[0]:,} (1.00 is linear)"
        )
    return result


def _walk(n_modules: int) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        model = many_modules(n_modules)
        start = clock()
        found = list(model.named_modules())
        seconds = clock() - start
        assert len(found) == n_modules
        return seconds / n_modules

    return measure


def _select(n_modules: int, selector: str | None) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        model = many_modules(n_modules)
        start = clock()
        selection = hl.select(model, selector)
        seconds = clock() - start
        assert len(selection)
        return seconds / n_modules

    return measure


def _attach(n_modules: int, selector: str | None) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        return _attach_and_detach_seconds(n_modules, selector, clock)[0] / n_modules

    return measure


def _detach(n_modules: int, selector: str | None) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        return _attach_and_detach_seconds(n_modules, selector, clock)[1] / n_modules

    return measure


def _attach_and_detach_seconds(
    n_modules: int, selector: str | None, clock: Clock
) -> tuple[float, float]:
    """The seconds of attaching a line, and of taking it off again after the model has run."""
    model = many_modules(n_modules)
    start = clock()
    line = hl.record(model, selector)
    attached = clock()
    model(torch.zeros(1, 1))
    ran = clock()
    line.remove()
    return attached - start, clock() - ran
