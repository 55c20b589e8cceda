"""Keep what is needed to run one module again: a file of safetensors, with a JSON text in it.

Nothing is pickled, so a file of somebody else is safe to open.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hookline.display.text import first_line, name_without_torch, type_and_line
from hookline.engine import module_tree, path_text
from hookline.engine.pytree import tree
from hookline.errors import FolderError, ModelError, NonFiniteError
from hookline.files.folder_or_url import as_local_path
from hookline.files.local_files import replace_file
from hookline.files.unreadable_or_damaged import DAMAGE
from hookline.recordings.encoding import decode, encode
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.shared.run_settings import Autocast, use_autocast

_FORMAT = "hookline finding 1"
_KEY = "hookline"


@final
@dataclass(slots=True)
class SavedCall:
    """A call that made a value that is not finite, with what it takes to run it again."""

    finding: CheckFinding  # who made the value
    path: str  # the module's path
    inputs: tuple[tuple[Any, ...], dict[str, Any]]  # its positional and keyword arguments
    state: dict[str, Tensor]  # its parameters and buffers
    rng: Tensor  # the random state before its call
    gradients: list[Tensor]  # the gradients of its outputs, for a backward
    training: bool  # whether it was in training mode
    autocast: Autocast  # the autocast of its run
    lost: tuple[str, ...] = ()  # the arguments that could not be saved

    def write(self, folder: Path) -> str:
        """Write the call into a new file of a folder, and return its path.

        Raises:
            FolderError: the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}

        def put(tensor: Tensor) -> str:
            name = str(len(tensors))
            tensors[name] = tensor.detach().cpu().contiguous().clone()
            return name

        lost: list[str] = []
        autocast = [(device, dtype) for device, is_on, dtype in self.autocast if is_on]
        body = {
            "format": _FORMAT,
            "finding": self.finding.as_json(),
            "path": self.path,
            "inputs": encode(list(self.inputs), put, lost.append),
            "state": {name: put(tensor) for name, tensor in self.state.items()},
            "rng": put(self.rng),
            "gradients": [put(grad) for grad in self.gradients],
            "training": self.training,
            "autocast": [(device, name_without_torch(dtype)) for device, dtype in autocast],
            "lost": lost,
        }
        finding = self.finding
        rank = "" if finding.rank is None else f"-rank{finding.rank}"
        name = f"step{finding.step}{rank}-{finding.path or 'root'}"
        text = json.dumps(body)
        try:
            # In a folder of its own, so that nothing half written stays.
            with TemporaryDirectory(prefix=".part", dir=folder) as part:
                save_file(tensors, Path(part, "whole"), metadata={_KEY: text})
                path = _reserve_file(folder, name)
                replace_file(Path(part, "whole"), path)
        except (OSError, SafetensorError) as error:
            raise FolderError(
                f"{folder / name} cannot be written: {first_line(error)}."
                "\nGive keep= a folder with enough space that can be written."
            ) from error
        return str(path)

    def run(self, model: nn.Module, check: Any) -> CheckFinding | None:
        """Run the module alone, with the kept state, inputs and random numbers.

        Args:
            model: the model that holds the module. The module gets the kept state.

        Returns:
            The finding; None if all is finite.
        """
        module = {node.path: node.module for node in module_tree(model).nodes}.get(self.path)
        if module is None:
            raise ModelError(
                f"the model must have a module {self.path!r}, got {type(model).__name__}."
                "\nName the model that the finding is of."
            )
        args, kwargs = self.inputs
        try:
            module.load_state_dict(self.state, strict=False)
            module.train(self.training)
            with torch.random.fork_rng(), use_autocast(self.autocast):
                torch.set_rng_state(self.rng)
                with check(module):
                    self._run_backward(module(*args, **kwargs))
        except NonFiniteError as error:
            finding: CheckFinding = error.finding
            return finding
        except Exception as error:
            lost = f" (not saved: {', '.join(self.lost)})" if self.lost else ""
            raise ModelError(
                f"the module {path_text(self.path)} ({type(module).__name__}) must run on what the"
                f" file holds{lost}, got {type_and_line(error)}."
                "\nName the model that the finding is of."
            ) from error
        return None

    def _run_backward(self, output: Any) -> None:
        outputs = [tensor for tensor in tree.distinct_tensors(output) if tensor.requires_grad]
        number = min(len(outputs), len(self.gradients))
        if number:
            torch.autograd.backward(outputs[:number], self.gradients[:number])


def read_saved_call(path: str | os.PathLike[str]) -> SavedCall:
    """Read a file that `SavedCall.write` made.

    Raises:
        FolderError: it is not such a file, or it is damaged.
    """
    try:
        # Opening a pipe would wait for a writer.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("it must be a regular file")
        with safe_open(path, framework="pt") as file:
            body = json.loads((file.metadata() or {})[_KEY])
            if body["format"] != _FORMAT:
                raise ValueError(body["format"])
            saved = _decode_call(body, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        str(saved.finding)  # fails if the finding is damaged
        torch.Generator().set_state(saved.rng)
        return saved
    except FileNotFoundError:
        raise FolderError(f"{path} does not exist.\n{_GIVE}") from None
    except (OSError, SafetensorError, *DAMAGE) as error:
        raise FolderError(
            f"{path} must be a file that hl.check(model, keep=folder) wrote, got another or a"
            f" damaged one ({first_line(error)}).\n{_GIVE}"
        ) from error


_GIVE = "Give the file that hl.check(model, keep=folder) wrote when it raised."


def _decode_call(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedCall:
    args, kwargs = decode(body["inputs"], tensors.__getitem__)
    return SavedCall(
        finding=CheckFinding.from_json(body["finding"]),
        path=str(body["path"]),
        inputs=(tuple(args), dict(kwargs)),
        state={name: tensors[key] for name, key in body["state"].items()},
        rng=tensors[body["rng"]],
        gradients=[tensors[key] for key in body["gradients"]],
        training=bool(body["training"]),
        autocast=tuple((device, True, getattr(torch, name)) for device, name in body["autocast"]),
        lost=tuple(body["lost"]),
    )


def _reserve_file(folder: Path, name: str) -> Path:
    """Create an empty file in a folder, under a name that no process has taken."""
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)[:100]
    for number in itertools.count():
        path = folder / f"{safe}{f'-{number}' if number else ''}.safetensors"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
    return path


def make_folder(keep: str | os.PathLike[str]) -> Path:
    """Make the folder for saved calls.

    Raises:
        FolderError: the folder cannot be made.
    """
    try:
        folder = as_local_path(keep).absolute()  # the working directory may change
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, ValueError, OSError) as error:
        raise FolderError(
            f"keep= must be a folder that can be written, got {keep!r} ({first_line(error)})."
            "\nGive its name, such as keep='nan/'."
        ) from error
    return folder
