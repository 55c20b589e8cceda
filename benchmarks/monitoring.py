"""A monitored training step of a GPT-2: against the bare step, and beside wandb.watch."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks import models
from benchmarks.compiling import _with_own_class
from benchmarks.timing import Contender, Plan, Result, Session, Step, measure_session, run_rounds

PORTS = ("output", "grad_output", "value", "grad", "update")
_EVERY = 10


class _Language(nn.Module):
    """A language model: the blocks, and the head over all words, as in a real training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = copy.deepcopy(models.gpt2().model).train()
        self.head = nn.Linear(256, self.body.config.vocab_size, bias=False)
        self.head.weight = self.body.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.body(tokens)[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class _Small(nn.Module):
    """A small language model, whose outputs are many numbers beside its work."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.small_gpt2()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens, labels=tokens).loss


def _contender(
    name: str, how: str, attach: Callable[[nn.Module], Any] | None, what: str, every: int = 1
) -> Contender:
    """A contender on a model of its own, which it trains with AdamW."""
    torch.manual_seed(0)
    is_small, compiled = what.startswith("small"), what == "compiled"
    model = _Small() if is_small else _Language()
    tokens = torch.randint(0, 1024, (4, 64)) if is_small else models.gpt2().inputs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    # A class of its own: compiled code of one contender is not tried for another.
    run = torch.compile(_with_own_class(model), fullgraph=True) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        run(tokens).backward()
        optimizer.step()

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with contextlib.nullcontext() if attach is None else attach(model):
            for _ in range(2 if every == 1 else 1):
                step()  # attaching is not what is measured
            yield step

    def check() -> None:
        with session() as one:
            one()

    measure = _each_of(every, session) if every > 1 else measure_session(session)
    return Contender(name, how, measure, check)


def _each_of(every: int, session: Session) -> Any:
    """Measure a whole round of steps, of which one is reported."""
    measure = measure_session(session)
    return lambda calls, clock: measure(every, clock)


def _activations(model: nn.Module) -> Any:
    return hl.monitor(model, "body.h.*", ports="output", stats=hl.stats.moments(compile=True))


def _small_outputs(model: nn.Module) -> Any:
    return hl.monitor(model, ports="output")


def _all_kinds(every: int) -> Callable[[nn.Module], Any]:
    def attach(model: nn.Module) -> Any:
        where = ["body.h.*", *model.parameters()]
        moments = hl.stats.moments(compile=True)
        return hl.monitor(model, where, ports=PORTS, every=every, stats=moments)

    return attach


@contextlib.contextmanager
def _wandb_watch(model: nn.Module) -> Iterator[None]:
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        os.environ["WANDB_SILENT"] = "true"
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(x_disable_stats=True))
        run.watch(model, log="all", log_freq=1)
        after = model.register_forward_hook(lambda *_: run.log({}))
        try:
            yield
        finally:
            after.remove()
            run.unwatch(model)
            run.finish()


def monitor_row(what: str, title: str, target: float) -> Callable[[str, Plan], Result]:
    """A row: a training step with a monitor, against the bare one.

    Args:
        what: "activations", "all", "tenth" (all kinds, every 10th step), "compiled"; or "small"
            and "small-all", which are a small model with the defaults.
        title: the row in words.
        target: at most this, as a ratio to the bare step.
    """
    attach = {
        "activations": _activations, "compiled": _activations, "all": _all_kinds(1),
        "tenth": _all_kinds(_EVERY), "small": _small_outputs, "small-all": hl.monitor,
    }[what]  # fmt: skip
    every = _EVERY if what == "tenth" else 1
    model = "A small GPT-2" if what.startswith("small") else "GPT-2 with its head"

    def measure(name: str, plan: Plan) -> Result:
        result = Result(name, title, "bare", target, calls=1)
        result.notes.append(f"{model}, 4 x 64 tokens, forward, backward, AdamW")
        with torch.enable_grad():
            contenders = [
                _contender("bare", "the training step", None, what, every),
                _contender("hookline", f"hl.monitor, {title}", attach, what, every),
            ]
            if what in ("all", "small-all"):
                how = 'wandb.watch(log="all", log_freq=1), offline'
                contenders.append(_contender("wandb.watch", how, _wandb_watch, what))
            run_rounds(result, contenders, plan)
        if what == "all" and "wandb.watch" in result.seconds:
            bare, ours, theirs = (
                result.spread(one).median for one in ("bare", "hookline", "wandb.watch")
            )
            share = (ours - bare) / (theirs - bare)
            result.notes.append(f"hookline adds {share:.2f} of what wandb.watch adds (<= 0.12)")
        return result

    return measure
