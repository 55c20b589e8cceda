"""Operations, the parts of attention and anatomy on real processes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import hookline as hl
from distributed_models import (
    half,
    llama,
    loss_of,
    planned,
    recorded,
    sharded,
    sharded_by_wrappers,
    split,
    tokens,
)
from processes import on_ranks

ATTENTION = "model.layers.1.self_attn"
PARTS = [f"{ATTENTION}@{name}" for name in ("q", "k", "v", "scores", "pattern", "z")]
SITES = [*PARTS, "model.layers.0@add"]
GRADIENTS = [f"{ATTENTION}@{name}:grad_output" for name in ("q", "pattern", "z")]


def _model():
    return llama().eval()


def _seen(model, batch):
    """Return what is recorded of operations, forward and backward."""
    model.zero_grad()
    with hl.record(model, [*SITES, *GRADIENTS], copy=True) as run:
        loss_of(model, batch).backward()
    return {site: run.calls(site) for site in [*SITES, *GRADIENTS]}


def _halved(model, batch):
    """Return the logits, and the gradient of the embeddings, under edits."""
    half = hl.edits.scale(0.5)
    changes = {f"{ATTENTION}@pattern": half, f"{ATTENTION}@q:grad_output": half}
    model.zero_grad()
    with hl.edit(model, changes), hl.record(model, "lm_head") as run:
        loss_of(model, batch).backward()
    return run["lm_head"]


def _largest(model, batch):
    largest = hl.by_query(lambda pattern: pattern.amax(-1))
    with hl.record(model, f"{ATTENTION}@pattern", keep=largest) as run, torch.no_grad():
        model(input_ids=batch)
    return run[f"{ATTENTION}@pattern"]


@pytest.mark.cell(
    "operations under DDP", "record", "gradients", "edit", "edit gradients", "statistics",
    "anatomy",
)  # fmt: skip
@on_ranks
def test_ddp_shows_operations_of_this_ranks_batch(rank, folder):
    _compare(DistributedDataParallel(_model()), half(tokens(), rank))


@pytest.mark.cell(
    "operations under FSDP2", "record", "gradients", "edit", "edit gradients", "statistics",
    "anatomy",
)  # fmt: skip
@on_ranks
def test_fsdp2_shows_operations_of_this_ranks_batch(rank, folder):
    _compare(sharded(_model()), half(tokens(), rank))


@pytest.mark.cell(
    "operations under FSDP1", "record", "gradients", "edit", "edit gradients", "statistics",
    "anatomy",
)  # fmt: skip
@on_ranks
def test_fsdp1_shows_operations_of_this_ranks_batch(rank, folder):
    _compare(sharded_by_wrappers(_model()), half(tokens(), rank))


def _compare(model, mine):
    plain = _model()
    assert_close(_seen(model, mine), _seen(plain, mine), rtol=1e-4, atol=1e-5)
    assert_close(_halved(model, mine), _halved(plain, mine), rtol=1e-4, atol=1e-5)
    assert_close(_largest(model, mine), _largest(plain, mine))
    _compare_parts(model, plain, mine)


def _fail(*_):
    raise IndexError


def _compare_parts(model, plain, mine):
    """Compare the names, the lens and what heads contribute with those of a plain model."""
    inputs = {"input_ids": mine, "use_cache": False}
    parts = hl.anatomy(plain, inputs)
    shards = list(model.parameters())
    here = hl.anatomy(model, inputs)
    assert all(map(operator.is_, shards, model.parameters()))
    assert here.to_dict() == parts.to_dict()
    names = [".resid_post", ".attn_heads.1"]
    with hl.record(model, names) as run, torch.no_grad():
        model(input_ids=mine)
    with hl.record(plain, names) as wanted, torch.no_grad():
        plain(input_ids=mine)
    assert_close(run[".resid_post.1"], wanted[".resid_post.1"])
    assert_close(here.lens(run).logits, parts.lens(wanted).logits)
    assert_close(here.contributions(run, 1), parts.contributions(wanted, 1))
    own, whole = here.heads(run[".attn_heads.1"]), parts.heads(wanted[".attn_heads.1"])
    assert any(torch.allclose(own, heads, atol=1e-5) for heads in whole.split(own.shape[1], 1))
    *_, last = (part for path, part in model.named_modules() if path.endswith(".mlp"))
    with last.register_forward_pre_hook(_fail), pytest.raises(IndexError):
        hl.anatomy(model, inputs)
    assert all(map(operator.is_, shards, model.parameters()))


@pytest.mark.cell(
    "operations under tensor parallelism", "record", "gradients", "edit", "edit gradients",
    "statistics", note="The parts of attention are those of this rank's heads.",
)  # fmt: skip
@pytest.mark.cell(
    "operations under tensor parallelism", "anatomy",
    note="The names are proven with whole weights, which each rank holds meanwhile.",
)  # fmt: skip
@on_ranks
def test_split_attention_shows_the_heads_of_this_rank(rank, folder):
    _compare_split(split(_model()), rank)


@on_ranks
def test_tp_plan_of_transformers_splits_as_torch_does(rank, folder):
    model = planned(_model(), folder).eval()
    _compare_split(model, rank)
    run, wanted = recorded(model, tokens()), recorded(_model(), tokens())
    for site in wanted:
        if isinstance(wanted[site], torch.Tensor):
            own = _part(wanted[site], run[site].shape, rank)
            assert_close(run[site], own, rtol=1e-4, atol=1e-5, msg=str(site))


def _part(whole, shape, rank):
    """Return the half of a value that a rank has, in the dimension that is split, if one is."""
    dims = [dim for dim in range(whole.dim()) if whole.shape[dim] != shape[dim]]
    return whole.chunk(2, dims[0])[rank] if dims else whole


def _compare_split(model, rank):
    plain, batch = _model(), tokens()
    seen, whole = _seen(model, batch), _seen(plain, batch)
    heads = slice(2 * rank, 2 * rank + 2)
    for site, values in seen.items():
        for value, wanted in zip(values, whole[site], strict=True):
            own = wanted[:, heads] if "self_attn" in site else wanted
            assert_close(value, own, rtol=1e-4, atol=1e-5)
    assert_close(_halved(model, batch), _halved(plain, batch), rtol=1e-4, atol=1e-5)
    assert_close(_largest(model, batch), _largest(plain, batch)[:, heads])
    _compare_parts(model, plain, batch)
