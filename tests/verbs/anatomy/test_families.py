"""Each name against equations by hand, from raw hooks of torch on the modules of each family."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import hookline as hl
from causal_zoo import build, texts

X = texts(seed=3, tokens=11)  # neither of the inputs on which the names are proven
LAYER = 1


class Seen:
    """What torch's own hooks saw: the first tensor that each module gets, and that it returns."""

    def __init__(self, model):
        self.got, self.gave = {}, {}
        handles = []
        for path, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                module.register_forward_hook(self._after(path)),
            ]
        with torch.no_grad():
            self.output = model(**X)
        for handle in handles:
            handle.remove()

    def _before(self, path):
        def hook(module, args, kwargs):
            values = [*args, *kwargs.values()]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            self.got.setdefault(path, [tensor.clone() for tensor in tensors[:1]])

        return hook

    def _after(self, path):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, torch.Tensor):
                self.gave.setdefault(path, value.clone())

        return hook


@cache
def family(name):
    """A model, its parts, and what torch's hooks saw."""
    model = build(name)
    return model, hl.anatomy(model), Seen(model)


def value(name, part, layer=LAYER):
    model, parts, _ = family(name)
    with torch.no_grad(), hl.record(model, parts[part, layer], copy=True) as run:
        model(**X)
    return run[str(next(iter(run.sites)))]


