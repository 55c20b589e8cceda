"""Store the activations of a data set on disk, and train a linear probe on them.

By hand: a loop that collects activations in lists until memory ends, starts again from nothing when
it is killed, and loses which row was which image. `hl.extract` writes checksummed shards while the
model runs, goes on where it was stopped, and keeps the index of each image beside its rows.

    python examples/probe_from_a_store.py
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.models import load_model

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
net = load_model("demo:digits").model
LAYERS = ["stem", "block1", "block2", "block3"]


def probe(rows, held_out):
    """The accuracy of a linear layer on held-out rows, trained on the others from the store."""
    torch.manual_seed(0)
    width = rows[0][0].numel()
    layer = nn.Linear(width, 10)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    known = [k for k in range(len(rows)) if not held_out[k]]
    for _ in range(5):
        for x, item in DataLoader(torch.utils.data.Subset(rows, known), 64, shuffle=True):
            loss = nn.functional.cross_entropy(layer(x.flatten(1)), labels[item])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, item = next(iter(DataLoader(torch.utils.data.Subset(rows, held_out.nonzero()[:, 0]), 1000)))
    return (layer(x.flatten(1)).argmax(1) == labels[item]).float().mean().item()


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
    held_out = torch.arange(len(store)) % 4 == 0
    print("accuracy of a linear probe on held-out digits, by layer:")
    for site in store:
        print(f"  {site:8} {probe(store.dataset(site), held_out):.1%}")
