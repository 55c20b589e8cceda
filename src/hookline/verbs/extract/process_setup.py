"""Give each process of an extraction what it needs to run any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.data.batch_tokens import DEFAULT_MASK, MaskOption
from hookline.data.data_source import DataSource
from hookline.display.text import listed
from hookline.engine import Selector, gather_full, is_dtensor, local_part, sharding_kind
from hookline.engine.pytree import tree
from hookline.errors import warn
from hookline.verbs.extract.options import Extracting
from hookline.verbs.extract.padding_check import PaddingCheck
from hookline.verbs.extract.worker import Worker
from hookline.verbs.record.float32_reductions import call_in_float32
from hookline.verbs.record.keep import Keep
from hookline.verbs.record.run_to_last_site import PartialForward
from hookline.verbs.record.track_model_state import KeptState
from hookline.verbs.shared.model_state import in_eval_mode

_MOST_NAMED = 3


@final
@dataclass(frozen=True)
class Setup:
    """Hold what a process needs to make any shard of a job.

    Args:
        model: the model.
        selector: the sites.
        source: the data.
        options: the options of `hl.extract`.
    """

    model: nn.Module
    selector: Selector
    source: DataSource
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
        is_split = sharding_kind(self.model) == "split"
        check = PaddingCheck(None if is_split else keep)
        keeping: Keep = {"copy": True}
        if not is_split:
            keeping = {"keep": check.watched(), "dtype": dtype, "copy": True}
        # Weights that are sharded change as they are gathered.
        state = None if sharding_kind(self.model) else KeptState(self.model)
        is_eval = options.get("eval", True)
        # The block begins at once: an error in between would leave hooks on the model.
        with (
            PartialForward(self.model, self.selector, "extract", keeping) as runner,
            in_eval_mode(runner.modules) if is_eval else nullcontext(),
        ):
            runner.state = state
            mask = MaskOption(options.get("mask", DEFAULT_MASK), "mask" in options)
            gather = partial(_gather_whole, keep, dtype) if is_split else None
            worker = Worker(runner, self.source, options.get("inputs"), mask, gather)
            worker.padding = check
            yield worker
        changed = runner.changing or (state.changed() if state else [])
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


def _gather_whole(keep: Callable[[Any], Any] | None, dtype: torch.dtype | None, value: Any) -> Any:
    """Gather a value of which each rank has a part, and return what is stored of it. A collective.

    Args:
        keep: what is kept of the whole value.
        dtype: the dtype of floating tensors as stored.
        value: this rank's part.
    """
    whole = tree.map_tensors(_whole, value)
    if keep is not None:
        whole = call_in_float32(keep, whole)
    if dtype is None:
        return whole
    return tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, whole)


def _whole(tensor: Tensor) -> Tensor:
    return gather_full(tensor) if is_dtensor(tensor) else local_part(tensor)
