"""The options of an extraction, and what each of its processes needs to run any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, final

import torch
from torch import Tensor, nn

from hookline.data.data_source import DataSource
from hookline.data.tokens_by_mask import DEFAULT_MASK, MaskOption
from hookline.display.text import listed
from hookline.engine import Selector, gather_full, is_dtensor, local_part, sharding_kind
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError, check_positive_int, warn
from hookline.verbs.extract.padding_check import PaddingCheck
from hookline.verbs.extract.worker import Worker
from hookline.verbs.record.float32_reductions import call_in_float32
from hookline.verbs.record.keep import KeepOptions
from hookline.verbs.record.model_state_tracker import ModelStateTracker
from hookline.verbs.record.partial_forward import PartialForward
from hookline.verbs.shared.model_state import in_eval_mode

_MOST_NAMED = 3


class ExtractOptions(TypedDict, total=False):
    """The options about what is kept and how data is loaded; `hl.extract` says what each does."""

    keep: Callable[[Any], Any] | None
    dtype: torch.dtype | None
    mask: str | Callable[[Any], torch.Tensor] | None
    inputs: Callable[[Any], Any] | None
    workers: int
    on_error: Literal["raise", "skip"]
    preprocess: Callable[[Any], Any] | None
    tokenize: Callable[..., Any] | None
    eval: bool
    shard_bytes: int
    progress: bool


def check_options(options: ExtractOptions) -> None:
    """Check what is not checked where it is used."""
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
    if "shard_bytes" in options:
        fix = "Leave it out, or give shard_bytes=32 * 1024**2."
        check_positive_int("shard_bytes", n_bytes, fix)
    if not isinstance(options.get("eval", True), bool):
        raise InputError(
            f"eval must be True or False, got {options['eval']!r}."
            "\nGive eval=False to keep the mode that the model is in."
        )


@final
@dataclass(frozen=True)
class ProcessSetup:
    """Hold what a process needs to make any shard of a job."""

    model: nn.Module
    selector: Selector
    source: DataSource
    options: ExtractOptions

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Attach to the model, in eval mode, and give what runs batches. For one thread.

        Raises:
            SelectionError: the selector matches nothing, or a gradient.
            InputError: the first batch cannot be loaded.
        """
        options = self.options
        keep, dtype = options.get("keep"), options.get("dtype")
        is_split = sharding_kind(self.model) == "split"
        check = PaddingCheck(None if is_split else keep)
        keeping: KeepOptions = {"copy": True}
        if not is_split:
            keeping = {"keep": check.watched_keep(), "dtype": dtype, "copy": True}
        # Weights that are sharded change as they are gathered.
        state = None if sharding_kind(self.model) else ModelStateTracker(self.model)
        is_eval = options.get("eval", True)
        # The block begins at once: an error in between would leave hooks on the model.
        with (
            PartialForward(self.model, self.selector, "extract", keeping) as runner,
            in_eval_mode(runner.modules) if is_eval else nullcontext(),
        ):
            runner.state = state
            mask = MaskOption(options.get("mask", DEFAULT_MASK), "mask" in options)
            gather = partial(_gather_and_keep, keep, dtype) if is_split else None
            yield Worker(runner, self.source, options.get("inputs"), mask, check, gather)
        changed = runner.changing or (state.changed_names() if state else [])
        if changed:
            remedy = (
                "Extract in one process, without an interruption, or reset it before each batch."
                if is_eval
                else "Extract again without eval=False, and train the model afterwards."
            )
            warn(
                f"{listed(changed, _MOST_NAMED)} changed"
                f" while the model ran: rows may depend on the batches before them.\n{remedy}"
            )


def _gather_and_keep(
    keep: Callable[[Any], Any] | None, dtype: torch.dtype | None, value: Any
) -> Any:
    """Gather a value that ranks have parts of, and return what is stored of it. A collective."""
    whole = tree.map_tensors(_gather_tensor, value)
    if keep is not None:
        whole = call_in_float32(keep, whole)
    if dtype is None:
        return whole
    return tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, whole)


def _gather_tensor(tensor: Tensor) -> Tensor:
    return gather_full(tensor) if is_dtensor(tensor) else local_part(tensor)
