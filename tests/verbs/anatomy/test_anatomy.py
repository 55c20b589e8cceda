"""hl.anatomy: what it names, what it refuses, and that it leaves the model as it was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn.attention.flex_attention import flex_attention

import hookline as hl
from causal_zoo import build, texts
from float32_device import Float32Device


class Attention(nn.Module):
    """Attention, step by step, with a projection of all heads."""

    def __init__(self, width=16, n_heads=2):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        pattern = self.masked(scores).softmax(-1)
        return self.out((pattern @ v).transpose(1, 2).flatten(-2))

    def masked(self, scores):
        return scores


class Causal(Attention):
    """Attention whose mask `vmap` makes, as that of models of transformers 4."""

    def masked(self, scores):
        places = torch.arange(scores.shape[-1])
        see = vmap(vmap(torch.ge, (None, 0)), (0, None))(places, places)
        return scores.masked_fill(~see, float("-inf"))


class Mlp(nn.Sequential):
    def __init__(self, width=16):
        super().__init__(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))


class Block(nn.Module):
    """A block whose names mislead: `attn` is an MLP, and `mlp` is attention."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp, self.attn = Attention(width), Mlp(width)

    def forward(self, x):
        x = x + self.mlp(self.first(x))
        return x + self.attn(self.second(x))


class Text(nn.Module):
    """Embeddings, blocks, a norm and an unembedding."""

    def __init__(self, block=Block, width=16):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([block(width) for _ in range(2)])
        self.norm, self.unembed = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Text().train()


@pytest.fixture(scope="module")
def parts(model):
    return hl.anatomy(model)


def sites(selection):
    return [str(site) for site in selection]


def test_attention_is_told_from_mlp_by_what_it_does(parts):
    assert sites(parts["attn_out"]) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert sites(parts["mlp_out"]) == ["blocks.0.attn", "blocks.1.attn"]
    assert sites(parts["pattern", 1]) == ["blocks.1.mlp@pattern"]
    assert sites(parts["mlp_act", -1]) == ["blocks.1.attn.2:input"]


def test_a_name_with_a_dot_selects_the_same(model, parts):
    x = torch.randint(50, (2, 6))
    assert sites(hl.select(model, ".resid_post")) == sites(parts["resid_post"])
    assert sites(hl.select(model, ".z.-1")) == sites(parts["z", 1])
    assert sites(hl.select(model, [".z.1", "norm"])) == ["blocks.1.mlp@z", "norm"]
    assert sites(hl.select(model, ".resid_pre.1:grad_output")) == ["blocks.1:grad_input"]
    assert sites(hl.select(model, ".attn_out.0:grad_output")) == ["blocks.0.mlp:grad_output"]
    forth = hl.select(model, [".z.1", ".mlp_act.1"], ports=("output", "grad_output"))
    assert sites(forth) == [
        "blocks.1.mlp@z",
        "blocks.1.mlp@z:grad_output",
        "blocks.1.attn.2:input",
        "blocks.1.attn.2:grad_input",
    ]
    back = hl.select(model, [".z.1", ".mlp_act.1"], ports="grad_output")
    assert sites(back) == sites(forth)[1::2]
    with hl.edit(model, ".attn_out.0", hl.edits.scale(0.0)):
        with hl.record(model, ".resid_mid.0") as run:
            model(x)
    assert torch.equal(run["blocks.0@add#0"], model.embed(x))


def test_a_part_is_looked_up_by_its_name(model, parts):
    x = torch.randint(50, (2, 6))
    with hl.record(model, [".resid_post", ".attn_out.0", ".z:grad_output"]) as run:
        for _ in range(2):
            model(x).sum().backward()
    (site,) = parts["resid_post", 1]
    last = run.passes[1]
    assert last[parts["resid_post", 1]] is last[".resid_post.1"] is last[str(site)]
    assert run[".resid_post.1#pass0"] is run[f"{site}#pass0"]
    assert parts["attn_out", 0] in run
    assert parts["attn_out", 1] not in run
    assert ".attn_out.0" in last
    assert ".attn_out.1" not in last
    assert last[".z.1:grad_output"].shape == last[".z.0:grad_output"].shape
    assert hl.plots.tokens(last, parts["resid_post"]).axes
    with pytest.raises(
        hl.AmbiguousError, match=r"a selection of 2 sites.*\n.*for site in selection"
    ):
        last[parts["resid_post"]]
    with pytest.raises(hl.AmbiguousError, match=r"'\.resid_post' names 2 sites"):
        last[".resid_post"]
    with pytest.raises(hl.NotRecordedError, match="was never selected"):
        last[parts["attn_out", 1]]
    with pytest.raises(hl.SelectionError, match="nothing"):
        last[".nothing"]


def test_the_port_of_a_name_is_that_of_its_gradient(model, parts):
    with pytest.raises(hl.SelectionError, match="must be grad_output or grad_input"):
        hl.select(model, ".resid_post:input")


def test_a_name_needs_an_anatomy_first():
    with pytest.raises(hl.SelectionError, match=r"parts = hl.anatomy\(model\)"):
        hl.select(Text(), ".resid_post")


def test_sizes_are_those_of_the_model(parts):
    assert (parts.n_layers, parts.n_heads, parts.n_key_value_heads, parts.width) == (2, 2, 2, 16)


