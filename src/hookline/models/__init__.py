"""Load a model and an input by name, from the command line or from Python.

torchvision, timm, transformers and pillow are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.data.guess_input import guess_input as guess_input
    from hookline.data.named_input import load_input as load_input
    from hookline.models.demo import load_demo_digits as load_demo_digits
    from hookline.models.load_model import load_model as load_model
    from hookline.models.loaded import Batch as Batch
    from hookline.models.loaded import LoadedModel as LoadedModel

# Imported on first use: the files of this package import each other, but no data.
_MODULES = {
    "Batch": "models.loaded",
    "LoadedModel": "models.loaded",
    "guess_input": "data.guess_input",
    "load_demo_digits": "models.demo",
    "load_input": "data.named_input",
    "load_model": "models.load_model",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hookline.models' has no attribute {name!r}")
    value = getattr(import_module(f"hookline.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
