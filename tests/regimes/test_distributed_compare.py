"""Folders of two ranks beside one process: equal up to rounding, and no site is lost."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hookline as hl
from parallel import half, llama, mesh, sharded, split, tokens
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
    assert mesh() is not None


@pytest.mark.parametrize("dims", [1.5, {"a": None, "b": [0]}, "rows"])
def test_dims_of_another_form_are_refused(dims):
    with pytest.raises((hl.InputError, ValueError), match="dims must be"):
        hl.compare({"x": torch.ones(1)}, {"x": torch.ones(1)}, dims=dims)