def test_the_table_says_what_is_proven_and_what_is_not(parts):
    text = str(parts)
    assert text.startswith("Anatomy of Text: 2 layers, 2 heads, width 16, proven on two inputs")
    assert "blocks.*@add#0" in text
    assert "pos_embed" in parts.refused
    data = parts.to_dict()
    assert data["heads"] == 2
    assert max(row["error"] or 0.0 for row in data["parts"]) < 1e-5
    row = next(row for row in data["parts"] if row["name"] == "pattern")
    assert (row["shape"], row["layers"]) == ([2, 2, 9, 9], [0, 1])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("pattern", 2), "the layer must be from 0 to 1, got 2"),
        (("pattern", -3), "the layer must be from 0 to 1, got -3"),
        ("resid_middle", r"got 'resid_middle'\. Did you mean 'resid_mid' .*\nProven here: embed"),
        (("pattern", "1"), r"the number of a layer, got \('pattern', '1'\)"),
        (("pattern", 1.0), "the number of a layer"),
        (("pattern", [0, 1]), "the number of a layer"),
        (("pattern", 0, 1), "the number of a layer"),
        (0, "a name, or a name and"),
        (("logits", 0), "'logits' belongs to no layer, got layer 0"),
        ("mlp_gate", "'mlp_gate' is not a proven part of Text: the MLP has no gate"),
    ],
)
def test_a_wrong_name_or_layer_is_told(parts, key, message):
    with pytest.raises(hl.SelectionError, match=message):
        parts[key]


def test_the_model_is_left_as_it_was(model):
    before = torch.get_rng_state()
    hl.anatomy(model)
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert len(hl.inventory(model)) == 0


def test_a_failed_run_leaves_no_hook():
    model = Text()
    model.unembed = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        hl.anatomy(model, torch.randint(50, (2, 7)))
    assert len(hl.inventory(model)) == 0


