"""Find layers that do not learn, because they get no gradient.

Without hookline, you print `p.grad` after backward. None does not tell a frozen layer from a layer
that the forward does not use. `run.gradients()` has a row for each parameter, with a state and a
reason. "none" means that the parameter is frozen, "dead" that an expected gradient did not arrive.

    python examples/frozen_layers.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hookline as hl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.stem_reduce = nn.Linear(64, 8)
        self.body = nn.Linear(8, 64)
        self.head = nn.Linear(64, 10)
        self.old_head = nn.Linear(64, 10)  # unused, and not deleted

    def forward(self, x):
        return self.head(self.body(self.stem_reduce(self.stem(x).relu())).relu())


def train(n_epochs=20):
    """Train the parameters that are not frozen; return the accuracy on held-out digits."""
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(n_epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return (net(x_test).argmax(1) == y_test).float().mean().item()


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels))
images, labels = torch.tensor(images).float()[order] / 16, torch.tensor(labels)[order]
x, y, x_test, y_test = images[450:], labels[450:], images[:450], labels[:450]

net = Net()
for name, parameter in net.named_parameters():
    if name.startswith("stem"):  # a mistake: this also freezes stem_reduce
        parameter.requires_grad_(False)
print(f"accuracy {train():.1%}, so what does not learn?")

with hl.record(net, ports="grad") as run:
    nn.functional.cross_entropy(net(x), y).backward()
flow = run.gradients()
print(flow)
for state in ("none", "dead"):
    print(f"{state}:", ", ".join(row.site for row in flow if row.state == state))

net.stem_reduce.requires_grad_()
print(f"accuracy {train():.1%} once stem_reduce learns, too")
