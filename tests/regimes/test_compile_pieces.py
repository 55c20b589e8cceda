"""torch.compile: models that are compiled in pieces, with eager code or other pieces between."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch.utils.checkpoint import checkpoint

import hookline as hl
from thoroughness import tries

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.Tanh()

    def forward(self, x):
        return self.act(self.linear(x))


class Broken(Step):
    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.act(x)


class EagerBetween(nn.Module):
    """One block: in compiled code, in eager code, in compiled code."""

    def __init__(self):
        super().__init__()
        self.block = Step()

    @torch.compiler.disable
    def eager(self, x):
        return self.block(x)

    def forward(self, x):
        return self.block(self.eager(self.block(x)))


class PartBetween(EagerBetween):
    """One block: in the model's code, in that of a part compiled by itself, in the model's."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(self.block, nn.ReLU())

    @torch.compiler.disable
    def eager(self, x):
        return self.part(x)


class Long(nn.Module):
    """A block that graphs break in, more often than dynamo compiles: the last calls are eager."""

    def __init__(self):
        super().__init__()
        self.block = Broken()

    def forward(self, x):
        for _ in range(10):
            x = self.block(x)
        return x


def compiled(model):
    part = getattr(model, "part", None)
    if part is not None:
        part.compile(backend="aot_eager")
    return torch.compile(model, backend="aot_eager")


def backward(model, x=X):
    model.zero_grad()
    model(x).sum().backward()


def same(found, expected):
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    return True


@pytest.mark.parametrize("kind", [EagerBetween, PartBetween, Long])
def test_calls_are_numbered_as_they_run(kind):
    torch.manual_seed(0)
    model, found = kind(), []
    for run in (model, compiled(model)):
        for sites in ("block", "block#1", "block#2"):
            ports = ("output", "grad_output") + ("input",) * ("#" in sites)
            with hl.record(model, sites, ports=ports) as seen:
                backward(run)
            found.append(dict(seen.items()))
    assert len(found[1]) == 3
    for eager, other in zip(found[:3], found[3:], strict=True):
        assert same(other, eager)
    assert not len(hl.inventory(model))


KINDS = [EagerBetween, PartBetween, Long]


@pytest.mark.parametrize(
    ("kind", "port", "call"),
    tries(
        [*itertools.product(KINDS, ["output", "grad_output"], [1, 2])],
        gate=[*zip(KINDS * 2, ["output"] * 3 + ["grad_output"] * 3, [1, 2] * 3, strict=True)],
    ),
)
def test_one_call_is_edited(kind, port, call):
    torch.manual_seed(0)
    model, found = kind(), []
    for run in (model, compiled(model)):
        with hl.edit(model, f"block:{port}#{call}", lambda value: value * 2) as line:
            backward(run)
        assert line.report().fired[0][1] == 1
        weight = model.block.linear.weight.grad
        found.append({"weight": weight.clone(), "y": model(X).detach()})
    assert same(found[1], found[0])
    backward(model)
    assert not torch.equal(model.block.linear.weight.grad, found[0]["weight"])


