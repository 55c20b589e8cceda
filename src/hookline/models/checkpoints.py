"""Read checkpoint files without unpickling, and load them into a model."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import HooklineError, ModelError
from hookline.models.packages import error_in_short
from hookline.util.local_paths import is_file, printable, why_no_file

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*_TORCH_SUFFIXES, ".safetensors")
# A module such as os is refused in other words than a class that is not known.
_REFUSED = re.compile(r"(?:Unsupported (?:global|class): ?\w*|unsupported GLOBAL) (\S+)")
_WRAPPERS = ("module.", "_orig_mod.")
_N_KEYS_NAMED = 3


@final
class ModuleState(dict[str, Any]):
    """The tensors of a file that says of itself that they are the state of a module."""


def read_state_dict(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state dict from a checkpoint without executing any of its contents.

        >>> torch.save({"state_dict": nn.Linear(2, 2).state_dict(), "epoch": 3}, "last.ckpt")
        >>> list(read_state_dict("last.ckpt"))
        ['weight', 'bias']

    Args:
        file: a `.pt`, `.pth`, `.bin` or `.ckpt` file of `torch.save`, or a `.safetensors` file.
            It holds the state dict itself, or a dict with it under `state_dict` or `model`.

    Returns:
        The state dict, on the CPU, with the keys of the file: a `ModuleState` if it lies under
        `state_dict` or `model`, or is a module's own, and no other dict of tensors.

    Raises:
        ModelError: the file does not exist, has another suffix, needs unpickling, is broken, or
            holds no state dict.
    """
    path = Path(os.path.expanduser(file))
    if not is_file(path):
        raise ModelError(
            f"the checkpoint {printable(path)} {why_no_file(path)}.\n"
            f"Give --weights default, none, or a file ({', '.join(SUFFIXES)})."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ModelError(
            f"the checkpoint must end in {', '.join(_TORCH_SUFFIXES)} or .safetensors, got {path}."
            "\nSave it with torch.save, or as .safetensors."
        )
    content = read_tensor_file(path, ModelError)
    is_state = hasattr(content, "_metadata")
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content, is_state = content[key], True
            break
    if not isinstance(content, dict) or not any(isinstance(v, Tensor) for v in content.values()):
        raise ModelError(
            f"{path} must hold a state dict, or a dict with one under state_dict or model, got "
            f"{_content_text(content)}.\nSave one: torch.save(model.state_dict(), FILE)."
        )
    named = {str(key): value for key, value in content.items()}
    return ModuleState(named) if is_state else named


def read_tensor_file(path: Path, error_type: type[HooklineError]) -> Any:
    """Read a `torch.save` or `.safetensors` file onto the CPU, without unpickling.

        >>> read_tensor_file(Path("x.pt"), InputError).shape
        torch.Size([1, 3, 224, 224])

    Args:
        path: the file. `.safetensors` is read as such, any other suffix by `torch.load`.
        error_type: the class of the error to raise.

    Returns:
        The contents of the file; for `.safetensors` a dict of tensors.

    Raises:
        HooklineError: of class `error_type`: the file needs unpickling or is broken.
    """
    try:
        if path.suffix.lower() == ".safetensors":
            return load_file(path, device="cpu")
        return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        # torch names the class that it refused; for a file of another format it names none.
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise error_type(_unreadable_text(path, "torch.save did not write it")) from error
        raise error_type(
            f"{path} needs unpickling ({refused[1]}), which can run any code, so hookline does "
            "not do it.\nIf you trust the file, load it yourself and save only its tensors: "
            "torch.save(model.state_dict(), FILE), or as .safetensors."
        ) from error
    except Exception as error:  # readers of broken files raise errors without a common base
        raise error_type(_unreadable_text(path, error_in_short(error))) from error


def load_state_into(model: nn.Module, state: dict[str, Any], name: str, source: str) -> None:
    """Load a state dict into a model, or raise an error that lists the keys that do not fit.

        >>> load_state_into(nn.Linear(2, 2), {"module.weight": w, "module.bias": b}, "mine", "a.pt")

    Args:
        model: the model, changed in place.
        state: the state dict; the wrapper prefixes `module.` and `_orig_mod.` are removed.
        name: the model's name, for the message.
        source: the file's name, for the message.

    Raises:
        ModelError: keys are missing, unexpected or of another shape. The message names up to three
            of each.
    """
    expected = model.state_dict(keep_vars=True)
    bare = {_strip_wrappers(key): value for key, value in state.items()}
    # A model may have a submodule named `module`: then its keys fit with the prefix.
    if len(expected.keys() & bare.keys()) > len(expected.keys() & state.keys()):
        state = bare
    reshaped = [
        f"{key}: {_shape_text(state[key])} in the file, {_shape_text(tensor)} in the model"
        for key, tensor in expected.items()
        if key in state and _differs_in_shape(tensor, state[key])
    ]
    missing = [key for key in expected if key not in state]
    # Non-persistent buffers, which files of older releases may still hold.
    computed = {name for name, _ in model.named_buffers()} - expected.keys()
    unexpected = [key for key in state if key not in expected and key not in computed]
    if not reshaped:
        try:
            # torch knows which keys older files may leave out (num_batches_tracked, ...).
            result = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise ModelError(f"{source} does not fit {name}: {error_in_short(error)}") from error
        # A tied parameter has several keys; loading one of them loads the parameter.
        loaded = {id(expected[key]) for key in expected if key in state}
        missing = [key for key in result.missing_keys if id(expected.get(key)) not in loaded]
        unexpected = [key for key in result.unexpected_keys if key not in computed]
    problems = _problems_text(
        {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    )
    if problems:
        raise ModelError(
            f"{source} does not fit {name}. Of its keys: {problems}.\n"
            "Name the model that the file was saved from, or save this model's own: "
            "torch.save(model.state_dict(), FILE)."
        )


def _problems_text(problems: dict[str, list[str]]) -> str:
    return "; ".join(
        f"{len(keys)} {problem} ({', '.join(keys[:_N_KEYS_NAMED])}"
        f"{', ...' if len(keys) > _N_KEYS_NAMED else ''})"
        for problem, keys in problems.items()
        if keys
    )


def _differs_in_shape(expected: Any, other: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(other, Tensor) or is_lazy(expected):
        return False
    return expected.shape != other.shape


def _strip_wrappers(key: str) -> str:
    while key.startswith(_WRAPPERS):
        key = key.split(".", 1)[1]
    # torch.compile also wraps submodules, so its prefix may occur inside a key.
    return key.replace("._orig_mod.", ".")


def _shape_text(tensor: Any) -> str:
    return "x".join(str(size) for size in tensor.shape) or "scalar"


def _content_text(content: Any) -> str:
    if isinstance(content, dict):
        keys = ", ".join(str(key) for key in list(content)[:_N_KEYS_NAMED])
        return f"a dict with the keys {keys}" if keys else "an empty dict"
    return f"a {type(content).__name__}"


def _unreadable_text(path: Path, reason: str) -> str:
    return (
        f"{path} cannot be read as a {path.suffix} file: {reason}.\n"
        "It may be cut short or of another kind: compare its size with the original's, and copy "
        "or save it again."
    )
