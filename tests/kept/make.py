"""Write a recording, a store and the run of a monitor, with the hookline that is imported.

    PYTHONPATH=src python tests/kept/make.py tests/kept/0.2.0

It runs under the code of each version that has the verbs: what a version lacks, it leaves out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import hookline as hl


class Mixed(nn.Module):
    """Return a container with values of several kinds."""

    def forward(self, x: Tensor) -> dict[str, object]:
        half = x.to(torch.bfloat16)
        return {"pair": (x * 2, None), "half": half, "count": 3, "mask": x > 6, "text": "as it is"}


class Net(nn.Module):
    """Compute whole numbers, which are the same on each machine."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.mixed = Mixed()
        with torch.no_grad():
            self.fc.weight.copy_(torch.arange(6.0).reshape(2, 3))
            self.fc.bias.copy_(torch.tensor([1.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of fc."""
        y = self.fc(x)
        self.mixed(x)
        return y


X = torch.arange(12.0).reshape(4, 3)


def make(folder: Path) -> None:
    """Write what this version of hookline can write into a new folder."""
    folder.mkdir(parents=True)
    model = Net()
    with hl.record(model, ["fc", "mixed"]) as run:
        model(X)
        model(X + 1)
    run.save(folder / "recording")
    if hasattr(hl, "extract"):
        hl.extract(model, X, "fc", folder / "store", batch_size=2)
    if hasattr(hl, "monitor"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with hl.monitor(model, "fc", to=folder / "run"):
            for x in (X, X + 1):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
