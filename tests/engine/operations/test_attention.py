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
