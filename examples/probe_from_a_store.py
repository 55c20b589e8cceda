"""Store the activations of a data set on disk, and train a linear probe on them.

A loop that collects activations in lists can fill the memory, and starts again if it is killed.
`hl.extract` writes files while the model runs, keeps the complete ones when it starts again, and
stores the index of each image next to its activations.

The network comes with hookline. It was trained on three quarters of these digits. So the accuracy
of the deep layers is higher here than on new digits.

    python examples/probe_from_a_store.py
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset

import hookline as hl
from hookline.models import load_model

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
net = load_model("demo:digits").model
LAYERS = ["stem", "block1", "block2", "block3"]


def probe(site):
    """Train a linear layer on rows of the store; return its accuracy on held-out rows."""
    torch.manual_seed(0)
    rows = store.dataset(site, "@item")  # "@item": which image a row belongs to
    layer = nn.Linear(store[site][0].numel(), 10)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    held_out = range(0, len(rows), 4)
    known = [k for k in range(len(rows)) if k not in held_out]
    for _ in range(5):
        for batch in DataLoader(Subset(rows, known), batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(
                layer(batch[site].flatten(1)), labels[batch["@item"]]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    rest = rows[list(held_out)]
    return (layer(rest[site].flatten(1)).argmax(1) == labels[rest["@item"]]).float().mean().item()


with tempfile.TemporaryDirectory() as folder:
    store = hl.extract(
        net, images, LAYERS, f"{folder}/digits", batch_size=64,
        keep=lambda t: nn.functional.adaptive_avg_pool2d(t, 2),
    )  # fmt: skip
    print(store)
    again = hl.extract(
        net, images, LAYERS, f"{folder}/digits", batch_size=64,
        keep=lambda t: nn.functional.adaptive_avg_pool2d(t, 2),
    )  # fmt: skip
    print(f"a second call finds all of its {len(again)} rows on disk, and runs nothing")
    print("accuracy of a linear probe on held-out digits, by layer:")
    for site in store:
        print(f"  {site:8} {probe(site):.1%}")
