"""Sweeps: clean values put back at each block and position, against the loop by hand."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks.contenders import contender, session_without_setup
from benchmarks.models import Placement, gpt2
from benchmarks.timing import Contender, Plan, Result, measure_session, run_rounds

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

    def by_nnsight() -> Any:
        return _by_nnsight(model, corrupt, clean)

    def by_transformer_lens() -> Any:
        return _by_transformer_lens(model, corrupt, clean)

    truth = loop()

    def check(values: Callable[[], Any], atol: float = 2e-6) -> Callable[[], None]:
        return lambda: np.testing.assert_allclose(values(), truth, rtol=0, atol=atol)

    for _, options in sweeps.values():
        check(sweep(options))()
    ours = [
        contender(name, how, session_without_setup(sweep(options)))
        for name, (how, options) in sweeps.items()
    ]
    by_hand = "a forward hook and a forward for each block and position"
    rivals = [
        _rival("nnsight", "a trace for each block and position", by_nnsight, check(by_nnsight)),
        _rival("TransformerLens", "`get_act_patch_resid_pre` on its bridge of the model, which"
               " patches the inputs of the blocks", by_transformer_lens),
    ]  # fmt: skip
    return [contender("hand-written", by_hand, session_without_setup(loop)), *ours, *rivals]


def _rival(
    name: str, how: str, step: Callable[[], Any], check: Callable[[], None] = lambda: None
) -> Contender:
    return Contender(name, how, measure_session(session_without_setup(step)), check, every=3)


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


@torch.no_grad()
def _by_nnsight(model: nn.Module, corrupt: Tensor, clean: Tensor) -> list[list[float]]:
    from nnsight import NNsight, save

    traced = NNsight(model)
    n_blocks = len(traced.transformer.h)
    with traced.trace(clean):
        values = save([traced.transformer.h[number].output for number in range(n_blocks)])
    numbers = []
    for number, value in enumerate(values):
        numbers.append([])
        for position in range(_N_TOKENS):
            with traced.trace(corrupt):
                output = traced.transformer.h[number].output.clone()
                output[:, position] = value[:, position]
                traced.transformer.h[number].output = output
                logits = save(traced.output.logits)
            numbers[-1].append(float(logits[0, -1, 3] - logits[0, -1, 5]))
    return numbers


@torch.no_grad()
def _by_transformer_lens(model: nn.Module, corrupt: Tensor, clean: Tensor) -> Any:
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    bridge = _bridges.get(model)
    if bridge is None:
        bridge = _bridges[model] = TransformerBridge.boot_transformers(
            "gpt2", hf_model=copy.deepcopy(model), tokenizer=word_tokenizer(_N_WORDS)
        )
    _, cache = bridge.run_with_cache(clean)
    metric = lambda logits: logits[0, -1, 3] - logits[0, -1, 5]  # noqa: E731
    return patching.get_act_patch_resid_pre(bridge, corrupt, cache, metric)


def word_tokenizer(n_words: int) -> Any:
    """A tokenizer that is not looked up on the web."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(n_words)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w0"))
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "w0")
    folder = tempfile.mkdtemp()  # from which the bridge loads it once more
    PreTrainedTokenizerFast(tokenizer_object=tokens, **marks).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


_bridges: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _patched(
    model: nn.Module, corrupt: Tensor, block: nn.Module, value: Tensor, position: int
) -> float:
    def put(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, position] = value[:, position]
        return output

    with block.register_forward_hook(put):
        return float(_metric(model(corrupt)))
