"""A compiled model that calls its modules inside torch.func: values plain, gradients refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.testing import assert_close

import hookline as hl

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("fresh_dynamo")]

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Inside(nn.Module):
    """Calls two layers inside a transform."""

    def __init__(self, transform):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)
        self.transform = transform

    def forward(self, x):
        return self.transform(lambda row: self.last(self.act(self.first(row))).sum())(x)


TRANSFORMS = {
    "vmap": vmap, "vmap of columns": lambda f: lambda x: vmap(f, in_dims=1)(x.T), "grad": grad,
    "vmap of grad": lambda f: vmap(grad(f)),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"keep": torch.norm}, {"detach": False}],
                         ids=["plain", "keep", "graph"])  # fmt: skip
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_in_compiled_transforms_are_those_of_eager_code(transform, options):
    model = Inside(transform)
    with hl.record(model, ["first", "last"], **{"copy": True, **options}) as run:
        expected = model(X)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.record(model, ["first", "last"], **options) as in_graph:
        assert_close(compiled(X), expected)
    assert list(in_graph) == list(run)
    for site in run:
        assert_close(in_graph[site], run[site])


@pytest.mark.parametrize(
    "line",
    [
        lambda model: hl.record(model, "first", ports="grad_output"),
        lambda model: hl.edit(model, "first:grad_output", hl.edits.scale(2.0)),
        lambda model: hl.clip(model, "first", norm=1.0, ports="grad_output"),
    ],
    ids=["record", "edit", "clip"],
)
def test_gradients_of_one_example_are_refused_in_compiled_code(line):
    model = Inside(vmap)
    compiled = torch.compile(model, backend="aot_eager")
    with line(model):
        with pytest.raises(hl.AttachError, match="under vmap gradients flow through the whole"):
            compiled(X)


def test_an_example_that_requires_no_gradient_is_not_refused():
    model = Inside(vmap).requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager")
    with hl.record(model, "first", ports=("output", "grad_output")) as run:
        compiled(X)
    assert run["first:grad_output"] is None
    assert_close(run["first"], model.first(X))
