"""What the examples in docstrings may use without importing it."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, object], tmp_path: Path) -> None:
    doctest_namespace.update(io=io, torch=torch, nn=nn, hl=hl, tmp_path=tmp_path)
