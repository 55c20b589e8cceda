"""Notice modules and parameters that were replaced in a model while it is monitored."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, final

from torch import nn

from hookline.engine import Site, path_text, sharding


@final
class Originals:
    """The modules and parameters that a model had when its monitor began.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: dict[str, weakref.ref[Any]] = {
            path: weakref.ref(one) for path, one in model.named_modules(remove_duplicate=False)
        }
        if not sharding(model):  # FSDP puts other tensors in their places, and back
            for path, one in model.named_parameters(remove_duplicate=False):
                self._known[path] = weakref.ref(one)

    def replaced(self, sites: Iterable[Site]) -> list[str]:
        """Return the paths of sites at which the model has another object now, or none."""
        paths = dict.fromkeys(site.path for site in sites)
        return [path_text(path) for path in paths if self._is_replaced(path)]

    def _is_replaced(self, path: str) -> bool:
        model, known = self._model(), self._known.get(path)
        if model is None or known is None:
            return False
        now: Any = model
        for name in path.split(".") if path else ():
            now = getattr(now, name, None)
        return now is not known()
