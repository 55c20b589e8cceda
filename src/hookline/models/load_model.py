"""Load a model from a NAME as a user types it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hookline.errors import ModelError
from hookline.models.checkpoints import SUFFIXES, load_state_into, read_state_dict
from hookline.models.demo import load_digits_net, preprocess_digit
from hookline.models.from_factory import load_file_factory, load_module_factory
from hookline.models.from_timm import load_timm
from hookline.models.from_torchvision import load_torchvision
from hookline.models.from_transformers import load_transformers
from hookline.models.loaded_model import LoadedModel
from hookline.util.local_paths import is_file, printable

_FORMS = (
    "torchvision:NAME, timm:NAME, hf:NAME, hf:FOLDER, path/to/file.py:FACTORY, "
    "package.module:FACTORY, demo:digits"
)


def load_model(name: str, *, weights: str | os.PathLike[str] = "default") -> LoadedModel:
    """Load a model by name, with its preprocessing, tokenizer and labels.

        >>> loaded = load_model("demo:digits")
        >>> loaded.model(load_demo_digits()[0]).shape
        torch.Size([8, 10])

    Random weights are drawn with a fixed seed, so two runs agree. The caller's random state is not
    consumed. A factory is called without a seed.

    Args:
        name: `torchvision:NAME`, `timm:NAME`, `hf:NAME` or `hf:FOLDER`, `path/to/file.py:FACTORY`,
            `package.module:FACTORY`, or `demo:digits`. A factory is a function or class that is
            called without arguments and returns an `nn.Module`, or a model itself. Pictures for
            its model are preprocessed by a guess: the short side to 256, the middle 224x224,
            ImageNet's mean and standard deviation.
        weights: "default" for the library's default pretrained weights. "none" for random weights
            without a download. With either, the model of a factory keeps its own weights. Or a
            checkpoint file (`.pt`, `.pth`, `.bin`, `.ckpt`, `.safetensors`) with a state dict,
            alone or under `state_dict` or `model`.

    Returns:
        A `LoadedModel`. Its `model` is in eval mode, on the CPU.

    Raises:
        ModelError: the name is malformed or unknown, a package is not installed, the weights
            cannot be fetched or do not fit, or a factory fails. The message gives the fix.
    """
    builder = _find_builder(name)
    # The file is read first, so that a wrong name fails before a model is built.
    state = None if weights in ("default", "none") else read_state_dict(weights)
    loaded = builder(default_weights=weights == "default")
    if state is not None:
        load_state_into(loaded.model, state, name, os.fspath(weights))
    loaded.model.eval()
    return replace(loaded, name=name)


def _find_builder(name: str) -> Callable[..., LoadedModel]:
    scheme, _, rest = name.partition(":")
    place, _, factory = name.rpartition(":")
    if rest and scheme in _LIBRARIES:
        return partial(_load_with_fixed_seed, _LIBRARIES[scheme], rest)
    if name == "demo:digits":
        return partial(_load_with_fixed_seed, _load_demo, name)
    if scheme not in _SCHEMES and factory.isidentifier():
        if place.endswith(".py"):
            return partial(_load_factory, load_file_factory, place, factory)
        if _DOTTED.fullmatch(place) and not _closest_schemes(scheme):
            return partial(_load_factory, load_module_factory, place, factory)
    hint = _suggest_correction(name)
    raise ModelError(
        f"'{printable(name)}' does not name a model{f': {hint}' if hint else '.'}\n"
        f"The forms are {_FORMS}."
    )


def _closest_schemes(scheme: str) -> list[str]:
    """Return the closest known scheme, or an empty list."""
    return difflib.get_close_matches(scheme, _SCHEMES, n=1, cutoff=0.7)


def _suggest_correction(name: str) -> str:
    """Suggest a correction of a name that does not name a model; empty if none is known."""
    scheme, colon, rest = name.partition(":")
    place, _, factory = name.rpartition(":")
    if not name.strip():
        return ""
    if scheme in _SCHEMES:
        return f"{'demo:digits' if scheme == 'demo' else f'{scheme}:NAME'} was expected."
    if _DOTTED.fullmatch(place) and factory.isidentifier():
        return f"did you mean {_closest_schemes(scheme)[0]}:{rest}?"
    if name.endswith(".py") or place.endswith(".py"):
        return f"which function makes the model? {place or name}:FACTORY"
    if is_file(Path(name) / "config.json"):
        return f"did you mean hf:{name}?"
    if colon:
        return ""
    if name.endswith(SUFFIXES):
        return "a file of weights goes into a model: give that model's name, and weights=FILE."
    if "/" in name:
        return f"did you mean hf:{name}?" * bool(_ON_HUB.fullmatch(name))
    return f"did you mean torchvision:{name}, timm:{name} or hf:{name}?"


def _load_demo(name: str, *, default_weights: bool) -> LoadedModel:
    labels = tuple(str(digit) for digit in range(10))
    net = load_digits_net(default_weights=default_weights)
    return LoadedModel(name, net, preprocess_digit, None, labels)


def _load_factory(
    load: Callable[..., LoadedModel], place: str, factory: str, *, default_weights: bool
) -> LoadedModel:
    del default_weights  # the factory itself decides the weights
    return load(place, factory)


def _load_with_fixed_seed(
    load: Callable[..., LoadedModel], rest: str, *, default_weights: bool
) -> LoadedModel:
    # torch.manual_seed would also reseed the accelerators, which are not used here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return load(rest, default_weights=default_weights)


_LIBRARIES: dict[str, Callable[..., LoadedModel]] = {
    "torchvision": load_torchvision,
    "timm": load_timm,
    "hf": load_transformers,
}
_SCHEMES = (*_LIBRARIES, "demo")
_ON_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")
_DOTTED = re.compile(r"\w+(\.\w+)*")
