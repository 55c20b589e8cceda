"""Use the hookline that is installed, in a bare environment: record, edit, save, open, monitor.

    python -P release/smoke.py [EXTRA]

With the name of an extra, do what needs this extra.
"""

from __future__ import annotations

import base64
import gzip
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hookline as hl
from hookline.models import load_demo_digits, load_model


def bare(folder: Path) -> None:
    """Do the README's first examples, which need no extra."""
    model = load_model("demo:digits").model
    x, _ = load_demo_digits()
    with hl.record(model, "block*") as run:
        model(x)
    opened = hl.open(run.save(folder / "run"))
    assert opened["block2"].shape == (8, 40, 4, 4)
    assert torch.equal(opened["block2"], run["block2"])
    with hl.edit(model, "block2", hl.edits.scale(0)) as line:
        model(x)
    assert line.report().passes == 1
    hl.extract(model, x, "block1", folder / "store")
    assert len(hl.open(folder / "store")) == 8
    with hl.monitor(model, "head", to=folder / "curves"):
        model(x).sum().backward()
    assert "head" in hl.open(folder / "curves")
    assert (Path(hl.__file__).parent / "py.typed").exists()


def _command(*arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "hookline", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cli(folder: Path) -> None:
    """Run the command's demo."""
    _command("demo", "--out", str(folder / "demo"))
    text = (folder / "demo" / "report.html").read_text("utf-8")
    packed = re.search(r'id="core">([^<]*)<', text)
    assert packed is not None
    assert b"block1" in gzip.decompress(base64.b64decode(packed[1]))


def page(folder: Path) -> None:
    """Write a page."""
    model = nn.Linear(2, 3)
    with hl.record(model) as run:
        model(torch.ones(4, 2))
    hl.write_page(run, folder / "page.html")
    assert (folder / "page.html").stat().st_size > 10_000


def plots(folder: Path) -> None:
    """Draw a figure."""
    model = load_model("demo:digits").model
    with hl.record(model, "block1") as run:
        model(load_demo_digits()[0])
    hl.plots.channels(run, "block1").savefig(folder / "channels.png")


def vision(folder: Path) -> None:
    """Load models of torchvision and of timm, without weights."""
    for name in ("torchvision:resnet18", "timm:resnet18"):
        model = load_model(name, weights="none").model.eval()
        feats = hl.features(model, torch.zeros(1, 3, 64, 64), "layer1")
        assert feats["layer1"].shape == (1, 64, 16, 16)


def text(folder: Path) -> None:
    """Record a transformer."""
    import transformers

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16, **ends)
    model = transformers.GPT2LMHeadModel(config).eval()
    with hl.record(model, "transformer.h.*") as run:
        model(torch.tensor([[1, 2, 3]]))
    assert len(run) == 2


def store(folder: Path) -> None:
    """Write a store at a URL, and export one to parquet."""
    rows = hl.extract(nn.Linear(2, 3), torch.zeros(4, 2), "", "memory://smoke")
    assert rows.export(folder / "rows.parquet", "parquet").exists()


def ray(folder: Path) -> None:
    """Extract on Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    model = nn.Linear(2, 3)
    rows = hl.extract(model, torch.zeros(4, 2), "", folder / "rows", engine="ray", batch_size=2)
    assert len(rows) == 4


def loggers(folder: Path) -> None:
    """Write statistics for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    model = nn.Linear(2, 3)
    with SummaryWriter(str(folder)) as writer, hl.monitor(model, to=writer):
        model(torch.ones(4, 2)).sum().backward()
    assert any(folder.iterdir())


def lightning(folder: Path) -> None:
    """Import the callback."""
    import hookline.integrations.lightning as integration

    assert integration.Monitor is not None


EXTRAS: dict[str, Callable[[Path], None]] = {
    "cli": cli, "page": page, "plots": plots, "vision": vision, "text": text, "store": store,
    "ray": ray, "loggers": loggers, "lightning": lightning,
}  # fmt: skip


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "bare"
    with tempfile.TemporaryDirectory() as place:
        {"bare": bare, **EXTRAS}[name](Path(place))
    print(f"{name}: hookline {hl.__version__} works, on torch {torch.__version__}.")