def test_dynamos_settings_are_put_back_whichever_line_ends_first():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Step()
            self.fast = torch.compile(
                lambda x: self.inner(x) * 1, backend="aot_eager", fullgraph=True
            )

        def forward(self, x):
            return self.fast(x)

    model = Inside()
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    for _ in range(2):
        with hl.edit(model, "inner", lambda v: v * 2), hl.record(model, "inner.act") as seen:
            out = model(X)
        assert config.skip_fwd_side_effects_in_bwd_under_checkpoint is before
        torch.testing.assert_close(seen["inner.act"] * 2, out, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_of_compiled_parts_in_a_region_are_recorded(reentrant):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Step()

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    model, found = Saving(), []
    for is_compiled in (False, True):
        if is_compiled:
            model.block.compile(backend="aot_eager", fullgraph=True)
        for sites in ("block.linear", "block.linear#1"):
            with (
                hl.record(model, sites, ports=("output", "grad_output")) as seen,
                hl.edit(model, "block.act:grad_output#1", lambda g: g * 2),
            ):
                backward(model, X.clone().requires_grad_())
            found.append({**seen, "weight": model.block.linear.weight.grad.clone()})
    assert "block.linear:grad_output#0" in found[0]
    assert same(found[2], found[0])
    assert same(found[3], found[1])


@pytest.mark.parametrize("is_held", [True, False])
def test_a_gradient_whose_edit_has_ended_is_refused_aloud(is_held):
    model, x = nn.Sequential(Step(), Step()), X.clone().requires_grad_()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    line = hl.edit(model, "0:grad_output", lambda g: g * 100)
    loss = run(x).sum()
    with pytest.warns(UserWarning, match="never fired"):
        line.remove()
    if not is_held:
        del line
    with pytest.raises(hl.AttachError, match=r"would change it all the same.\nCall backward"):
        loss.backward()
    assert x.grad is None
    backward(run, x)
    assert torch.isfinite(x.grad).all()


def test_what_ran_before_a_line_ended_in_compiled_code_is_kept():
    class Ending(nn.Module):
        line = None

        def __init__(self):
            super().__init__()
            self.first, self.second = Step(), Step()

        @torch.compiler.disable
        def between(self, x):
            if self.line is not None:
                self.line.remove()
            return x

        def forward(self, x):
            return self.second(self.between(self.first(x)))

    model = Ending()
    run = compiled(model)
    line = hl.record(model, Step)
    run(X)
    model.line = line
    run(X)
    assert [list(one.keys()) for one in line.recording.passes] == [["first", "second"], ["first"]]
    assert torch.equal(line.recording.passes[1]["first"], model.first(X))
    assert not len(hl.inventory(model))


def test_copies_of_a_compiled_model_with_a_line_are_free_of_it():
    model = nn.Sequential(Step(), Step())
    run = compiled(model)
    with hl.record(model, "1") as seen:
        y = run(X)
        again = copy.deepcopy(run)
        assert torch.equal(again(X), y)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(X), y)
            assert not len(hl.inventory(other))
            assert all("forward" not in vars(module) for module in other.modules())
    assert len(seen.passes) == 1
    assert torch.equal(again(X), y)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_a_forward_that_was_compiled_and_put_in_its_own_place(is_whole, is_compiled_before):
    """`model.forward = torch.compile(model.forward)`, as transformers has it for `generate`."""
    torch.manual_seed(0)
    model = nn.Sequential(Step(), nn.ReLU())
    place = model if is_whole else model[0]
    expected = model[0].linear(X).detach()
    place.forward = own = torch.compile(place.forward, backend="aot_eager", fullgraph=True)
    if is_compiled_before:
        model(X)
    for _ in range(2):
        with hl.record(model, "0.linear") as seen:
            model(X)
        assert torch.equal(seen["0.linear"], expected)
        with hl.edit(model, "0.linear", hl.edits.scale(0.0)):
            assert not model(X).any()
        with hl.record(model, "0.act", ports="input") as seen:
            model(X)
        assert torch.equal(seen["0.act:input"], expected)
    assert vars(place)["forward"] is own


def test_gradients_are_recorded_after_edits_under_each_name():
    class Scaled(nn.Module):
        def forward(self, x, y):
            return x.sin() * y

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), Scaled()

        def forward(self, x):
            h = self.first(x)
            return self.last(self.middle(h), h)

    def recorded(net):
        with hl.record(net, "*", ports=("grad_input", "grad_output")) as run:
            with hl.edit(net, "last:grad_input", lambda grad: grad * 2):
                net(torch.ones(2, 3, requires_grad=True)).sum().backward()
        return {str(site): value for site, value in run.items()}

    net = Layers()
    want = recorded(net)
    for layer in (net.first, net.last):
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(recorded(net), want)
