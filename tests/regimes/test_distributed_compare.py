"""Folders of two ranks beside one process: equal up to rounding, and no site is lost."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import nn

import hookline as hl
from distributed_models import half, llama, sharded, split, tokens
from processes import on_ranks

CLOSE = 2e-6
# Plain tensors that tensor parallelism splits: outputs of columns, inputs of rows.
SPLIT = {
    "**.{q_proj,k_proj,v_proj,gate_proj,up_proj,act_fn}": -1,
    "**.{o_proj,down_proj,act_fn}:input": -1,
}


def recorded(model, ids, ports=("output", "grad")):
    model.zero_grad()
    with hl.record(model, ports=ports) as run:
        model(input_ids=ids).logits.square().mean().backward()
    return run


def opened(run, folder):
    run.save(folder / "run")
    dist.barrier()
    return hl.open(folder / "run")


def assert_whole(found, plain):
    """Every tensor of one process has a row, and each is equal up to rounding."""
    assert found.ok, str(found)
    assert max(row.relative for row in found) <= CLOSE
    compared = {re.sub(r"(:(?:in|out)put)[.\[].*", r"\1", row.site) for row in found}
    assert set(plain) <= {site.removesuffix(":output") for site in compared}
    assert not [finding for finding in found.findings if finding.kind == "names"]


@on_ranks
def test_two_ranks_of_fsdp2_are_as_one_process(rank, folder):
    run = opened(recorded(sharded(llama()), half(tokens(), rank)), folder)
    plain = recorded(llama(), tokens())
    found = hl.compare(run, plain, dims=0)
    rotary = [row for row in found if "rotary_emb" in row.site]
    assert {row.verdict for row in found if row not in rotary} <= {"identical", "noise"}
    assert {row.why.partition(" [")[0] for row in rotary} == {"shapes"}
    found = hl.compare(run, plain, dims={"**": 0, "**.rotary_emb": "mean"})
    assert_whole(found, plain)


@on_ranks
def test_two_ranks_of_split_layers_are_as_one_process(rank, folder):
    ports = ("input", "output", "grad")
    run = opened(recorded(split(llama()), tokens(), ports), folder)
    plain = recorded(llama(), tokens(), ports)
    assert_whole(hl.compare(run, plain, dims=SPLIT), plain)
    unsaid = hl.compare(str(folder / "run"), plain)
    row = unsaid["model.layers.0.self_attn.q_proj"]
    assert row.verdict == "not comparable"
    assert row.why == (
        "each of 2 ranks has its own [4, 5, 16], of [4, 5, 32]:"
        " give dims={'model.layers.0.self_attn.q_proj': 2}"
    )
    assert unsaid["model.layers.1"].verdict in ("identical", "noise")
    assert unsaid.first is None


@on_ranks
def test_partial_sums_are_added_and_a_fault_is_named(rank, folder):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh())
    part = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity())
    with torch.no_grad():
        part[0].weight.copy_(whole[0].weight[:, 4 * rank :][:, :4])
    x = torch.randn(3, 8)
    with hl.record(part, "0") as run:
        part(x[:, 4 * rank :][:, :4])
    with hl.record(whole, "0") as plain:
        whole(x)
    found = hl.compare(opened(run, folder), plain)
    assert "give dims={'0': 'sum'}" in found["0"].why
    assert hl.compare(str(folder / "run"), plain, dims="sum")["0"].relative <= CLOSE
    assert hl.compare(str(folder / "run"), plain, dims="mean").first.site == "0"
    odd = hl.compare(str(folder / "run"), plain, dims={"0": 7})["0"]
    assert "each of 2 ranks has its own" in odd.why
    assert "dim must be a dimension" in odd.why


def padded(rows, side, width):
    """A batch of sequences, padded on a side, with positions."""
    batch = torch.zeros(3, len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        place = slice(start, start + len(row))
        batch[:, number, place] = torch.stack([row, torch.ones_like(row), torch.arange(len(row))])
    return dict(zip(("input_ids", "attention_mask", "position_ids"), batch, strict=True))


def sequences():
    return [row[:length] for row, length in zip(tokens(), (5, 3, 4, 2), strict=True)]


def outputs(model, inputs, also="output"):
    with hl.record(model, ["**", "(root):input", f"**:{also}"]) as run, torch.no_grad():
        model(**inputs)
    return run


@on_ranks
def test_ranks_with_rows_of_their_own_are_aligned(rank, folder):
    rows = sequences()
    mine = rows[2 * rank :][:2]
    run = opened(outputs(sharded(llama()), padded(mine, "right", len(mine[0]))), folder)
    plain = outputs(llama(), padded(rows[::-1], "left", 7))
    for dims in (None, 0, {"**": 0, "**.rotary_emb": "mean"}):
        found = hl.compare(run, plain, dims=dims)
        assert found["lm_head"].form == "[14, 64] float32"
        assert found["lm_head"].relative <= CLOSE
        odd = [row for row in found if row.verdict not in ("identical", "noise")]
        assert not odd or dims, str(found)
    fewer = hl.compare(plain, outputs(llama(), padded(rows[:1], "right", 5)))
    assert fewer["lm_head"].form == "[5, 64] float32"


@on_ranks
def test_tokens_are_aligned_after_columns_are_joined(rank, folder):
    rows = sequences()
    run = opened(outputs(split(llama()), padded(rows, "right", 7), "input"), folder)
    plain = outputs(llama(), padded(rows[::-1], "left", 9), "input")
    found = hl.compare(run, plain, dims=SPLIT)
    assert found.ok, str(found)
    assert found["model.layers.0.self_attn.q_proj"].form == "[14, 32] float32"
    unsaid = hl.compare(run, plain)["model.layers.0.self_attn.q_proj"]
    assert (unsaid.verdict, "give dims=" in unsaid.why) == ("not comparable", True)
