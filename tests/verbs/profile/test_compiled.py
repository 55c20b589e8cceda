"""profile of compiled models: compiled regions are rows, and compiled code stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from zoo import ROWS, BlockInRegion, rows_net

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo looks at the .grad of the inputs of a block that is compiled by itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def n_graphs():
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("given", ["model", "compiled"])
def test_a_compiled_model_is_one_row_with_time_and_flops(given):
    model = rows_net()
    compiled = torch.compile(model, backend="aot_eager")
    with hl.profile(model if given == "model" else compiled) as prof:
        for _ in range(2):
            compiled(ROWS).sum().backward()
    with hl.profile(rows_net()) as eager:
        for _ in range(2):
            eager._line.root(ROWS).sum().backward()
    row = prof[""]
    assert row.calls == 2
    assert row.time.forward == row.self_time.forward > 0
    assert row.time.backward == row.self_time.backward > 0
    assert row.activation_bytes > 0
    assert [one.flops for one in prof.rows] == [one.flops for one in eager.rows]
    assert {one.path for one in prof.rows if one.calls} == {""}


def test_a_compiled_block_is_a_row_among_eager_ones():
    model = BlockInRegion(is_checkpointed=False)
    model.block.compile(backend="aot_eager")
    with hl.profile(model) as prof:
        for _ in range(2):
            model(ROWS).sum().backward()
    assert {row.path for row in prof.rows if row.calls} == {"", "first", "block", "last"}
    assert prof["block"].time.backward > 0
    assert prof["block.linear"].flops.forward == 2 * 2 * 5 * 4 * 4
    total = sum(row.self_time.all for row in prof.rows)
    assert total == pytest.approx(prof[""].time.all)


def test_profiling_compiles_nothing_again():
    model = BlockInRegion(is_checkpointed=False)
    model.block.compile(backend="aot_eager")
    whole = torch.compile(rows_net(), backend="aot_eager")
    for _ in range(2):
        model(ROWS).sum().backward()
        whole(ROWS).sum().backward()
    before = n_graphs()
    for _ in range(2):
        with hl.profile(model) as prof, hl.profile(whole) as other:
            model(ROWS).sum().backward()
            whole(ROWS).sum().backward()
        assert prof["block"].calls == other[""].calls == 1
        assert prof.total.flops.all
        model(ROWS).sum().backward()
        whole(ROWS).sum().backward()
    assert n_graphs() == before


def test_compiled_numbers_stay_as_they_are():
    model = BlockInRegion(is_checkpointed=True)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = run(ROWS)
    expected.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with hl.profile(run) as prof:
        output = run(ROWS)
        output.sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert prof["block"].flops.forward == 2 * 5 * 4 * 4


def test_a_compiled_model_that_raises_is_named():
    class Refuses(nn.Module):
        def forward(self, x):
            return torch.nn.functional.linear(x, x.new_ones(3, 3))

    run = torch.compile(nn.Sequential(Refuses()), backend="eager")
    with pytest.raises(Exception, match=r"shapes|size"), hl.profile(run) as prof:
        run(ROWS)
    assert prof.failure is not None
    assert prof[""].calls == 1
