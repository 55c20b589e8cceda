"""Load a model from timm: `timm:NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline.errors import ModelError
from hookline.models.from_torchvision import unknown_model_error
from hookline.models.loaded_model import LoadedModel
from hookline.models.packages import (
    RANDOM,
    error_in_short,
    import_package,
    is_reachable,
    unavailable_weights_error,
)
from hookline.models.preprocessing import accept_any_mode

# In timm's own order of preference.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def load_timm(model_name: str, *, default_weights: bool) -> LoadedModel:
    """Build a timm model with timm's default weights or with random weights.

        >>> load_timm("resnet18.a1_in1k", default_weights=False).model.num_classes
        1000

    Args:
        model_name: a name from `timm.list_models()`, or from `timm.list_pretrained()`, where a tag
            names the weights.
        default_weights: False builds with random weights and downloads nothing.

    Returns:
        The model, with the preprocessing and the labels that timm publishes for it.

    Raises:
        ModelError: timm is not installed, does not know the model, or cannot fetch the weights.
    """
    name = f"timm:{model_name}"
    timm = import_package("timm", name)
    architecture, _, tag = model_name.partition(".")
    if not timm.is_model(architecture):
        raise unknown_model_error(name, timm.list_models(), "timm.list_models()")
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and model_name not in tagged:
        raise unknown_model_error(name, tagged, f"timm.list_pretrained('{architecture}.*')")
    if default_weights:
        _check_weights_reachable(timm, model_name, name)
    try:
        model = timm.create_model(model_name, pretrained=default_weights)
    except Exception as error:  # errors of the hub, the network and timm have no common base
        if default_weights:
            raise unavailable_weights_error(name, error_in_short(error)) from error
        raise ModelError(f"{name} cannot be built: {error_in_short(error)}.") from error
    config = timm.data.resolve_model_data_config(model)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    preprocess = accept_any_mode(timm.data.create_transform(**config), mode)
    return LoadedModel(name, model, preprocess, None, _class_labels(timm, model))


def _check_weights_reachable(timm: Any, model_name: str, name: str) -> None:
    """Check that the weights are cached or reachable, before timm retries for a minute."""
    config = timm.get_pretrained_cfg(model_name)
    hub_id = getattr(config, "hf_hub_id", None)
    url = getattr(config, "url", None)
    if hub_id:
        hub = import_package("huggingface_hub", name)
        files = [config.hf_hub_filename] if config.hf_hub_filename else _HUB_FILES
        repository = hub_id.partition("@")[0]
        if any(isinstance(hub.try_to_load_from_cache(repository, file), str) for file in files):
            return
        if hub.constants.HF_HUB_OFFLINE:
            raise unavailable_weights_error(name, f"{repository} is not cached: HF_HUB_OFFLINE")
        if not is_reachable(hub.constants.ENDPOINT):
            raise unavailable_weights_error(name, f"no connection to {hub.constants.ENDPOINT}")
    elif url:
        cached = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
        if not cached.is_file() and not is_reachable(url):
            raise unavailable_weights_error(name, f"no connection to {url}")
    else:
        tags = ", ".join(timm.list_pretrained(f"{model_name}.*")[:3])
        raise ModelError(
            f"timm publishes no weights for {model_name}{f'; it does for {tags}' if tags else ''}."
            f"\nUse {RANDOM}, or --weights FILE for a checkpoint."
        )


def _class_labels(timm: Any, model: nn.Module) -> tuple[str, ...] | None:
    config: Any = getattr(model, "pretrained_cfg", {})
    n_classes = getattr(model, "num_classes", None)
    labels = config.get("label_names")
    if not labels:
        subset = timm.data.infer_imagenet_subset(model)
        labels = timm.data.ImageNetInfo(subset).label_descriptions() if subset else ()
    return tuple(labels) if labels and len(labels) == n_classes else None