# For each family: the path of a block, and each part as a function of what was seen in the block.
# `gave("mlp")` is what the block's module returned, `got("mlp")` what it was given.
LLAMA = {
    "resid_pre": lambda gave, got: got(""),
    "attn_in": lambda gave, got: gave("input_layernorm"),
    "attn_out": lambda gave, got: gave("self_attn"),
    "resid_mid": lambda gave, got: got("") + gave("self_attn"),
    "mlp_in": lambda gave, got: gave("post_attention_layernorm"),
    "mlp_out": lambda gave, got: gave("mlp"),
    "resid_post": lambda gave, got: got("") + gave("self_attn") + gave("mlp"),
}
NEURONS = {
    "mlp_pre": lambda gave, got: gave("mlp.gate_proj"),
    "mlp_gate": lambda gave, got: gave("mlp.gate_proj"),
    "mlp_up": lambda gave, got: gave("mlp.up_proj"),
    "mlp_act": lambda gave, got: got("mlp.down_proj"),
}
EXPERTS = {
    "router_logits": lambda gave, got: gave("mlp.gate"),
    "expert_out": lambda gave, got: gave("mlp.experts"),
}
# A norm stands between each part and the sum.
SANDWICH = {
    "attn_out_raw": lambda gave, got: gave("self_attn"),
    "attn_out": lambda gave, got: gave("post_attention_layernorm"),
    "resid_mid": lambda gave, got: got("") + gave("post_attention_layernorm"),
    "mlp_out_raw": lambda gave, got: gave("mlp"),
    "mlp_out": lambda gave, got: gave("post_feedforward_layernorm"),
}
FAMILIES = {
    "llama": ("model.layers", LLAMA | NEURONS),
    "gpt2": ("transformer.h", {
        "attn_out": lambda gave, got: gave("attn"),
        "resid_mid": lambda gave, got: got("") + gave("attn"),
        "mlp_pre": lambda gave, got: gave("mlp.c_fc"),
        "mlp_act": lambda gave, got: got("mlp.c_proj"),
        "mlp_out": lambda gave, got: gave("mlp"),
    }),
    "gemma2": ("model.layers", SANDWICH | NEURONS),
    "olmo2": ("model.layers", SANDWICH | {"attn_in": lambda gave, got: got("")}),
    "granite": ("model.layers", {
        "attn_out_raw": lambda gave, got: gave("self_attn"),
        "attn_out": lambda gave, got: 0.3 * gave("self_attn"),
        "resid_mid": lambda gave, got: got("") + 0.3 * gave("self_attn"),
        "mlp_out": lambda gave, got: 0.3 * gave("mlp"),
    }),
    "bloom": ("transformer.h", {
        "attn_out": lambda gave, got: gave("self_attention") - got(""),
        "resid_mid": lambda gave, got: gave("self_attention"),
        "mlp_out": lambda gave, got: gave("") - gave("self_attention"),
    }),
    "mpt": ("transformer.blocks", {
        "attn_out": lambda gave, got: gave("attn"),
        "resid_mid": lambda gave, got: got("") + gave("attn"),
        "mlp_out": lambda gave, got: gave("") - got("") - gave("attn"),
    }),
    "gpt_neox": ("gpt_neox.layers", {
        "attn_out": lambda gave, got: gave("attention"),
        "mlp_in": lambda gave, got: gave("post_attention_layernorm"),
        "mlp_out": lambda gave, got: gave("mlp"),
    }),
    "falcon": ("transformer.h", {
        "attn_out": lambda gave, got: gave("self_attention"),
        "mlp_out": lambda gave, got: gave("mlp"),
    }),
    "bert": ("bert.encoder.layer", {
        "attn_out": lambda gave, got: gave("attention.output.dense"),
        "resid_mid": lambda gave, got: gave("attention.output.LayerNorm"),
        "mlp_pre": lambda gave, got: gave("intermediate.dense"),
        "mlp_out": lambda gave, got: gave("output.dense"),
        "resid_post": lambda gave, got: gave("output.LayerNorm"),
    }),
    "opt": ("model.decoder.layers", {
        "attn_out": lambda gave, got: gave("self_attn"),
        "resid_mid": lambda gave, got: got("") + gave("self_attn"),
        "mlp_pre": lambda gave, got: gave("fc1"),
        "mlp_out": lambda gave, got: gave("fc2"),
    }),
    "mixtral": ("model.layers", LLAMA | EXPERTS),
    "deepseek_v3": ("model.layers", LLAMA | EXPERTS),
    "qwen3_next": ("model.layers", LLAMA | EXPERTS | {
        "q_norm": lambda gave, got: gave("self_attn.q_norm"),
        "attn_heads": lambda gave, got: got("self_attn.o_proj"),
        # The second half of each head of a projection of double width.
        "attn_gate": lambda gave, got: (
            gave("self_attn.q_proj").unflatten(-1, (4, 32))[..., 16:].flatten(-2).sigmoid()
        ),
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, (_, parts) in FAMILIES.items() for part in parts]
)
def test_a_part_is_what_its_equation_says(name, part):
    stack, equations = FAMILIES[name]
    seen = family(name)[2]
    block = f"{stack}.{LAYER}"

    def gave(path):
        return seen.gave[f"{block}.{path}".rstrip(".")]

    def got(path):
        return seen.got[f"{block}.{path}".rstrip(".")][0]

    expected = equations[part](gave, got)
    recorded = value(name, part).reshape(expected.shape)
    assert torch.allclose(recorded, expected, atol=1e-5, rtol=1e-5)


# The value that another library gives under a name, with the right shape.
RIVALS = [
    ("bloom", "attn_out", "self_attention"),  # it adds the residual itself
    ("bloom", "mlp_out", "mlp"),
    ("mpt", "mlp_out", "ffn"),
    ("granite", "attn_out", "self_attn"),  # without the multiplier
    ("granite", "mlp_out", "mlp"),
    ("gemma2", "mlp_in", "post_attention_layernorm"),  # the norm after attention, not before
    ("gemma2", "attn_out", "self_attn"),
    ("olmo2", "mlp_out", "mlp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part", "path"), RIVALS)
def test_the_wrong_value_of_a_rival_is_not_given(name, part, path):
    rival = family(name)[2].gave[f"{FAMILIES[name][0]}.{LAYER}.{path}"]
    off = (value(name, part).reshape(rival.shape) - rival).norm() / rival.norm()
    assert off > 0.05


@pytest.mark.slow
def test_the_embedding_is_what_its_module_returns():
    # Gemma's module scales what it looks up; Granite scales what its module returns.
    for name in ("gemma2", "granite"):
        parts = family(name)[1]
        assert list(map(str, parts["embed"])) == ["model.embed_tokens"]
    scaled, stream = family("gemma2")[2].gave["model.embed_tokens"], value("gemma2", "resid_pre", 0)
    assert torch.equal(scaled, stream)


@pytest.mark.slow
def test_the_dense_first_layer_of_deepseek_has_neurons():
    _, parts, seen = family("deepseek_v3")
    (neurons,) = seen.got["model.layers.0.mlp.down_proj"]
    assert torch.equal(value("deepseek_v3", "mlp_act", 0), neurons)
    with pytest.raises(hl.SelectionError, match=r"of layer 1 .*the MLP is of experts"):
        parts["mlp_act", 1]
    with pytest.raises(hl.SelectionError, match="of layer 0"):
        parts["router_logits", 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "falcon"])
