"""Functions of each query's row: the whole pattern of a long text is never made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from hookline.engine.attention import pattern
from tensor_memory import Alive

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 100, 8


class Attention(nn.Module):
    """Calls the kernel of torch."""

    def forward(self, q, k, v, mask=None, is_causal=False):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )


def entropy(rows):
    return torch.special.entr(rows).sum(-1)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(pattern, "_BLOCK", 1)  # 16 queries, the fewest


def _made(dtype=torch.float32):
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=dtype)
    return q, *torch.randn(2, BATCH, 2, TOKENS, WIDTH, dtype=dtype)


SEEDED = torch.Generator().manual_seed(3)


def _no_key_for_query_3():
    mask = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=SEEDED) > 0.5
    mask[:, :, 3] = False
    return mask


CALLS = {
    "causal": {"is_causal": True},
    "whole": {},
    "mask of truth values": {"mask": _no_key_for_query_3()},
    "mask of numbers": {"mask": torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=SEEDED)},
    "one mask for all queries": {"mask": torch.randn(BATCH, 1, 1, TOKENS, generator=SEEDED)},
}


@pytest.mark.parametrize("call", CALLS)
def test_blocks_give_what_the_whole_gives(small_blocks, call):
    model, values, options = Attention(), _made(), CALLS[call]
    bare = model(*values, **options)
    for site, keep in (("@pattern", entropy), ("@scores", lambda rows: rows.topk(3))):
        with hl.record(model, site, keep=keep) as wanted:
            model(*values, **options)
        with hl.record(model, site, keep=hl.by_query(keep)) as run:
            assert torch.equal(model(*values, **options), bare)
        if site == "@pattern":
            assert torch.allclose(run[site], wanted[site], atol=1e-6)
        else:
            # Not by their places: the products of a block may round otherwise, and swap two.
            assert torch.allclose(run[site].values, wanted[site].values, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, HEADS, TOKENS, WIDTH), (BATCH, HEADS, 0, WIDTH)])
def test_what_is_empty_has_an_empty_result(shape):
    model = Attention()
    with hl.record(model, "@pattern", keep=hl.by_query(entropy)) as run:
        model(*torch.randn(3, *shape))
    assert run["@pattern"].shape == shape[:3]


def test_a_long_text_takes_the_memory_of_two_blocks(monkeypatch):
    monkeypatch.setattr(pattern, "_BLOCK", 1 << 16)
    values, model = torch.randn(3, 1, 1, 1024, 4), Attention()
    block = 4 * (1 << 16)
    with hl.record(model, "@pattern", keep=hl.by_query(entropy)) as run, Alive() as alive:
        model(*values, is_causal=True)
    assert run["@pattern"].shape == (1, 1, 1024)
    assert block < alive.peak < 2.5 * block


def test_narrow_values_are_measured_as_in_the_whole(small_blocks):
    model, values = Attention(), _made(torch.bfloat16)
    with hl.record(model, "@pattern", keep=hl.by_query(lambda rows: rows.sum(-1))) as run:
        model(*values)
    assert run["@pattern"].dtype is torch.float32
    assert torch.allclose(run["@pattern"], torch.ones(()), atol=1e-2)


def test_the_graph_is_kept_when_asked_for(small_blocks):
    model, (q, k, v) = Attention(), _made()
    q.requires_grad_()
    grads = []
    for keep in (entropy, hl.by_query(entropy)):
        with hl.record(model, "@pattern", keep=keep, detach=False) as run:
            model(q, k, v)
        grads.append(torch.autograd.grad(run["@pattern"].sum(), q)[0])
    assert torch.allclose(*grads, atol=1e-5)
    with hl.record(model, "@pattern", keep=hl.by_query(entropy)) as run:
        model(q, k, v)
    assert not run["@pattern"].requires_grad


def test_an_edit_of_the_pattern_is_seen(small_blocks):
    model, values = Attention(), _made()
    with (
        hl.edit(model, "@pattern", hl.edits.scale(2.0)),
        hl.record(model, "@pattern", keep=hl.by_query(lambda rows: rows.sum(-1))) as run,
    ):
        model(*values)
    assert torch.allclose(run["@pattern"], torch.tensor(2.0), atol=1e-6)


BAD = {
    "sum over queries": (lambda rows: rows.sum(-2), "query, in dimension 2|the last queries alone"),
    "one number": (lambda rows: rows.mean(), r"in dimension 2, got \[\] of"),
    "less their mean": (lambda rows: rows - rows.mean(-2, keepdim=True), "the last queries alone"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("is_long", [True, False])
def test_a_function_of_all_queries_is_refused(monkeypatch, bad, is_long):
    if is_long:
        monkeypatch.setattr(pattern, "_BLOCK", 1)
    function, message = BAD[bad]
    model = Attention()
    with (
        hl.record(model, "@pattern", keep=hl.by_query(function)),
        pytest.raises(hl.StructureError, match=message),
    ):
        model(*_made())


NEEDS_OTHERS = {
    "diagonal": lambda rows: rows.diagonal(dim1=-2, dim2=-1),
    "deviation": lambda rows: (rows - rows.mean(-2, keepdim=True)).amax(-1),
}


@pytest.mark.parametrize("name", NEEDS_OTHERS)
def test_small_entries_of_many_keys_are_compared(name):
    # Each entry is about 1 / 3000.
    values = 0.1 * torch.randn(3, 1, 1, 3000, 4, generator=torch.Generator().manual_seed(0))
    model = Attention()
    with (
        hl.record(model, "@pattern", keep=hl.by_query(NEEDS_OTHERS[name])),
        pytest.raises(hl.StructureError, match="whatever the other queries are"),
    ):
        model(*values)


ALONE = {
    "cancels": lambda rows: rows.sum(-1) - 1,
    "narrow": lambda rows: rows.amax(-1).bfloat16(),
    "double": lambda rows: rows.double().var(-1),
    "masked": lambda rows: rows.clone().masked_fill_(rows < 1e-4, -torch.inf),
    "undefined": lambda rows: rows.sum(-1) * torch.nan,
}


@pytest.mark.parametrize("name", ALONE)
def test_rounding_is_no_difference(small_blocks, name):
    values = torch.randn(3, 1, 2, 1000, 4, generator=torch.Generator().manual_seed(0))
    keep, model = ALONE[name], Attention()
    with (
        hl.record(model, "@pattern", keep=hl.by_query(keep)) as run,
        hl.record(model, "@pattern") as whole,
    ):
        model(*values)
    wanted = keep(whole["@pattern"])
    assert torch.allclose(run["@pattern"], wanted, 1e-2, 1e-5, equal_nan=True)


def test_what_has_no_rows_is_refused():
    with pytest.raises(hl.AttachError, match="must be given a function, got 3"):
        hl.by_query(3)
    model = nn.LSTM(2, 2)
    with (
        hl.record(model, "(root)", keep=hl.by_query(entropy)),
        pytest.raises(hl.StructureError, match=r"a tensor of rows, got tuple|Select the leaf"),
    ):
        model(torch.ones(1, 2))


@pytest.mark.compiles
def test_compiled_code_computes_the_whole(small_blocks):
    model, values = Attention(), _made()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with hl.record(model, "@pattern", keep=entropy) as wanted:
        model(*values)
    with hl.record(compiled, "@pattern", keep=hl.by_query(entropy)) as run:
        compiled(*values)
    assert torch.allclose(run["@pattern"], wanted["@pattern"], atol=1e-6)
