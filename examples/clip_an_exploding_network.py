"""Train a recurrent network that learns only if its gradients are clipped.

Without hookline, you call `clip_grad_norm_` in the training loop, and count yourself how often it
clips. With `hl.clip`, the loop stays as it is. The report says how often each gradient was clipped,
and by how much.

    python examples/clip_an_exploding_network.py
"""

from contextlib import nullcontext

import torch
from torch import nn

import hookline as hl


class AddUp(nn.Module):
    """Add up fifty numbers: the gradient is multiplied by one matrix fifty times."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 32, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)  # as in Le, Jaitly and Hinton (2015)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def train(clipping, n_steps=300):
    """Train on the same data, from the same weights; only the clipping differs."""
    torch.manual_seed(0)
    net = AddUp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    with clipping(net) as line:
        for step in range(n_steps):
            x = torch.randn(64, 50, 1)
            loss = (net(x) - x.sum(1) / 50**0.5).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in (0, 1, 2, 3, 10, 30, 100, n_steps - 1):
                print(f"  step {step:3}  loss {loss.item():.3g}")
    return line


print("as it is:")
train(nullcontext, n_steps=4)

print("no gradient's norm above 0.3 (always to answer 0 would have a loss of 1):")
line = train(lambda net: hl.clip(net, norm=0.3))
print(line.report())
