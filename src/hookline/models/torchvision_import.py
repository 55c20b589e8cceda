"""Import torchvision, even if its compiled operators do not fit the installed torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

# torchvision registers a meta kernel for `torchvision::nms` while it is imported. If its compiled
# operators cannot be loaded (a torchvision build for CUDA beside a torch build for the CPU), that
# operator is undeclared, and the import ends with this error. The models themselves are plain
# Python; only the detectors need the operator, for their boxes.
_FAILURE = "operator torchvision::nms does not exist"

# A Library withdraws its declarations when it is garbage-collected, so it is kept here.
_KEPT: list[torch.library.Library] = []


def import_torchvision() -> Any:
    """Import torchvision; if only its operators are missing, declare them and try again.

        >>> import_torchvision().models.resnet18().fc.out_features
        1000

    Returns:
        The package `torchvision`.

    Raises:
        ImportError: torchvision is not installed, or one of its own imports failed.
        RuntimeError: the import fails for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if str(error) != _FAILURE or _KEPT:
            raise
    # The failed import leaves half-initialised modules behind, which would be reused.
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)
    return importlib.import_module("torchvision")
