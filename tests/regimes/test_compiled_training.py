"""Compiled training with each verb on and off: bit for bit what it is without the verb."""

from __future__ import annotations

import copy
import functools
import warnings
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hookline as hl
from thoroughness import IS_GATE

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("dynamo_of_all")]

N_STEPS = 9
IS_ON = range(2, 7)  # the steps with the verb


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        # Not by unflatten, which torch does not compile under a default device.
        shape = (*x.shape[:-1], 2, 4)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        rate = 0.1 if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(8), nn.LayerNorm(8), Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.drop = nn.Embedding(20, 8), nn.Embedding(6, 8), nn.Dropout()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(8, 20, bias=False)

    def forward(self, tokens):
        x = self.drop(self.tokens(tokens) + self.places.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.conv = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
        self.drop, self.fc = nn.Dropout2d(0.2), nn.Linear(4, 5)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        x = x + self.drop(self.conv(x))
        return self.fc(x.mean((2, 3)))


def text_loss(run, step):
    tokens = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(step))
    return cross_entropy(run(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def image_loss(run, step):
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
    return cross_entropy(run(images), torch.arange(4))


MODELS = {"gpt": (Gpt, text_loss), "conv": (Conv, image_loss)}
PORTS = ("output", "input", "grad_output", "grad_input", "grad")


@contextmanager
def raw_hooks(model):
    with hl.attach(model) as line:
        line.forward_pre(None, lambda module, args: None)
        line.forward(None, lambda module, args, output: None)
        line.accumulated(None, lambda parameter: None)
        yield


@contextmanager
def watch(model):
    with redirect_stdout(StringIO()), hl.watch(model):
        yield


VERBS = {
    "record": lambda model: hl.record(model, ports=("output", "input")),
    "gradients": lambda model: hl.record(
        model, "**.{fc,conv,stem,attn,mlp}", ports=PORTS, copy=True
    ),
    "statistics": lambda model: hl.record(model, keep=lambda t: t.double().mean()),
    "edit": lambda model: hl.edit(model, "**.{fc,mlp,attn,conv,stem}", lambda value: value.clone()),
    "edit gradients": lambda model: hl.edit(model, "**.{fc,mlp,conv}:grad_output", torch.clone),
    "raw hooks": raw_hooks,
    "watch": watch,
    "clip": lambda model: hl.clip(model, "**.{fc,mlp,conv,stem,head}", norm=1e9),
    "check": hl.check,
    "check also": functools.partial(
        hl.check, also=("magnitude", "dead", "constant", "shapes", "missing_grad")
    ),
    "monitor": hl.monitor,
    "profile": hl.profile,
}


@pytest.fixture(scope="module")
def dynamo_of_all(fresh_dynamo_of_file):
    """The verbs come and go on one model: each has graphs of its own."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@functools.cache
def compiled(name, backend):
    """A model, compiled once for all verbs, and its state."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    state = copy.deepcopy(model.state_dict())
    return model, torch.compile(model, backend=backend, fullgraph=True), state


def trained(name, backend, verb):
    """All that some steps of training leave."""
    loss_of = MODELS[name][1]
    model, run, state = compiled(name, backend)
    model.load_state_dict(state)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(run, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    train(range(IS_ON.start))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # of dead units and the like
        with verb(model):
            train(IS_ON)
    train(range(IS_ON.stop, N_STEPS))
    grads = {f"{path}:grad": one.grad.clone() for path, one in model.named_parameters()}
    moments = {
        f"{k}:{key}": value
        for k, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    left = {"losses": torch.stack(losses), "rng": torch.get_rng_state()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    return {**weights, **grads, **moments, **left}


@functools.cache
def bare(name, backend):
    return trained(name, backend, nullcontext)


# Both models take half a minute: in the gate each verb has one of them.
OF_CONV = ("clip", "edit", "statistics", "watch", "monitor")
CASES = [
    (name, verb, "aot_eager")
    for name in MODELS
    for verb in VERBS
    if not IS_GATE or (name == "conv") is (verb in OF_CONV)
]
# It compiles in workers.
INDUCTOR = pytest.param("conv", "check also", "inductor", marks=pytest.mark.processes)


@pytest.mark.parametrize(("name", "verb", "backend"), [*CASES, INDUCTOR])
def test_compiled_training_is_the_same_bit_for_bit(name, verb, backend):
    expected = bare(name, backend)
    found = trained(name, backend, VERBS[verb])
    assert list(found) == list(expected)
    different = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert different == []