def test_names_do_not_keep_the_model_alive():
    model = Text()
    hl.anatomy(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_an_input_of_ones_own_is_taken(model):
    parts = hl.anatomy(model, torch.randint(50, (3, 8)))
    assert parts.to_dict()["parts"][1]["shape"] == [3, 8, 16]


def test_a_default_device_changes_no_part(model, parts):
    with torch.device("meta"):
        assert hl.anatomy(model).to_dict() == parts.to_dict()


class WrongName(nn.Module):
    """What its second part adds also depends on the token before: a convolution."""

    def __init__(self, width=16):
        super().__init__()
        self.mlp, self.shift = Mlp(width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.shift(x.roll(1, 1))
        return x + self.mlp(x)


def test_what_mixes_tokens_without_a_pattern_is_no_attention():
    parts = hl.anatomy(Text(WrongName))
    assert sites(parts["mixer_out"]) == ["blocks.0.shift", "blocks.1.shift"]
    with pytest.raises(hl.SelectionError, match="the block has no attention"):
        parts["attn_out"]
    with pytest.raises(hl.SelectionError, match=r"in it, mixer_out \(blocks\.0\.shift\), shows no"):
        parts["pattern"]


class Flex(Attention):
    """Attention by a kernel that compiles itself."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(flex_attention(q, k, v).transpose(1, 2).flatten(-2))


class FlexBlock(Block):
    def __init__(self, width=16):
        super().__init__(width)
        self.mlp = Flex(width)


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")
def test_an_attention_that_compiles_itself_is_refused_by_name():
    with pytest.raises(hl.AttachError, match=r"^hl\.anatomy must .*, got flex_attention, whic"):
        hl.anatomy(Text(FlexBlock))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_is_named():
    model = Text()
    for block in model.blocks:
        block.attn = torch.jit.script(block.attn)
    assert "blocks.0.attn is a ScriptModule: what it calls has no names." in str(hl.anatomy(model))
    model = Text(Mlp)
    model.blocks[0] = torch.jit.script(model.blocks[0])
    with pytest.raises(hl.SelectionError, match=r"; blocks\.0 is a ScriptModule, whose calls are"):
        hl.anatomy(model)


class Gate(nn.Module):
    """A sum that is no sum: the stream is multiplied by a value of its own."""

    def __init__(self, width=16):
        super().__init__()
        self.linear, self.inner = nn.Linear(width, width), Mlp(width)

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def test_a_stream_behind_a_nonlinearity_is_refused():
    number = r"@relu, off by \d\.\de-01 from a scale or a norm on input 1"
    with pytest.raises(hl.SelectionError, match=r"on the way is blocks\.\d" + number):
        hl.anatomy(Text(Gate))


class OneHead(Attention):
    """Attention without an axis of heads."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT / 4).softmax(-1) @ v)


class HeadsAreRows(Attention):
    """Attention by products of matrices, one for each head of each text."""

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.flatten(1, 2)
        z = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        return self.out(z.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(-2))


class ByEinsum(Attention):
    """Attention whose heads come after the tokens."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).unbind(-3)
        pattern = torch.einsum("bqhe,bkhe->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhe->bqhe", pattern, v).flatten(-2))


class OfTorch(nn.Module):
    """The attention of torch, whose queries, keys and values are one tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Grouped(Attention):
    """Attention whose heads share keys and values, repeated by a view."""

    def __init__(self, width=16):
        super().__init__(width)
        self.qkv = nn.Linear(width, 2 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        k, v = (part.unsqueeze(2).expand(-1, -1, 2, -1).transpose(1, 2) for part in (k, v))
        q = q.unflatten(-1, (2, -1)).transpose(1, 2)
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(z.transpose(1, 2).flatten(-2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "n_heads", "n_key_value_heads"),
    [(OneHead, 1, 1), (HeadsAreRows, 2, 2), (ByEinsum, 2, 2), (Grouped, 2, 1), (OfTorch, 2, 2)],
)
@pytest.mark.parametrize("n_texts", [1, 3])
def test_heads_are_counted(attention, n_heads, n_key_value_heads, n_texts):
    model = Text()
    for block in model.blocks:
        block.mlp = attention()
    parts = hl.anatomy(model, torch.randint(50, (n_texts, 7)))
    assert (parts.n_heads, parts.n_key_value_heads) == (n_heads, n_key_value_heads)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attention_with_a_padding_mask_is_no_cross_attention(name):
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    parts = hl.anatomy(build(name), {"input_ids": ids, "attention_mask": mask, "use_cache": False})
    assert "cross_attn_out" not in parts
    assert {"attn_out", "q", "k", "v", "pattern"} <= set(parts)
    assert parts.n_heads == 4


class Two(nn.Module):
    """The sum of two modules of a type."""

    def __init__(self, kind):
        super().__init__()
        self.one, self.other = kind(), kind()

    def forward(self, x):
        return self.one(x) + self.other(x)


def test_two_mlps_or_attentions_in_one_have_no_parts():
    model = Text()
    for block in model.blocks:
        block.mlp, block.attn = Two(Attention), Two(Mlp)
    parts = hl.anatomy(model)
    assert sites(parts["attn_out", 0]) == ["blocks.0.mlp"]
    assert sites(parts["mlp_out", 0]) == ["blocks.0.attn"]
    with pytest.raises(hl.SelectionError, match="2 patterns mix tokens in the attention"):
        parts["pattern"]
    with pytest.raises(hl.SelectionError, match="it also adds a product of other neurons"):
        parts["mlp_act"]


class NormedValues(Attention):
    """Attention whose queries are its keys; its values have a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(q, q, self.norm(k))
        return self.out(z.transpose(1, 2).flatten(-2))


def test_a_norm_of_values_is_no_norm_of_keys():
    model = Text()
    for block in model.blocks:
        block.mlp = NormedValues()
    assert not {"q_norm", "k_norm"} & set(hl.anatomy(model))


class Balanced(Block):
    """A block that also adds a number of each text to those of the blocks before, given first."""

    def forward(self, given):
        balance, x = given
        x = super().forward(x)
        return balance + x.mean((1, 2)), x


class BalancedText(Text):
    def __init__(self):
        super().__init__(Balanced)

    def forward(self, x):
        state = torch.zeros(len(x)), self.embed(x)
        for block in self.blocks:
            state = block(state)
        return self.unembed(self.norm(state[1]))


class InOneStack(Text):
    """A stack that also holds dropout, a norm before the blocks, and the last norm."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Dropout(), nn.LayerNorm(16), *self.blocks, nn.LayerNorm(16))

    def forward(self, x):
        return self.unembed(self.blocks(self.embed(x)))


class NormInLast(Block):
    """A block that may end with the last norm of the model."""

    def __init__(self, width=16, *, is_last=False):
        super().__init__(width)
        self.last = nn.LayerNorm(width) if is_last else nn.Identity()

    def forward(self, x):
        return self.last(super().forward(x))


class InLast(Text):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([NormInLast(), NormInLast(is_last=True)])
        self.norm = nn.Identity()


@pytest.mark.parametrize(
    ("kind", "norm", "last"),
    [(InOneStack, "blocks.4", "blocks.3"), (InLast, "blocks.1.last", "blocks.1@add#1")],
)
def test_the_last_stream_is_before_the_last_norm(kind, norm, last):
    model = kind()
    parts, ids = hl.anatomy(model), torch.randint(50, (2, 6))
    assert parts.n_layers == 2
    assert sites(parts["ln_final"]) == [norm]
    assert sites(parts["resid_post", -1]) == [last]
    with torch.no_grad(), hl.record(model, parts["resid_post"]) as run:
        model(ids)
        expected = model.unembed(model.get_submodule(norm)(run[parts["resid_post", 0]]))
    assert torch.equal(parts.lens(run).logits[0], expected)


def test_a_model_that_is_one_sequence_is_a_stack():
    model = nn.Sequential(
        nn.Embedding(50, 16), Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 50)
    )
    parts = hl.anatomy(model)
    assert (parts.n_layers, list(parts.stacks)) == (2, [""])
    assert sites(parts["embed"]) == ["0"]
    assert sites(parts["mlp_out"]) == ["1.attn", "2.attn"]
    assert sites(parts["ln_final"]) == ["3"]


@pytest.mark.slow
def test_stages_of_blocks_are_a_stack_each():
    stages = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block())
    parts = hl.anatomy(nn.Sequential(nn.Embedding(50, 16), *stages))
    assert {path: stack.n_layers for path, stack in parts.stacks.items()} == {"1": 2, "2": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_encoder_and_the_decoder_of_torch_are_two_stacks(batch_first, norm_first):
    order = {"batch_first": batch_first, "norm_first": norm_first}
    parts = hl.anatomy(nn.Transformer(16, 2, 2, 2, 32, **order), tuple(torch.randn(2, 4, 7, 16)))
    assert list(parts.stacks) == ["encoder.layers", "decoder.layers"]
    for layer, path in enumerate(("decoder.layers.0", "decoder.layers.1")):
        assert sites(parts["attn_out", layer]) == [f"{path}.self_attn:output[0]"]
        assert sites(parts["cross_attn_out", layer]) == [f"{path}.multihead_attn:output[0]"]


def test_a_number_of_each_text_is_no_stream():
    parts = hl.anatomy(BalancedText())
    assert sites(parts["resid_post"]) == ["blocks.0:output[1]", "blocks.1:output[1]"]


class OtherSum(Block):
    """A block that adds something else to texts of seven tokens, as the second input has."""

    def forward(self, x):
        middle = x + self.mlp(self.first(x)) * (1.5 if x.shape[1] == 7 else 1.0)
        return middle + self.attn(self.second(middle))


@pytest.mark.slow
def test_a_sum_of_one_input_alone_is_refused_with_its_number():
    parts = hl.anatomy(Text(OtherSum))
    reason = r"resid_mid.* is off by \d\.\de-0\d on input 2, above 1e-05, at blocks\.1@add"
    assert "attn_out" not in parts
    with pytest.raises(hl.SelectionError, match=reason):
        parts["resid_mid", 1]


class MlpFirst(Block):
    """A block whose MLP comes before its attention."""

    def forward(self, x):
        middle = x + self.attn(self.first(x))
        return middle + self.mlp(self.second(middle))


def test_a_block_whose_mlp_comes_first_has_no_middle():
    parts = hl.anatomy(Text(MlpFirst))
    assert sites(parts["mlp_out", 0]) == ["blocks.0.attn"]
    with pytest.raises(hl.SelectionError, match="the MLP comes before a part that mixes tokens"):
        parts["resid_mid", 0]


class Leaking(nn.Module):
    """Adds the values of the token before to what its pattern mixes."""

    def __init__(self, width=16):
        super().__init__()
        self.attention = Attention(width)

    def forward(self, x):
        return self.attention(x) + 0.1 * x.roll(1, 1)


class LeakingBlock(Block):
    """A block whose attention is none."""

    def __init__(self, width=16):
        super().__init__(width)
        self.mlp = Leaking(width)


def test_a_pattern_that_leaks_is_refused_with_its_number():
    parts = hl.anatomy(Text(LeakingBlock))
    reason = r"no attention: at blocks\.0\.mlp a change of one token reaches .* by \d\.\de-0\d"
    with pytest.raises(hl.SelectionError, match=reason):
        parts["attn_out"]


class Curved(Text):
    """The first stream is no sum, norm or scale of what the embedding returns."""

    def forward(self, x):
        x = self.embed(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))


def test_an_embedding_that_is_bent_is_refused_with_its_number():
    reason = r"gives the first stream: the closest is off by \d\.\de-0\d on input 1"
    with pytest.raises(hl.SelectionError, match=reason):
        hl.anatomy(Curved())["embed"]


class Beside(Block):
    """A block whose attention and MLP are added in one expression, and scaled."""

    def forward(self, x):
        return x + 0.5 * (self.mlp(self.first(x)) + self.attn(self.second(x)))


class Fused(Block):
    """A block with one projection for the heads and the neurons, as PaLM's."""

    def __init__(self, width=16):
        super().__init__(width)
        self.mlp.out, self.neurons = nn.Identity(), nn.Linear(width, 24)
        self.out = nn.Linear(width + 24, width)

    def forward(self, x):
        normed = self.first(x)
        return x + self.out(torch.cat([self.mlp(normed), self.neurons(normed).relu()], -1))


@pytest.mark.parametrize(("block", "site"), [(Beside, "@mul"), (Fused, ".out")])
def test_a_sum_of_attention_and_mlp_is_no_attention(block, site):
    parts = hl.anatomy(Text(block))
    assert sites(parts["mixer_out", 0]) == [f"blocks.0{site}"]
    reason = rf"blocks\.0{site} adds more than what its pattern mixes, by \d\.\de-0\d"
    for name in ("attn_out", "pattern"):
        with pytest.raises(hl.SelectionError, match=reason):
            parts[name]


class Shift(nn.Module):
    """Adds a product of the token before, along a dimension; or of a mean over it."""

    def __init__(self, dim, *, is_mean=False):
        super().__init__()
        self.dim, self.is_mean, self.shift, self.mlp = dim, is_mean, nn.Linear(16, 16), Mlp()

    def forward(self, x):
        other = x.mean(self.dim, keepdim=True) if self.is_mean else x.roll(1, self.dim)
        x = x + self.shift(other)
        return x + self.mlp(x)


@pytest.mark.slow
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2, 7), 1), ((7, 2), 0), ((7, 1), 0), ((7, 8), 0), ((7,), 0)],
)
def test_what_mixes_tokens_is_known_in_every_layout(shape, dim, is_mean):
    model = nn.Sequential(*[Shift(dim, is_mean=is_mean) for _ in range(2)])
    parts = hl.anatomy(model, torch.randn(*shape, 16))
    assert sites(parts["mixer_out"]) == ["0.shift", "1.shift"]
    assert sites(parts["mlp_out"]) == ["0.mlp", "1.mlp"]


