"""Models for tests of distributed training, and how people put them on two ranks."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import hookline as hl

CPU = torch.device("cpu")
EVERYTHING = ("input", "output", "grad_output", "grad_input", "grad")


def images():
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def half(batch, rank):
    return batch[2 * rank : 2 * rank + 2]


def llama(n_blocks=2):
    from hookline.models.torchvision_import import import_torchvision

    import_torchvision()  # transformers wants it, and it wants a guard
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=n_blocks, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens():
    return torch.randint(0, 64, (4, 5), generator=torch.Generator().manual_seed(1))


def loss_of(model, batch):
    """A sum, so that the gradients of a batch are the sum over its parts."""
    if batch.is_floating_point():
        return model(batch).square().sum()
    return model(input_ids=batch).logits.square().sum()


def recorded(model, batch, selector=None, ports=EVERYTHING, **options):
    model.zero_grad()
    with hl.record(model, selector, ports=ports, **options) as run:
        loss_of(model, batch).backward()
    return run


def mesh():
    return init_device_mesh("cpu", (2,))


def sharded(model):
    """As people shard: each block, then the rest."""
    for block in getattr(getattr(model, "model", None), "layers", None) or [model.block]:
        fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model


def sharded_by_wrappers(model):
    """As people sharded before FSDP2: each block, then the rest."""
    blocks = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=CPU)


def split(model):
    """As people split a Llama over two ranks."""
    plan = {}
    for k in range(len(model.model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"model.layers.{k}.{name}"] = ColwiseParallel()
        plan[f"model.layers.{k}.self_attn.o_proj"] = RowwiseParallel()
        plan[f"model.layers.{k}.mlp.gate_proj"] = ColwiseParallel()
        plan[f"model.layers.{k}.mlp.up_proj"] = ColwiseParallel()
        plan[f"model.layers.{k}.mlp.down_proj"] = RowwiseParallel()
    return parallelize_module(model, mesh(), plan)


def planned(model, folder):
    """As transformers splits a model over two ranks, by its own plan, while it loads it."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return type(model).from_pretrained(folder, tp_plan="auto", tp_size=2)


class Stack(nn.Sequential):
    """A layer split by columns, what works on the parts, one split by rows, and what has it all."""

    is_checkpointed = False

    def forward(self, x):
        run = partial(checkpoint, self[1], use_reentrant=True) if self.is_checkpointed else self[1]
        return self[3](self[2](run(self[0](x)) * 2))


def stack(*, is_split):
    torch.manual_seed(0)
    model = Stack(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh(), plan) if is_split else model


def rows():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Gated(nn.Module):
    """A llama's feed-forward part: two layers share their input, which is added to the result."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.down(self.gate(x).tanh() * self.up(x)))


def gated(*, is_split):
    torch.manual_seed(0)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Gated(), mesh(), plan) if is_split else Gated()


def sentences():
    """A batch of three dimensions, of which a linear layer returns a view."""
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
