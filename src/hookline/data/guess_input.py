"""Guess an input that a model accepts, for commands without an input."""

from __future__ import annotations

from torch import Tensor, nn

from hookline.data.load_named_input import load_input, picture_batch
from hookline.data.random_batch import seeded_integers, seeded_normal
from hookline.errors import InputError
from hookline.models.loaded_model import Batch, LoadedModel, describe
from hookline.models.packages import import_package

_TEXT = "A line holds hooks together for a while."
_N_TOKENS = 8
_SIDE = 224
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


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
    return picture_batch(loaded.preprocess(picture).unsqueeze(0), "a grey picture", loaded)


def _guess_by_first_layer(loaded: LoadedModel) -> Batch | None:
    for module in loaded.model.modules():
        x = _random_input_for(module)
        if x is not None:
            return Batch((x,), {}, f"random, {describe(x)}")
        if any(True for _ in module.parameters(recurse=False)):
            return None  # the first layer is of an unknown kind
    return None


def _random_input_for(module: nn.Module) -> Tensor | None:
    if isinstance(module, nn.Embedding):
        return seeded_integers((1, _N_TOKENS), module.num_embeddings)
    if isinstance(module, nn.Linear):
        return seeded_normal((1, module.in_features))
    for kind, n_sides in _CONVOLUTIONS.items():
        if type(module) is kind:
            side = _SIDE if n_sides < 3 else _SIDE // 4
            return seeded_normal((1, module.in_channels, *[side] * n_sides))
    return None
