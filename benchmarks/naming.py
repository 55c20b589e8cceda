"""The parts that `hl.anatomy` names, beside those of other libraries on the same weights.

    python -m benchmarks.naming [LIBRARY ...]

For each library and model: how many names are compared in all layers, and the largest relative
error. The models are small ones of the tests (`tests/causal_zoo.py`), with attention by torch's
kernel for hookline. Libraries that are not installed are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

import hookline as hl
from benchmarks.sweeping import word_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tests"))
zoo = importlib.import_module("causal_zoo")

# The types of the models, and a checkpoint of each, by which TransformerLens knows them.
MODELS = {
    "gpt2": "gpt2",
    "llama": "meta-llama/Llama-2-7b-hf",
    "qwen3": "Qwen/Qwen3-0.6B",
    "gemma2": "google/gemma-2-2b",
}
Values = dict[str, list[Tensor]]  # of each layer, or one of the whole model, by hookline's name
_CLOSE = 1e-5


def by_hookline(kind: str, ids: Tensor) -> Values:
    """Record every name."""
    model = zoo.build(kind)
    parts = hl.anatomy(model, {"input_ids": ids, "use_cache": False})
    sites = {name: list(map(str, parts[name])) for name in parts if name != "unembed"}
    with torch.no_grad(), hl.record(model, list(chain(*sites.values()))) as run:
        model(input_ids=ids, use_cache=False)
    return {name: [run[site] for site in of_name] for name, of_name in sites.items()}


# -- TransformerLens ------------------------------------------------------------------------------

_HOOKS = {
    "resid_pre": "hook_resid_pre", "attn_in": "attn.hook_in", "v": "attn.hook_v",
    "q": "attn.hook_q", "k": "attn.hook_k", "scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern", "z": "attn.hook_z", "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid", "mlp_in": "mlp.hook_in", "mlp_pre": "mlp.hook_pre",
    "mlp_up": "mlp.hook_pre_linear", "mlp_act": "mlp.hook_post", "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}  # fmt: skip


def by_transformer_lens(kind: str, ids: Tensor) -> Values:
    """Read the cache of a bridge. Its `hook_q` is before rotary embeddings, `hook_rot_q` after."""
    bridges = importlib.import_module("transformer_lens.model_bridge")
    bridge = bridges.TransformerBridge.boot_transformers(
        MODELS[kind], hf_model=zoo.build(kind), tokenizer=word_tokenizer(zoo.VOCABULARY)
    )
    logits, cache = bridge.run_with_cache(ids)
    hooks = dict(_HOOKS)
    if "blocks.0.attn.hook_rot_q" in cache:
        hooks |= {"q": "attn.hook_rot_q", "k": "attn.hook_rot_k"}
    values = {
        name: [cache[f"blocks.{layer}.{hook}"] for layer in range(bridge.cfg.n_layers)]
        for name, hook in hooks.items()
        if f"blocks.0.{hook}" in cache
    }
    once = {"embed": "hook_embed", "pos_embed": "hook_pos_embed", "ln_final": "ln_final.hook_out"}
    values |= {name: [cache[hook]] for name, hook in once.items() if hook in cache}
    return values | {"logits": [logits]}


# -- nnsight --------------------------------------------------------------------------------------

# The norm, the blocks, and in a block the modules that the trace below reads.
_LLAMA = (
    "model.norm",
    "model.layers",
    ("self_attn", "post_attention_layernorm", "mlp", "mlp.act_fn", "mlp.down_proj"),
)
_PATHS = {
    "gpt2": ("transformer.ln_f", "transformer.h", ("attn", "ln_2", "mlp", "mlp.act", "mlp.c_proj")),
    "gemma2": (*_LLAMA[:2], ("self_attn", "pre_feedforward_layernorm", *_LLAMA[2][2:])),
}
_TRACED = (
    "resid_pre", "q", "k", "v", "z", "pattern", "attn_out_raw", "resid_mid", "mlp_in", "mlp_pre",
    "mlp_act", "mlp_out_raw", "resid_post",
)  # fmt: skip


def by_nnsight(kind: str, ids: Tensor) -> Values:
    """Read `.source` of eager attention, and the inputs and outputs of modules."""
    nnsight = importlib.import_module("nnsight")
    model = zoo.build(kind, "eager")
    traced, (norm, blocks, parts) = nnsight.NNsight(model), _PATHS.get(kind, _LLAMA)
    paths = [f"{blocks}.{layer}" for layer in range(len(model.get_submodule(blocks)))]
    layers = [
        [traced.get(path), *(traced.get(f"{path}.{part}") for part in parts)] for path in paths
    ]
    final = traced.get(norm)
    with traced.trace(input_ids=ids, use_cache=False):
        kept = nnsight.save([])
        for block, attention, second_norm, mlp, act, down in layers:
            kept.append(block.input)
            kept.extend(attention.source.attention_interface_1.inputs[0][1:4])
            kept.extend(attention.source.attention_interface_1.output[:2])
            kept.append(attention.output[0])
            kept.extend([second_norm.input, mlp.input, act.input, down.input, mlp.output])
            kept.append(block.output)
        kept.extend([final.output, traced.output.logits])
    by_name = {name: kept[k : -2 : len(_TRACED)] for k, name in enumerate(_TRACED)}
    return {**by_name, "ln_final": [kept[-2]], "logits": [kept[-1]]}


# -- interp-engine --------------------------------------------------------------------------------

_POINTS = {
    "resid_pre": "resid_pre", "attn_in": "attn_in", "q_norm": "q_norm_out", "k_norm": "k_norm_out",
    "v": "value", "scores": "attn_scores", "pattern": "attn_probs", "z": "z",
    "attn_out_raw": "attn_out", "attn_out": "attn_out_post", "resid_mid": "resid_mid",
    "mlp_in": "mlp_in", "mlp_pre": "mlp_pre", "mlp_up": "mlp_pre_linear", "mlp_act": "mlp_act",
    "mlp_out_raw": "mlp_out", "mlp_out": "mlp_out_post", "resid_post": "resid_post",
}  # fmt: skip


def by_interp_engine(kind: str, ids: Tensor) -> Values:
    """Capture its points, on the model loaded from a folder."""
    engine, model = importlib.import_module("interp_engine"), zoo.build(kind)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        word_tokenizer(zoo.VOCABULARY).save_pretrained(folder)
        loaded = engine.load_model(folder, backend="eager", device="cpu", dtype="float32")
    once = {"embed": "embeddings", "ln_final": "final_norm", "logits_raw": "lm_head"}
    layers = range(model.config.num_hidden_layers)
    points = {name: [engine.Address(point, k) for k in layers] for name, point in _POINTS.items()}
    points |= {name: [engine.Address(point)] for name, point in once.items()}
    values: Values = {}
    for name, addresses in points.items():
        with contextlib.suppress(ValueError):  # the architecture has no such point
            cache = engine.capture(loaded, ids, addresses)
            values[name] = [cache[address] for address in addresses]
    return values


# -- comparison -----------------------------------------------------------------------------------

LIBRARIES: dict[str, Callable[[str, Tensor], Values]] = {
    "transformer_lens": by_transformer_lens,
    "nnsight": by_nnsight,
    "interp_engine": by_interp_engine,
}


def error(name: str, theirs: Tensor, ours: Tensor) -> float:
    """Return the relative error; infinity for values that are not of the same shape by head."""
    if ours.dim() == 4 and theirs.dim() == 3 and theirs.shape[-1] % ours.shape[-1] == 0:
        theirs = theirs.unflatten(-1, (-1, ours.shape[-1]))  # heads side by side
    if ours.dim() == 4 and theirs.shape[1] == ours.shape[2]:
        theirs = theirs.transpose(1, 2)  # heads behind the tokens
    if name in ("k", "v"):  # which some models repeat for the heads of queries
        theirs = theirs.repeat_interleave(ours.shape[1] // theirs.shape[1], 1)
    if len(ours) == 1:  # positions, which are the same for all rows
        ours = ours.expand(len(theirs), *ours.shape[1:])
    if theirs.shape != ours.shape:
        return float("inf")
    if name == "scores":  # of the pairs that no mask leaves out
        is_seen = ours > -1e3
        theirs, ours = theirs[is_seen], ours[is_seen]
    return float((theirs - ours).norm() / ours.norm())


def largest_errors(theirs: Values, ours: Values) -> dict[str, float]:
    """Return the largest error of each name over the layers."""
    return {
        name: max(error(name, *pair) for pair in zip(values, ours[name], strict=True))
        for name, values in theirs.items()
        if name in ours
    }


@torch.no_grad()
def main() -> None:
    warnings.simplefilter("ignore")
    ids = zoo.texts()["input_ids"]
    for kind in MODELS:
        ours = by_hookline(kind, ids)
        for library in sys.argv[1:] or LIBRARIES:
            try:
                errors = largest_errors(LIBRARIES[library](kind, ids), ours)
            except ImportError:
                continue
            close = [value for value in errors.values() if value < _CLOSE]
            others = {name: f"{value:.1e}" for name, value in errors.items() if value >= _CLOSE}
            print(f"{library:16s} {kind:8s} {len(close):2d} names within {max(close):.1e}", end="")
            print(f"; otherwise: {others}" if others else "", flush=True)


if __name__ == "__main__":
    main()
