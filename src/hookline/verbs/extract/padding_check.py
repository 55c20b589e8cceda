"""Find out whether `keep=` reads the padding of a batch, by padding it with NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.data.seeding import seeded
from hookline.engine.pytree import tree
from hookline.errors import warn
from hookline.stores.batch_columns import BatchTokens
from hookline.verbs.record.float32_reductions import call_in_float32


@final
class PaddingCheck:
    """Warn once if what is kept of a value changes with the value's padding.

    In compiled code, where `keep` is a part of the graph, nothing is checked.

    Args:
        keep: the function of a value; None keeps values as they are, and nothing is checked.
    """

    def __init__(self, keep: Callable[[Any], Any] | None) -> None:
        self._keep = keep
        self._mask: Tensor | None = None
        self._value: Any = None
        self._is_done = keep is None

    def watched_keep(self) -> Callable[[Any], Any] | None:
        """Return `keep`, which then also leaves a value of each batch to the check."""
        keep = self._keep
        if not callable(keep):
            return keep

        def keep_and_hold(value: Any) -> Any:
            if not is_dynamo_compiling():
                self._save_value(value)
            return keep(value)

        return keep_and_hold

    @contextmanager
    def check_batch(self, tokens: BatchTokens | None) -> Iterator[None]:
        """Check the first batch with padding, which is run in the block."""
        if not self._is_done and tokens is not None and tokens.rival is None:
            self._mask = None if bool(tokens.mask.all()) else tokens.mask
        try:
            yield
            if self._mask is not None and self._value is not None:
                self._compare_with_nan_padding(self._value, self._mask)
        finally:
            self._mask = self._value = None

    def _compare_with_nan_padding(self, value: Any, mask: Tensor) -> None:
        """Call `keep` on a value, as it is and with NaN at the padding."""
        self._is_done = True

        def filled(tensor: Tensor) -> Tensor:
            if not _has_tokens(tensor, mask):
                return tensor.clone()
            return tensor.masked_fill(~mask.to(tensor.device)[..., None], torch.nan)

        try:
            kept = self._call_keep(tree.map_tensors(torch.clone, value))
            changed = self._call_keep(tree.map_tensors(filled, value))
            reads_padding = isinstance(kept, Tensor) and _kept_differ(kept, changed, mask)
        except Exception:  # of a function that refuses NaN
            return
        if reads_padding:
            warn(
                "keep= reads padding: what it gives changes with the values at tokens that the mask"
                " leaves out.\nStore a row for each token, without keep=, and reduce"
                " store[site].of_items([k]) for each item k; or give mask=None."
            )

    def _call_keep(self, value: Any) -> Any:
        assert self._keep is not None
        devices = {tensor.device for _, tensor in tree.tensors(value)}
        with seeded(0, devices - {torch.device("cpu")}):
            return call_in_float32(self._keep, value)

    def _save_value(self, value: Any) -> None:
        mask = self._mask
        if mask is None or self._value is not None:
            return
        if any(_has_tokens(tensor, mask) for _, tensor in tree.tensors(value)):
            self._value = value


def _has_tokens(tensor: Tensor, mask: Tensor) -> bool:
    """Tell whether a tensor has features for each token of the mask."""
    return tensor.ndim == 3 and tensor.shape[:2] == mask.shape and tensor.is_floating_point()


def _kept_differ(kept: Tensor, changed: Tensor, mask: Tensor) -> bool:
    """Tell whether two results differ, apart from rows of padding, which are not stored."""
    if kept.shape[:2] == mask.shape and kept.ndim > 2:
        kept, changed = (tensor[mask.to(tensor.device)] for tensor in (kept, changed))
    return bool(((kept != changed) & ~kept.isnan()).any())
