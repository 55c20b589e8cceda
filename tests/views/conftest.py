"""A model that shows the page's every face, and one page made of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

SCRIPT = "<script>alert(1)<"  # a name may hold anything but a dot


class Strange(nn.Module):
    """Repeated calls, an in-place change, NaN, a module that never runs, a hostile name."""

    def __init__(self):
        super().__init__()
        self.add_module(SCRIPT, nn.Conv2d(1, 6, 3, padding=1))
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.broken = nn.Identity()
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.relu(self.norm(self.get_submodule(SCRIPT)(x)))
        x = self.blocks[0](self.blocks[1](self.blocks[0](x)))
        y = x.clone()
        y[0, 0, 2:4] = float("nan")
        self.broken(y)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="session")
def strange() -> Strange:
    torch.manual_seed(0)
    return Strange().eval()


@pytest.fixture(scope="session")
def strange_run(strange):
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with hl.record(strange) as run:
        strange(x)
    return run
