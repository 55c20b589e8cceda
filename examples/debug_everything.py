"""Hook every module that runs in this thread, forward and backward, and remove the hooks again.

torch's global hooks, such as `torch.nn.modules.module.register_module_forward_hook`, are called for
every model of the process, in every thread. They also stay registered after an exception. The hooks
on `hl.EVERYWHERE` are called only in this thread, and are removed at the end of the `with` block.

    python examples/debug_everything.py
"""

import threading

import torch
from torch import nn

import hookline as hl

torch.manual_seed(0)
my_model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
theirs = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
called, losses = [], []


def show(what, module, values):
    called.append(module)
    shapes = ", ".join(str(list(value.shape)) for value in values)
    print(f"  {what:12}  {type(module).__name__:10}  {shapes}")


def run_my_model():
    my_model(torch.randn(2, 4, requires_grad=True)).sum().backward()


def train_theirs():
    """Train another model, in another thread."""
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    x = torch.linspace(-3, 3, 64)[:, None]
    for _ in range(200):
        loss = (theirs(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


other = threading.Thread(target=train_theirs)
with hl.attach(hl.EVERYWHERE) as line:
    line.forward_pre(None, lambda module, args: show("forward_pre", module, args))
    line.forward(None, lambda module, args, output: show("forward", module, [output]))
    line.backward_pre(None, lambda module, grad_out: show("backward_pre", module, grad_out))
    line.backward(None, lambda module, grad_in, grad_out: show("backward", module, grad_in))
    other.start()
    run_my_model()
    other.join()

print(f"the other thread trained meanwhile: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print("modules of its model that were seen here:", len(set(called) & set(theirs.modules())))

called.clear()
run_my_model()
print("calls seen after the block:", len(called))
print("left behind:", hl.inventory(my_model))  # global hooks included
