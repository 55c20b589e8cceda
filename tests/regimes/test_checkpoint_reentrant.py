"""Gradients in reentrant checkpoints of any shape: those of the model without checkpoints."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookline as hl
from thoroughness import examples

# Torch says it of each reentrant region that the first run of another one holds.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
PORTS = ("grad_input", "grad_output")


def double(grad):
    return grad * 2


class Mul(nn.Module):
    def forward(self, a, b):
        return a * b


class Pair(nn.Module):
    def forward(self, both):
        return both[0].sin() * both[1], both[1].cos()


class Named(nn.Module):
    def forward(self, a, *, b):
        return a * 2 + b["one"] * b["two"][0]


class PassOn(nn.Module):
    def forward(self, a, b):
        return b, a * b


KINDS = {"linear": lambda: nn.Linear(3, 3), "mul": Mul, "pair": Pair, "named": Named, "on": PassOn}


class Program(nn.Module):
    """Runs a list of steps; each adds values to those that later steps can take.

    A step is (kind, two values to take, whether the second is a constant), or a region: (whether it
    is reentrant, values to take, steps).
    """

    def __init__(self, steps, is_checkpointed) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = [name for name, *_ in _leaves(steps)]
        self.parts = nn.ModuleDict({name: KINDS[name.split("_")[0]]() for name in names}).double()
        self.steps, self.is_checkpointed = steps, is_checkpointed

    def call(self, name, a, b):
        kind = name.split("_")[0]
        part = self.parts[name]
        if kind == "linear":
            return (part(a),)
        if kind == "pair":
            return part((a, b))
        if kind == "named":
            return (part(a, b={"one": b, "two": [a]}),)
        new = part(a, b)
        return new if isinstance(new, tuple) else (new,)

    def run(self, steps, *values):
        for head, *rest in steps:
            if isinstance(head, str):
                first, second, is_fixed = rest
                a, b = values[first % len(values)], values[second % len(values)]
                # Torch gives a region's output a gradient even where the value requires none.
                is_fixed = is_fixed and head.startswith(("mul", "named"))
                values += tuple(self.call(head, a, torch.full_like(a, 0.5) if is_fixed else b))
                continue
            taken, inner = rest
            given = [values[0], *(values[k % len(values)] for k in taken)]
            if self.is_checkpointed:
                region = partial(self.region, inner)
                values += checkpoint(region, *given, use_reentrant=head)
            else:
                values += self.region(inner, *given)
        return values

    def region(self, steps, *given):
        """The last value, all others in one, and the first input as it is."""
        values = self.run(steps, *given)
        return values[-1], sum(value * (k + 1) for k, value in enumerate(values)), values[0]

    def forward(self, x):
        values = self.run(self.steps, x * 1)
        return sum(value.square().sum() * (k + 1) for k, value in enumerate(values))


def _leaves(steps):
    for step in steps:
        if isinstance(step[0], str):
            yield step
        else:
            yield from _leaves(step[2])


def _kinds(steps):
    return (name.split("_")[0] for name, *_ in _leaves(steps))


def named(steps, count):
    """Give each module of its own a name: a kind and a number."""
    new = []
    for head, *rest in steps:
        if isinstance(head, str):
            count[0] += 1
            new.append((f"{head}_{count[0]}", *rest))
        else:
            new.append((head, rest[0], named(rest[1], count)))
    return new


places = st.integers(0, 8)
parts = st.tuples(st.sampled_from(sorted(KINDS)), places, places, st.booleans())
regions = st.recursive(
    st.lists(parts, min_size=1, max_size=3),
    lambda inner: st.lists(
        parts | st.tuples(st.booleans(), st.lists(places, max_size=2), inner),
        min_size=1,
        max_size=3,
    ),
    max_leaves=4,
)
# A region stands in each program; what comes before and after it may be anything.
programs = st.builds(
    lambda first, taken, inner, rest: named([*first, (True, taken, inner), *rest], [0]),
    st.lists(parts, max_size=2),
    st.lists(places, max_size=2),
    regions,
    regions,
)
all_sizes = settings(
    max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck)
)


def train(steps, *, is_checkpointed, attach=()):
    """The gradients that one training step records, and those of the input and the parameters."""
    net = Program(steps, is_checkpointed)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(hl.record(net, "parts.*", ports=PORTS))
        for line in attach:
            stack.enter_context(line(net))
        net(x).backward()
    recorded = {str(site): value for site, value in run.items()}
    return recorded, {"x": x.grad} | {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.slow
@all_sizes
@given(programs)
def test_each_gradient_is_that_without_checkpoints(steps):
    assert_close(train(steps, is_checkpointed=True), train(steps, is_checkpointed=False))


CHANGES = {
    "edit": lambda site: [lambda net: hl.edit(net, site, double)],
    "clip by norm": lambda site: [lambda net: hl.clip(net, site, norm=0.3)],
    "clip by value": lambda site: [lambda net: hl.clip(net, site, value=0.1)],
    "two edits": lambda site: [
        lambda net: hl.edit(net, site, double),
        lambda net: hl.edit(net, "parts.*", lambda grad: grad * 3, ports="grad_output"),
    ],
}


# A site whose value requires no gradient, or whose gradient nothing wants, is told.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hookline.errors.HooklineWarning")
@pytest.mark.parametrize("change", CHANGES)
@settings(all_sizes, max_examples=8)
@given(programs, st.integers(0, 20), st.sampled_from(PORTS))
def test_changes_reach_what_they_reach_without_checkpoints(change, steps, which, port):
    names = [name for name, *_ in _leaves(steps)]
    lines = CHANGES[change](f"parts.{names[which % len(names)]}:{port}")
    _, want = train(steps, is_checkpointed=False, attach=lines)
    _, got = train(steps, is_checkpointed=True, attach=lines)
    assert_close(got, want)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_tensor_that_nested_regions_pass_on_is_changed_once(depth):
    step = ("linear_1", 0, 0, False)
    for _ in range(depth):
        step = (True, [], [step])
    # The last output of a region is what came in; the first one of a region around it, too.
    steps = [step, ("mul_2", 0, 3 if depth == 1 else 1, False)]
    lines = CHANGES["edit"]("parts.mul_2:grad_input")
    want = train(steps, is_checkpointed=False, attach=lines)
    assert_close(train(steps, is_checkpointed=True, attach=lines), want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hookline.errors.HooklineWarning")
@settings(all_sizes, max_examples=8)
@given(programs.filter(lambda steps: {*_kinds(steps)} & {"linear", "mul", "named"}))
def test_gradients_belong_to_edited_values(steps):
    lines = [
        lambda net: hl.edit(net, lambda _, part: type(part) in (nn.Linear, Mul, Named), double)
    ]
    with_edits = train(steps, is_checkpointed=True, attach=lines)
    assert_close(with_edits, train(steps, is_checkpointed=False, attach=lines))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mul = nn.Linear(4, 4), Mul()

    def forward(self, x):
        return self.mul(self.linear(x).relu(), x)


class Residual(nn.Module):
    def __init__(self, is_checkpointed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.is_checkpointed else block(x)
        return x


def of_mul(net, n_backwards=1):
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with hl.record(net, "blocks.1.mul:grad_input") as run:
        loss = net(x).sum()
        for k in range(n_backwards):
            loss.backward(retain_graph=k + 1 < n_backwards)
    return [back["blocks.1.mul:grad_input"] for back in run.passes[0].backwards]


def test_each_of_several_backwards_has_the_whole_gradient():
    (want,) = of_mul(Residual(False))
    assert_close(of_mul(Residual(True), n_backwards=3), [want, want, want])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
@pytest.mark.parametrize("part", ["", "mul"])
def test_compiled_parts_of_a_region_record_whole_gradients(part, fresh_dynamo):
    net = Residual(True)
    for block in net.blocks:
        block.get_submodule(part).compile(backend="aot_eager")
    assert_close(of_mul(net), of_mul(Residual(False)))


def test_inputs_of_an_unused_region_have_their_gradients():
    net = Residual(False)
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with hl.record(net.blocks[0], "mul", ports="grad_input") as run:
        h = x * 1
        checkpoint(net.blocks[0], h, use_reentrant=True)
        (h * 2).sum().backward()
    assert_close(run["mul:grad_input"], {"a": None, "b": torch.full((3, 4), 2.0)})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_compiled_checkpoints_change_each_gradient_once(backend, is_whole, fresh_dynamo):
    results = []
    for net in (Residual(False), Residual(True)):
        if net.is_checkpointed and is_whole:
            net.compile(backend=backend)
        elif net.is_checkpointed:
            net.blocks[1].linear.compile(backend=backend)
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        site = "blocks.1.mul:grad_input.b" if is_whole else "blocks.1.mul:grad_output"
        with hl.edit(net, site, double):
            net(x).sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    assert_close(*results)
