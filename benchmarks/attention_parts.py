"""Parts of attention recorded inside the modules of a GPT-2, against the model alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks import models
from benchmarks.compiling import compiled_row
from benchmarks.contenders import Values, bare, contender, recording, session_without_setup
from benchmarks.models import Case
from benchmarks.timing import Contender, Plan, Result, run_rounds

QKV = ("q", "k", "v")


def inside_row(parts: tuple[str, ...], target: float) -> Callable[[str, Plan], Result]:
    """A row: record parts of each attention of the GPT-2, such as `("q", "k", "v")`.

    nnsight's `.source` stands beside q, k and v. Both must give what the kernel got, to the bit.
    """

    def measure(name: str, plan: Plan) -> Result:
        case = _gpt2_with_attention_parts(parts)
        title = f"GPT-2: record {', '.join(parts)} of 12 attentions"
        result = Result(name, title, "bare", target, calls=2)
        truth = _given(case) if parts == QKV else None
        with torch.no_grad():
            contenders = [bare(case)]
            if truth is not None:
                with contextlib.suppress(ImportError):
                    contenders.append(_nnsight_source(case, truth))
            how = f"`hl.record(model, {case.selector!r})`"
            ours = contender("hookline", how, recording(case), _at(case.paths), truth)
            return run_rounds(result, [*contenders, ours], plan)

    return measure


def compiled_inside_row(parts: tuple[str, ...], target: float) -> Callable[[str, Plan], Result]:
    """A row: the same on the compiled model, against it compiled without hooks."""
    title = f"compiled GPT-2: record {', '.join(parts)} of 12 attentions"
    return compiled_row(
        lambda: _gpt2_with_attention_parts(parts), "inside", title, target, 2, base="bare"
    )


def _gpt2_with_attention_parts(parts: tuple[str, ...]) -> Case:
    """The GPT-2, with parts of its attentions as the places to record."""
    case = models.gpt2()
    sites = tuple(f"{path}.attn@{part}" for path in case.paths for part in parts)
    return dataclasses.replace(case, selector=f"h.*.attn@{{{','.join(parts)}}}", paths=sites)


def _at(sites: tuple[str, ...]) -> Values:
    return lambda run: [run[site] for site in sites]


class _Kernel(TorchFunctionMode):
    """Copies the queries, keys and values that torch's attention gets."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.given += [value.clone() for value in args[:3]]
        return func(*args, **(kwargs or {}))


def _given(case: Case) -> Values:
    def values(_: object) -> list[Tensor]:
        with _Kernel() as kernel:
            case.model(case.inputs)
        return kernel.given

    return values


def _nnsight_source(case: Case, truth: Values) -> Contender:
    """A model wrapped once; the arguments of the call of the attention function."""
    import nnsight

    wrapped, inputs = nnsight.NNsight(case.model), case.inputs
    modules = [wrapped.get(f"{path}.attn") for path in models.gpt2().paths]

    def step() -> list[Any]:
        with wrapped.trace(inputs):
            kept = nnsight.save([])
            for module in modules:
                kept.extend(module.source.attention_interface_1.inputs[0][1:4])
        return kept

    how = "`.source.attention_interface_1.inputs`, `with wrapped.trace(x)` each call"
    return contender("nnsight", how, session_without_setup(step), list, truth, every=4)
