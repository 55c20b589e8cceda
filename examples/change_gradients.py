"""Change gradients during the backward pass.

Without hookline, you call `register_hook` on the convolution's output inside `forward`, so you must
edit the model's code. For the biases, you need a second loop over `named_parameters()`. Here,
`hl.edit` names both gradients, and both edits end with the `with` block.

    python examples/change_gradients.py
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


def gradients():
    """Print gradients of the convolution and of the last layer's bias."""
    net.zero_grad()
    with hl.record(net, ["conv:grad_output", "fc.bias:grad"]) as run:
        net(x).sum().backward()
    print(f"  smallest element at conv:grad_output  {run['conv:grad_output'].min():+.4f}")
    print(f"  gradient of fc.bias                   {run['fc.bias:grad'].tolist()}")
    print(f"  norm of conv.weight.grad              {net.conv.weight.grad.norm():.4f}")


print("as it is:")
gradients()

print("changed:")
with (
    hl.edit(net, "conv:grad_output", hl.edits.clamp(min=0)),
    hl.edit(net, "fc*.bias:grad", torch.zeros_like) as line,
):
    gradients()
print(line.report())

print("after the block, as before:")
gradients()
