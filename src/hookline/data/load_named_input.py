"""Load a batch from an INPUT as a user types it, or guess one that a model accepts."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.data import array_files
from hookline.data.arrays import ArrayRows, read_rows
from hookline.data.data_source import LoadOptions
from hookline.data.dataset_items import DatasetItems
from hookline.data.images import ImageItems
from hookline.data.indexed_source import IndexedSource, Items
from hookline.data.make_source import SUFFIXES, items_of_path, resolve_path
from hookline.data.texts import TextItems, as_tokenizer
from hookline.display.text import plural
from hookline.errors import InputError, check_one_of
from hookline.models.demo import load_demo_digits
from hookline.models.loaded_model import Batch, LoadedModel, describe_value
from hookline.models.packages import import_package
from hookline.util.local_paths import is_file, is_folder, is_special, printable

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_ITEMS = 64  # of pictures and rows; texts are small
_N_TEXT_SHOWN = 40
# Of random numbers.
_RANDOM = "random:"
_DTYPES = (
    "float32", "float", "float64", "double", "float16", "half", "bfloat16", "int64", "long",
    "int32", "int", "uint8", "bool",
)  # fmt: skip
_SEED = 0
_N_IDS = 100
_MAX_ELEMENTS = 2**31
_MAX_DIMENSIONS = 64  # torch's own limit
_N_DIGITS = 20  # more digits than any valid size has
# Of the input that is guessed.
_TEXT = "A line holds hooks together for a while."
_N_TOKENS = 8
_SIDE = 224
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def load_input(spec: str, loaded: LoadedModel) -> Batch:
    """Load the input that a user names, as a batch for a model.

        >>> loaded = load_model("demo:digits")
        >>> batch = load_input("demo", loaded)
        >>> loaded.model(*batch.args, **batch.kwargs).shape
        torch.Size([8, 10])

    Args:
        spec: the input, one of:

            - a path as `hl.extract` takes it, all of whose items become one batch: a picture, or a
              folder of at most 64 pictures; a `.txt`, `.jsonl` or `.parquet` file of texts; or the
              folder of a data set of Hugging Face with at most 64 rows;
            - a `.npy`, `.npz`, `.pt` or `.safetensors` file: one array is the argument, several are
              keyword arguments, and a tuple in a `.pt` file is several arguments;
            - `random:SHAPE[:DTYPE]`, such as `random:1x3x224x224` or `random:1x128:int64`: numbers
              from a fixed seed. Floats are normal, and float32 by default. Integers are from 0 to
              99, or below the size of the model's vocabulary;
            - for a model with a tokenizer: the text itself;
            - for `demo:digits`: `demo`, the eight digits that hookline ships.
        loaded: the model.

    Returns:
        The batch. Nothing is moved or cast, with one exception: if the model's parameters are
        float32, numpy's float64 becomes float32, and the description says so.

    Raises:
        InputError: the file does not exist, is broken or of an unknown kind, or the model does not
            take such an input. The message gives the fix.
    """
    if spec.lower().startswith(_RANDOM):
        return _make_random(spec, loaded)
    if spec == "demo" and loaded.name == "demo:digits":
        return _demo_batch()
    if loaded.tokenize is not None and _is_text(spec):
        if not spec.strip():
            raise InputError(
                "the text must not be empty.\nGive a text, a file or random:SHAPE:int64."
            )
        items = DatasetItems([spec], tokenize=as_tokenizer(loaded.tokenize))
        return _load_all_items(items, f'text "{_shorten(spec)}"')
    path = resolve_path(spec, "the input", _path_fix(spec, loaded))
    if path.suffix.lower() in array_files.SUFFIXES and not is_folder(path):
        return _load_arrays(path, loaded.model)
    return _load_path(path, loaded)


def _make_random(spec: str, loaded: LoadedModel) -> Batch:
    """Draw the input that `random:SHAPE[:DTYPE]` describes; of bool, true and false alike."""
    match = re.fullmatch(r"random:([0-9]+(?:x[0-9]+)*)(?::(\w+))?", spec.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(
            f"the input must be random:SHAPE or random:SHAPE:DTYPE, got {printable(spec)}.\n"
            "For instance random:1x3x224x224 for a picture, random:1x128:int64 for tokens."
        )
    name = (match[2] or "float32").lower()
    fix = f"Write random:{match[1]}:float32, for instance."
    check_one_of(f"the type in {spec!r}", name, _DTYPES, fix)
    shape = [int(size[:_N_DIGITS]) for size in re.split("x", match[1], flags=re.IGNORECASE)]
    if math.prod(shape) > _MAX_ELEMENTS or len(shape) > _MAX_DIMENSIONS:
        raise InputError(
            f"the shape must have at most {_MAX_ELEMENTS:,} numbers and {_MAX_DIMENSIONS}"
            f" dimensions, got {printable(spec)}.\nGive a smaller shape."
        )
    dtype = getattr(torch, name)
    if dtype.is_floating_point:
        tensor = _seeded_normal(shape).to(dtype)
    else:
        high = 2 if dtype is torch.bool else min(_N_IDS, _vocabulary_size(loaded.model))
        tensor = _seeded_integers(shape, high).to(dtype)
    return Batch((tensor,), {}, f"random, {describe_value(tensor)}")


def _seeded_normal(shape: Sequence[int]) -> Tensor:
    """Draw floats from the normal distribution, from a fixed seed."""
    return torch.randn(shape, generator=_seeded_generator(), device="cpu")


def _seeded_integers(shape: Sequence[int], high: int) -> Tensor:
    """Draw integers from 0 to below `high`, from a fixed seed."""
    return torch.randint(0, high, shape, generator=_seeded_generator(), device="cpu")


def _seeded_generator() -> torch.Generator:
    """Return a separate generator: torch's global random state is not consumed."""
    return torch.Generator().manual_seed(_SEED)