def test_a_token_of_padding_hides_no_mixer():
    class Padded(Shift):
        def forward(self, x):
            seen = (torch.arange(x.shape[1]) > 1)[:, None]  # the first two tokens are padding
            x = x + self.shift((x * seen).roll(1, 1)) * seen
            return x + self.mlp(x)

    parts = hl.anatomy(nn.Sequential(Padded(1), Padded(1)), torch.randn(2, 7, 16))
    assert sites(parts["mixer_out"]) == ["0@mul#1", "1@mul#1"]


@pytest.mark.parametrize("n_rows", [1, 2, 7, 8])
def test_tokens_that_come_before_rows_are_known(n_rows):
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parts = hl.anatomy(model, torch.randn(7, n_rows, 16))
    assert sites(parts["attn_out", 1]) == ["layers.1.self_attn:output[0]"]
    assert sites(parts["mlp_out", 1]) == ["layers.1.linear2"]
    assert parts.n_heads == 2


class Image(Block):
    """A block of (rows, height, width, features), whose attention is over all places."""

    def forward(self, x):
        x = x + self.mlp(self.first(x).flatten(1, 2)).view_as(x)
        return x + self.attn(self.second(x))


def test_attention_over_two_dimensions_is_attention():
    parts = hl.anatomy(nn.Sequential(Image(), Image()), torch.randn(2, 3, 4, 16))
    assert sites(parts["attn_out"]) == ["0.mlp", "1.mlp"]
    assert sites(parts["mlp_out"]) == ["0.attn", "1.attn"]


