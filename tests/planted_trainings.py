"""Trainings that are healthy, and trainings with a planted fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hookline as hl
from healthy_models import WIDTH, Recurrent, plain
from planted_faults import Net

STEPS, WHEN = 60, 30


class Small(nn.Module):
    """A convolutional net with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if not k else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
            )
            for k in range(4)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _tokens(step: int) -> Any:
    return torch.randint(3, 100, (4, 16))


def _rows(step: int) -> Any:
    return torch.randn(32, WIDTH)


def _pictures(step: int) -> Any:
    return torch.randn(8, 3, 12, 12)


@dataclass
class Setting:
    """What a fault may change before a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    batch: Any = None
    scale: float = 1.0  # of the loss


Change = Callable[[Setting, int], Any]


@dataclass(frozen=True)
class Training:
    """A training, with a change before some steps.

    Args:
        name: what happens.
        model: makes the model.
        batch: makes the batch of a step.
        change: is called before each forward.
        sites: the accepted paths of the first finding; None accepts any.
        kinds: its accepted kinds; empty for a healthy training.
        step: the step at which it must be said to begin; None for any.
        held_out: whether thresholds were never looked at with it.
        options: of the training: lr, optimizer, every, schedule, clip.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    change: Change = lambda setting, step: None
    sites: tuple[str, ...] | None = None
    kinds: tuple[str, ...] = ()
    step: int | None = WHEN
    held_out: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> hl.Findings:
        """Train, and judge the training."""
        torch.manual_seed(0)
        model = self.model().train()
        options = {
            "lr": 1e-3,
            "optimizer": torch.optim.Adam,
            "every": 1,
            "steps": STEPS,
        } | self.options
        optimizer = options["optimizer"](model.parameters(), lr=options["lr"])
        schedule = options.get("schedule")
        setting = Setting(model, optimizer, schedule(optimizer) if schedule else None)
        self.change(setting, -1)
        with hl.monitor(model, every=options["every"]) as seen:
            for step in range(options["steps"]):
                setting.batch, setting.scale = self.batch(step), 1.0
                with torch.no_grad():
                    self.change(setting, step)
                output = model(setting.batch)
                scores = output.reshape(-1, output.shape[-1])
                labels = (
                    setting.batch.reshape(-1) % 100
                    if setting.batch.dtype == torch.int64
                    else (torch.arange(len(scores)) % scores.shape[-1])
                )
                loss = nn.functional.cross_entropy(scores, labels) * setting.scale
                seen.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if setting.scheduler is not None:
                    setting.scheduler.step()
        return seen.findings()

    def is_named(self, findings: hl.Findings) -> bool:
        """Tell whether the first finding names the fault, at its site and step."""
        if not self.kinds:
            return findings.ok
        if not findings:
            return False
        first = findings[0]
        path = first.site.split(":")[0]
        is_there = self.sites is None or path in self.sites
        is_then = self.step is None or first.step == self.step
        return is_there and is_then and first.kind in self.kinds


def lr(factor: float) -> Change:
    def change(setting, step):
        if step == WHEN:
            for group in setting.optimizer.param_groups:
                group["lr"] *= factor

    return change


def batch_times(factor: float) -> Change:
    def change(setting, step):
        if step == WHEN:
            setting.batch = setting.batch * factor

    return change


def fill(path: str, number: float) -> Change:
    def change(setting, step):
        if step == WHEN:
            setting.model.get_parameter(path).fill_(number)

    return change


def kept(path: str, number: float) -> Change:
    def change(setting, step):
        if step >= WHEN:
            setting.model.get_parameter(path).fill_(number)

    return change


def scaled(path: str, factor: float) -> Change:
    def change(setting, step):
        if step == WHEN:
            setting.model.get_parameter(path).mul_(factor)

    return change


def loss_times(factor: float) -> Change:
    def change(setting, step):
        if step == WHEN:
            setting.scale = factor

    return change


def freeze(path: str) -> Change:
    def change(setting, step):
        if step == -1:
            setting.model.get_submodule(path).requires_grad_(False)

    return change


def left_out(path: str) -> Change:
    def change(setting, step):
        if step == -1:
            lost = set(setting.model.get_submodule(path).parameters())
            group = setting.optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if p not in lost]

    return change


def of_another_model(setting: Setting, step: int) -> None:
    if step == -1:
        others = list(copy.deepcopy(setting.model).parameters())
        setting.optimizer.param_groups[0]["params"] = others


def freeze_at(path: str) -> Change:
    def change(setting, step):
        if step == WHEN:
            for parameter in setting.model.get_submodule(path).parameters():
                parameter.requires_grad_(False)

    return change


