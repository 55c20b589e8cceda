"""Load a model from torchvision: `torchvision:NAME`."""

from __future__ import annotations

import difflib
import inspect
import urllib.error
from pathlib import Path
from typing import Any

import torch

from hookline.errors import ModelError
from hookline.models.checkpoints import read_tensor_file
from hookline.models.loaded_model import LoadedModel, Preprocess
from hookline.models.packages import (
    RANDOM,
    error_in_short,
    import_package,
    is_reachable,
    unavailable_weights_error,
)
from hookline.models.preprocessing import accept_any_mode


def load_torchvision(model_name: str, *, default_weights: bool) -> LoadedModel:
    """Build a torchvision model with torchvision's default weights or with random weights.

        >>> load_torchvision("resnet18", default_weights=False).labels[0]
        'tench'

    Args:
        model_name: a name from `torchvision.models.list_models()`.
        default_weights: False builds with random weights and downloads nothing.

    Returns:
        The model. Its preprocessing and labels are those of the default weights, even if the
        weights are random.

    Raises:
        ModelError: torchvision is not installed, does not know the model, or the weights cannot be
            fetched.
    """
    name = f"torchvision:{model_name}"
    models = import_package("torchvision", name).models
    names = models.list_models()
    if model_name not in names:
        raise unknown_model_error(name, names, "torchvision.models.list_models()")
    weights = getattr(models.get_model_weights(model_name), "DEFAULT", None)
    if default_weights and weights is None:
        raise ModelError(
            f"torchvision publishes no weights for {model_name}.\n"
            f"Use {RANDOM}, or --weights FILE for a checkpoint."
        )
    options: dict[str, Any] = {}
    if default_weights:
        _download_tensors_only(weights, name)
    # Detectors and segmenters download a pretrained backbone by default.
    elif "weights_backbone" in inspect.signature(models.get_model_builder(model_name)).parameters:
        options["weights_backbone"] = None
    model = models.get_model(model_name, weights=weights if default_weights else None, **options)
    labels = weights.meta.get("categories") if weights else None
    preprocess: Preprocess | None = accept_any_mode(weights.transforms()) if weights else None
    return LoadedModel(name, model, preprocess, None, tuple(labels) if labels else None)


def unknown_model_error(name: str, names: list[str], listing: str) -> ModelError:
    """Return the error for a model that a library does not have, with the closest names."""
    library, _, short = name.partition(":")
    close = difflib.get_close_matches(short.lower(), names, n=4, cutoff=0.6)
    hint = (
        f"Did you mean {', '.join(f'{library}:{match}' for match in close)}?"
        if close
        else f"{listing} lists the {len(names)} that it has."
    )
    return ModelError(f"{library} has no model {short!r}.\n{hint}")


def _download_tensors_only(weights: Any, name: str) -> None:
    """Download a checkpoint into torch's cache, and check that it holds nothing but tensors.

    torchvision then reads the file with an unpickler that can execute code. The check reads it
    first with `weights_only=True`, which refuses a file with code in it.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
    if not path.is_file():
        if not is_reachable(weights.url):
            raise unavailable_weights_error(name, f"no connection to {weights.url}")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = path.stem.rpartition("-")[2]
        try:
            torch.hub.download_url_to_file(weights.url, str(path), hash_prefix=digest)
        except (urllib.error.URLError, OSError, RuntimeError) as error:
            raise unavailable_weights_error(name, error_in_short(error)) from error
    read_tensor_file(path, ModelError)
