"""Load a model and an input by name, from the command line or from Python.

torchvision, timm, transformers and pillow are imported on first use.
"""

from hookline.models.demo import load_demo_digits as load_demo_digits
from hookline.models.guess_input import guess_input as guess_input
from hookline.models.inputs import load_input as load_input
from hookline.models.load_model import load_model as load_model
from hookline.models.loaded import Batch as Batch
from hookline.models.loaded import LoadedModel as LoadedModel

__all__ = ["Batch", "LoadedModel", "guess_input", "load_demo_digits", "load_input", "load_model"]
