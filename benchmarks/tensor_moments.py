"""Statistics of one tensor: `hl.stats.moments` against reductions written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hookline as hl
from benchmarks.contenders import contender, session_without_setup
from benchmarks.timing import Contender, Plan, Result, run_rounds


def measuring_row(numel: int, target: float, calls: int) -> Callable[[str, Plan], Result]:
    """A row: an update of `hl.stats.moments` with a float32 tensor, against torch's reductions."""

    def measure(name: str, plan: Plan) -> Result:
        title = f"measure a tensor of {numel:,} elements"
        result = Result(name, title, "hand-written", target, calls=calls)
        result.notes.append("by hand: five reductions in float32, without non-finite numbers")
        return run_rounds(result, _contenders(torch.randn(numel)), plan)

    return measure


def _contenders(x: Tensor) -> list[Contender]:
    forms: dict[str, tuple[str, Callable[[], Any]]] = {
        "bare": ("`x.sum()`", x.sum),
        "hand-written": ("aminmax, sum, dot(x, x), dot(x², x²), count_nonzero", lambda: _dots(x)),
        "hookline": ("`hl.stats.moments(compile=True)`", _update(x, compile=True)),
        "hookline, plain": ("`hl.stats.moments(compile=False)`", _update(x, compile=False)),
        "histc": ("`torch.histc(x, 64)`", lambda: torch.histc(x, 64)),
        "isfinite": ("`x.isfinite().all()`", lambda: x.isfinite().all()),
        "var_mean": ("aminmax, var_mean, count_nonzero", lambda: _var_mean(x)),
    }
    return [
        contender(name, how, session_without_setup(step)) for name, (how, step) in forms.items()
    ]


def _dots(x: Tensor) -> list[Tensor]:
    squares = x * x
    sums = [x.sum(), torch.dot(x, x), torch.dot(squares, squares), x.count_nonzero()]
    return [*x.aminmax(), *sums]


def _var_mean(x: Tensor) -> list[Tensor]:
    return [*x.aminmax(), *torch.var_mean(x), x.count_nonzero()]


def _update(x: Tensor, *, compile: bool) -> Callable[[], Tensor]:
    moments = hl.stats.moments(compile=compile)
    slots = moments.start(x)
    moments.update(slots, torch.randn(20_000))  # so that it is compiled before the timing
    found = moments.result(moments.update(slots, x))
    assert found.count == x.numel()
    assert abs(found.std - x.double().std(correction=0).item()) < 1e-6
    return lambda: moments.update(slots, x)
