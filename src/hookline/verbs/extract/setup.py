"""What each process of an extraction is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, final

import torch
from torch import Tensor, nn

from hookline.engine import Selector, full_value, is_dtensor, local_part, sharding
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError, warn
from hookline.stores.batch_columns import DEFAULT_MASK, Mask
from hookline.verbs.extract.batches import Source
from hookline.verbs.extract.worker import Worker
from hookline.verbs.record.float32 import measured
from hookline.verbs.record.keep import Keep
from hookline.verbs.record.prefix import Prefix
from hookline.verbs.shared.run_model import in_eval_mode


class Extracting(TypedDict, total=False):
    """The options of `hl.extract` about what is kept, and how data is loaded.

    Args:
        keep: what to keep of each value, as in `hl.record`.
        dtype: the dtype of floating tensors as stored; None keeps theirs.
        mask: for rows that are tokens: the key of the mask in a batch that is a dict, or a function
            that takes the batch and returns a mask of shape (items, tokens), or the length of each
            item. Values with a row a token are stored without padding. None: rows are items.
        inputs: a function that takes a batch and returns what the model takes; None takes all.
        workers: the processes that load data; 0 loads it in this one.
        on_error: "raise" stops at an item that cannot be loaded; "skip" leaves it out and lists it
            in `store.skipped`.
        preprocess: for a folder of images: the function that makes a tensor of a picture.
        tokenize: for text: a tokenizer of transformers, or a function that takes a list of strings
            and returns the batch.
        eval: False keeps the mode that the model is in.
        shard_bytes: about how large a shard is, in bytes.
        progress: False shows no progress bar; it is only shown in a terminal.
    """

    keep: Callable[[Any], Any] | None
    dtype: torch.dtype | None
    mask: Mask
    inputs: Callable[[Any], Any] | None
    workers: int
    on_error: Literal["raise", "skip"]
    preprocess: Callable[[Any], Any] | None
    tokenize: Callable[..., Any] | None
    eval: bool
    shard_bytes: int
    progress: bool


def check_options(options: Extracting) -> None:
    """Check what is not checked where it is used.

    Raises:
        TypeError: there is no such option. InputError: one has another type, or is too small.
    """
    unknown = options.keys() - Extracting.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"hl.extract() got an unexpected keyword argument {min(unknown)!r}."
            f"\nGive some of {', '.join(f'{known}=' for known in Extracting.__annotations__)}."
        )
    mask, inputs, n_bytes = options.get("mask"), options.get("inputs"), options.get("shard_bytes")
    if not (mask is None or isinstance(mask, str) or callable(mask)):
        raise InputError(
            f"mask must be a key of a batch, a function of one, or None, got"
            f" {describe.in_words(mask)}.\nGive one such as mask=lambda ids: ids != 0."
        )
    if inputs is not None and not callable(inputs):
        raise InputError(
            f"inputs must be a function of a batch, got {describe.in_words(inputs)}."
            "\nGive one such as inputs=lambda batch: batch[0]."
        )
    if "shard_bytes" in options and (type(n_bytes) is not int or n_bytes < 1):
        raise InputError(
            f"shard_bytes must be a positive integer, got {n_bytes!r}."
            "\nLeave it out, or give shard_bytes=32 * 1024**2."
        )
    if not isinstance(options.get("eval", True), bool):
        raise InputError(
            f"eval must be True or False, got {options['eval']!r}."
            "\nGive eval=False to keep the mode that the model is in."
        )


_MOST_NAMED = 3


@final
@dataclass(frozen=True)
class Setup:
    """What a process needs to make any shard of a job.

    Args:
        model: the model.
        selector: the sites.
        source: the data.
        options: the options of `hl.extract`.
    """

    model: nn.Module
    selector: Selector
    source: Source
    options: Extracting

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Attach to the model, in eval mode, and give what runs batches. For one thread.

        Raises:
            SelectionError: the selector matches nothing, or a gradient.
            InputError: the first batch cannot be loaded.
        """
        options = self.options
        keep, dtype = options.get("keep"), options.get("dtype")
        is_split = sharding(self.model) == "split"
        kept: Keep = {"copy": True} if is_split else {"keep": keep, "dtype": dtype, "copy": True}
        prefix = Prefix(self.model, self.selector, "extract", kept)
        mode = in_eval_mode(prefix.modules) if options.get("eval", True) else nullcontext()
        before = _versions(self.model)
        with prefix, mode:
            mask = options.get("mask", DEFAULT_MASK)
            gather = _Gather(keep, dtype) if is_split else None
            yield Worker(prefix, self.source, options.get("inputs"), mask, gather)
        after = _versions(self.model)
        changed = [name for name, version in before.items() if after.get(name) != version]
        if changed:
            warn(
                f"{', '.join(changed[:_MOST_NAMED])}{', …' * (len(changed) > _MOST_NAMED)} changed"
                " while the model ran: rows depend on when they were made."
                "\nExtract again without eval=False, and train the model afterwards."
            )


@final
@dataclass(frozen=True)
class _Gather:
    """Gathers a value of which each rank has a part, and makes of it what is stored.

    Args:
        keep: what is kept of the whole value.
        dtype: the dtype of floating tensors as stored.
    """

    keep: Callable[[Any], Any] | None
    dtype: torch.dtype | None

    def __call__(self, value: Any) -> Any:
        """Return what is stored of a value. A collective."""
        found = tree.map_tensors(_whole, value)
        if self.keep is not None:
            found = measured(self.keep, found)
        return tree.map_tensors(self._converted, found)

    def _converted(self, tensor: Tensor) -> Tensor:
        is_converted = self.dtype is not None and tensor.is_floating_point()
        return tensor.to(self.dtype) if is_converted else tensor


def _versions(model: nn.Module) -> dict[str, int]:
    """Return what changes when a parameter or buffer is written to; of sharded weights nothing."""
    if sharding(model):
        return {}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor._version for name, tensor in named if not tensor.is_inference()}


def _whole(tensor: Tensor) -> Tensor:
    return full_value(tensor) if is_dtensor(tensor) else local_part(tensor)