class Sums(Text):
    """Adds up what is looked up for types, for positions and for tokens, in this order."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.types, self.places = kind, nn.Embedding(3, 16), nn.Embedding(64, 16)
        self.rest, self.table = nn.Embedding(64, 16), nn.Parameter(torch.randn(64, 16))

    def forward(self, x, given=None):
        places = torch.arange(x.shape[1])
        total = {
            "types": lambda: self.types(torch.zeros_like(x)),
            "positions": lambda: self.places(places),
            "from the end": lambda: self.places(places.flip(0)),
            "beside padding": lambda: self.places((x != 0).long().cumsum(1)),
            "axes": lambda: self.places(places // 3) + self.rest(places % 3),
            "table": lambda: self.table[: x.shape[1]],
            "given types": lambda: self.types(given),
            "given positions": lambda: self.places(given),
        }[self.kind]() + self.embed(x)
        for block in self.blocks:
            total = block(total)
        return self.unembed(self.norm(total))


TYPES, PADDED = torch.randint(0, 2, (2, 9)), torch.tensor([[0, 0, 7, 8, 9], [3, 9, 4, 8, 2]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "inputs", "positions"),
    [
        ("types", None, "nothing that counts up"),
        ("positions", None, "places"),
        ("positions", torch.arange(9)[None], "places"),
        ("positions", torch.randint(3, 50, (1, 9)).expand(2, 9), "places"),
        ("from the end", None, "places"),
        ("beside padding", PADDED, "places"),
        ("axes", None, "2 of this kind are added: places, rest"),
        ("table", None, "no module gets or returns it"),
        ("given types", (torch.randint(3, 50, (2, 9)), TYPES), "nothing that counts up"),
        ("given positions", (PADDED, torch.arange(5).expand(2, 5)), "places"),
    ],
)
def test_the_embedding_is_that_of_the_tokens(kind, inputs, positions):
    parts = hl.anatomy(Sums(kind), inputs)
    assert sites(parts["embed"]) == ["embed"]
    if "pos_embed" in parts:
        assert sites(parts["pos_embed"]) == [positions]
    else:
        assert positions in parts.refused["pos_embed"]


def test_an_embedding_before_a_norm_is_named():
    class Normed(Text):
        """A norm that is written out comes before the blocks, as in nanochat."""

        def forward(self, x):
            x = self.embed(x)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            for block in self.blocks:
                x = block(x)
            return self.unembed(x)

    assert sites(hl.anatomy(Normed())["embed"]) == ["embed"]


class Minus(Block):
    """A block that takes away what its parts return."""

    def forward(self, x):
        x = x - self.mlp(self.first(x))
        return x - self.attn(self.second(x))


def test_blocks_that_add_nothing_are_told():
    with pytest.raises(hl.SelectionError, match=r"blocks\.0 adds to its input nothing that it"):
        hl.anatomy(Text(Minus))


@pytest.mark.slow
def test_embeddings_that_cannot_be_told_apart_are_refused():
    ids = torch.randint(3, 50, (2, 9)), torch.randint(3, 50, (2, 9))
    with pytest.raises(hl.SelectionError, match="2 of this kind are added: places, embed"):
        hl.anatomy(Sums("given positions"), ids)["embed"]
    with pytest.raises(hl.SelectionError, match="no embedding is looked up before"):
        hl.anatomy(nn.Sequential(Block(), Block()), torch.randn(2, 7, 16))["embed"]


class Scaled(Block):
    """A block that scales what its parts add, by ones in the beginning."""

    start = 1.0

    def __init__(self, width=16):
        super().__init__(width)
        self.scales = nn.Parameter(torch.full((2, width), self.start))

    def forward(self, x):
        x = x + self.scales[0] * self.mlp(self.first(x))
        return x + self.scales[1] * self.attn(self.second(x))


class ScaledByZero(Scaled):
    start = 0.0


def test_a_scale_of_ones_is_a_scale():
    parts = hl.anatomy(Text(Scaled))
    assert sites(parts["attn_out"]) == ["blocks.0@mul#0", "blocks.1@mul#0"]
    assert sites(parts["attn_out_raw"]) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert sites(parts["mlp_out"]) == ["blocks.0@mul#1", "blocks.1@mul#1"]


def test_what_adds_zeros_has_no_known_kind():
    parts = hl.anatomy(Text(ScaledByZero))
    for name in ("attn_out", "mlp_out", "resid_mid", "pattern", "mlp_act"):
        with pytest.raises(hl.SelectionError, match=r"blocks\.0@mul#0 adds nothing but zeros"):
            parts[name]


class Swap(nn.Module):
    """Two streams, each of which gets what is computed from the other."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = Mlp(width), Mlp(width)

    def forward(self, both):
        a, b = both
        a = a + self.first(b)
        return a, b + self.second(a)


class TwoStreams(Text):
    def forward(self, x):
        both = self.embed(x), self.embed(x) * 2
        for block in self.blocks:
            both = block(both)
        return self.unembed(self.norm(both[0] + both[1]))


