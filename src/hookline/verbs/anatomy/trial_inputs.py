"""Make the inputs on which the names are proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.pytree import tree
from hookline.errors import InputError
from hookline.verbs.shared.run_model import signature_of

_ROWS, _TOKENS, _FEWER_TOKENS = 2, 9, 7


def trial_inputs(model: nn.Module, given: Any = None) -> list[Any]:
    """Return two inputs: the given one and another of its form, or two that the model takes.

    Raises:
        InputError: none is given, and the model has no embedding of tokens and wants no pictures.
    """
    if given is not None:
        is_one = len(list(tree.tensors(given))) == 1
        return [given, tree.map_tensors(_perturb if is_one else _perturb_unless_mask, given)]
    size = _picture_size(model)
    if size is not None:
        return [_random_normal((2, *size), seed) for seed in (0, 1)]
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    words = declared_embedding(model) or next(tables, None)
    if words is None:
        raise InputError(
            "hl.anatomy must be given an input: the model has no embedding of tokens."
            "\nWrite hl.anatomy(model, x)."
        )
    return [_random_texts(model, words, seed, n) for seed, n in ((0, _TOKENS), (1, _FEWER_TOKENS))]


def _seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random_normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=_seeded_generator(seed), device="cpu")


def _random_texts(model: nn.Module, embedding: nn.Embedding, seed: int, n_tokens: int) -> Any:
    def draw(more: int) -> Tensor:
        high = embedding.num_embeddings
        shape = (_ROWS, n_tokens)
        low, own = min(3, high - 1), _seeded_generator(seed + more)
        ids = torch.randint(low, high, shape, generator=own, device="cpu")
        return ids.to(embedding.weight.device)

    signature = signature_of(model)
    names = () if signature is None else tuple(signature.parameters)
    if "input_ids" not in names:
        return draw(0)
    inputs: dict[str, Any] = {"input_ids": draw(0)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = draw(2)
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


def declared_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding of tokens that a model of transformers tells; None if it tells none."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        words = get() if callable(get) else None
    except NotImplementedError:  # transformers raises it for a model without embeddings
        words = None
    return words if isinstance(words, nn.Embedding) else None


def _picture_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return the channels, height and width of the pictures that a model takes."""
    timm = getattr(model, "default_cfg", None)
    if isinstance(timm, Mapping) and "input_size" in timm:
        return tuple(timm["input_size"])
    config = getattr(model, "config", None)
    side, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if getattr(model, "main_input_name", "") != "pixel_values" or not side or not channels:
        return None  # it takes none, or pictures of any size, as DETR does
    height, width = (side, side) if isinstance(side, int) else side
    return channels, height, width


def _perturb_unless_mask(tensor: Tensor) -> Tensor:
    """Return another tensor of the same form, or the same one if it may be a mask."""
    if not tensor.is_floating_point():
        return _perturb(tensor)
    # Of infinities, or of two numbers, such as zero and the least one of the dtype.
    ends = tensor.aminmax() if tensor.numel() else (tensor, tensor)
    is_of_two = bool(((tensor == ends[0]) | (tensor == ends[1])).all())
    return tensor if is_of_two or not bool(tensor.isfinite().all()) else _perturb(tensor)


def _perturb(tensor: Tensor) -> Tensor:
    """Return another tensor of the same form: moved by one token, or with noise."""
    if tensor.is_floating_point():
        noise = _random_normal(tensor.shape, 1).to(tensor)
        return tensor.flip(0) + 0.1 * noise * tensor.std().clamp(min=1e-3)
    is_mask = tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())
    return tensor if is_mask or tensor.dim() < 1 else tensor.roll(1, -1)
