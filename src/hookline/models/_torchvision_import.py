"""Import torchvision, also where its compiled operators do not fit the torch that is installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

# torchvision registers a meta kernel for `torchvision::nms` while it is imported. Where its
# compiled operators cannot be loaded (a build of torchvision for CUDA beside a build of torch for
# the CPU), nobody has declared that operator, and the import ends with this error. The models
# themselves are plain Python and need no such operator, apart from the boxes of the detectors.
_FAILURE = "operator torchvision::nms does not exist"

# A Library takes its declarations back when it is collected, so it is kept here.
_KEPT: list[torch.library.Library] = []


def import_torchvision() -> Any:
    """Import torchvision; where exactly its operators are missing, declare them and try again.

        >>> import_torchvision().models.resnet18().fc.out_features
        1000

    Returns:
        The package `torchvision`.

    Raises:
        ImportError: torchvision is not installed, or an import of its own failed.
        RuntimeError: its import fails in another way.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if str(error) != _FAILURE or _KEPT:
            raise
    # What the failed import left behind would be taken for the package.
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)
    return importlib.import_module("torchvision")