def test_two_streams_are_refused():
    with pytest.raises(hl.SelectionError, match="has 2 streams"):
        hl.anatomy(TwoStreams(Swap))


@pytest.mark.slow
def test_a_resnet_is_refused():
    torchvision = pytest.importorskip("torchvision")
    with pytest.raises(hl.SelectionError, match=r"on the way is layer\d\.\d\.relu@relu"):
        hl.anatomy(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"), [("hy_v4", "mixes 4 streams"), ("deepseek_v4", "layers.0@matmul")]
)
def test_hyper_connections_are_refused(name, reason):
    with pytest.raises(hl.SelectionError, match=reason):
        hl.anatomy(build(name), texts())


def test_a_model_without_embedding_needs_an_input():
    with pytest.raises(hl.InputError, match=r"hl.anatomy\(model, x\)"):
        hl.anatomy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_a_model_that_does_not_take_a_made_input_needs_one():
    model = Sums("positions")
    model.places = nn.Embedding(8, 16)
    with pytest.raises(hl.InputError, match=r"Sums takes, .* IndexError: .*\nWrite hl\.ana"):
        hl.anatomy(model)


def test_a_model_or_an_input_without_numbers_is_refused():
    model = Text()
    with pytest.raises(hl.InputError, match="inputs with numbers"):
        hl.anatomy(model, torch.zeros(2, 7, dtype=torch.long, device="meta"))
    model.unembed = nn.Linear(16, 50, device="meta")
    with pytest.raises(hl.InputError, match=r"got unembed\.weight on the meta device"):
        hl.anatomy(model)


@pytest.mark.slow
def test_inference_mode_changes_no_name(model, parts):
    ids = torch.randint(50, (2, 7))
    with torch.inference_mode():
        made = Text()
        assert set(hl.anatomy(model)) == set(hl.anatomy(model, ids.clone())) == set(parts)
        with hl.record(model, [parts["resid_post"], parts["attn_heads"]]) as run:
            logits = model(ids)
        assert torch.allclose(parts.lens(run).logits[1], logits, atol=1e-6)
        assert parts.contributions(run, 0).shape == (2, 2, 7, 16)
    assert set(hl.anatomy(made, ids)) == set(parts)


def test_an_input_that_the_model_writes_to_is_kept():
    class Writes(Text):
        def forward(self, x):
            x.add_(1).remainder_(50)
            return super().forward(x)

    ids = torch.randint(50, (2, 7))
    before = ids.clone()
    assert "attn_out" in hl.anatomy(Writes(), ids)
    assert torch.equal(ids, before)


PADDING = torch.arange(7).expand(2, 7) > torch.tensor([[3], [6]])
CAUSAL = torch.full((7, 7), -torch.inf).triu(1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    "masks",
    [
        {"src_key_padding_mask": PADDING},
        {"mask": CAUSAL},
        {"mask": CAUSAL.clamp(min=torch.finfo(torch.float32).min)},
        {"mask": CAUSAL + 0.1 * torch.arange(7)},
    ],
)
def test_masks_hide_no_name_of_the_encoder_of_torch(masks):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    is_fast = torch.backends.mha.get_fastpath_enabled()
    parts = hl.anatomy(model.eval(), {"src": torch.randn(2, 7, 16), **masks})
    assert sites(parts["attn_out", 1]) == ["layers.1.self_attn:output[0]"]
    assert sites(parts["resid_mid", 1]) == ["layers.1.norm1"]
    assert {"q", "k", "v", "pattern"} <= set(parts)
    assert torch.backends.mha.get_fastpath_enabled() is is_fast


def test_a_value_that_is_nan_is_told():
    model = Text()
    model.blocks[1].mlp.masked = lambda scores: scores - torch.inf
    reason = r"'pattern' of layer 1 .*: blocks\.1\.mlp adds NaN or infinity, which does not tell"
    with pytest.raises(hl.SelectionError, match=reason):
        hl.anatomy(model)["pattern", 1]


def test_blocks_that_run_again_are_no_stack():
    class Again(Text):
        def forward(self, x):
            x = self.embed(x)
            for number in (0, 1, 2, 0):
                x = self.blocks[number](x)
            return self.unembed(self.norm(x))

    model = Again()
    model.blocks.append(Block())
    with pytest.raises(hl.SelectionError, match="no stack of blocks ran"):
        hl.anatomy(model)


def test_a_sum_outside_of_the_blocks_is_told():
    class Outside(Text):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = x + block.mlp(x)
            return self.unembed(self.norm(x))

    with pytest.raises(hl.SelectionError, match=r"x \+ block\(x\) must lie within the block"):
        hl.anatomy(Outside())


@pytest.mark.slow
def test_a_compiled_model_is_refused():
    with pytest.raises(hl.AttachError, match=r"before torch\.compile"):
        hl.anatomy(torch.compile(Text(), backend="eager"))


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_two_stacks():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    parts = hl.anatomy(transformers.T5ForConditionalGeneration(config))
    assert list(parts.stacks) == ["encoder.block", "decoder.block"]
    assert sites(parts["cross_attn_out", 0]) == [
        "decoder.block.0.layer.1.EncDecAttention:output[0]"
    ]
    assert sites(parts["ln_final"]) == ["decoder.final_layer_norm"]
    encoder = parts.stacks["encoder.block"]
    assert sites(encoder["mlp_out", 1]) == ["encoder.block.1.layer.1.DenseReluDense"]
    assert "cross_attn_out" not in encoder


