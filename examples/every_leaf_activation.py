"""Record the output of every leaf module of a nested model.

Hooks on `net.named_children()` miss the modules inside containers. Hooks on `named_modules()` also
store the outputs of the containers, and the stored output of the convolution is wrong: the in-place
ReLU after it overwrites the tensor. `copy=True` copies the tensor before that.

    python examples/every_leaf_activation.py
"""

import torch
from torch import nn

import hookline as hl

torch.manual_seed(0)
net = nn.Sequential(
    nn.Sequential(nn.Conv2d(3, 10, 2, stride=2), nn.ReLU(inplace=True)),
    nn.Flatten(),
    nn.Sequential(nn.Linear(160, 5), nn.Softmax(dim=1)),
)
x = torch.randn(1, 3, 8, 8)


def is_leaf(path, module):
    return not list(module.children())


with hl.record(net, is_leaf, copy=True) as run:
    net(x)

for site, activation in run.items():
    layer = type(net.get_submodule(site)).__name__
    low, high = activation.min(), activation.max()
    print(f"{site:4} {layer:8} {list(activation.shape)!s:15} from {low:+.3f} to {high:+.3f}")
