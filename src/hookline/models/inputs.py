"""Load a batch from an INPUT as a user types it."""

from __future__ import annotations

import difflib
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.display.text import plural
from hookline.errors import InputError
from hookline.models import arrays, pictures
from hookline.models.demo import load_demo_digits
from hookline.models.loaded import Batch, LoadedModel, describe
from hookline.models.packages import import_package, in_short
from hookline.models.places import absence, is_file, is_folder, is_special, names_in, printable
from hookline.models.random_batch import PREFIX, make_random

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (*pictures.SUFFIXES, *arrays.SUFFIXES, ".txt")
_N_TEXT_SHOWN = 40


def load_input(spec: str, loaded: LoadedModel) -> Batch:
    """Load the input that a user names, as a batch for a model.

        >>> loaded = load_model("demo:digits")
        >>> batch = load_input("demo", loaded)
        >>> loaded.model(*batch.args, **batch.kwargs).shape
        torch.Size([8, 10])

    Args:
        spec: the input, one of:

            - a picture, or a folder of at most 64 pictures, which become one batch, sorted by name
              and preprocessed for the model;
            - a `.npy`, `.npz`, `.pt` or `.safetensors` file: one array is the argument, several are
              keyword arguments, and a tuple in a `.pt` file is several arguments;
            - `random:SHAPE[:DTYPE]`, such as `random:1x3x224x224` or `random:1x128:int64`: numbers
              from a fixed seed. Floats are normal, and float32 by default. Integers are from 0 to
              99, or below the size of the model's vocabulary;
            - for a model with a tokenizer: a `.txt` file with one text a line, or the text itself;
            - for `demo:digits`: `demo`, the eight digits that hookline ships.
        loaded: the model.

    Returns:
        The batch. Nothing is moved or cast, with one exception: if the model's parameters are
        float32, numpy's float64 becomes float32, and the description says so.

    Raises:
        InputError: the file does not exist, is broken or of an unknown kind, or the model does not
            take such an input. The message gives the fix.
    """
    if spec.lower().startswith(PREFIX):
        return make_random(spec, loaded)
    if spec == "demo" and loaded.name == "demo:digits":
        return _demo_batch()
    expanded = os.path.expanduser(spec)
    if is_folder(expanded):
        return _picture_batch(Path(expanded), loaded)
    if is_file(expanded):
        return _file_batch(Path(expanded), loaded)
    if is_special(expanded):
        raise InputError(f"{printable(spec)} {absence(expanded)}.\nCopy its contents into a file.")
    if loaded.tokenize is None or _means_a_file(spec):
        raise _not_there(spec, loaded)
    if not spec.strip():
        raise InputError("the text must not be empty.\nGive a text, a file or random:SHAPE:int64.")
    return _text_batch([spec], f'text "{_shorten(spec)}"', loaded)


def _file_batch(path: Path, loaded: LoadedModel) -> Batch:
    suffix = path.suffix.lower()
    if suffix in pictures.SUFFIXES:
        return _picture_batch(path, loaded)
    if suffix in arrays.SUFFIXES:
        return arrays.read_arrays(path, loaded.model)
    if suffix == ".txt":
        return _text_file_batch(path, loaded)
    raise InputError(
        f"{path} must have a suffix that hookline reads, got {path.suffix or '(none)'}.\n"
        f"Give a file that ends in one of {', '.join(_SUFFIXES)}."
    )


def _picture_batch(path: Path, loaded: LoadedModel) -> Batch:
    files, n_others = pictures.find_pictures(path) if is_folder(path) else ([path], 0)
    opened = [pictures.open_picture(file) for file in files]
    x = pictures.stack_pictures(opened, [file.name for file in files], loaded)
    source = path.name
    if is_folder(path):
        source = f"{path.resolve().name}/ ({plural(len(files), 'picture')}"
        source += f", {plural(n_others, 'other file')} left out)" if n_others else ")"
    return _with_pictures(x, source, opened, loaded)


def _demo_batch() -> Batch:
    images, _ = load_demo_digits()
    image_module = import_package("PIL.Image", "demo:digits", InputError)
    opened = [image_module.fromarray((image[0] * 255).round().byte().numpy()) for image in images]
    return Batch((images,), {}, f"eight digits, {describe(images)}", tuple(opened))


def _with_pictures(x: Tensor, source: str, opened: list[Image], loaded: LoadedModel) -> Batch:
    description = f"{source}, {describe(x)}"
    # A model with several inputs (text and pictures) names the one that takes pictures.
    if "pixel_values" in inspect.signature(loaded.model.forward).parameters:
        return Batch((), {"pixel_values": x}, description, tuple(opened))
    return Batch((x,), {}, description, tuple(opened))


def _text_file_batch(path: Path, loaded: LoadedModel) -> Batch:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read as text: {in_short(error)}.\nSave it as UTF-8."
        ) from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise InputError(f"{path} must hold a text, got an empty file.\nWrite one text a line.")
    return _text_batch(texts, f"{path.name} ({plural(len(texts), 'text')})", loaded)


def _text_batch(texts: list[str], source: str, loaded: LoadedModel) -> Batch:
    if loaded.tokenize is None:
        raise InputError(
            f"{source} is text, and {loaded.name} has no tokenizer.\n"
            "Give it tokens (.npy, .npz, .pt, .safetensors or random:1x128:int64)."
        )
    kwargs: dict[str, Any] = dict(loaded.tokenize(texts))
    parts = ", ".join(f"{key} {describe(value)}" for key, value in kwargs.items())
    return Batch((), kwargs, f"{source}, {parts}")


def _means_a_file(spec: str) -> bool:
    return Path(spec).suffix.lower() in _SUFFIXES and not any(c.isspace() for c in spec)


def _not_there(spec: str, loaded: LoadedModel) -> InputError:
    path = Path(spec).expanduser()
    shown = f"'{_shorten(printable(spec))}'"
    close = difflib.get_close_matches(path.name, names_in(path.parent), n=3)
    if close:
        found = ", ".join(str(path.parent / name) for name in close)
        return InputError(f"the file {shown} does not exist.\nDid you mean {found}?")
    if spec == "demo":
        return InputError("'demo' is an input of demo:digits only.\nGive a file or random:SHAPE.")
    if loaded.tokenize is not None:
        return InputError(
            f"the file {shown} does not exist.\nCheck the path, or give a text with a space in it."
        )
    takes = "a picture, a folder of pictures, " if loaded.preprocess else ""
    return InputError(
        f"the file {shown} does not exist; for text {loaded.name} has no tokenizer."
        f"\nGive {takes}{', '.join(arrays.SUFFIXES)} or random:SHAPE (random:1x3x224x224)."
    )


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _N_TEXT_SHOWN else text[: _N_TEXT_SHOWN - 3] + "..."
