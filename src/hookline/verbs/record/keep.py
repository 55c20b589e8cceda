"""The options of `record` and `features`: what to keep of a value, and where."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, final

import torch
from torch import Tensor, nn

from hookline.display.text import type_and_line
from hookline.engine import (
    Pass,
    Site,
    UnversionedMemory,
    bind_own_defaults,
    call_measuring_function,
    clone_locally,
    every_tensor,
    hidden_tensor_holder,
    local_shards,
    snapshot_detached,
    snapshot_with_graph,
    unwrap_all_transforms,
)
from hookline.engine.pytree import describe, tree
from hookline.errors import AttachError, SiteError, StructureError
from hookline.recordings import StampWithCopies, UndetectableStamp, version_stamp
from hookline.verbs.record.float32_reductions import call_in_float32

_MOST_TRIED = 8  # of the tensors in a value


class KeepOptions(TypedDict, total=False):
    """The options of `record` and `features`: what to keep of a value, and where."""

    # A function of the value; its result is kept, as in `lambda t: t[:, -1]`. It is called with the
    # whole value, or with each tensor of a gradient as that arrives. It runs without autocast. It
    # computes sums, means, norms and powers of 16-bit floats in float32, and these results stay
    # float32.
    keep: Callable[[Any], Any] | None
    device: torch.device | str | None  # the device on which tensors are kept
    # The dtype in which floating tensors are kept. Other tensors keep theirs.
    dtype: torch.dtype | None
    detach: bool  # False keeps the autograd graph, and with it the memory of the whole pass
    # True copies every tensor, False none. None, the default, copies where torch cannot report
    # later changes: tensors that share memory with a parameter or buffer, DTensors, inference
    # tensors, and every tensor in a process group of several ranks or where weights are sharded.
    copy: bool | None


def check_keep_options(options: KeepOptions) -> KeepOptions:
    """Refuse options with an invalid value; return them for compiled code.

    Raises:
        AttachError: copy, detach, keep, dtype or device is invalid.
    """
    copy, detach, keep = options.get("copy"), options.get("detach", True), options.get("keep")
    if copy is not None and not isinstance(copy, bool):
        raise AttachError(
            f"copy= must be True, False or None, got {describe.in_words(copy)}."
            "\nLeave it out to copy where torch cannot report changes."
        )
    if not isinstance(detach, bool):
        raise AttachError(
            f"detach= must be True or False, got {describe.in_words(detach)}."
            "\nGive detach=False to keep the graph of the recorded tensors."
        )
    if keep is not None and not callable(keep):
        raise AttachError(
            f"keep= must be a function of the value, got {describe.in_words(keep)}."
            "\nGive one such as keep=lambda t: t.norm()."
        )
    device, dtype = options.get("device"), options.get("dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise AttachError(
            f"dtype must be a torch.dtype, got {dtype!r}.\nGive one such as dtype=torch.float16."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise AttachError(
            f"dtype must be a floating dtype, got {dtype}: it converts floating tensors."
            "\nGive one such as dtype=torch.float16, or keep=, a function that converts."
        )
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise AttachError(
            f"device must be a torch.device or its name, got {device!r}.\nGive one such as"
            " device='cpu'."
        ) from None
    keep = options.get("keep")
    return options if keep is None else {**options, "keep": bind_own_defaults(keep, 1)}


def keeps_plain_values(options: KeepOptions) -> bool:
    """Tell whether the options keep values as they are, detached; then the fast path is used."""
    return options.get("detach", True) and not any(
        options.get(key) for key in ("keep", "device", "dtype", "copy")
    )


def compiled_keep_function(options: KeepOptions) -> Callable[[Any], Any] | None:
    """Return the part of keeping a value that runs in compiled code; None for a plain copy."""
    keep, copied = (
        options.get("keep"),
        snapshot_detached if options.get("detach", True) else snapshot_with_graph,
    )
    if keep is None:
        return None if copied is snapshot_detached else copied
    return lambda value: copied(
        call_measuring_function(partial(call_in_float32, keep), value, _write_error)
    )


@final
class Keeper:
    """Make the kept form of a value, and a stamp that tells whether the kept form changes later.

    Args:
        options: the options of `record`.
        unversioned: tells where torch raises no version; None switches this check off.
    """

    __slots__ = ("_copy", "_detach", "_keep", "_move", "_unversioned")

    def __init__(self, options: KeepOptions, unversioned: UnversionedMemory | None) -> None:
        self._keep = options.get("keep")
        self._move = options.get("device"), options.get("dtype")
        self._detach = options.get("detach", True)
        self._copy = options.get("copy")
        self._unversioned = unversioned

    def __call__(self, current: Pass, value: Any, site: Site | None = None) -> tuple[Any, Any]:
        """Return the kept form of a value, and its stamp.

        Args:
            current: the pass.
            value: the value.
            site: the site of the value, for messages; None for one tensor of a gradient.

        Raises:
            SiteError: with `copy=True`, a tensor of the value cannot be copied.
            StructureError: `keep=` takes a tensor of the value instead of the value, or writes to
                it.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        if self._keep is None:
            value_kept = tree.map_tensors(
                lambda tensor: self._keep_tensor(tensor, self._must_copy(current, tensor), copies),
                value,
            )
        else:
            value_kept = self._keep_by_function(current, value, site, copies)
        return value_kept, self._make_stamp(current, value_kept, copies)

    def _keep_by_function(
        self, current: Pass, value: Any, site: Site | None, copies: list[tuple[Tensor, Tensor]]
    ) -> Any:
        keep = self._keep
        assert keep is not None
        # The result may be a view of any tensor of the value.
        must = any(self._must_copy(current, tensor) for _, tensor in tree.tensors(value))
        if self._detach:
            value = tree.map_tensors(Tensor.detach, value)
        try:
            # keep= gets this rank's part, and so communicates with no other rank.
            result = call_measuring_function(
                partial(call_in_float32, keep), local_shards(value), _write_error
            )
        except Exception as error:
            if site is not None and not isinstance(error, StructureError):
                _refuse_nested_value(keep, value, site, error)
            error.add_note(f"hookline: keep= was called with {describe.in_words(value)}")
            raise

        def take(tensor: Tensor) -> Tensor:
            # A slice would keep the whole memory that it is a part of.
            copied = must or _is_view_of_larger(tensor) or self._must_copy(current, tensor)
            return self._keep_tensor(tensor, copied, copies)

        return tree.map_tensors(take, result)

    def _must_copy(self, current: Pass, tensor: Tensor) -> bool:
        if self._copy is not None or self._unversioned is None:
            return bool(self._copy)
        return tensor.is_inference() or self._unversioned.contains(current, tensor)

    def _keep_tensor(
        self, tensor: Tensor, copied: bool, copies: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        if self._detach and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
            tensor = tensor.detach()
        device, dtype = self._move
        if device is not None or dtype is not None:
            moved = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            if moved is not tensor:
                return moved
        if not copied:
            return tensor
        if not tensor.requires_grad or self._copy or tensor.is_inference():
            return clone_locally(tensor)
        # It stays in the graph: gradients with respect to a copy are not those of the value.
        copies.append((tensor, clone_locally(tensor.detach())))
        return tensor

    def _make_stamp(self, current: Pass, result: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
        holder = hidden_tensor_holder(result)
        if holder is not None and self._copy:
            raise SiteError(
                f"copy=True must copy every tensor, got one in a {type(holder).__name__}, which"
                " cannot be copied.\nRecord with keep=, a function that takes the tensors out."
            )
        if holder is not None and any(
            self._must_copy(current, tensor) for tensor in every_tensor(holder)
        ):
            return UndetectableStamp(type(holder).__name__)
        return (
            version_stamp(result) if not copies else StampWithCopies(version_stamp(result), copies)
        )


def _write_error() -> StructureError:
    return StructureError(
        "keep= must not write to the value, which the model goes on with.\nUse an operation that is"
        " not in place, such as t.sub(1) for t.sub_(1), or begin with t.clone()."
    )


def _refuse_nested_value(
    keep: Callable[[Any], Any], value: Any, site: Site, error: Exception
) -> None:
    """Refuse a nested value if `keep` takes one of its tensors, and name that tensor's leaf."""
    for leaf, tensor in itertools.islice(tree.tensors(value), _MOST_TRIED):
        if not leaf:
            return
        try:
            call_in_float32(keep, local_shards(tensor))
        except Exception:  # keep= may take the next tensor
            continue
        raise StructureError(
            f"keep= must take the value at {site}, got {describe.in_words(value)}:"
            f" {type_and_line(error)}."
            f"\nSelect the leaf that keep= takes: {str(replace(site, leaf=site.leaf + leaf))!r}."
        ) from error


def _is_view_of_larger(tensor: Tensor) -> bool:
    memory_holder = unwrap_all_transforms(tensor)
    return (
        memory_holder.layout is torch.strided
        and memory_holder.untyped_storage().nbytes() > memory_holder.nbytes
    )
