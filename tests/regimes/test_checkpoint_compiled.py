"""Activation checkpointing inside compiled code: records, gradients and edits as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine.torch_private.dynamo import OLD_DYNAMO

# Dynamo looks at the .grad of whatever comes into a graph, with or without hooks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


class Block(nn.Sequential):
    """With a forward of its own: before torch 2.15, torch's own are not compiled by `compile()`."""

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(
            Block(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(1)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


X = torch.linspace(-1, 1, 15).view(5, 3)
# Before torch 2.13 a gradient is not recorded where it is changed, in one graph: that is refused.
READ = ["blocks.*.1", "blocks.*.2"] if OLD_DYNAMO else ["blocks.*.*"]
N_READ = 4 if OLD_DYNAMO else 6
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def close(one, other):
    assert list(one) == list(other)
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.trap(12)
@backends
@pytest.mark.cell(
    "activation checkpointing in compiled code", "record", "gradients", "edit", "edit gradients"
)
def test_compiled_regions_are_recorded_and_edited_as_in_eager(backend):
    config = torch._dynamo.config
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    plain, model = Net(), Net(False)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    runs = []
    for one, call in ((plain, plain), (model, compiled)):
        for factor in (1.0, 3.0) if backend == "aot_eager" else (3.0,):
            with (
                hl.edit(one, "blocks.0.0", hl.edits.scale(factor)),
                hl.edit(one, "blocks.0.0:grad_output", lambda g: g * 2),
                hl.record(one, READ, ports=("output", "grad_output")) as run,
            ):
                call(X).square().sum().backward()
            assert len(run.passes) == 1
            runs.append((dict(run.items()), gradients(one)))
            one.zero_grad()
    half = len(runs) // 2
    for expected, found in zip(runs[:half], runs[half:], strict=True):
        close(expected[0], found[0])
        close(expected[1], found[1])
    assert before == config.skip_fwd_side_effects_in_bwd_under_checkpoint


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_of_compiled_parts_record_once_and_edit_twice(reentrant):
    plain, model, found = Net(), Net(reentrant), []
    model.blocks[0].compile(fullgraph=True, backend="aot_eager")
    for one in (plain, model):
        for _ in range(2):
            one.zero_grad()
            with (
                hl.edit(one, "blocks.0.0", hl.edits.scale(3.0)) as edit,
                hl.edit(one, "blocks.0.0:grad_output", lambda g: g * 2),
                hl.record(one, READ, ports=("output", "grad_output")) as run,
            ):
                for factor in (1, 2):
                    one(X * factor).square().sum().backward()
            assert [count for _, count in edit.report().fired] == [2]
        assert [len(one) for one in run.passes] == [N_READ, N_READ]
        values = {f"{k}/{site}": v for k in (0, 1) for site, v in run.passes[k].items()}
        found.append((values, gradients(one)))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


@pytest.mark.trap(12)
def test_a_raw_hook_that_keeps_a_value_is_refused_by_dynamo():
    class Keep:
        value = None

    model, keep = Net(False), Keep()
    model.blocks[0][0].register_forward_hook(lambda m, args, out: setattr(keep, "value", out))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"(?i)side.effect"):
        compiled(X)
    assert keep.value is None


class Residuals(nn.Module):
    """Blocks of which what goes in is used elsewhere, too; the second in a checkpoint in one."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.stem, self.block = nn.Linear(3, 4), Block(nn.Linear(4, 4), nn.Tanh())
        self.inner = Block(nn.Linear(4, 4), nn.Tanh())

    def again(self, function, x):
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.stem(x)
        x = x * 2 + self.again(self.block, x)
        return x + self.again(lambda y: self.again(self.inner, y) * y, x)


def residuals(reentrant):
    model = Residuals(reentrant).double()
    if reentrant is not None:
        model.block.compile(fullgraph=True, backend="aot_eager")
        model.inner.compile(fullgraph=True, backend="aot_eager")
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_enters_a_compiled_region_has_its_whole_gradient(reentrant):
    found = []
    for model in (residuals(None), residuals(reentrant)):
        with hl.record(model, ["block.*", "inner.*"], ports=("grad_input", "grad_output")) as run:
            model(X.double()).square().sum().backward()
        assert not any(count == 0 for _, count in run.report().fired)
        found.append(dict(run.items()) | gradients(model))
    assert len(found[0]) == 8 + 6
    assert set(found[1]) == set(found[0])
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, msg=str(key))


@pytest.mark.parametrize("path", ["block", "inner"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_edit_of_what_enters_a_compiled_region_is_of_all(reentrant, path):
    plain, model = residuals(None), residuals(reentrant)
    site = f"{path}.0:grad_input"
    if reentrant:
        reason = f"^{site} cannot be changed: it came into a reentrant checkpoint from outside"
        with (
            pytest.raises(hl.AttachError, match=reason),
            hl.edit(model, site, hl.edits.scale(3.0)),
        ):
            model(X.double()).square().sum().backward()
        site = f"{path}.1:grad_input"
        model.zero_grad()
    for one in (plain, model):
        with hl.edit(one, site, hl.edits.scale(3.0)):
            one(X.double()).square().sum().backward()
    close(gradients(model), gradients(plain))


def test_a_checkpoint_in_a_checkpoint_says_what_to_do():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(reentrant=False)

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    model = Nested()
    compiled = torch.compile(model, backend="eager")
    with hl.record(model, "**.1") as run:
        with pytest.raises(Exception, match="does not belong to this Graph") as caught:
            compiled(X)
        with torch.compiler.set_stance("force_eager"):
            compiled(X)
    assert "inside another checkpoint" in caught.value.__notes__[-1]
    assert "net.blocks.0.1" in run.passes[-1]
