"""Parts of attention recorded inside the modules of a GPT-2, against the model alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

import hookline as hl
from benchmarks import models
from benchmarks.contenders import bare, contender
from benchmarks.models import Case
from benchmarks.timing import Contender, Plan, Result, Step, run_rounds


def inside_row(parts: tuple[str, ...], target: float) -> Callable[[str, Plan], Result]:
    """A row: record parts of each attention of the GPT-2, such as `("q", "k", "v")`."""

    def measure(name: str, plan: Plan) -> Result:
        case = models.gpt2()
        title = f"GPT-2: record {', '.join(parts)} of 12 attentions"
        result = Result(name, title, "bare", target, calls=2)
        with torch.no_grad():
            return run_rounds(result, [bare(case), _recording(case, parts)], plan)

    return measure


def _recording(case: Case, parts: tuple[str, ...]) -> Contender:
    model, inputs = case.model, case.inputs
    selector = f"h.*.attn@{{{','.join(parts)}}}" if len(parts) > 1 else f"h.*.attn@{parts[0]}"

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with hl.record(model, selector) as run:

            def step() -> hl.Recording:
                model(inputs)
                return run

            yield step

    return contender("hookline", f"`hl.record(model, {selector!r})`", session)
