"""A small transformer with every part that ports get wrong, and planted faults."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotated(x, base):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** -(torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.base, self.is_causal, self.is_fused = heads, 10_000.0, True, True
        self.scale = 1 / math.sqrt(width // heads)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotated(q, self.base), rotated(k, self.base)
        if self.is_fused:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.scale)
        else:
            mask = torch.full((x.shape[1],) * 2, -math.inf, dtype=x.dtype).triu(1)
            z = (q @ k.transpose(-1, -2) * self.scale + mask).softmax(-1) @ v
        return self.out(z.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class FunctionMlp(Mlp):
    """The same with a function in place of a module, of the other kind."""

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class CalledMlp(Mlp):
    """The same with a function in place of a module, of the same kind."""

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate=self.act.approximate))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(width), Attention(width)
        self.rms, self.mlp = RMSNorm(width), Mlp(width)
        self.is_post = False

    def forward(self, x):
        x = x + self.attn(self.ln(x))
        return self.rms(x + self.mlp(x)) if self.is_post else x + self.mlp(self.rms(x))


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.bn, self.head = nn.BatchNorm1d(width), nn.Linear(width, 50)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.bn(x.transpose(1, 2)).transpose(1, 2))


class Renamed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.decoder, self.training = net, net.training

    def forward(self, ids):
        return self.decoder(ids)


def with_functions(model):
    """Put a function in place of each activation, in place."""
    for block in model.blocks:
        if type(block.mlp) is Mlp:
            block.mlp.__class__ = CalledMlp
    return model


def net():
    """A net whose biases are not zero, and whose activations are small enough to show an eps."""
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.embed.weight.mul_(0.1)
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.01, 0.1)
    return model


IDS = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(1))


def run_of(model, *args, ports=("input", "output"), **kwargs):
    with hl.record(model, ["**", ":input"], ports=ports, copy=True) as run, torch.no_grad():
        model(*(args or (IDS,)), **kwargs)
    return run


def _set(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def _write(path, change):
    def fault(model):
        parameter = model.get_parameter(path)
        with torch.no_grad():
            parameter.copy_(change(parameter.clone()))

    return fault


def _replace(path, make):
    def fault(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return fault


def _as_function(mlp):
    twin = copy.deepcopy(mlp)
    twin.__class__ = FunctionMlp
    return twin


# A fault, and the module whose forward it is in.
FAULTS = {
    "eps of a layer norm": (_set("blocks.1.ln", "eps", 1e-6), "blocks.1.ln"),
    "eps of an RMS norm": (_set("blocks.0.rms", "eps", 1e-6), "blocks.0.rms"),
    "eps of a batch norm": (_set("bn", "eps", 1e-3), "bn"),
    "batch norm in training": (lambda model: model.bn.train(), "bn"),
    "tanh for erf": (_replace("blocks.1.mlp.act", lambda _: nn.GELU("tanh")), "blocks.1.mlp.act"),
    "a function for a module": (_replace("blocks.1.mlp", _as_function), "blocks.1.mlp"),
    "rows of q flipped": (_write("blocks.2.attn.q.weight", torch.flipud), "blocks.2.attn.q"),
    "transposed weight": (_write("blocks.0.attn.out.weight", torch.t), "blocks.0.attn.out"),
    "bias dropped": (_write("blocks.1.mlp.up.bias", torch.zeros_like), "blocks.1.mlp.up"),
    "channels permuted": (_write("head.weight", lambda w: w.flip(0)), "head"),
    "scale of attention": (_set("blocks.1.attn", "scale", 1.0), "blocks.1.attn"),
    "no causal mask": (_set("blocks.2.attn", "is_causal", False), "blocks.2.attn"),
    "base of RoPE": (_set("blocks.0.attn", "base", 5e5), "blocks.0.attn"),
    "order of the residual": (_set("blocks.1", "is_post", True), "blocks.1"),
}  # fmt: skip
