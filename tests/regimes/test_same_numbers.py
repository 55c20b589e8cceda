"""A Llama of 12 blocks and a ResNet-34: the values and gradients of every block, compiled as eager.

Inductor takes a minute for each, so that in the gate it compiles one block of a ResNet alone.
Checkpointed and on many ranks they are compared in `test_checkpoint_training.py` and
`test_distributed.py`.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

import hookline as hl
from hookline.models.torchvision_import import import_torchvision
from thoroughness import tries

import_torchvision()  # transformers imports it, and cannot where its operators are missing

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

PORTS = ("output", "grad_output")

INDUCTOR = pytest.param("inductor", marks=pytest.mark.processes)  # it compiles in workers


@functools.cache
def llama(n_blocks=12):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=n_blocks,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return model, (lambda run: run(input_ids=tokens, labels=tokens).loss), re.compile(
        r"^model\.layers\.\d+$"
    )  # fmt: skip


@functools.cache
def resnet34(n_blocks=(3, 4, 6, 3)):
    """One with other numbers of blocks; the last stages may have none."""
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    model = ResNet(BasicBlock, [n or 1 for n in n_blocks]).eval()
    for stage, n in enumerate(n_blocks, 1):
        if n == 0:
            setattr(model, f"layer{stage}", torch.nn.Identity())
    model.fc = torch.nn.Linear(32 * 2 ** sum(map(bool, n_blocks)), 10)
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return model, (lambda run: run(image).square().mean()), re.compile(r"^layer\d\.\d+$")


def recorded(make, run):
    model, loss, blocks = make()
    model.zero_grad()
    with hl.record(model, blocks, ports=PORTS) as seen:
        loss(run).backward()
    weights = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**seen, **weights}


def short_llama():
    return llama(n_blocks=3)


def short_resnet():
    return resnet34((2, 2, 2, 2))


def one_block():
    return resnet34((1, 0, 0, 0))


CASES = tries(
    [(llama, "aot_eager"), (llama, "inductor"), (resnet34, "aot_eager"), (resnet34, "inductor")],
    gate=[(short_llama, "aot_eager"), (short_resnet, "aot_eager"), (one_block, "inductor")],
)


@pytest.mark.processes  # inductor compiles in workers
@pytest.mark.parametrize(("make", "backend"), CASES, ids=lambda of: getattr(of, "__name__", of))
@pytest.mark.cell("torch.compile", "record", "gradients")
def test_every_block_has_the_eager_models_values_and_gradients(make, backend):
    model = make()[0]
    expected = recorded(make, model)
    found = recorded(make, torch.compile(model, backend=backend, fullgraph=True))
    assert list(found) == list(expected)
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_twenty_steps_of_training_are_the_same_with_a_line_on(backend):
    def losses(attach):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 2)
        )
        run = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, found = torch.randn(16, 8, generator=torch.Generator().manual_seed(2)), []
        for _ in range(20):
            optimizer.zero_grad()
            with attach(model):
                loss = run(x).square().mean()
                loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with_line = losses(lambda model: hl.record(model, "*", ports=("output", "grad_output", "grad")))
    assert with_line == losses(lambda model: torch.enable_grad())
    assert with_line[-1] < with_line[0]
