"""Training with activation checkpointing and a line on: bit for bit what it is without the line."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hookline as hl
from hookline.models.torchvision_import import import_torchvision

transformers = pytest.importorskip("transformers")
import_torchvision()  # which transformers imports

both = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
N_STEPS = 20


class Residual(nn.Module):
    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_channels, n_channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, n_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_channels, n_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, n_channels)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


class ConvNet(nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.run = run
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(Residual(8) for _ in range(6))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.fc(x.mean((2, 3)))


def conv_net(reentrant):
    torch.manual_seed(0)
    if reentrant is None:
        return ConvNet(lambda layer, x: layer(x))
    return ConvNet(partial(checkpoint, use_reentrant=reentrant))


def llama(reentrant):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def image_loss(model, step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 6, 6, generator=generator)
    return nn.functional.cross_entropy(model(images), torch.arange(4) % 5)


def text_loss(model, step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 40, (2, 7), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


CASES = {
    "conv": (conv_net, image_loss, ["layers.*", "layers.*.conv*"]),
    "llama": (llama, text_loss, ["model.layers.*", "**.mlp", "**.q_proj"]),
}
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def train(model, loss_of, n_steps=N_STEPS):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@both
@every_case
@pytest.mark.slow
def test_twenty_steps_are_the_same_bit_for_bit_with_a_line_on(case, reentrant):
    build, loss_of, sites = case
    bare = train(build(reentrant), loss_of)
    model = build(reentrant)
    ports = ("output", "grad_output", "grad_input", "grad")
    with hl.record(model, sites, ports=ports, keep=lambda t: t.double().mean()) as run:
        losses = train(model, loss_of)
    assert torch.equal(bare, losses)
    assert len(run.passes) == N_STEPS
    assert all(len(one.order) == len(run.passes[0].order) for one in run.passes)
    assert all(len(one.backwards) == 1 for one in run.passes)


@pytest.mark.slow
@both
@every_case
def test_values_and_gradients_are_those_without_checkpointing(case, reentrant):
    build, loss_of, sites = case
    runs = []
    for model in (build(None), build(reentrant)):
        ports = ("output", "grad_output", "grad_input", "grad")
        with hl.record(model, sites, ports=ports, copy=True) as run:
            train(model, loss_of, n_steps=2)
        runs.append(run)
    plain, run = runs
    assert len(run.passes) == len(plain.passes) == 2
    for one, other in zip(plain.passes, run.passes, strict=True):
        assert list(one) == list(other)
        for key in one:
            values = zip(tensors(one[key]), tensors(other[key]), strict=True)
            assert all(torch.equal(a, b) for a, b in values), key


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in parts or () if isinstance(part, torch.Tensor)]


@pytest.mark.slow
@both
@every_case
def test_an_edit_trains_as_without_checkpointing(case, reentrant):
    build, loss_of, sites = case
    losses = []
    for model in (build(None), build(reentrant)):
        change = hl.edits.noise(0.1, seed=5)
        with hl.edit(model, sites[1], change) as line:
            losses.append(train(model, loss_of, n_steps=5))
        assert {count for _, count in line.report().fired} == {5}
    assert torch.equal(*losses)


def stack():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers)


def sum_loss(model, step):
    return model(torch.linspace(-1, 1, 12).view(3, 4).requires_grad_() + step).square().sum()


@both
def test_checkpoint_sequential_is_recorded_once(reentrant):
    class Model(nn.Module):
        def __init__(self, is_split) -> None:
            super().__init__()
            self.stack, self.is_split = stack(), is_split

        def forward(self, x):
            if not self.is_split:
                return self.stack(x)
            return checkpoint_sequential(self.stack, 3, x, use_reentrant=reentrant)

    check_alike(Model(False), Model(True), "stack.*")


@pytest.mark.parametrize("kind", CheckpointImpl)
def test_wrapped_modules_are_recorded_once(kind):
    plain, wrapped = stack(), stack()
    for k in (0, 2, 4):
        wrapped[k] = checkpoint_wrapper(wrapped[k], kind)
    check_alike(plain, wrapped, "**")


def check_alike(plain, model, sites):
    ports = ("output", "grad_output", "grad_input", "grad")
    with hl.record(plain, sites, ports=ports, copy=True) as expected:
        train(plain, sum_loss, n_steps=2)
    with hl.record(model, sites, ports=ports, copy=True) as run:
        train(model, sum_loss, n_steps=2)
    for one, other in zip(expected.passes, run.passes, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[key], other[key]) for key in one)


@both
@pytest.mark.cell("activation checkpointing", "features")
def test_summary_and_features_count_no_second_run(reentrant):
    model, plain = conv_net(reentrant).train(), conv_net(None)
    x = torch.ones(2, 3, 6, 6)
    warns = pytest.MonkeyPatch()
    warns.setattr("warnings.warn", lambda *args, **kwargs: None)  # torch's: nothing needs gradients
    try:
        table = hl.summary(model, x)
    finally:
        warns.undo()
    assert [row.calls for row in table.rows] == [row.calls for row in hl.summary(plain, x).rows]
    found = hl.features(model, x, ["layers.5", "layers.2"])
    assert torch.equal(found["layers.5"], hl.features(plain, x, "layers.5")["layers.5"])
    image_loss(model, 0).backward()
