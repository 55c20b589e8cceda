"""The parts of an attention, by names that hold for every implementation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl

PARTS = ("q", "k", "v", "scores", "pattern", "z")
SITES = [f"@{part}" for part in PARTS]


class Attention(nn.Module):
    """Computes one attention in one of several ways."""

    def __init__(self, how, n_heads=4):
        super().__init__()
        self.how, self.num_heads = how, n_heads
        self.project = nn.Linear(16, 48)
        self.softmax = nn.Softmax(dim=-1)
        self.sinks = nn.Parameter(torch.randn(n_heads))

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, self.num_heads, -1).unbind(2)
        return getattr(self, self.how)(q, k, v).flatten(-2)

    def kernel(self, q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def steps(self, q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        pattern = F.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        return (pattern @ v).transpose(1, 2)

    def flat(self, q, k, v):  # [batch · head, position, width]
        batch = q.shape[0]
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        later = torch.full((q.shape[1], q.shape[1]), -torch.inf).triu(1)
        scores = torch.baddbmm(later, q, k.mT, alpha=1 / math.sqrt(q.shape[-1]))
        z = torch.bmm(scores.softmax(-1), v)
        return z.view(batch, self.num_heads, -1, z.shape[-1]).transpose(1, 2)

    def letters(self, q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", pattern, v)

    def with_sinks(self, q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        pattern = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (pattern @ v).transpose(1, 2)


def _made(how):
    torch.manual_seed(0)
    return Attention(how).eval()


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def _values(model):
    with hl.record(model, SITES, copy=True) as run:
        out = model(X)
    return out, {part: run[f"@{part}"] for part in PARTS}


@pytest.mark.parametrize("how", ["kernel", "steps", "flat", "letters"])
def test_parts_are_the_same_however_attention_is_computed(how):
    model = _made(how)
    bare = model(X)
    out, values = _values(model)
    _, wanted = _values(_made("steps"))
    assert torch.equal(out, bare)
    for part in PARTS:
        assert torch.allclose(values[part], wanted[part], atol=1e-6), part
    assert values["q"].shape == (2, 4, 5, 4)
    assert torch.allclose(values["pattern"] @ values["v"], values["z"], atol=1e-6)


@pytest.mark.parametrize("how", ["kernel", "steps", "flat", "letters"])
@pytest.mark.parametrize("part", PARTS)
def test_an_edit_of_a_part_is_the_same_however_computed(how, part):
    def change(value):
        return value.roll(1, 1)  # the heads

    outs = []
    for way in (how, "steps"):
        model = _made(way)
        with hl.edit(model, f"@{part}", change):
            outs.append(model(X))
        assert not torch.allclose(outs[-1], model(X), atol=1e-3)
    assert torch.allclose(*outs, atol=1e-6)


@pytest.mark.parametrize("how", ["kernel", "flat", "letters"])
def test_gradients_of_the_parts_are_those_of_the_steps(how):
    found = []
    for way in (how, "steps"):
        model = _made(way)
        with hl.record(model, [f"@{part}:grad_output" for part in PARTS]) as run:
            model(X).pow(2).sum().backward()
        found.append(run)
    for part in PARTS:
        first, second = (run[f"@{part}:grad_output"] for run in found)
        assert torch.allclose(first, second, atol=1e-5), part


def test_a_sink_is_no_key_and_rows_sum_to_less_than_one():
    model = _made("with_sinks")
    bare = model(X)
    out, values = _values(model)
    assert torch.equal(out, bare)
    assert values["pattern"].shape == values["scores"].shape == (2, 4, 5, 5)
    assert (values["pattern"].sum(-1) < 1).all()
    assert torch.allclose(values["pattern"] @ values["v"], values["z"], atol=1e-6)
    with hl.edit(model, "@pattern", hl.edits.scale(2.0)):
        doubled = model(X)
    assert torch.allclose(doubled, 2 * bare, atol=1e-6)


def test_a_head_taken_out_of_the_pattern_is_out_of_z():
    def without(value):
        value = value.clone()
        value[:, 2] = 0
        return value

    model = _made("kernel")
    with hl.edit(model, "@pattern", without):
        by_pattern = model(X)
    with hl.edit(model, "@z", without):
        by_z = model(X)
    assert torch.allclose(by_pattern, by_z, atol=1e-6)


def test_masks_leave_a_query_without_keys_at_zero():
    class Masked(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.3)

    model, q = Masked(), torch.randn(1, 2, 3, 4)
    mask = torch.tensor([[False, False, False], [True, False, True], [True, True, True]])
    as_float = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    for given in (mask, as_float):
        with hl.record(model, ["@pattern", "@z"]) as run:
            model(q, given)
        assert run["@pattern"][0, :, 0].abs().max() == 0
        assert torch.allclose(run["@pattern"] @ q, run["@z"], atol=1e-6)


def test_keys_with_fewer_heads_serve_groups_of_queries():
    class Grouped(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    model, q, k = Grouped(), torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    bare = model(q, k)
    with hl.record(model, ["@pattern", "@k"]) as run:
        assert torch.equal(model(q, k), bare)
    assert torch.allclose(run["@pattern"] @ k.repeat_interleave(2, 1), bare, atol=1e-6)
    with hl.edit(model, "@pattern", lambda pattern: pattern * 2):
        assert torch.allclose(model(q, k), 2 * bare, atol=1e-6)


def test_packed_queries_of_one_token_are_shown_by_head():
    class Packed(nn.Module):
        num_heads, num_key_value_groups = 4, 2

        def forward(self, q, k):
            q = q.reshape(1, 2, 2, 8)  # as transformers packs one token
            return F.scaled_dot_product_attention(q, k, k).reshape(1, 4, 1, 8)

    model, q, k = Packed(), torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)
    bare = model(q, k)
    with hl.record(model, SITES) as run:
        assert torch.equal(model(q, k), bare)
    assert torch.equal(run["@q"], q)
    assert torch.equal(run["@z"], bare)
    assert run["@pattern"].shape == (1, 4, 1, 6)
    with hl.edit(model, "@pattern", lambda pattern: pattern * 2):
        assert torch.allclose(model(q, k), 2 * bare, atol=1e-6)


def test_half_precision_patterns_are_computed_in_single():
    class Half(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    model, q = Half(), torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    with hl.record(model, "@pattern") as run:
        model(q)
    exact = (q.float() @ q.float().mT / math.sqrt(8)).softmax(-1)
    assert run["@pattern"].dtype is torch.bfloat16
    assert torch.equal(run["@pattern"], exact.bfloat16())


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_shows_its_parts(need_weights):
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(3, 5, 16)
    wanted = model(x, x, x, average_attn_weights=False)[1]
    bare = model(x, x, x, need_weights=need_weights)[0]
    with hl.record(model, SITES, copy=True) as run:
        out = model(x, x, x, need_weights=need_weights)[0]
    assert torch.equal(out, bare)
    assert torch.allclose(run["@pattern"], wanted, atol=1e-6)
    assert torch.allclose(run["@pattern"] @ run["@v"], run["@z"], atol=1e-6)
    with hl.edit(model, "@pattern", lambda pattern: pattern * 2):
        first = model(x, x, x, need_weights=need_weights)[0]
    with hl.edit(model, "@z", lambda z: z * 2):
        second = model(x, x, x, need_weights=need_weights)[0]
    assert torch.allclose(first, second, atol=1e-6)


def test_its_own_call_is_seen_beside_the_parts():
    model, x = nn.MultiheadAttention(16, 4), torch.randn(5, 3, 16)
    with hl.record(model, ["@pattern", "@multi_head_attention_forward"]) as run:
        out = model(x, x, x)
    assert run["@pattern"].shape == (3, 4, 5, 5)
    assert torch.equal(run["@multi_head_attention_forward"][0], out[0])


def test_a_product_without_a_softmax_is_no_attention():
    class Linear(nn.Module):
        def forward(self, x):
            return (x @ x.mT) @ x

    model = Linear()
    with hl.record(model, "@q"), pytest.raises(hl.AttachError, match="no attention whose parts"):
        model(X)


class ChannelsFirst(nn.Module):
    """Attention over the positions of a picture, as in VQGAN and in diffusion models."""

    def __init__(self, how, width=6):
        super().__init__()
        self.how = how
        self.q, self.k, self.v = (nn.Conv1d(width, width, 1) for _ in range(3))

    def forward(self, x):  # [batch, width, position]
        self.parts = q, k, v = self.q(x), self.k(x), self.v(x)
        return getattr(self, self.how)(q, k, v)

    def products(self, q, k, v):
        pattern = torch.bmm(q.mT, k).softmax(2)
        return torch.bmm(v, pattern.mT)

    def letters(self, q, k, v):
        pattern = torch.einsum("bct,bcs->bts", q, k).softmax(-1)
        return torch.einsum("bts,bcs->bct", pattern, v)

    def copied(self, q, k, v):
        pattern = torch.softmax(torch.bmm(q.mT, k), 2).clone()
        return torch.bmm(v, pattern.mT)

    def of_values(self, q, k, v):
        pattern = torch.softmax(torch.bmm(q.mT, k), 2).clone()
        return torch.bmm(pattern, v.mT).mT


@pytest.mark.parametrize("how", ["products", "letters", "copied", "of_values"])
@pytest.mark.parametrize("n_positions", [4, 6, 8])  # 6: values and pattern have one shape
def test_values_come_before_the_pattern_if_channels_do(how, n_positions):
    torch.manual_seed(0)
    model = ChannelsFirst(how)
    x = torch.randn(2, 6, n_positions)
    with hl.record(model, SITES, copy=True) as run:
        out = model(x)
    q, k, v = (part.mT for part in model.parts)
    assert torch.equal(run["@q"], q)
    assert torch.equal(run["@k"], k)
    assert torch.equal(run["@v"], v)
    torch.testing.assert_close(run["@pattern"], (q @ k.mT).softmax(-1))
    torch.testing.assert_close(run["@z"], run["@pattern"] @ v)
    assert torch.equal(run["@z"].mT, out)
    with hl.edit(model, "@v", hl.edits.scale(2)), hl.edit(model, "@z", lambda z: z + 1):
        torch.testing.assert_close(model(x), 2 * out + 1)


def test_a_sequence_of_one_token_has_all_parts():
    model = Attention("steps").eval()
    with hl.record(model, SITES) as run:
        for n_tokens in (3, 1, 3):
            model(X[:, :n_tokens])
    assert {site: len(run.cat(site, dim=None)) for site in SITES} == dict.fromkeys(SITES, 3)
    token = X[:, :1]
    with hl.edit(model, "@z", hl.edits.scale(0)):
        assert not model(token).any()


@pytest.mark.parametrize(("n_queries", "n_keys"), [(4, 0), (0, 0), (0, 3)])
def test_what_is_empty_has_parts_without_numbers(n_queries, n_keys):
    class Steps(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    q, k = torch.randn(2, 3, n_queries, 5), torch.randn(2, 3, n_keys, 5)
    model = Steps()
    with hl.record(model, ["@q", "@pattern", "@v", "@z"]) as run:
        out = model(q, k, k)
    assert run["@pattern"].shape == (2, 3, n_queries, n_keys)
    assert torch.equal(run["@v"], k)
    assert torch.equal(run["@z"], out)


class Projected(nn.Module):
    """Attention whose projections have a matrix for each head."""

    def __init__(self, cast):
        super().__init__()
        self.cast = cast
        weights = (nn.Parameter(torch.randn(2, 8, 5)) for _ in range(3))
        self.of_q, self.of_k, self.of_v = weights

    def forward(self, x):
        x = x[:, None]
        q, k, v = (x @ self.cast(w) for w in (self.of_q, self.of_k, self.of_v))
        self.q, self.pattern = q, (q @ k.mT).softmax(-1)
        return self.pattern @ v


@pytest.mark.parametrize("n_tokens", [4, 5, 6, 7])  # 5: as many as the width of a head; 6: one more
@pytest.mark.parametrize(
    "cast", [lambda w: w, lambda w: w.double().float(), lambda w: (w * 2)[None]],
    ids=["as it is", "cast", "with a batch of its own"],
)  # fmt: skip
def test_projections_by_head_are_no_scores(cast, n_tokens):
    model = Projected(cast)
    with hl.record(model, ["@q", "@pattern"]) as run:
        model(torch.randn(3, n_tokens, 8))
    assert torch.equal(run["@q"], model.q)
    assert torch.equal(run["@pattern"], model.pattern)


def test_weights_of_a_functional_call_are_no_keys():
    model = Projected(lambda w: w)
    weights = {name: weight.detach() * 1 for name, weight in model.named_parameters()}
    with hl.record(model, ["@q", "@pattern"]) as run:
        torch.func.functional_call(model, weights, (torch.randn(3, 6, 8),))
    assert torch.equal(run["@q"], model.q)
    assert torch.equal(run["@pattern"], model.pattern)


def test_a_projection_whose_result_is_multiplied_again():
    model = Projected(lambda w: w[None] * 2)
    x = torch.randn(1, 6, 8)  # with one item, a weight has all dimensions that keys have
    with hl.record(model, "@pattern") as run:
        model(x)
    assert torch.equal(run["@pattern"], model.pattern)
    with (
        hl.record(model, "@q"),
        pytest.raises(hl.AttachError, match="its first product is a factor"),
    ):
        model(x)


def test_a_softmax_over_queries_is_no_pattern():
    class KeysFirst(nn.Module):
        def forward(self, q, k, v):
            return (k @ q.mT).softmax(dim=-2).mT @ v

    q, k = torch.randn(1, 2, 4, 5), torch.randn(1, 2, 6, 5)
    model = KeysFirst()
    with hl.record(model, "@q"), pytest.raises(hl.AttachError, match="no softmax of its first"):
        model(q, k, k)


def test_a_kernel_that_shows_nothing_is_refused_by_name():
    class Opaque(nn.Module):
        def forward(self, q):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    model = Opaque()
    with (
        hl.record(model, "@pattern"),
        pytest.raises(hl.AttachError, match="_scaled_dot_product_flash_attention_for_cpu computes"),
    ):
        model(torch.randn(1, 2, 5, 8))


def test_a_softmax_alone_is_no_pattern():
    class Router(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    model = Router()
    with pytest.warns(hl.HooklineWarning, match="computes no attention whose parts are known"):
        with hl.record(model, "@pattern"):
            model(X)
