"""Replace modules, parameters and buffers while a model is built.

torch's `register_module_module_registration_hook` acts on every model that the process builds. To
replace modules of a finished model, you need a loop with `setattr`, and can miss a module that the
model holds twice. `line.registered` acts only inside the `with` block and in this thread.

    python examples/watch_a_model_being_built.py
"""

import numpy as np
import torch
from torch import nn

import hookline as hl


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(n_out)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


class Net(nn.Module):
    """A model whose tensors `mean` and `gain` come from NumPy, in float64."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(np.full((3, 1, 1), 0.5)))
        self.gain = nn.Parameter(torch.from_numpy(np.ones((3, 1, 1))))
        self.blocks = nn.Sequential(Block(3, 8), Block(8, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.blocks((x - self.mean) * self.gain).mean((2, 3)))


def on_module(module, name, child):
    """Replace batch norms and initialise layers. A registered module has all its parameters."""
    if isinstance(child, nn.BatchNorm2d):
        print(f"  {type(module).__name__}.{name}: BatchNorm2d -> GroupNorm")
        return nn.GroupNorm(4, child.num_features)
    if isinstance(child, nn.Conv2d | nn.Linear):
        print(f"  {type(module).__name__}.{name}: {type(child).__name__} initialised")
        nn.init.orthogonal_(child.weight)
        nn.init.zeros_(child.bias)
    return None


def on_parameter(module, name, value):
    """Convert to float32. Do not initialise here: layers fill parameters after registration."""
    if value.dtype is torch.float64:
        print(f"  {type(module).__name__}.{name}: parameter float64 -> float32")
        return nn.Parameter(value.detach().float())
    return None


def on_buffer(module, name, value):
    if value is not None and value.dtype is torch.float64:
        print(f"  {type(module).__name__}.{name}: buffer float64 -> float32")
        return value.float()
    return None


torch.manual_seed(0)
with hl.attach(hl.EVERYWHERE) as line:
    line.registered("module", on_module)
    line.registered("parameter", on_parameter)
    line.registered("buffer", on_buffer)
    print("while it is built:")
    net = Net()
print(line.report())

print(hl.summary(net, torch.randn(2, 3, 8, 8)))
w = net.head.weight
print("rows of head.weight orthonormal:", torch.allclose(w @ w.T, torch.eye(5), atol=1e-5))
print("dtypes:", {t.dtype for t in net.state_dict().values()})
print("a model built after the block keeps its", type(Block(3, 8).norm).__name__)