def _vocabulary_size(model: nn.Module) -> int:
    get = getattr(model, "get_input_embeddings", None)
    try:
        embeddings = get() if callable(get) else None
    except NotImplementedError:  # transformers raises it for a model without embeddings
        return _N_IDS
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else _N_IDS


def make_picture_batch(
    pixels: Tensor, source: str, loaded: LoadedModel, pictures: tuple[Image, ...] = ()
) -> Batch:
    """Return preprocessed pictures as a batch for a model."""
    description = f"{source}, {describe_value(pixels)}"
    # A model with several inputs (text and pictures) names the one that takes pictures.
    if "pixel_values" in inspect.signature(loaded.model.forward).parameters:
        return Batch((), {"pixel_values": pixels}, description, pictures)
    return Batch((pixels,), {}, description, pictures)


def _demo_batch() -> Batch:
    pixels, _ = load_demo_digits()
    image_module = import_package("PIL.Image", "demo:digits", InputError)
    pictures = [image_module.fromarray((image[0] * 255).round().byte().numpy()) for image in pixels]
    return Batch((pixels,), {}, f"eight digits, {describe_value(pixels)}", tuple(pictures))


def _load_path(path: Path, loaded: LoadedModel) -> Batch:
    pictures: list[Image] = []
    preprocess = loaded.preprocess

    def keep(picture: Image) -> Tensor:
        assert preprocess is not None
        pictures.append(picture)
        return preprocess(picture)

    loading = LoadOptions(preprocess=None if preprocess is None else keep, tokenize=loaded.tokenize)
    items = items_of_path(path, loading)
    n_items = len(items)
    if n_items > _MAX_ITEMS and not isinstance(items, TextItems):
        kind = "pictures" if isinstance(items, ImageItems) else "rows"
        raise InputError(
            f"{path} must hold at most {_MAX_ITEMS} {kind} for a batch, got {n_items}."
            "\nPut those that you want into a folder of their own."
        )
    source = path.name
    if isinstance(items, ImageItems) and is_folder(path):
        others_text = f", {plural(items.n_others, 'other file')} left out" if items.n_others else ""
        source = f"{path.resolve().name}/ ({plural(n_items, 'picture')}{others_text})"
    batch = _load_all_items(items, source)
    return make_picture_batch(batch.args[0], source, loaded, tuple(pictures)) if pictures else batch


def _load_all_items(items: Items, source: str) -> Batch:
    """Load all items as one batch."""
    loading = LoadOptions(len(items), skip_fix="Mend it, or leave it out.")
    (batch,) = IndexedSource(items, loading).batches([0])
    if not batch.items:
        raise InputError(f"{source} must have at least one text, got none.\nWrite one text a line.")
    if isinstance(items, TextItems):
        source = f"{source} ({plural(len(batch.items), 'text')})"
    return _to_described_batch(batch.data, source)