def test_parallel_blocks_have_no_resid_mid_and_say_why(name):
    with pytest.raises(hl.SelectionError, match="attention and MLP are parallel"):
        family(name)[1]["resid_mid"]


@pytest.mark.slow
def test_a_layer_without_attention_has_a_mixer():
    _, parts, seen = family("qwen3_next")
    mixed = value("qwen3_next", "mixer_out", 0)
    assert torch.equal(mixed, seen.gave["model.layers.0.linear_attn"])
    with pytest.raises(hl.SelectionError, match=r"'pattern' of layer 0 .*no single attention"):
        parts["pattern", 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite", "mixtral"])
def test_the_lens_of_the_last_stream_gives_the_logits(name):
    # Gemma caps its logits, and Granite divides them.
    model, parts, seen = family(name)
    with torch.no_grad(), hl.record(model, parts["resid_post"]) as run:
        model(**X)
    lens = parts.lens(run, n=3)
    last = parts.n_layers - 1
    assert torch.allclose(lens.logits[last], seen.output.logits, atol=1e-6)
    assert not torch.allclose(lens.logits[0], seen.output.logits, atol=1e-2)
    assert torch.equal(lens.tokens[last], seen.output.logits.topk(3).indices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "qwen3_next"])
def test_the_contributions_of_heads_add_up(name):
    model, parts, _ = family(name)
    with torch.no_grad(), hl.record(model, ".attn_heads") as run:
        model(**X)
    by_head = parts.contributions(run, LAYER)
    raw = value(name, "attn_out_raw")
    projection = model.get_submodule(
        {"gpt2": "transformer.h.1.attn.c_proj", "llama": "model.layers.1.self_attn.o_proj",
         "bloom": "transformer.h.1.self_attention.dense",
         "qwen3_next": "model.layers.1.self_attn.o_proj"}[name]
    )  # fmt: skip
    bias = 0 if projection.bias is None else projection.bias
    assert len(by_head) == 4
    assert torch.allclose(by_head.sum(0) + bias, raw, atol=1e-5)
    # A head is what is lost when its part of z is taken out.
    width = 32 if name in ("gpt2", "bloom") else 64

    def without_head(merged):
        kept = merged.clone()
        kept[..., : width // 4] = 0
        return kept

    with torch.no_grad(), hl.edit(model, parts["attn_heads", LAYER], without_head):
        changed = value(name, "attn_out_raw")
    assert torch.allclose(raw - changed, by_head[0], atol=1e-5)


@pytest.mark.slow
def test_the_load_of_experts_counts_their_tokens():
    model, parts, seen = family("mixtral")
    with torch.no_grad(), hl.record(model, ".expert_indices") as run:
        model(**X)
    load = parts.expert_load(run)
    chosen = seen.gave["model.layers.1.mlp.gate"].topk(2).indices
    assert load.keys() == {0, 1, 2}
    assert load[1].tolist() == [int((chosen == expert).sum()) for expert in range(4)]


@pytest.mark.slow
def test_an_edit_of_router_logits_changes_the_choice():
    model, parts, _ = family("mixtral")
    without_expert_0 = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])
    with torch.no_grad(), hl.edit(model, parts["router_logits"], hl.edits.add(without_expert_0)):
        with hl.record(model, ".expert_indices") as run:
            model(**X)
    chosen = torch.cat([indices.flatten() for indices in run.values()])
    assert chosen.unique().tolist() == [1, 2, 3]