def all_lr_zero(setting: Setting, step: int) -> None:
    if step == WHEN:
        for group in setting.optimizer.param_groups:
            group["lr"] = 0.0


def one_nan(setting: Setting, step: int) -> None:
    if step == WHEN:
        setting.batch = setting.batch.clone()
        setting.batch.view(-1)[3] = float("nan")


def _restarts(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 12)


def _warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))


def _probe() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    model[0].requires_grad_(False)
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)
    return model


def _net() -> nn.Module:
    return Net(4)


_SGD = {"optimizer": torch.optim.SGD, "lr": 0.1}
HEALTHY: list[Training] = [
    Training("transformer", _net, _tokens),
    Training("plain, SGD", plain, _rows, options=_SGD),
    Training("convolutions, SGD", Small, _pictures, options=_SGD),
    Training("warm-up", _net, _tokens, options={"schedule": _warm_up}),
    Training("warm restarts", _net, _tokens, options={"schedule": _restarts}),
    Training("every second step", _net, _tokens, options={"every": 2, "steps": 80}, held_out=True),
    Training("recurrent", Recurrent, _tokens, held_out=True, options={"lr": 1e-2}),
    Training(
        "AdamW, large rate", _net, _tokens, options={"optimizer": torch.optim.AdamW, "lr": 3e-3}
    ),
    Training("long", lambda: Net(2), _tokens, options={"steps": 600}, held_out=True),
    Training("frozen embedding", _net, _tokens, freeze("embed")),
    Training("a new head of zeros", _probe, _rows),
]
FAULTS: list[Training] = [
    Training("learning rate x1000", _net, _tokens, lr(1000), None, ("learning rate",)),
    Training(
        "learning rate x1000, SGD",
        Small,
        _pictures,
        lr(1000),
        None,
        ("learning rate",),
        options=_SGD,
        held_out=True,
    ),
    Training("a bad batch", plain, _rows, batch_times(1000), ("0",), ("jump",)),
    Training(
        "a bad batch of pictures",
        Small,
        _pictures,
        batch_times(1e4),
        ("blocks.0.0", "blocks.0"),
        ("jump",),
        held_out=True,
    ),
    Training("a NaN in a batch", plain, _rows, one_nan, ("0",), ("non-finite",)),
    Training(
        "a NaN in a weight",
        _net,
        _tokens,
        fill("blocks.2.up.weight", float("nan")),
        ("blocks.2.up.weight", "blocks.2.up"),
        ("non-finite",),
    ),
    Training(
        "a layer explodes",
        _net,
        _tokens,
        scaled("blocks.2.down.weight", 1e3),
        ("blocks.2.down.weight", "blocks.2.down"),
        ("jump",),
    ),
    Training(
        "the embedding explodes",
        _net,
        _tokens,
        scaled("embed.weight", 1e3),
        ("embed.weight", "embed"),
        ("jump",),
        held_out=True,
    ),
    Training(
        "the loss explodes",
        plain,
        _rows,
        loss_times(1e4),
        ("16", "(root)"),
        ("jump",),
        options=_SGD,
    ),
    Training(
        "a dead ReLU from a step on",
        plain,
        _rows,
        kept("6.bias", -1e4),
        ("7", "6", "6.bias"),
        ("dead", "jump"),
    ),
    Training(
        "a layer dies",
        _net,
        _tokens,
        kept("blocks.1.out.weight", 0.0),
        ("blocks.1.out", "blocks.1.out.weight"),
        ("dead",),
    ),
    Training(
        "the optimizer of another model",
        plain,
        _rows,
        of_another_model,
        None,
        ("frozen",),
        step=0,
    ),
    Training(
        "a layer frozen by accident",
        _net,
        _tokens,
        freeze("blocks.2.up"),
        ("blocks.2.up.weight",),
        ("frozen",),
        None,
    ),
    Training(
        "a layer left out of the optimizer",
        _net,
        _tokens,
        left_out("blocks.1.key"),
        ("blocks.1.key.weight",),
        ("frozen",),
        None,
        held_out=True,
    ),
    Training(
        "a layer frozen from a step on",
        _net,
        _tokens,
        freeze_at("blocks.3.value"),
        ("blocks.3.value.weight",),
        ("frozen",),
        None,
    ),
    Training("learning rate 0 from a step on", _net, _tokens, all_lr_zero, None, ("frozen",)),
    Training(
        "learning rate too high from the start",
        _net,
        _tokens,
        options={"lr": 1.0},
        kinds=("learning rate",),
        step=None,
    ),
]
