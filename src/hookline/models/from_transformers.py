"""Load a model from transformers: `hf:NAME` or `hf:FOLDER`."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hookline.errors import InputError, ModelError
from hookline.models.loaded_model import LoadedModel, Preprocess, Tokenize
from hookline.models.packages import (
    RANDOM,
    error_in_short,
    import_package,
    is_reachable,
    unavailable_weights_error,
)
from hookline.util.local_paths import is_file, is_folder, printable

if TYPE_CHECKING:
    from PIL.Image import Image

# A tokenizer without a limit reports a maximum of 1e30 tokens.
_NO_LIMIT = 10**9


def load_transformers(place: str, *, default_weights: bool) -> LoadedModel:
    """Build a transformers model from a folder or from its name on the Hugging Face hub.

    Weights are read from `.safetensors` only, and code in a repository is never run.

        >>> load_transformers("openai-community/gpt2", default_weights=True).model.config.n_layer
        12

    Args:
        place: a folder with a `config.json`, or a name on the hub.
        default_weights: False builds from the configuration alone, with random weights.

    Returns:
        The model, of the class that its configuration names. Its tokenizer, preprocessing and
        labels are included if they are published with it.

    Raises:
        ModelError: transformers is not installed, the folder or its files do not exist, the model
            needs code of its own, or the files cannot be fetched.
    """
    name = f"hf:{place}"
    transformers = import_package("transformers", name)
    folder = Path(os.path.expanduser(place))
    is_local = is_folder(folder)
    options: dict[str, Any] = {"trust_remote_code": False}
    if is_local:
        place = str(folder)
        _check_has_config(folder, name)
        options["local_files_only"] = True
    else:
        _check_hub_name(place, name)
        options["local_files_only"] = not _is_hub_reachable(name)
    config = _load_config(transformers, place, name, options)
    model_class = _model_class(transformers, config)
    if default_weights:
        _check_has_safetensors(folder, place, name, options)
    try:
        if default_weights:
            model = model_class.from_pretrained(
                place, config=config, use_safetensors=True, **options
            )
        elif model_class is transformers.AutoModel:
            model = model_class.from_config(config)
        else:
            model = model_class(config)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        if isinstance(error, OSError) and not is_local:
            raise unavailable_weights_error(name, error_in_short(error)) from error
        raise ModelError(
            f"{name} cannot be built as {model_class.__name__}: {error_in_short(error)}.\n"
            "Its config.json and its weights must be those of one model."
        ) from error
    return LoadedModel(
        name,
        model,
        _load_preprocess(transformers, place, options),
        _load_tokenize(transformers, place, name, config, options),
        _class_labels(config),
    )


def _check_has_config(folder: Path, name: str) -> None:
    if not is_file(folder / "config.json"):
        raise ModelError(
            f"{name}: the folder has no config.json, so it holds no model of transformers.\n"
            "Give a folder that save_pretrained() wrote."
        )


def _check_hub_name(place: str, name: str) -> None:
    if re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", place) and not place.startswith("."):
        return
    raise ModelError(
        f"hf:NAME must be a folder, or OWNER/NAME of a model on the hub, got {printable(name)}.\n"
        "Give a folder that save_pretrained() wrote, or a name such as hf:openai-community/gpt2."
    )


def _is_hub_reachable(name: str) -> bool:
    constants = import_package("huggingface_hub", name).constants
    return not constants.HF_HUB_OFFLINE and is_reachable(constants.ENDPOINT)


def _load_config(transformers: Any, place: str, name: str, options: dict[str, Any]) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(place, **options)
    except OSError as error:
        if is_folder(place):
            raise ModelError(
                f"{name}: its config.json cannot be read: {error_in_short(error)}."
            ) from error
        if not options["local_files_only"]:
            raise ModelError(
                f"{name}: the hub does not know this model, or you may not read it: "
                f"{error_in_short(error)}.\nLook the name up on the hub. If the model is gated, log"
                " in first with `hf auth login`."
            ) from error
        raise ModelError(
            f"{name}: a folder of that name does not exist, the hub cannot be reached, and the "
            "model's config.json is not in the cache.\nGive a folder that save_pretrained() "
            "wrote, also with --weights none or --weights FILE: both need its config.json."
        ) from error
    except (ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} is made by code in its own repository, which hookline never runs.\n"
                "If you trust it, build it in a file of your own: path/to/file.py:FACTORY."
            ) from error
        raise ModelError(
            f"{name}: this release of transformers does not know its model_type: "
            f"{error_in_short(error)}.\nInstall the newest one: pip install -U transformers"
        ) from error


def _model_class(transformers: Any, config: Any) -> Any:
    named = getattr(transformers, (config.architectures or [""])[0], None)
    # A configuration is untrusted: it could name a class that is not a model.
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    return transformers.AutoModel


def _check_has_safetensors(folder: Path, place: str, name: str, options: dict[str, Any]) -> None:
    if is_folder(folder):
        if any(folder.glob("*.safetensors")):
            return
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt")]
        instead = f"--weights {pickled[0]}" if pickled else "--weights FILE"
        raise ModelError(
            f"{name}: the folder has no weights as .safetensors, the only kind read from it.\n"
            f"Use {instead} to load a checkpoint's tensors, or {RANDOM}."
        )
    if options["local_files_only"]:
        return  # transformers reports files that are missing from the cache
    # Without them, transformers would ask a server to convert the repository, and wait.
    hub = import_package("huggingface_hub", name)
    files = ("model.safetensors", "model.safetensors.index.json")
    try:
        has_weights = any(hub.file_exists(place, file) for file in files)
    except Exception as error:  # errors of the hub's client have no stable common base
        raise unavailable_weights_error(name, error_in_short(error)) from error
    if not has_weights:
        raise ModelError(
            f"{name} has no weights as .safetensors on the hub, the only kind read from there.\n"
            f"Download its checkpoint and use --weights FILE, or use {RANDOM}."
        )


def _load_preprocess(transformers: Any, place: str, options: dict[str, Any]) -> Preprocess | None:
    processor = _load_if_published(transformers.AutoImageProcessor, place, options)
    # It pickles, for processes that load pictures.
    return None if processor is None else partial(_preprocess, processor)


def _load_if_published(auto_class: Any, place: str, options: dict[str, Any]) -> Any:
    """Return what is published with a model; None without it, which transformers finds an error."""
    try:
        return auto_class.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def _preprocess(processor: Any, picture: Image) -> Tensor:
    batch: Any = processor(images=picture.convert("RGB"), return_tensors="pt")
    pixels: Tensor = batch["pixel_values"][0]
    return pixels


def _load_tokenize(
    transformers: Any, place: str, name: str, config: Any, options: dict[str, Any]
) -> Tokenize | None:
    tokenizer = _load_if_published(transformers.AutoTokenizer, place, options)
    # If the tokenizer's files are missing, transformers may build an empty tokenizer, which would
    # turn every word into the unknown token.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    start = getattr(config, "decoder_start_token_id", None)
    is_two_part = getattr(config, "is_encoder_decoder", False) and start is not None
    return partial(_tokenize, tokenizer, name, start if is_two_part else None)


def _tokenize(tokenizer: Any, name: str, start: int | None, texts: list[str]) -> dict[str, Tensor]:
    """Tokenize texts for a model; `start` is the first token of a decoder of its own."""
    if len(texts) > 1 and tokenizer.pad_token is None:
        raise InputError(
            f"the tokenizer of {name} cannot pad texts to one length.\nGive one text at a time."
        )
    n_tokens = max(len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"])
    limit = min(tokenizer.model_max_length, _NO_LIMIT)
    if n_tokens > limit:
        raise InputError(
            f"a text for {name} must have at most {limit} tokens, got {n_tokens}.\n"
            "Shorten it, or split it into several texts, one a line of a .txt file."
        )
    tokens: dict[str, Tensor] = dict(tokenizer(texts, padding=len(texts) > 1, return_tensors="pt"))
    if start is not None:
        tokens["decoder_input_ids"] = torch.full((len(texts), 1), start, device="cpu")
    return tokens


def _class_labels(config: Any) -> tuple[str, ...] | None:
    names: dict[int, str] = getattr(config, "id2label", None) or {}
    # transformers fills in LABEL_0, LABEL_1, ... for classes without names.
    if not names or all(re.fullmatch(r"LABEL_\d+", str(label)) for label in names.values()):
        return None
    return tuple(str(names[index]) for index in sorted(names))
