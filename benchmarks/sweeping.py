"""Sweeps: clean values put back at each block and position, against the loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks.contenders import always, contender
from benchmarks.models import Placement, gpt2
from benchmarks.timing import Contender, Plan, Result, run_rounds

_N_TOKENS, _N_WORDS = 16, 1000


def sweep_row(n_blocks: int, width: int, target: float) -> Callable[[str, Plan], Result]:
    """A row: all block outputs x 16 positions of a GPT-2.

    Args:
        n_blocks: its blocks.
        width: its features.
        target: at most this part of the loop's time.
    """

    def measure(name: str, plan: Plan) -> Result:
        title = f"sweep {n_blocks} blocks x {_N_TOKENS} positions of a GPT-2 of width {width}"
        result = Result(name, title, "hand-written", target)
        return run_rounds(result, _contenders(_model(n_blocks, width)), plan)

    return measure


def _model(n_blocks: int, width: int) -> nn.Module:
    gpt2()  # which imports torchvision first
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=width, n_head=4, n_layer=n_blocks, vocab_size=_N_WORDS, n_positions=_N_TOKENS,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().to(Placement.device)


def _metric(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits[0, -1, 3] - logits[0, -1, 5]


def _contenders(model: nn.Module) -> list[Contender]:
    corrupt, clean = torch.randint(0, _N_WORDS, (2, 1, _N_TOKENS), device=Placement.device)
    sweeps = {
        "hookline": ("`hl.sweep`", {}),
        "hookline, rows=1": ("`hl.sweep(rows=1)`", {"rows": 1}),
    }

    def sweep(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: hl.sweep(
            model, corrupt, "transformer.h.*", _metric, clean=clean, each={"position": 1},
            progress=False, **options,
        ).values  # fmt: skip

    def loop() -> Any:
        return _by_hand(model, corrupt, clean)

    truth = loop()
    for _, options in sweeps.values():
        np.testing.assert_allclose(sweep(options)(), truth, rtol=0, atol=2e-6)
    ours = [contender(name, how, always(sweep(options))) for name, (how, options) in sweeps.items()]
    by_hand = "a forward hook and a forward for each block and position"
    return [contender("hand-written", by_hand, always(loop)), *ours]


@torch.no_grad()
def _by_hand(model: nn.Module, corrupt: Tensor, clean: Tensor) -> list[list[float]]:
    blocks = list(model.get_submodule("transformer.h").children())
    values: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, a, out: values.append(out)) for block in blocks]
    model(clean)
    for hook in hooks:
        hook.remove()
    return [
        [_patched(model, corrupt, block, value, position) for position in range(_N_TOKENS)]
        for block, value in zip(blocks, values, strict=True)
    ]


def _patched(
    model: nn.Module, corrupt: Tensor, block: nn.Module, value: Tensor, position: int
) -> float:
    def put(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, position] = value[:, position]
        return output

    with block.register_forward_hook(put):
        return float(_metric(model(corrupt)))