@pytest.mark.slow
def test_a_vision_transformer_of_timm_is_named():
    timm = pytest.importorskip("timm")
    sizes = {"depth": 2, "img_size": 32, "embed_dim": 48, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes).eval()
    parts = hl.anatomy(model, torch.randn(2, 3, 32, 32))
    assert sites(parts["attn_out"]) == ["blocks.0.attn", "blocks.1.attn"]
    assert sites(parts["resid_mid", 1]) == ["blocks.1@add#0"]
    with pytest.raises(hl.SelectionError, match="no output of the model"):
        parts["logits"]


def test_the_encoder_of_torch_is_named():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parts = hl.anatomy(model, torch.randn(2, 7, 16))
    assert sites(parts["attn_in", 0]) == ["layers.0.self_attn:input.query"]
    assert sites(parts["mlp_act", 0]) == ["layers.0.linear2:input"]
    assert parts.n_heads == 4


def test_what_does_not_divide_into_heads_is_refused(parts):
    with pytest.raises(hl.StructureError, match=r"2 heads side by side, got \[2, 7\]"):
        parts.heads(torch.ones(2, 7))


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (2, 0), (0, 7)])
def test_a_text_of_one_token_or_none_is_refused(model, shape):
    with pytest.raises(hl.InputError, match=r"at least 3 tokens, got [01] at blocks\.0"):
        hl.anatomy(model, torch.zeros(shape, dtype=torch.long))


def test_wrong_arguments_of_the_reads_are_told(model, parts):
    with torch.no_grad(), hl.record(model, [".attn_heads", ".resid_post"]) as run:
        model(torch.randint(50, (2, 7)))
    for read in (parts.lens, parts.expert_load, lambda run: parts.contributions(run, 0)):
        with pytest.raises(hl.InputError, match="run must be a recording, got str"):
            read("run")
    for layer in ("0", None, 1.0, True):
        with pytest.raises(hl.InputError, match="layer must be the number of a layer, got"):
            parts.contributions(run, layer)
    with pytest.raises(hl.SelectionError, match="the layer must be from 0 to 1, got -3"):
        parts.contributions(run, -3)
    assert torch.equal(parts.contributions(run, -1), parts.contributions(run.passes[0], 1))
    with torch.no_grad(), hl.record(model, ".attn_heads") as twice:
        model(torch.randint(50, (2, 7)))
        model(torch.randint(50, (2, 7)))
    with pytest.raises(
        hl.InputError, match=r"must be of one pass, got a recording of 2\.\n.*\[0\]"
    ):
        parts.contributions(twice, 0)
    for value in (None, torch.ones(()), torch.ones(16), [1.0]):
        with pytest.raises(hl.StructureError, match="value must be a tensor of"):
            parts.heads(value)


def test_a_mask_that_vmap_makes_hides_no_name(parts):
    model = Text()
    for block in model.blocks:
        block.mlp = Causal()
    causal = hl.anatomy(model)
    assert set(causal) == set(parts)
    assert sites(causal["pattern"]) == sites(parts["pattern"])


def test_what_vmap_computes_has_no_name(parts):
    class Mapped(Block):
        def forward(self, x):
            x = x + self.mlp(self.first(x))
            return x + vmap(self.attn)(self.second(x))

    mapped = hl.anatomy(Text(Mapped))
    assert sites(mapped["attn_out"]) == sites(parts["attn_out"])
    assert "mlp_act" not in mapped


def test_an_exported_program_is_refused():
    program = torch.export.export(Mlp(), (torch.ones(1, 16),)).module()
    with pytest.raises(hl.AttachError, match=r"before torch\.export"):
        hl.anatomy(program, torch.ones(1, 16))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_norms_of_queries_and_keys_are_found_in_any_attention(attention):
    parts = hl.anatomy(build("qwen3", attention), texts())
    for name in ("q_norm", "k_norm"):
        paths = [f"model.layers.{layer}.self_attn.{name}" for layer in range(parts.n_layers)]
        assert [str(site) for site in parts[name]] == paths


# -- the lens, by the weights that the model has ---------------------------------------------------


