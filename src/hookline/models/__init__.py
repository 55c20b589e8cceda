"""Load a model by name, from the command line or from Python.

torchvision, timm, transformers and pillow are imported on first use.
"""

from typing import TYPE_CHECKING

from hookline.util.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from hookline.models.demo import load_demo_digits as load_demo_digits
    from hookline.models.load_model import load_model as load_model
    from hookline.models.loaded_model import Batch as Batch
    from hookline.models.loaded_model import LoadedModel as LoadedModel

# Imported on first use: the files of this package import each other.
_MODULE_OF = {
    "Batch": "hookline.models.loaded_model",
    "LoadedModel": "hookline.models.loaded_model",
    "load_demo_digits": "hookline.models.demo",
    "load_model": "hookline.models.load_model",
}

__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
