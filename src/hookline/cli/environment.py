"""Describe this installation: versions, devices, and which extras are there."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any, final

import torch

from hookline.display.results import Printout, Result
from hookline.display.text_table import Heading
from hookline.engine.provenance import versions_here

_PACKAGES = (
    "numpy", "torchvision", "timm", "transformers", "lightning", "accelerate", "safetensors",
    "matplotlib", "ray", "fsspec", "pyarrow",
)  # fmt: skip
_EXTRAS = ("cli", "page", "plots", "vision", "text", "store", "ray", "loggers", "lightning")
_NAME = re.compile(r"[\w.-]+")


@final
class Environment(Result):
    """The versions, devices and extras of this installation, as a report of a fault needs them.

    Attributes:
        versions: the versions of Python, hookline, torch and other packages that are installed.
        devices: the devices that torch can use.
        extras: whether each extra is installed, by name; empty where hookline was not installed.
    """

    def __init__(self) -> None:
        packages = {name: _installed_version(name) for name in _PACKAGES}
        self.versions: dict[str, str] = versions_here() | {k: v for k, v in packages.items() if v}
        n_gpus, name_of = torch.cuda.device_count(), torch.cuda.get_device_name
        self.devices: list[str] = ["cpu", *(f"cuda:{k} ({name_of(k)})" for k in range(n_gpus))]
        self.extras: dict[str, bool] = _installed_extras()

    def _printout(self) -> Printout:
        there = [name for name, is_there in self.extras.items() if is_there]
        missing = [name for name, is_there in self.extras.items() if not is_there]
        return Printout(
            title="hookline env",
            headings=(Heading("package"), Heading("version")),
            rows=[[name, text] for name, text in self.versions.items()],
            totals=[
                ("devices", ", ".join(self.devices)),
                ("threads", str(torch.get_num_threads())),
                ("extras", ", ".join(there) or "none"),
                ("not installed", ", ".join(missing) or "none"),
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"versions": self.versions, "devices": self.devices, "extras": self.extras}


def _installed_extras() -> dict[str, bool]:
    """Return whether each extra's packages are installed; empty from a source tree."""
    try:
        lines = distribution("hookline").requires or []
    except PackageNotFoundError:
        return {}
    needs: dict[str, list[str]] = {name: [] for name in _EXTRAS}
    for line in lines:
        package, _, marker = line.partition(";")
        match = re.search(r"""extra == ['"](\w+)['"]""", marker)
        name = _NAME.match(package)
        if match is not None and match[1] in needs and name is not None:
            needs[match[1]].append(name[0])
    return {extra: all(map(_installed_version, names)) for extra, names in needs.items()}


def _installed_version(name: str) -> str:
    """Return the version of a package; an empty text if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
