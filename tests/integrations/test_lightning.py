"""The callback for Lightning, in real fits."""

from __future__ import annotations

import copy
import csv
import math
import pickle

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.models.torchvision_import import import_torchvision

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
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
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


def fit(tmp_path, monitor, module=None, *, callbacks_too=(), ckpt_path=None, **options):
    data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=CSVLogger(tmp_path),
        callbacks=[monitor, *callbacks_too],
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=4,
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    module = module or Module()
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
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


def test_the_loss_of_reported_steps_is_kept(tmp_path):
    losses = []

    class Said(Module):
        def training_step(self, batch, index):
            losses.append(super().training_step(batch, index))
            return losses[-1]

    monitor = Monitor("net", ports="output", to=tmp_path / "run")
    fit(tmp_path, monitor, Said())
    for curves in (monitor.curves, hl.open(tmp_path / "run")):
        steps = curves.logged["loss"].steps.tolist()
        assert steps == curves.steps.tolist() == [3, 7, 11, 15]
        assert curves.logged["loss"].values.tolist() == [losses[step].item() for step in steps]


def test_accumulated_batches_are_one_step(tmp_path):
    losses = []

    class Said(Module):
        def training_step(self, batch, index):
            losses.append(super().training_step(batch, index))
            return losses[-1]

    monitor = Monitor(every=1)
    fit(tmp_path, monitor, Said(), accumulate_grad_batches=2)
    seen = monitor.curves
    assert seen.logged["loss"].values.tolist() == [loss.item() for loss in losses[1::2]]
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


def test_a_callback_given_twice_measures_once(tmp_path):
    monitor = Monitor("net.1", ports="output", to=tmp_path / "run", every=1)
    module = fit(tmp_path, monitor, callbacks_too=[monitor])
    assert monitor.curves["net.1"].count.tolist() == [32] * 16
    assert hl.open(tmp_path / "run").steps.tolist() == list(range(16))
    assert not len(hl.inventory(module))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_callback_has_the_curves_and_no_line(tmp_path, make):
    monitor = Monitor("net.1", ports="output")
    copies = []

    class Copies(lightning.Callback):
        def on_train_batch_end(self, trainer, *others):
            if trainer.global_step == 5:
                copies.append(make(monitor))

    fit(tmp_path / "one", monitor, callbacks_too=[Copies()])
    assert monitor.curves.steps.tolist() == [3, 7, 11, 15]
    assert copies[0].line is None
    assert copies[0].curves.steps.tolist() == [3]
    fit(tmp_path / "other", copies[0])
    assert copies[0].curves.steps.tolist() == [3, 7, 11, 15]
    assert monitor.curves.steps.tolist() == [3, 7, 11, 15]


def test_a_frozen_part_of_a_training_step_is_measured(tmp_path):
    class Frozen(Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def training_step(self, batch, index):
            with torch.no_grad():
                batch = self.frozen(batch)
            return self.net(batch).square().mean()

        def validation_step(self, batch, index):
            self.net(self.frozen(batch))

    monitor = Monitor(["frozen", "net.1"], ports="output")
    fit(tmp_path, monitor, Frozen())
    assert monitor.curves["frozen"].count.tolist() == [16] * 4
    assert monitor.curves["net.1"].count.tolist() == [32] * 4


def test_a_nan_in_a_fit_is_named_before_the_weights_change(tmp_path):
    class Spoilt(Module):
        def training_step(self, batch, index):
            if self.trainer.global_step == 5:
                batch = batch * math.nan
            return super().training_step(batch, index)

    module = Spoilt()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(module):
        fit(tmp_path, Monitor(), module)
    assert caught.value.finding.path == "net.0"
    assert all(one.isfinite().all() for one in module.parameters())
    assert not len(hl.inventory(module))


class ByHand(Module):
    """Steps two optimizers by turns."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()[index % 2]
        optimizer.zero_grad()
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[k].parameters(), lr=0.1) for k in (0, 2)]


@pytest.mark.parametrize("kind", [Module, ByHand])
@pytest.mark.filterwarnings("ignore:.*ckpt_path|.*manual optimization|.*not resumable")
def test_a_fit_that_is_resumed_goes_on_with_lightnings_numbers(tmp_path, kind):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=6,
                            save_top_k=-1, save_on_train_epoch_end=False)  # fmt: skip
    monitor = Monitor("net.1", ports="output", every=1)
    fit(tmp_path / "first", monitor, kind(), callbacks_too=[saves], enable_checkpointing=True)
    assert monitor.curves.steps.tolist() == list(range(16))
    fit(tmp_path / "second", monitor, kind(), ckpt_path=tmp_path / "saved" / "step=6.ckpt")
    assert monitor.curves.steps.tolist() == list(range(6, 16))
    (file,) = (tmp_path / "second").rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [int(row["step"]) for row in rows if row.get("loss")] == [7, 11, 15]
    assert [int(row["step"]) for row in rows if row.get("net.1/std")] == list(range(6, 16))


def test_steps_that_a_scaler_skips_keep_lightnings_numbers(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    class Skipped(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * math.nan if index == 3 else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    monitor = Monitor("net.1", ports=("output", "grad_output"), every=1)
    module = Skipped()
    with hl.check(module.net) as line:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        fit(tmp_path, monitor, module, plugins=[plugin])
    assert not line.findings
    assert monitor.curves.steps.tolist() == [k for k in range(16) if k % 8 != 3]
    assert monitor.curves["net.1"].count.tolist() == [32] * 14
    assert not monitor.curves["net.1:grad_output"].non_finite.any()
