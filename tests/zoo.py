"""Small models that behave like real ones, for the tests of all rooms."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def data_parallel(module):
    """`DataParallel` over no device, as without a GPU: where there is one, it would take that."""
    home = sys.modules[nn.DataParallel.__module__]
    with mock.patch.object(home, "_get_available_device_type", return_value=None):
        return nn.DataParallel(module)


class Block(nn.Module):
    """Conv, batch norm, an in-place ReLU that overwrites the batch norm's output, a residual."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x))) + x


class SmallNet(nn.Module):
    """A little convolutional network with the shapes of a big one."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block(), Block())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(self.pool(x).flatten(1))


class Looped(nn.Module):
    """One block, run three times in each pass."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Out:
    """A dataclass that torch's pytrees do not know."""

    hidden: torch.Tensor
    extra: object = None


class Nested(nn.Module):
    """Returns every kind of structure, from every kind of argument."""

    def forward(self, x, *rest, scale=None, **options):
        return OrderedDict(
            pair=Pair(x + 1, [x * 2, None]),
            out=Out(x - 1, extra={"n": 3, "deep": (x,)}),
            text="kept",
        )


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Nested()

    def forward(self, x):
        return self.inner(x, x, scale=2.0, mask=x > 0)


class Step(nn.Module):
    """Linear, ReLU, a residual."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        return self.act(self.linear(x)) + x


def steps(n: int = 4) -> nn.Sequential:
    """Blocks that are all alike, as those of a transformer."""
    torch.manual_seed(0)
    return nn.Sequential(*[Step() for _ in range(n)])


def tanh_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class Residual(nn.Module):
    """x + f(x), between two linear layers."""

    def __init__(self, inner):
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(4, 4), inner, nn.Linear(4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.inner(x))


class Attention(nn.Module):
    """Wants to know whether it is self-attention, as torch's own does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, query, key, value, *, mask=None):
        assert query is key is value
        return self.linear(query)


class Asking(nn.Module):
    """Calls its attention with one tensor three times, as self-attention is called."""

    def __init__(self):
        super().__init__()
        self.stem, self.attention = nn.Linear(4, 4), Attention()

    def forward(self, x):
        x = self.stem(x)
        return self.attention(x, x, value=x, mask=torch.ones(4)) + x


class Two(nn.Module):
    """Two inputs, two outputs."""

    def forward(self, a, b):
        return a * b, a.tanh() + b


class Delegating(nn.Module):
    """Gives the attributes of another module as its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


class Sized(nn.Module):
    """Knows how many of its activations are alive."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.act, self.head = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x):
        x = self.act(self.layer(x))
        self.alive.append(weakref.ref(x))
        return self.head(x)  # which keeps it for backward

    def n_alive(self):
        gc.collect()
        return sum(one() is not None for one in self.alive)


ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def rows_net(change=None):
    """Two linear layers and a tanh, always of the same numbers; for `ROWS`.

    Args:
        change: called with the first layer.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    if change is not None:
        change(model[0])
    return model


def lazy_net():
    """The same layers, without a shape before their first run."""
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))


class Checkpointed(nn.Sequential):
    """Three layers, the second of which is in a checkpointed region."""

    is_reentrant = True

    def forward(self, x):
        return self[2](checkpoint(self.inner, self[0](x), use_reentrant=self.is_reentrant))

    def inner(self, x):
        return self[1](x * 2) * x


class NotCheckpointed(Checkpointed):
    """The same without a checkpoint."""

    def forward(self, x):
        return self[2](self.inner(self[0](x)))


class Gated(nn.Module):
    """x + tanh of a layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh() + x


class BlockInRegion(nn.Module):
    """A block between two layers, checkpointed or not; always of the same numbers, for `ROWS`."""

    def __init__(self, *, is_checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(4, 4), Gated(), nn.Linear(4, 3)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        x = self.first(x)
        if self.is_checkpointed:
            return self.last(checkpoint(self.block, x, use_reentrant=False))
        return self.last(self.block(x))


def encoder():
    """Two encoder layers of torch's, always of the same numbers; for a batch of (2, 3, 8)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Recursive(nn.Module):
    """Calls itself, and its layer in each call."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, depth=2):
        return self.linear(x) if not depth else self(x, depth - 1) + self.linear(x)


class Tagged(torch.Tensor):
    """A tensor that is of a class of its own, and stays so."""


def int8_net():
    """Two linear layers whose weights torchao holds in 8 bits."""
    from torchao import quantization  # it takes seconds to load

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


class ConvNet(nn.Module):
    """A little network with an in-place layer and a residual, without batch statistics."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU())
        self.fc = nn.Linear(4, 6)

    def forward(self, x):
        x = self.stem(x)
        return self.fc((x + self.block(x)).mean((2, 3)))


def conv_net():
    torch.manual_seed(0)
    return ConvNet()


class DiesInActors(nn.Module):
    """Kills the process of an actor of Ray at once, and no other."""

    def forward(self, x):
        if sys.argv[0].endswith("default_worker.py"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x