class Tied(Text):
    """Logits by the transposed weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.unembed = None

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def last_error(model, parts, ids):
    """How far the lens of the last stream is from the logits."""
    with torch.no_grad(), hl.record(model, parts["resid_post"]) as run:
        output = model(ids)
    logits = getattr(output, "logits", output)
    return float((parts.lens(run).logits[parts.n_layers - 1] - logits).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "gemma2", "weight norm"])
def test_the_lens_reads_what_is_computed_of_weights_anew(name):
    model = {"tied": Tied, "weight norm": Text}.get(name, lambda: build(name))()
    if name == "weight norm":
        nn.utils.parametrizations.weight_norm(model.unembed)
    parts = hl.anatomy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    assert last_error(model, parts, torch.randint(50, (2, 6))) < 1e-5


def test_the_lens_reads_a_model_that_was_cast_since():
    model = Text()
    parts = hl.anatomy(model)
    ids = torch.randint(50, (2, 6))
    assert last_error(model.double(), parts, ids) < 1e-12
    assert last_error(model.bfloat16(), parts, ids) < 0.1


class Packed(torch.Tensor):
    """A weight without memory of its own, which knows few functions, as those of torchao."""

    @staticmethod
    def __new__(cls, whole):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)

    def __init__(self, whole):
        self.whole = whole

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.overloadpacket in {torch.ops.aten.detach, torch.ops.aten.t}:
            return Packed(function(args[0].whole))
        if function.overloadpacket not in {torch.ops.aten.mm, torch.ops.aten.addmm}:
            raise NotImplementedError(function)
        return function(*[part.whole if isinstance(part, Packed) else part for part in args])


def test_packed_weights_hide_no_part_and_no_lens(parts):
    model = Text()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Packed(module.weight.detach()), requires_grad=False)
    packed = hl.anatomy(model)
    assert {name: sites(packed[name]) for name in packed} == {
        name: sites(parts[name]) for name in parts
    }
    assert last_error(model, packed, torch.randint(50, (2, 6))) < 1e-5


@pytest.mark.slow
def test_the_lens_has_rows_first_where_the_stream_has_not():
    model = build("xlnet")
    assert last_error(model, hl.anatomy(model, texts()), texts()["input_ids"]) < 1e-5


class Valued(Text):
    """Returns a number for each token, besides the logits, or other logits."""

    def __init__(self, n_classes):
        super().__init__()
        self.value = nn.Linear(16, n_classes)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.unembed(x)
        return {"value": self.value(x), "logits": logits, "again": logits}


def test_the_logits_are_those_of_words():
    parts = hl.anatomy(Valued(1))
    assert sites(parts["logits"]) == ["(root):output.logits"]
    assert sites(parts["unembed"]) == ["unembed"]
    reason = r"several outputs .* from the last stream: \(root\):output\.value, .*\.logits"
    with pytest.raises(hl.SelectionError, match=reason):
        hl.anatomy(Valued(50))["logits"]


class MaskedWords(Text):
    """Gives words that do not exist no chance."""

    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(50) > 45, -torch.inf)


def test_words_that_are_masked_hide_no_lens():
    model = MaskedWords()
    parts, ids = hl.anatomy(model), torch.randint(45, (2, 6))
    with torch.no_grad(), hl.record(model, parts["resid_post"]) as run:
        logits = model(ids)
    assert torch.equal(parts.lens(run).logits[1], logits)


def test_logits_of_two_products_have_no_unembedding():
    model = Text()
    model.unembed = Two(lambda: nn.Linear(16, 50))
    parts = hl.anatomy(model)
    assert {"logits", "ln_final"} <= set(parts)
    with pytest.raises(hl.SelectionError, match="the logits are made of several products"):
        parts["unembed"]


class Convolved(nn.Module):
    """A head that reads three tokens for each logit."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 50)

    def forward(self, x):
        return self.linear(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Placed(nn.Linear):
    """A head that adds something for each position."""

    def __init__(self):
        super().__init__(16, 50)
        self.table = nn.Parameter(torch.randn(20, 50))

    def forward(self, x):
        return super().forward(x) + self.table[: x.shape[1]]


@pytest.mark.parametrize("head", [Convolved, Placed])
def test_a_head_that_reads_other_tokens_or_positions_is_no_lens(head):
    model = Text()
    model.unembed = head()
    parts = hl.anatomy(model, torch.randint(50, (2, 9)))
    assert "resid_post" in parts
    assert "logits" not in parts


def test_a_lens_of_few_classes_has_as_many():
    model = Text()
    model.unembed = nn.Linear(16, 3)
    parts = hl.anatomy(model)
    with hl.record(model, parts["resid_post"]) as run:
        model(torch.randint(50, (2, 6)))
    assert parts.lens(run).tokens[1].shape == (2, 6, 3)
    for n in (0, -1, 2.0, "a", True):
        with pytest.raises(hl.InputError, match="n must be a number of tokens, 1 or more"):
            parts.lens(run, n)
    with hl.record(model, parts["resid_post"], keep=lambda value: value[..., :4]) as run:
        model(torch.randint(50, (2, 6)))
    with pytest.raises(hl.StructureError, match="must have 16 features, got"):
        parts.lens(run)


class Normed(nn.Linear):
    """A projection that divides what it returns."""

    def forward(self, x):
        return nn.functional.layer_norm(super().forward(x), (16,))


def test_contributions_of_more_than_a_projection_are_refused():
    model = Text()
    for block in model.blocks:
        block.mlp.out = Normed(16, 16)
    parts = hl.anatomy(model)
    with torch.no_grad(), hl.record(model, parts["attn_heads"]) as run:
        model(torch.randint(50, (2, 6)))
    with pytest.raises(hl.SelectionError, match=r"blocks\.0\.mlp\.out must be a projection"):
        parts.contributions(run, 0)


class Residual(Attention):
    """Attention that returns its input to the projection, too."""

    def __init__(self):
        super().__init__()
        self.out = Around(16, 16)


class Around(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x


class Bent(Attention):
    """Attention that bends what it projects."""

    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Residual, r"the attention returns more than what blocks\.0\.mlp\.out does"),
        (Bent, r"'attn_out_raw' of layer 0 is not a proven part"),
    ],
)
def test_contributions_that_are_not_all_are_refused(kind, reason):
    model = Text()
    for block in model.blocks:
        block.mlp = kind()
    parts = hl.anatomy(model)
    with torch.no_grad(), hl.record(model, "blocks.*.mlp.out:input") as run:
        model(torch.randint(50, (2, 6)))
    with pytest.raises(hl.SelectionError, match=reason):
        parts.contributions(run, 0)


def test_a_config_without_a_size_of_pictures_asks_for_an_input():
    transformers = pytest.importorskip("transformers")

    class Segmenter(nn.Module):
        main_input_name, config = "pixel_values", transformers.SegformerConfig()

        def forward(self, pixel_values):
            return pixel_values

    with pytest.raises(hl.InputError, match=r"given an input: .*\nWrite hl.anatomy\(model, x\)"):
        hl.anatomy(Segmenter())


def test_names_are_proven_on_a_device_without_float64(model, parts):
    with Float32Device():
        assert str(hl.anatomy(model)) == str(parts)
