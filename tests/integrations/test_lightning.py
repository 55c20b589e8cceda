"""The callback for Lightning, in real fits."""

from __future__ import annotations

import csv

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.models._torchvision_import import import_torchvision

import_torchvision()  # which Lightning imports
lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from hookline.integrations.lightning import Monitor  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*num_workers"),
]


class Module(lightning.LightningModule):
    def __init__(self, *, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.fails = fails

    def training_step(self, batch, index):
        if self.fails and index == 3:
            raise ZeroDivisionError
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.net(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, monitor, module=None, **options):
    data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=CSVLogger(tmp_path), callbacks=[monitor],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=4, **options,
    )  # fmt: skip
    module = module or Module()
    trainer.fit(module, data, data)
    return module


def test_steps_are_reported_when_lightning_logs(tmp_path):
    monitor = Monitor("net.1", ports="output")
    fit(tmp_path, monitor)
    seen = monitor.curves
    assert seen.steps.tolist() == [3, 7, 11, 15]
    assert seen["net.1"].count.tolist() == [32] * 4  # validation is left out
    (file,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    losses = [int(row["step"]) for row in rows if row.get("loss")]
    ours = {int(row["step"]): float(row["net.1/std"]) for row in rows if row.get("net.1/std")}
    assert losses == list(ours)
    assert list(ours.values()) == pytest.approx(seen["net.1"].std.tolist())


def test_accumulated_batches_are_one_step(tmp_path):
    monitor = Monitor(every=1)
    fit(tmp_path, monitor, accumulate_grad_batches=2)
    seen = monitor.curves
    assert len(seen) == 8
    assert seen["net.1"].count.tolist() == [64] * 8
    assert (seen["net.0.weight:grad"].norm > 0).all()
    update, grad = seen["net.0.weight:update"].norm, seen["net.0.weight:grad"].norm
    assert update.tolist() == pytest.approx((0.1 * grad).tolist(), rel=1e-3)


def test_a_fit_that_raises_leaves_no_hook(tmp_path):
    monitor, module = Monitor(), Module(fails=True)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, monitor, module)
    assert not len(hl.inventory(module))


def test_curves_before_a_fit_say_what_to_do():
    with pytest.raises(AttributeError, match=r"Call trainer\.fit first"):
        _ = Monitor().curves
