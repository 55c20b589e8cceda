"""The gradients of intermediate tensors.

After `backward()`, `b.grad` is None for every tensor that was computed from others. By hand one
calls `b.retain_grad()`, which has to come before backward and keeps the gradient for good, or
`b.register_hook(...)` with a closure that stores it and a handle that somebody has to remove.
Here tensors are recorded under names of one's own, for as long as the block lasts.

    python examples/gradients_of_intermediate_tensors.py
"""

import torch

import hookline as hl

a = torch.ones(5, requires_grad=True)
b = 2 * a
c = b.mean()

with hl.record({"a": a, "b": b}) as run:
    c.backward()

print("dc/db =", run["b:grad"])  # a mean of five: a fifth for each element
print("dc/da =", run["a:grad"])  # b is twice a: twice that
print("kept on b itself:", b.retains_grad)

# Or seen by a function of one's own when it arrives, and changed by what the function returns.
b = 2 * a
with hl.attach() as line:
    line.grad(b, lambda grad: 10 * grad)
    line.grad(a, lambda grad: print("ten times as much arrives at a:", grad))
    b.mean().backward()
