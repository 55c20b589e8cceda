"""Record the gradients of each layer's input, output, weight and bias, by name.

Old tutorials use `register_backward_hook`, which is deprecated. It gives gradients without names.
For the Linear below, their shapes are [5], [1, 160], [160, 5]: the bias, the input and the
transposed weight. For the Conv2d, the order is input, weight, bias.

    python examples/what_flows_back.py
"""

import torch
from torch import nn

import hookline as hl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(160, 5)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).flatten(1))


torch.manual_seed(0)
net, x = Net(), torch.randn(1, 3, 8, 8)
x.requires_grad_()  # otherwise the gradient of the input is None

with hl.record(net, ["conv", "fc"], ports=("grad_output", "grad_input", "grad")) as run:
    net(x).sum().backward()

for site, gradient in run.items():
    print(f"{site:17}  {list(gradient.shape)!s:15}  norm {gradient.norm():.3f}")

# The gradients equal those of autograd, to the last bit.
assert torch.equal(run["conv:grad_input"], x.grad)
assert torch.equal(run["fc.weight:grad"], net.fc.weight.grad)
