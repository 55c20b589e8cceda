"""What a name on the command line becomes: a model with what belongs to it, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.display.text import escape_invisible, plural

if TYPE_CHECKING:
    from PIL.Image import Image

_N_LABELS_SHOWN = 3

Preprocess = Callable[["Image"], Tensor]
Tokenize = Callable[[list[str]], dict[str, Tensor]]


@final
@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
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

    def __repr__(self) -> str:
        """One line: the model alone would print hundreds, its labels a thousand words."""
        n_parameters = sum(one.numel() for one in self.model.parameters() if not is_lazy(one))
        takes = [
            kind
            for kind, function in (("pictures", self.preprocess), ("texts", self.tokenize))
            if function is not None
        ]
        parts = [
            f"{type(self.model).__name__} of {plural(n_parameters, 'parameter')}",
            *([f"takes {' and '.join(takes)}"] if takes else []),
            *([_labels(self.labels)] if self.labels else []),
        ]
        return escape_invisible(f"{type(self).__name__} {self.name!r}: {', '.join(parts)}")


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


def _labels(labels: tuple[str, ...]) -> str:
    first = ", ".join(map(repr, labels[:_N_LABELS_SHOWN]))
    more = ", …" * (len(labels) > _N_LABELS_SHOWN)
    return f"{plural(len(labels), 'label')} ({first}{more})"


def describe(value: Any) -> str:
    """Say a tensor as shape and type, `1x3x224x224 float32`, and anything else as its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return f"nested {str(value.dtype).removeprefix('torch.')}"
    shape = "x".join(str(size) for size in value.shape) or "scalar"
    return f"{shape} {str(value.dtype).removeprefix('torch.')}"
