"""Import torchvision, also beside a build of torch that its compiled operators do not fit."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

# A Library takes its declarations back when it is collected, so it is kept here.
_KEPT: list[torch.library.Library] = []


def import_torchvision() -> Any:
    """Import torchvision; where its operators are missing, declare them and import again.

    Its models are plain Python and use none of them, but the import registers a meta kernel for
    `torchvision::nms`, and fails where nobody has declared that operator.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error) or _KEPT:
            raise
    # What the failed import left behind would be taken for the package.
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor a, Tensor b, float c) -> Tensor")
    library.define("qnms(Tensor a, Tensor b, float c) -> Tensor")
    _KEPT.append(library)
    return importlib.import_module("torchvision")
