"""Train the demo's model on scikit-learn's digits, and write the files that hookline ships.

    python -m hookline.models.demo.train [FOLDER]

The seed and the split are fixed, so the test split is the same each time. Besides the weights, the
script writes eight pictures of the test split and the measured accuracy.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module, metadata
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hookline.models.demo.net import DigitsNet

SEED = 0
N_EPOCHS = 40
BATCH_SIZE = 64
LEARNING_RATE = 4e-3


def load_splits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read scikit-learn's digits and hold out a quarter, the same quarter each time.

    >>> x_train, y_train, x_test, y_test = load_splits()
    >>> x_test.shape
    torch.Size([450, 1, 8, 8])

    Returns:
        The pictures and labels to train on, then those to test on: shapes `(n, 1, 8, 8)`,
        float32 from 0 (dark) to 1 (light), and `(n,)`, int64.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    digits = import_module("sklearn.datasets").load_digits()
    x = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1)
    y = torch.from_numpy(digits.target).to(torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:450], order[450:]
    return x[train], y[train], x[test], y[test]


def train_digits(x_train: Tensor, y_train: Tensor, *, n_epochs: int = N_EPOCHS) -> DigitsNet:
    """Train a `DigitsNet` from a fixed seed on pictures shifted by up to one pixel.

    >>> x_train, y_train, x_test, y_test = load_splits()
    >>> net = train_digits(x_train, y_train, n_epochs=1)

    Args:
        x_train: the pictures, shape `(n, 1, 8, 8)`.
        y_train: their labels, shape `(n,)`.
        n_epochs: the number of epochs.

    Returns:
        The trained network, in eval mode.
    """
    generator = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = DigitsNet().train()
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
        n_steps = n_epochs * -(-len(y_train) // BATCH_SIZE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, n_steps)
        for _ in range(n_epochs):
            for rows in torch.split(torch.randperm(len(y_train), generator=generator), BATCH_SIZE):
                top, left = torch.randint(0, 3, (2,), generator=generator).tolist()
                x = nn.functional.pad(x_train[rows], (1, 1, 1, 1))
                x = x[:, :, top : top + 8, left : left + 8]
                loss = nn.functional.cross_entropy(net(x), y_train[rows], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return net.eval()


@torch.inference_mode()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Measure the fraction of pictures whose highest score is their label.

    >>> accuracy(train_digits(x_train, y_train), x_test, y_test)
    0.99...

    Args:
        net: maps shape `(n, 1, 8, 8)` to `(n, 10)`.
        x: the pictures, shape `(n, 1, 8, 8)`.
        y: their labels, shape `(n,)`.

    Returns:
        The accuracy from 0 to 1.
    """
    return float((net(x).argmax(dim=1) == y).double().mean())


def pick_samples(x_test: Tensor, y_test: Tensor) -> dict[str, Tensor]:
    """Take the first test picture of each of the digits 0 to 7.

    >>> pick_samples(x_test, y_test)["labels"].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]

    Args:
        x_test: the pictures, shape `(n, 1, 8, 8)`.
        y_test: their labels, shape `(n,)`.

    Returns:
        `images`, shape `(8, 1, 8, 8)`, and `labels`, shape `(8,)`.
    """
    rows = [int((y_test == digit).nonzero()[0]) for digit in range(8)]
    return {"images": x_test[rows].contiguous(), "labels": y_test[rows].contiguous()}


def train_and_write(folder: Path, *, n_epochs: int = N_EPOCHS) -> dict[str, object]:
    """Train, measure, and write `digits.safetensors`, `samples.safetensors` and `about.json`.

    >>> train_and_write(Path("demo"))["accuracy"]
    0.99...

    Args:
        folder: where the three files go; it must exist.
        n_epochs: the number of epochs.

    Returns:
        The contents of `about.json`.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        OSError: the folder cannot be written.
    """
    x_train, y_train, x_test, y_test = load_splits()
    net = train_digits(x_train, y_train, n_epochs=n_epochs)
    about: dict[str, object] = {
        "data": "scikit-learn's digits, 8x8 pictures (sklearn.datasets.load_digits)",
        "accuracy": round(accuracy(net, x_test, y_test), 4),
        "n_train": len(y_train),
        "n_test": len(y_test),
        "n_epochs": n_epochs,
        "seed": SEED,
        "sklearn": metadata.version("scikit-learn"),
        "torch": metadata.version("torch"),
    }
    save_file(net.state_dict(), folder / "digits.safetensors")
    save_file(pick_samples(x_test, y_test), folder / "samples.safetensors")
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def main(arguments: list[str], *, n_epochs: int = N_EPOCHS) -> None:
    """Train, write the files, and print the accuracy: `python -m hookline.models.demo.train`.

    >>> main(["demo"])
    accuracy 99.8% on 450 test pictures; files written to demo

    Args:
        arguments: the folder to write to; if empty, the folder of this file.
        n_epochs: the number of epochs.
    """
    folder = Path(arguments[0]) if arguments else Path(__file__).parent
    about = train_and_write(folder, n_epochs=n_epochs)
    print(
        f"accuracy {100 * float(str(about['accuracy'])):.1f}% on {about['n_test']} test pictures; "
        f"files written to {folder}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