def _load_arrays(path: Path, model: nn.Module) -> Batch:
    """Read a file of arrays: one is the argument, several are keyword arguments."""
    content, is_converted = array_files.open_and_cast_arrays(path, model)

    def read(value: Any) -> Any:
        return read_rows(value, str(path)) if isinstance(value, ArrayRows) else value

    if isinstance(content, dict):
        content = {str(key): read(value) for key, value in content.items()}
    else:
        parts = content if isinstance(content, tuple | list) else (content,)
        content = tuple(map(read, parts))
    values = list(content.values() if isinstance(content, dict) else content)
    if not any(isinstance(value, Tensor) for value in values):
        raise InputError(
            f"{path} must hold a tensor, got {describe_value(values[0]) if values else 'none'}.\n"
            "Save a tensor, a tuple of arguments, or a dict of keyword arguments."
        )
    batch = _to_described_batch(content, path.name)
    note = " (float64 in the file)" * is_converted
    return Batch(batch.args, batch.kwargs, batch.description + note)


def _to_described_batch(data: Any, source: str) -> Batch:
    """Return the data of a batch as arguments, with a description of each."""
    if isinstance(data, dict):
        parts = [f"{key} {describe_value(value)}" for key, value in data.items()]
        return Batch((), data, ", ".join([source, *parts]))
    args = data if isinstance(data, tuple) else (data,)
    return Batch(args, {}, ", ".join([source, *map(describe_value, args)]))


def _is_text(spec: str) -> bool:
    """Tell whether a text is meant: no path exists, and it does not look like a file's name."""
    path = os.path.expanduser(spec)
    if is_file(path) or is_folder(path) or is_special(path):
        return False
    return any(map(str.isspace, spec)) or Path(spec).suffix.lower() not in SUFFIXES


def _path_fix(spec: str, loaded: LoadedModel) -> str:
    if spec == "demo":
        return "'demo' is an input of demo:digits only: give a file or random:SHAPE."
    if loaded.tokenize is not None:
        return "Check the path, or give a text with a space in it."
    takes = "a picture, a folder of pictures, " if loaded.preprocess else ""
    return (
        f"Give {takes}{', '.join(array_files.SUFFIXES)} or random:SHAPE (random:1x3x224x224);"
        f" {loaded.name} has no tokenizer for text."
    )


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _N_TEXT_SHOWN else text[: _N_TEXT_SHOWN - 3] + "..."


def guess_input(loaded: LoadedModel) -> Batch | None:
    """Guess an input for a model that was loaded by name.

        >>> guess_input(load_model("demo:digits")).description
        'eight digits, 8x1x8x8 float32'

    For a library's model, the library prepares a text or a grey picture. For any other model, the
    input is random numbers in the shape that its first layer takes: 8 tokens for an embedding,
    224x224 for a 2-D convolution. For `demo:digits`, it is the eight digits that hookline ships.

    Args:
        loaded: the model.

    Returns:
        A batch, of one row except for `demo:digits`; None if the shape cannot be guessed.

    Raises:
        InputError: the input needs pillow, which is not installed.
    """
    if loaded.name == "demo:digits":
        return load_input("demo", loaded)
    if loaded.tokenize is not None:
        return load_input(_TEXT, loaded)
    # For other models, the preparation of pictures is a guess itself.
    is_of_library = loaded.name.startswith(("torchvision:", "timm:", "hf:"))
    if loaded.preprocess is None or not is_of_library:
        return _guess_by_first_layer(loaded)
    image_module = import_package("PIL.Image", loaded.name, InputError)
    picture = image_module.new("RGB", (256, 256), (128, 128, 128))
    return make_picture_batch(loaded.preprocess(picture).unsqueeze(0), "a grey picture", loaded)


def _guess_by_first_layer(loaded: LoadedModel) -> Batch | None:
    for module in loaded.model.modules():
        x = _random_input_for(module)
        if x is not None:
            return Batch((x,), {}, f"random, {describe_value(x)}")
        if any(True for _ in module.parameters(recurse=False)):
            return None  # the first layer is of an unknown kind
    return None


def _random_input_for(module: nn.Module) -> Tensor | None:
    if isinstance(module, nn.Embedding):
        return _seeded_integers((1, _N_TOKENS), module.num_embeddings)
    if isinstance(module, nn.Linear):
        return _seeded_normal((1, module.in_features))
    for kind, n_sides in _CONVOLUTIONS.items():
        if type(module) is kind:
            side = _SIDE if n_sides < 3 else _SIDE // 4
            return _seeded_normal((1, module.in_channels, *[side] * n_sides))
    return None
