"""Read what a model is given: data of any kind as batches, and an input by its name."""

from typing import TYPE_CHECKING

from hookline.util.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from hookline.data.load_named_input import guess_input as guess_input
    from hookline.data.load_named_input import load_input as load_input

# Imported on first use: the files of this package import each other.
_MODULE_OF = dict.fromkeys(("guess_input", "load_input"), "hookline.data.load_named_input")

__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
