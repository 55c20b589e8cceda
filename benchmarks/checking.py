"""A step of training under hl.check, beside what people use to find a NaN."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks import models
from benchmarks.compiling import _with_own_class
from benchmarks.models import Case
from benchmarks.timing import Clock, Contender, Plan, Result, run_rounds


def checking_row(title: str, target: float, *, compiled: bool) -> Callable[[str, Plan], Result]:
    """A row: a step of training of a GPT-2 with its words, under a check, against it alone.

    Args:
        title: the row in words.
        target: at most this, as a ratio to the bare step.
        compiled: whether the model is compiled by inductor, as one graph.
    """

    def measure(name: str, plan: Plan) -> Result:
        result = Result(name, title, "bare", target, calls=1)
        result.notes.append("a step is zero_grad, forward, cross entropy, backward, AdamW")
        result.notes.append(
            "block: entering and leaving `with hl.check(model)`, once in a training"
        )
        case = models.gpt2()
        names = ["bare", "hookline", "block", *([] if compiled else ["isfinite", "anomaly"])]
        with torch.enable_grad():
            made = [_contender(kind, case, compiled=compiled) for kind in names]
            run_rounds(result, made, plan)
        torch.compiler.reset()
        return result

    return measure


class _Words(nn.Module):
    """A GPT-2 and its words, whose weights are those of the embedding."""

    def __init__(self, gpt2: nn.Module) -> None:
        super().__init__()
        self.gpt2 = gpt2
        self.head = nn.Linear(256, 50_257, bias=False)
        self.head.weight = gpt2.wte.weight  # type: ignore[union-attr, assignment]

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.gpt2(ids)[0])
        return found


def _contender(kind: str, case: Case, *, compiled: bool) -> Contender:
    model = _Words(copy.deepcopy(case.model)).train()
    run: Any = torch.compile(_with_own_class(model), fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    target = case.inputs.reshape(-1)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run(case.inputs).flatten(0, 1), target)
        loss.backward()
        optimizer.step()

    contexts: dict[str, tuple[str, Callable[[], Any]]] = {
        "bare": ("the step alone", contextlib.nullcontext),
        "hookline": ("hl.check(model)", lambda: hl.check(model)),
        "block": ("entering and leaving hl.check(model)", lambda: hl.check(model)),
        "isfinite": (
            "a hook on each leaf: output.isfinite().all().item()",
            lambda: _check_hooks(model),
        ),
        # Its own context manager warns of what it is.
        "anomaly": ("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True)),
    }
    how, context = contexts[kind]

    def measure(calls: int, clock: Clock) -> float:
        began = clock()
        with context():
            entered = clock()
            step()  # the first step under a line copies the buffers, and compiles
            start = clock()
            for _ in range(calls):
                step()
            end = clock()
        if kind == "block":
            return entered - began + clock() - end
        return (end - start) / calls

    return Contender(kind, how, measure, every=1 if kind in ("bare", "hookline") else 4)


@contextlib.contextmanager
def _check_hooks(model: nn.Module) -> Iterator[None]:
    def look(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all().item():
            raise ValueError("not finite")

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(look) for module in leaves]
    yield
    for handle in handles:
        handle.remove()
