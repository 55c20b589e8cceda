"""Patch: put back the value that another run had at the same site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine import Site, is_in_transform
from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import StructureError
from hookline.recordings import Recording
from hookline.recordings.pass_record import PassRecord
from hookline.verbs.edit.compiled_edits import refuse_compiled
from hookline.verbs.edit.operands import Operand
from hookline.verbs.edit.recorded_values import (
    ChangeFromRecording,
    RecordedValues,
    missing_site_error,
)
from hookline.verbs.edit.steps_and_tokens import PassAndCall


@final
class SitePatch:
    """The patch of one site.

    Args:
        run: the recording, or one of its passes.
        site: the site.
    """

    __slots__ = ("_alone", "_recorded", "_where")
    wants_pass_and_call = True

    def __init__(self, run: Recording | PassRecord, site: Site) -> None:
        self._recorded = RecordedValues(run, site)
        self._where = str(site)
        # Compiled code cannot look values up.
        alone = self._recorded.only_value()
        self._alone = alone if isinstance(alone, Tensor) else None

    def __call__(self, value: Any, pass_and_call: PassAndCall | None = None) -> Any:
        """Return the recorded value in the form of the present value.

        Raises:
            StructureError: the recorded value has another form.
        """
        if pass_and_call is None:
            if not is_dynamo_compiling():
                raise missing_site_error("patch")
            if self._alone is None:
                refuse_compiled("hl.edits.patch", self._where, "it cannot tell its run and call")
            return recorded_like(value, self._alone, self._where)
        return recorded_like(value, self._recorded.value_at(pass_and_call), self._where)


def recorded_like(value: Any, recorded: Any, where: str) -> Any:
    """Return the recorded value with the device, dtype and strides of the present value.

    Raises:
        StructureError: the recorded value has another form.
    """
    if isinstance(value, Tensor) and isinstance(recorded, Tensor):
        return _tensor_like(value, recorded, where)
    now, then = dict(_tensors_by_leaf(value)), dict(_tensors_by_leaf(recorded))
    if not now or now.keys() != then.keys():
        raise _form_error(value, recorded, where)
    for leaf, tensor in now.items():
        new = _tensor_like(tensor, then[leaf], where)
        value = leaves.put(value, leaf, new, where)
    return value


def _tensors_by_leaf(value: Any, leaf: tree.Leaf = ()) -> Iterator[tuple[tree.Leaf, Tensor]]:
    """Yield the tensors in plain containers: an object such as a cache stays the model's own."""
    if isinstance(value, Tensor):
        yield leaf, value
    elif isinstance(value, tuple | list | Mapping) or is_dataclass(value):
        for key, part in tree.items(value) or ():
            yield from _tensors_by_leaf(part, (*leaf, key))


def _tensor_like(value: Tensor, recorded: Tensor, where: str) -> Tensor:
    if value.shape != recorded.shape:
        raise _form_error(value, recorded, where)
    Operand(recorded, "patch").check_dtype_and_broadcast(
        value
    )  # no number that the dtype cannot hold
    return torch.empty_like(value).copy_(recorded)


def _form_error(value: Any, recorded: Any, where: str) -> StructureError:
    if is_dynamo_compiling():  # a graph writes no text
        return StructureError("hl.edits.patch must put a value of the same form.")
    now, then = describe.in_words(value), describe.in_words(recorded)
    advice = (
        "Record and patch with inputs of one shape, and record without keep=. In generate, patch"
        " the steps that were recorded: hl.edit(..., steps=0)."
    )
    if is_in_transform():
        advice = "Run the model on the batch, without vmap: under vmap a value is one example's."
    return StructureError(
        f"hl.edits.patch must put a value of the same form at {where}: expected {now}, got {then}."
        f"\n{advice}"
    )


def patch(run: Recording | PassRecord) -> ChangeFromRecording:
    """Put the recorded value of the same site in place of the value.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> clean, corrupt = torch.ones(1, 2), torch.zeros(1, 2)
        >>> with hl.record(model, "0") as run:
        ...     expected = model(clean)
        >>> with hl.edit(model, "0", hl.edits.patch(run)):
        ...     torch.equal(model(corrupt), expected)
        True

    The k-th run of the model gets the value of the k-th recorded run, and each call of a module
    that of the same call. Failed runs are not counted. A recording of one run serves every run.
    With `at=`, only these tokens are patched; the inputs still need one shape and padding, because
    a token gets the value at its index.

    Args:
        run: what `hl.record` returned or `hl.open` read, or one of its `passes`. The value is cast
            to the device and dtype of the value in the model. Of a tuple, list, dict or dataclass,
            the tensors are patched; other objects, such as a cache, stay the model's own.

    Returns:
        A change for `hl.edit`. Gradients do not flow through a patched value to the layers before
        it.

    Raises:
        AttachError: `run` is not a recording; or (when the model runs) it has several runs, and
            the present one, after the prompt, is of assisted decoding.
        NotRecordedError: (by `hl.edit`) the recording lacks a site; (when the model runs) it lacks
            the run or the call.
        StructureError: (when the model runs) the recorded value has another shape.
    """
    return ChangeFromRecording("patch", run, SitePatch)
