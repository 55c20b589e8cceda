"""A model loaded by name, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.display.text import escape_invisible, listed, plural

if TYPE_CHECKING:
    from PIL.Image import Image

_N_LABELS_SHOWN = 3

Preprocess = Callable[["Image"], Tensor]
Tokenize = Callable[[list[str]], dict[str, Tensor]]


@final
@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A model loaded by name, with its preprocessing, tokenizer and labels.

        >>> loaded = load_model("demo:digits")
        >>> loaded.labels[:3]
        ('0', '1', '2')

    Attributes:
        name: the name given to `load_model`.
        model: the model, in eval mode, on the CPU.
        preprocess: converts a picture of any mode and size to one row of the model's input, of
            shape `(channels, height, width)`. None for a model that takes no pictures.
        tokenize: converts a list of texts to a dict of the model's keyword arguments, each of shape
            `(texts, tokens)`. Raises `InputError` if a text is too long. None for a model that
            takes no text.
        labels: the class names, in the order of the model's scores; None if unknown.
    """

    name: str
    model: nn.Module
    preprocess: Preprocess | None = None
    tokenize: Tokenize | None = None
    labels: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        """Return one line; the model's own repr and its labels would fill pages."""
        n_parameters = sum(
            parameter.numel() for parameter in self.model.parameters() if not is_lazy(parameter)
        )
        takes = [
            kind
            for kind, function in (("pictures", self.preprocess), ("texts", self.tokenize))
            if function is not None
        ]
        parts = [
            f"{type(self.model).__name__} of {plural(n_parameters, 'parameter')}",
            *([f"takes {' and '.join(takes)}"] if takes else []),
            *([_labels_text(self.labels)] if self.labels else []),
        ]
        return escape_invisible(f"{type(self).__name__} {self.name!r}: {', '.join(parts)}")


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """An input for a model: `model(*batch.args, **batch.kwargs)`.

        >>> batch = load_input("random:1x1x8x8", load_model("demo:digits"))
        >>> batch.description
        'random, 1x1x8x8 float32'

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
        description: the source, the shapes and dtypes, and any conversion that was made.
        images: the original pictures (pillow's), one for each row; empty if the input is not
            pictures.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    images: tuple[Image, ...] = ()


def _labels_text(labels: tuple[str, ...]) -> str:
    return f"{plural(len(labels), 'label')} ({listed([*map(repr, labels)], _N_LABELS_SHOWN)})"


def describe_value(value: Any) -> str:
    """Describe a tensor by shape and dtype, `1x3x224x224 float32`; any other value by its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return f"nested {str(value.dtype).removeprefix('torch.')}"
    shape = "x".join(str(size) for size in value.shape) or "scalar"
    return f"{shape} {str(value.dtype).removeprefix('torch.')}"
