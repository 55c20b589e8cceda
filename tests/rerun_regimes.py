"""Regimes in which verbs run the model themselves, such as `hl.sweep`.

`tests/regimes/test_runs_again.py` goes over them, and `tests/regimes/table.py` writes them into
docs/where-it-works.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from regime_cases import QUANTIZATION, SENTENCES, checkpointed, replaced
from tiny_transformers import tiny
from zoo import ROWS, Delegating, NotCheckpointed, data_parallel, encoder, int8_net, rows_net

OTHER = ROWS.flip(0) * 0.5 + 0.1


class Again(NamedTuple):
    """A regime in which a verb runs the model.

    Attributes:
        name: that of its row in docs/where-it-works.md.
        make: makes the model; the same one each time.
        path: the layer's.
        inputs: what it is run on, and what the clean run gets.
        around: the context in which it is run.
        plain: makes the model that torch's hooks are put on.
        without: verbs that are not tried.
        warning: what a sweep warns of.
        marks: those of pytest.
    """

    name: str
    make: Callable[[], nn.Module]
    path: str = "1"
    inputs: tuple[torch.Tensor, torch.Tensor] = (ROWS[:1], OTHER[:1])
    around: Callable[[], Any] = nullcontext
    plain: Callable[[], nn.Module] | None = None
    without: tuple[str, ...] = ()
    warning: str = ""
    marks: tuple[pytest.MarkDecorator, ...] = ()


def compiled(make):
    torch._dynamo.reset()
    return torch.compile(make(), backend="aot_eager")


def linear_net():
    return rows_net().eval()


def pruned():
    return rows_net(partial(prune.l1_unstructured, name="weight", amount=0.5)).eval()


def eval_encoder():
    return encoder().eval()


def fast_path_off():
    before = torch.backends.mha.get_fastpath_enabled()
    stack = contextlib.ExitStack()
    torch.backends.mha.set_fastpath_enabled(False)
    stack.callback(torch.backends.mha.set_fastpath_enabled, before)
    return stack


class Logits(nn.Module):
    """A causal model of transformers that returns its logits alone."""

    def __init__(self):
        super().__init__()
        self.model = tiny("llama")

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits


ENCODER = {"path": "layers.0", "inputs": (SENTENCES[:1], SENTENCES[1:])}
INT8 = (torch.linspace(-1, 1, 64).view(1, 64), torch.linspace(1, -2, 64).view(1, 64))
# Torch says so of a reentrant checkpoint whose input wants none.
NO_GRADIENTS = (pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),)
AGAIN = [
    Again("autocast", linear_net, around=partial(torch.autocast, "cpu", torch.bfloat16)),
    Again("torch.compile", partial(compiled, linear_net), plain=linear_net,
          marks=(pytest.mark.compiles,)),
    *(Again("activation checkpointing", partial(checkpointed, is_reentrant), "0",
            plain=lambda: NotCheckpointed(*rows_net()), marks=NO_GRADIENTS)
      for is_reentrant in (True, False)),
    Again("no_grad, inference_mode", linear_net, around=torch.no_grad),
    Again("no_grad, inference_mode", linear_net, around=torch.inference_mode),
    Again("DataParallel", lambda: data_parallel(linear_net()), plain=linear_net),
    Again("models of transformers", Logits, "model.model.layers.0",
          (torch.tensor([[3, 7, 5, 9]]), torch.tensor([[4, 7, 8, 9]]))),
    Again("TransformerEncoder, torch's fast path on", eval_encoder, **ENCODER,
          warning="fast path"),
    Again("TransformerEncoder, torch's fast path off", eval_encoder, **ENCODER,
          around=fast_path_off),
    *(Again("parametrized weights", lambda change=change: rows_net(change).eval())
      for change in (parametrizations.weight_norm, parametrizations.orthogonal)),
    Again("pruning; old `weight_norm` and `spectral_norm`", pruned),
    Again("AveragedModel (EMA, SWA)", lambda: AveragedModel(linear_net()).eval(), plain=linear_net),
    Again("a forward replaced on the instance", lambda: replaced().eval(), "0"),
    Again("modules with their own `__getattr__`, `__setattr__`",
          lambda: Delegating(rows_net()).eval(), "inner.1"),
    Again("torchao, int8 weights", int8_net, inputs=INT8),
    Again("dynamically quantised",
          lambda: quantize_dynamic(linear_net(), {nn.Linear}, dtype=torch.qint8),
          without=("attribute",), marks=QUANTIZATION),
    Again("torch.fx.GraphModule", lambda: torch.fx.symbolic_trace(linear_net())),
]  # fmt: skip


def each_again(verb: str) -> pytest.MarkDecorator:
    """Give a test each regime in which a verb is tried."""
    cases = [
        pytest.param(again, marks=again.marks, id=f"{again.name}-{number}")
        for number, again in enumerate(AGAIN) if verb not in again.without
    ]  # fmt: skip
    return pytest.mark.parametrize("again", cases)


def told_again(verb: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names of the regimes that `each_again` gives."""
    for again in AGAIN:
        if verb not in again.without:
            yield again.name, (verb,)
