"""Record the gradients of intermediate tensors.

After `backward()`, `b.grad` is None for a tensor that was computed from others. Without hookline,
you call `b.retain_grad()` before backward, or `b.register_hook(...)` and remove the handle later.
`hl.record` takes the tensors by names that you choose, and ends with the `with` block.

    python examples/gradients_of_intermediate_tensors.py
"""

import torch

import hookline as hl

a = torch.ones(5, requires_grad=True)
b = 2 * a
c = b.mean()

with hl.record({"a": a, "b": b}) as run:
    c.backward()

print("dc/db =", run["b:grad"])  # the mean of five elements: 1/5 for each
print("dc/da =", run["a:grad"])  # b = 2 * a: 2/5
print("kept on b itself:", b.retains_grad)

# Or call a function with the gradient during backward. What it returns replaces the gradient.
b = 2 * a
with hl.attach() as line:
    line.grad(b, lambda grad: 10 * grad)
    line.grad(a, lambda grad: print("ten times as much arrives at a:", grad))
    b.mean().backward()
