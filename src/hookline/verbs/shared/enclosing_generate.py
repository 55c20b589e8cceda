"""The search of transformers' `generate` that a run of a model belongs to."""

from __future__ import annotations

from itertools import islice
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple, final

from torch import nn

from hookline.util.walk_stack import walk_stack

_GENERATION = ("transformers", "generation", "utils.py")
_CONTINUOUS = ("transformers", "generation", "continuous_batching")
_SEARCHES = ("beam_", "_sample", "_assisted_decoding")  # in the names of its functions
_PREFILL = ("_prefill",)
# The frames between the search and the model's call: decorators, wrappers, and outer models.
_MOST_FRAMES = 60


def may_generate(model: nn.Module) -> bool:
    """Tell whether a model is one of transformers, which may run in `generate`."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def innermost_search_frame(frame: FrameType) -> FrameType | None:
    """Return the frame of the innermost search that a call runs in; None without a search."""
    return _innermost_frame(frame, _SEARCHES)


def _innermost_frame(frame: FrameType, names: tuple[str, ...]) -> FrameType | None:
    """Return the innermost frame of `generate` around a call whose name holds one of those."""
    for above in islice(walk_stack(frame.f_back), _MOST_FRAMES):
        code = above.f_code
        is_wanted = any(name in code.co_name for name in names)
        if is_wanted and PurePath(code.co_filename).parts[-3:] == _GENERATION:
            return above
    return None


def n_beams(frame: FrameType) -> int:
    """Return the number of beams of the search that a call runs in; 1 without a search."""
    search = innermost_search_frame(frame)
    if search is None or "beam_" not in search.f_code.co_name:
        return 1
    n = search.f_locals.get("num_beams", 1)
    return n if isinstance(n, int) else 1


@final
class PromptChunk(NamedTuple):
    """The place of a run in a prompt that `generate` gives to the model in chunks."""

    is_first: bool = True  # whether the run has the first chunk
    is_whole: bool = True  # whether the run has the whole prompt


def prefill_chunk(frame: FrameType) -> PromptChunk:
    """Return which chunk of a prompt a call has: the whole one without `prefill_chunk_size`."""
    prefill = _innermost_frame(frame, _PREFILL)
    names = {} if prefill is None else prefill.f_locals
    chunks = names.get("input_chunks")
    if not chunks:
        return PromptChunk()
    return PromptChunk(names.get("input_chunk") is chunks[0], len(chunks) == 1)


def is_continuous(frame: FrameType) -> bool:
    """Tell whether a call is one of continuous batching: `generate_batch`."""
    return any(
        PurePath(above.f_code.co_filename).parts[-4:-1] == _CONTINUOUS
        for above in islice(walk_stack(frame.f_back), _MOST_FRAMES)
    )


def is_assisted(frame: FrameType) -> bool:
    """Tell whether a call drafts tokens, or checks several at once: assisted decoding."""
    return _innermost_frame(frame, ("_assisted_decoding",)) is not None
