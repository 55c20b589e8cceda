"""What a name on the command line becomes: a model with what belongs to it, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

if TYPE_CHECKING:
    from PIL.Image import Image

Preprocess = Callable[["Image"], Tensor]
Tokenize = Callable[[list[str]], dict[str, Tensor]]


@final
@dataclass(frozen=True, eq=False)
class Loaded:
    """A model that was loaded by name, with what its library publishes about it.

        >>> loaded = load_model("demo:digits")
        >>> loaded.labels[:3]
        ('0', '1', '2')

    Attributes:
        name: the name as it was given.
        model: the model, in eval mode, on the CPU.
        preprocess: turns a picture of any mode and size into one row of the model's input, shape
            `(channels, height, width)`; None for a model that takes no pictures.
        tokenize: turns texts into the model's keyword arguments, each of shape `(texts, tokens)`;
            None for a model that takes no text. It raises `InputError` for a text too long.
        labels: the names of the classes, in the order of the model's scores; None if unknown.
    """

    name: str
    model: nn.Module
    preprocess: Preprocess | None = None
    tokenize: Tokenize | None = None
    labels: tuple[str, ...] | None = None


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """An input for a model: call it as `model(*batch.args, **batch.kwargs)`.

        >>> batch = load_input("random:1x1x8x8", loaded)
        >>> batch.description
        'random, 1x1x8x8 float32'

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
        description: where it came from, with shapes and types, and what was changed on the way.
        images: the original pictures, one for each row, where the input was pictures.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    images: tuple[Image, ...] = ()


def describe(value: Any) -> str:
    """Say a tensor as shape and type, `1x3x224x224 float32`, and anything else as its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return f"nested {str(value.dtype).removeprefix('torch.')}"
    shape = "x".join(str(size) for size in value.shape) or "scalar"
    return f"{shape} {str(value.dtype).removeprefix('torch.')}"
