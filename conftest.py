"""What the examples in docstrings may use without importing it."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.models import load_demo_digits, load_input, load_model

# The examples of inner functions are for reading: some want files, a network, or a minute.
collect_ignore_glob = [
    "src/hookline/models/[a-k]*.py",
    "src/hookline/models/[m-z]*.py",
    "src/hookline/models/_torch*.py",
    "src/hookline/models/demo/train.py",
    "src/hookline/cli/*.py",
]


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, object], tmp_path: Path) -> None:
    doctest_namespace.update(
        io=io,
        torch=torch,
        nn=nn,
        hl=hl,
        tmp_path=tmp_path,
        load_demo_digits=load_demo_digits,
        load_input=load_input,
        load_model=load_model,
        loaded=load_model("demo:digits"),
    )
