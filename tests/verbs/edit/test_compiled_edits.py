"""Edits of some tokens in compiled code, and what compiled code refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

pytestmark = pytest.mark.compiles


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x[:, -1])


IDS, OTHER = torch.randint(0, 20, (2, 2, 6), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("at", [2, -1, slice(1, 4), [0, -2]])
def test_tokens_are_changed_as_in_eager_code(model, at):
    fast = compiled(model)
    change = {"blocks.0": hl.edits.steer(torch.ones(8), 3.0), "blocks.1": hl.edits.scale(0)}
    with hl.edit(model, change, at=at):
        wanted = model(IDS)
    with hl.edit(fast, change, at=at):
        for mask in (None, torch.ones(2, 6)):
            assert torch.equal(fast(IDS, mask), wanted)
    assert torch.equal(fast(IDS), model(IDS))


@torch.no_grad()
def test_rows_of_other_lengths_are_changed_at_their_own_end(model):
    fast = compiled(model)
    lengths = (4, 6, 9)
    rows = [torch.randint(0, 20, (2, length)) for length in lengths]
    with hl.edit(model, "blocks.1", hl.edits.scale(0), at=-1):
        wanted = [model(ids) for ids in rows]
    with hl.edit(fast, "blocks.1", hl.edits.scale(0), at=-1):
        assert all(torch.equal(fast(ids), logits) for ids, logits in zip(rows, wanted, strict=True))


def test_each_recording_is_patched_though_the_code_is_the_same(model):
    fast = compiled(model)
    for ids in (IDS, OTHER):
        with hl.record(model, "blocks.1") as run:
            model(ids)
        with hl.edit(model, "blocks.1", hl.edits.patch(run)):
            wanted = model(IDS)
        with hl.edit(fast, "blocks.1", hl.edits.patch(run)):
            assert torch.equal(fast(IDS), wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda: hl.edits.project_out(torch.eye(8)[:2]), lambda: hl.edits.round_to(torch.bfloat16),
        lambda: hl.edits.round_to(4), lambda: hl.edits.steer(torch.ones(8), torch.tensor(0.0)),
    ],
)  # fmt: skip
def test_ready_made_changes_are_those_of_eager_code(model, change):
    fast = compiled(model)
    with hl.edit(model, "blocks.0", change()):
        wanted = model(IDS)
    with hl.edit(fast, "blocks.0", change()):
        torch.testing.assert_close(fast(IDS), wanted)


def refused(fast, said, *args, selector="blocks.0", change=None, **places):
    with hl.edit(fast, selector, change or hl.edits.scale(0), **places):
        with pytest.raises(hl.AttachError, match=said):
            fast(*args)


def test_what_compiled_code_cannot_tell_is_refused(model):
    fast = compiled(model)
    refused(fast, r"cannot apply steps= at blocks.0 in compiled code: it cannot", IDS, steps=0)
    refused(fast, r"cannot apply at= .*the model has padding", IDS, PADDED, at=0)
    refused(fast, r"cannot apply at= at head .*the value is not", IDS, selector="head", at=0)
    with hl.record(model, "blocks.0") as twice:
        model(IDS)
        model(OTHER)
    refused(fast, r"hl.edits.patch .*its run and call", IDS, change=hl.edits.patch(twice))


def test_padding_in_a_later_run_is_refused(model):
    fast = compiled(model)
    with hl.edit(fast, "blocks.0", hl.edits.scale(0), at=0):
        fast(IDS, torch.ones(2, 6).long())
        with pytest.raises(hl.AttachError, match="the model has padding"):
            fast(IDS, PADDED)


@torch.no_grad()  # compiling a part warns of the .grad of its input
def test_a_part_that_runs_outside_the_model_is_refused(model):
    model.blocks[0].compile(backend="aot_eager")
    x = torch.randn(2, 6, 8)
    with hl.edit(model, "blocks.0", hl.edits.scale(0), at=1):
        model(IDS)
        with pytest.raises(hl.AttachError, match="outside"):
            model.blocks[0](x)


def test_gradients_in_compiled_code_have_no_place(model):
    fast = compiled(model)
    with pytest.raises(hl.AttachError, match="its backward has no pass"):
        with hl.edit(fast, "blocks.0:grad_output", hl.edits.scale(0), at=0):
            fast(IDS).sum().backward()


def test_an_index_that_a_value_does_not_have_is_refused(model):
    block = compiled(model.blocks[0])
    x = torch.randn(2, 6, 8)
    with hl.edit(block, "(root)", hl.edits.scale(0), at=2):
        assert not block(x)[:, 2].any()
    refused(block, "the value has no such position", x, selector="(root)", at=9)
