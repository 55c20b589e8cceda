"""Parts of attention recorded inside the modules of a GPT-2, against the model alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from benchmarks import models
from benchmarks.contenders import bare, contender, recording
from benchmarks.timing import Plan, Result, run_rounds


def inside_row(parts: tuple[str, ...], target: float) -> Callable[[str, Plan], Result]:
    """A row: record parts of each attention of the GPT-2, such as `("q", "k", "v")`."""

    def measure(name: str, plan: Plan) -> Result:
        selector = f"h.*.attn@{{{','.join(parts)}}}"
        case = dataclasses.replace(models.gpt2(), selector=selector)
        title = f"GPT-2: record {', '.join(parts)} of 12 attentions"
        result = Result(name, title, "bare", target, calls=2)
        with torch.no_grad():
            ours = contender("hookline", f"`hl.record(model, {selector!r})`", recording(case))
            return run_rounds(result, [bare(case), ours], plan)

    return measure
