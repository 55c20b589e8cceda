"""Two-layer models, and how far their sites lie apart once the tokens of two runs are aligned."""

from __future__ import annotations

import inspect

import torch

import hookline as hl
from hookline.engine.pytree import tree
from hookline.models.torchvision_import import import_torchvision
from hookline.verbs.compare.locate_tokens import locate_tokens
from hookline.verbs.compare.token_alignment import align_tokens
from hookline.verbs.shared.token_inputs import CACHES

import_torchvision()  # transformers imports it, and cannot where its operators are missing

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip


def model(name):
    import transformers as tf

    torch.manual_seed(0)
    if name == "gpt2":
        config = tf.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=64, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        made = tf.GPT2LMHeadModel(config)
    elif name == "t5":
        config = tf.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=50,
            decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        made = tf.T5ForConditionalGeneration(config)
    elif name == "bert":
        made = tf.BertModel(tf.BertConfig(**SMALL))
    elif name == "mixtral":
        made = tf.MixtralForCausalLM(
            tf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
        )
    else:
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, num_key_value_heads=2))
    return made.eval()


def ids(*shape, seed=1):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


def recorded(made, *inputs, sites=("**", "(root):input")):
    """The run of a model on some inputs, one pass each."""
    with torch.no_grad(), hl.record(made, list(sites)) as run:
        for given in inputs:
            made(**given)
    return run


def chunked(made, rows, *sizes, **given):
    """The run of a causal model on chunks of its input, with a cache."""
    with torch.no_grad(), hl.record(made, ["**", "(root):input"]) as run:
        name = next(name for name in CACHES if name in inspect.signature(made.forward).parameters)
        cache = None
        for part in rows.split(sizes, 1):
            cache = made(input_ids=part, use_cache=True, **{name: cache})[name]
    return run


def tensors(run):
    """The tensors of each site and leaf, by pass."""
    sites = {}
    for record in run.passes:
        for key in record.order:
            for leaf, tensor in tree.tensors(record[key]):
                if key != "(root):input" and not any(name in leaf for name in CACHES):
                    sites.setdefault((key, leaf), {})[record.number] = tensor
    return sites


def distance(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30)) if a.numel() else 0.0


def apart(run_a, run_b, **given):
    """The greatest distance of aligned sites, the number of these, and the sites that are refused.

    Naive rows are those of the first dimensions, up to the shorter.
    """
    alignment = align_tokens(locate_tokens(run_a, **given), locate_tokens(run_b, **given))
    assert not isinstance(alignment, str), alignment
    sites_a, sites_b = tensors(run_a), tensors(run_b)
    common = [site for site in sites_a if site in sites_b]
    for site in common:
        alignment.observe_shapes(
            *({n: tuple(t.shape) for n, t in side[site].items()} for side in (sites_a, sites_b))
        )
    distances, refused = {}, {}
    for site in common:
        pair = alignment.pair_common_tokens(sites_a[site], sites_b[site])
        if isinstance(pair, str):
            refused[site[0]] = pair
        else:
            distances[site] = distance(*pair)
    return alignment, distances, refused


def naive(run_a, run_b):
    """The greatest distance of the blocks' values where no token is aligned."""
    sites_a, sites_b = tensors(run_a), tensors(run_b)
    most = 0.0
    for site in sites_a:
        for a, b in zip(sites_a[site].values(), sites_b.get(site, {}).values(), strict=False):
            if a.ndim == b.ndim == 3:
                sizes = [slice(0, min(n, m)) for n, m in zip(a.shape, b.shape, strict=True)]
                most = max(most, distance(a[tuple(sizes)], b[tuple(sizes)]))
    return most
