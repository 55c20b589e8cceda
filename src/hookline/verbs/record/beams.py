"""Notice that a model of transformers runs in a beam search.

Its values then have a row for each beam, and the search reorders the beams between passes.
"""

from __future__ import annotations

from pathlib import PurePath
from types import FrameType

from torch import nn

_GENERATION = ("transformers", "generation", "utils.py")
# The frames between the search and the model's call: decorators, wrappers, and outer models.
_MOST_FRAMES = 60


def may_search(model: nn.Module) -> bool:
    """Tell whether a model is one of transformers, which may run in `generate`."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def n_beams(frame: FrameType) -> int:
    """Return the number of beams of the search that a call runs in; 1 without a search."""
    above = frame.f_back
    for _ in range(_MOST_FRAMES):
        if above is None:
            break
        code = above.f_code
        if "beam_" in code.co_name and PurePath(code.co_filename).parts[-3:] == _GENERATION:
            n = above.f_locals.get("num_beams", 1)
            return n if isinstance(n, int) else 1
        above = above.f_back
    return 1
