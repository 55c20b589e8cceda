"""The models that are measured, each with its input and the places where it is recorded."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torchvision_import import import_torchvision


@dataclass(frozen=True)
class Case:
    """A model, its input, and the places to record, said in each library's way.

    Args:
        model: in eval mode, its weights random: no cost here depends on their values.
        inputs: the model's only argument.
        paths: the module paths to record, in registration order.
        selector: the same places for hookline.
        pattern: the same places as a regular expression, for libraries that take one.
        traceable: whether `torch.fx` can trace the model.
    """

    model: nn.Module
    inputs: Tensor
    paths: tuple[str, ...]
    selector: Any
    pattern: str
    traceable: bool = True

    def modules(self) -> list[nn.Module]:
        """The modules at the paths."""
        found = dict(self.model.named_modules())
        return [found[path] for path in self.paths]


class Placement:
    """The device that models are made for; `python -m benchmarks --device cuda` sets it."""

    device = torch.device("cpu")


def made_once(make: Callable[[], Case]) -> Callable[[], Case]:
    """Make a case at its first use, and put its model and input on the device."""

    @functools.cache
    @functools.wraps(make)  # pickled by this name, for other processes
    def placed() -> Case:
        case = make()
        case.model.to(Placement.device)
        return replace(case, inputs=case.inputs.to(Placement.device))

    return placed


@made_once
def tiny() -> Case:
    """200 linear layers of 8 numbers, batch 1: nearly all of the time is torch's own overhead."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(200)]).eval()
    paths = tuple(str(number) for number in range(200))
    return Case(model, torch.randn(1, 8), paths, nn.Linear, r"^\d+$")


@made_once
def tiny_identities() -> Case:
    """100 linear layers of 8 numbers and 100 identities in turn, batch 4: bare layers so quick that
    little but the hooks is left to measure, as on a machine with faster cores."""
    torch.manual_seed(0)
    layers = [layer for _ in range(100) for layer in (nn.Linear(8, 8), nn.Identity())]
    paths = tuple(str(number) for number in range(200))
    return Case(nn.Sequential(*layers).eval(), torch.randn(4, 8), paths, "*", r"^\d+$")


class OwnLinear(nn.Linear):
    """A layer of one's own, of which nobody knows whether it returns a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@made_once
def tiny_own() -> Case:
    """200 tiny layers of a class of one's own: each output is asked whether it shares memory with a
    parameter, of whose changes torch does not always tell."""
    torch.manual_seed(0)
    model = nn.Sequential(*[OwnLinear(8, 8) for _ in range(200)]).eval()
    paths = tuple(str(number) for number in range(200))
    return Case(model, torch.randn(1, 8), paths, nn.Linear, r"^\d+$")


@made_once
def resnet34() -> Case:
    """ResNet-34, 4 images of 224 x 224, recorded at its 36 convolutions."""
    torch.manual_seed(0)
    model = import_torchvision().models.resnet34().eval()
    paths = tuple(n for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    pattern = r"(^|.*\.)conv\d$|.*\.downsample\.0$"
    return Case(model, torch.randn(4, 3, 224, 224), paths, nn.Conv2d, pattern)


@made_once
def gpt2() -> Case:
    """A GPT-2 of 12 blocks, 4 x 64 tokens, recorded at its blocks.

    A third as wide as the smallest published one, so that what hooks cost is not lost in products
    of matrices.
    """
    # transformers imports torchvision where it is installed, and fails where that fails.
    with contextlib.suppress(ImportError):
        import_torchvision()
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_embd=256, n_head=4, use_cache=False)).eval()
    tokens = torch.randint(0, model.config.vocab_size, (4, 64))
    paths = tuple(f"h.{number}" for number in range(12))
    return Case(model, tokens, paths, "h.*", r"^h\.\d+$", traceable=False)


def small_gpt2() -> nn.Module:
    """A GPT-2 of 4 blocks with 128 features and 1,024 words, in training mode, made anew."""
    gpt2()  # which imports torchvision first
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_head=4, n_layer=4, vocab_size=1024, use_cache=False)
    return GPT2LMHeadModel(config).train()


def resnet34_prefix() -> Callable[[], Tensor]:
    """ResNet-34 as far as layer1, as one would write it by hand."""
    model, inputs = resnet34().model, resnet34().inputs

    def prefix() -> Tensor:
        x = model.maxpool(model.relu(model.bn1(model.conv1(inputs))))
        return model.layer1(x)

    return prefix


def gpt2_prefix() -> Callable[[], Tensor]:
    """GPT-2 as far as its third block, as one would write it by hand."""
    model, tokens = gpt2().model, gpt2().inputs

    def prefix() -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = model.drop(model.wte(tokens) + model.wpe(positions))
        for block in model.h[:3]:
            hidden = block(hidden)
        return hidden

    return prefix


@functools.cache
def many_modules(n_modules: int) -> nn.Module:
    """A model of so many modules, four levels deep; one in ten is called `fc`. It runs on `[1, 1]`.

    Args:
        n_modules: the number, the root included; a multiple of 2,500.
    """
    n_stages = n_modules // 2500
    blocks = [_block() for _ in range(n_modules // 10)]
    # The root and the stages count too: they take the place of one part each of the first blocks.
    for block in blocks[: n_stages + 1]:
        del block.part7
    stages = [nn.Sequential(*blocks[number::n_stages]) for number in range(n_stages)]
    root = nn.Sequential(*stages)
    assert sum(1 for _ in root.modules()) == n_modules
    return root


def _block() -> nn.Sequential:
    """Ten modules with itself, one of them called `fc`."""
    parts: dict[str, nn.Module] = {f"part{number}": nn.Identity() for number in range(8)}
    return nn.Sequential(OrderedDict(fc=nn.Linear(1, 1), **parts))
