"""Read the settings of torch that change the numbers of a pass, at the moment when it begins."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn

from hookline.display.text import name_without_torch
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.selection.site import paths_above
from hookline.engine.torch_private.modes import float32_precision

_DEVICES = ("cpu", "cuda")
_LIBRARIES = ("CUDA products", "cuDNN convolutions", "CPU products")

# The relative rounding of products of float32 that a library computes at lower precision.
ROUNDING = {"ieee": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7}
# The types of modules that cuDNN computes; of classes derived from them, most names say so.
_OF_CUDNN = re.compile(r"Conv(Transpose)?[123]d|^(RNN|LSTM|GRU)$")


@final
@dataclass(frozen=True)
class Settings:
    """The settings of torch under which a pass ran."""

    # Whether the model was in training mode, by the path of a module; modules that are not listed
    # were in the mode of the module around them. The root's path is empty.
    training: Mapping[str, bool]
    # The dtype of autocast by the type of device; empty where autocast was off.
    autocast: Mapping[str, str]
    grad: str  # "on", "off" (`torch.no_grad`) or "inference" (`torch.inference_mode`)
    seed: int  # the seed of torch's generator on the CPU (`torch.initial_seed()`)
    # How products of float32 were computed, such as "tf32", by the library.
    precision: Mapping[str, str]
    deterministic: bool  # whether `torch.use_deterministic_algorithms` was on

    def is_training(self, path: str) -> bool:
        """Tell whether a module was in training mode."""
        return _mode_of_first_path(self.training, [path, *paths_above(path)]) or False

    def tf32_flags(self, kinds: Collection[str]) -> list[str]:
        """Return the flags of torch that had a GPU multiply in TF32.

        Args:
            kinds: the names of the types of the model's modules; empty if unknown.
        """
        library = "cuDNN convolutions"
        is_with_cudnn = not kinds or any(map(_OF_CUDNN.search, kinds))
        flags = ["cuda.matmul"] * (self.precision.get("CUDA products") == "tf32")
        flags += ["cudnn"] * (is_with_cudnn and self.precision.get(library) == "tf32")
        return [f"torch.backends.{name}.allow_tf32" for name in flags]

    def as_json(self) -> dict[str, Any]:
        """Return the fields as `from_json` reads them."""
        return asdict(self)

    @staticmethod
    def from_json(row: Any) -> Settings:
        """Read the fields that `as_json` returned.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: it is something else.
        """
        return Settings(
            {str(path): bool(mode) for path, mode in row["training"].items()},
            {str(device): str(dtype) for device, dtype in row["autocast"].items()},
            str(row["grad"]),
            int(row["seed"]),
            {str(name): str(precision) for name, precision in row["precision"].items()},
            bool(row["deterministic"]),
        )


class RawSettings(NamedTuple):
    """Hold what a pass reads, in little time; `settings_from` makes settings of it."""

    paths: Collection[str]  # the path of each module
    # The modes of the modules, and the states of torch in the order of `SettingsReader`.
    state: tuple[Any, ...]


@final
class SettingsReader:
    """Reads the settings at each pass; equal ones are one object.

    Args:
        nodes: the modules of the model, in registration order.
        paths: the path of each.
    """

    __slots__ = ("_last", "_nodes", "_paths")

    def __init__(self, nodes: Sequence[ModuleNode], paths: Collection[str]) -> None:
        self._nodes = nodes
        self._paths = paths
        self._last: RawSettings | None = None

    def read(self) -> RawSettings:
        """Return the settings of the running code."""
        try:
            modes = [node.module.training for node in self._nodes]
        except AttributeError:  # a frozen ScriptModule has no training flag
            modes = [getattr(node.module, "training", False) for node in self._nodes]
        state = (
            modes,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(),
            *_precisions(),
        )
        last = self._last
        if last is None or last.state != state:
            last = self._last = RawSettings(self._paths, state)
        return last


def settings_from(noted: RawSettings | Settings | None) -> Settings | None:
    """Return the settings that a pass has noted."""
    if not isinstance(noted, RawSettings):
        return noted
    flags, has_grad, is_inference, cpu, cuda, seed, is_deterministic, *precision = noted.state
    modes = dict(zip(noted.paths, flags, strict=True))
    return Settings(
        {
            path: mode
            for path, mode in modes.items()
            if _mode_of_first_path(modes, paths_above(path)) is not mode
        },
        {
            device: name_without_torch(dtype)
            for device, dtype in zip(_DEVICES, (cpu, cuda), strict=True)
            if dtype
        },
        "inference" if is_inference else "on" if has_grad else "off",
        seed,
        _precision_by_library(precision),
        is_deterministic,
    )


def precision_here() -> dict[str, str]:
    """Return how products of float32 are computed at present, such as "tf32", by the library."""
    return _precision_by_library(_precisions())


def _precisions() -> list[str]:
    return [
        float32_precision("cuda", "matmul"),
        float32_precision("cuda", "conv"),
        float32_precision("mkldnn", "matmul"),
    ]


def _precision_by_library(precisions: Sequence[str]) -> dict[str, str]:
    # "none" leaves it to a more general setting, which leaves float32 as it is.
    return {
        name: text.replace("none", "ieee")
        for name, text in zip(_LIBRARIES, precisions, strict=True)
    }


def ignores_mode(type_name: str) -> bool:
    """Tell whether modules of torch with this name compute the same in training and eval mode."""
    kind = getattr(nn, type_name, None)
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code is not None and "training" not in code.co_names


def _mode_of_first_path(modes: Mapping[str, bool], paths: list[str]) -> bool | None:
    """Return the mode of the first of some paths that has one; None if none has."""
    return next((modes[path] for path in paths if path in modes), None)
