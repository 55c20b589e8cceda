"""Call users' functions that may replace or measure a value, but must not write to it.

The tensors of a value have other holders, too: other branches of the model, and the model's caller.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine.memory.unversioned_memory import is_freed
from hookline.engine.passes.modes import unwrap_all_transforms
from hookline.engine.pytree import tree
from hookline.engine.pytree.hidden_tensors import every_tensor
from hookline.engine.pytree.identity_map import IdentityMap
from hookline.engine.torch_private.autograd import hook_gradient
from hookline.engine.torch_private.dynamo import (
    compare_graph_version,
    store_graph_version,
    was_written_in_graph,
)
from hookline.errors import StructureError


def call_undoing_writes(
    function: Callable[[Any], Any],
    value: Any,
    refusal: Callable[[], StructureError],
    unreturned: Callable[[], StructureError],
) -> Any:
    """Call a function on a value, and undo the function's writes to the value's tensors.

    A function that changes a container in place must return a container: None says that the
    container is unchanged. In compiled code, changes of containers are not checked.

    In compiled code, writes are found by the versions of the stand-in tensors while the code is
    traced. The check adds nothing to the code that runs.

    Args:
        function: the user's function.
        value: the function's argument. Inference tensors have no version, so the function gets
            copies of them.
        refusal: makes the error for a write to a tensor.
        unreturned: makes the error for a container that was changed, or an iterator that was used
            up, by a function that returns None.

    Raises:
        StructureError: the function wrote to a tensor of the value, or changed a container and
            returned None.
    """
    if is_dynamo_compiling():
        return _call_in_compiled_code(function, value, refusal)
    value = _without_inference_tensors(value)
    tensors = every_tensor(value)
    before = [_TensorSnapshot(tensor) for tensor in tensors]
    try:
        new = function(value)
    except BaseException:
        _undo_writes(before, refusal)
        raise
    if _undo_writes(before, refusal):
        raise refusal()
    if new is None and not isinstance(value, Tensor):
        left = every_tensor(value)
        if len(left) != len(tensors) or not all(map(operator.is_, left, tensors)):
            raise unreturned()
    return new


def call_measuring_function(
    function: Callable[[Any], Any], value: Any, refusal: Callable[[], StructureError]
) -> Any:
    """Call a function that measures a value. Writes to its tensors are refused, not undone.

    So no number is copied, except those of inference tensors, which have no version: the function
    may write to these copies.

    Args:
        function: the user's function.
        value: the function's argument.
        refusal: makes the error for a write to a tensor.

    Raises:
        StructureError: the function wrote to a tensor of the value.
    """
    if is_dynamo_compiling():
        return _call_in_compiled_code(function, value, refusal)
    tensors = [
        unwrap_all_transforms(part) for part in every_tensor(value) if not part.is_inference()
    ]
    versions = [tensor._version for tensor in tensors]
    result = function(_without_inference_tensors(value))
    if versions != [tensor._version for tensor in tensors]:
        raise refusal()
    return result


def _call_in_compiled_code(
    function: Callable[[Any], Any], value: Any, refusal: Callable[[], StructureError]
) -> Any:
    graph_tensors = _tensors_in_compiled_code(value)
    for tensor in graph_tensors:
        store_graph_version(tensor)
    new = function(value)
    for tensor in graph_tensors:
        compare_graph_version(tensor)
    if was_written_in_graph():
        raise refusal()
    return new


def _tensors_in_compiled_code(value: Any) -> list[Tensor]:
    """Return the tensors of a value in compiled code; one that it holds twice comes twice."""
    if isinstance(value, Tensor):
        return [value]
    return [
        tensor for _, part in tree.items(value) or () for tensor in _tensors_in_compiled_code(part)
    ]


def _without_inference_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _clone_with_version(value) if value.is_inference() else value
    copies: IdentityMap[Tensor] = IdentityMap()
    for _, tensor in tree.tensors(value):
        if tensor.is_inference():
            copies[tensor] = _clone_with_version(tensor)
    return tree.replace_tensors(value, copies, tuples_only=False) if copies else value


def _clone_with_version(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode has no version
        return tensor.clone()


@final
class _TensorSnapshot:
    """The state of a tensor before the call of a function that might write to it."""

    __slots__ = ("_clone_with_version", "_inner", "_node", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._inner = unwrap_all_transforms(tensor)
        self._version = None if tensor.is_inference() else self._inner._version
        self._node = tensor.grad_fn
        self._clone_with_version: Tensor | None = None
        if not is_freed(self._inner):
            # Some kinds of tensors cannot be copied. A write to them is refused all the same.
            with contextlib.suppress(RuntimeError, TypeError), torch.no_grad():
                self._clone_with_version = tensor.clone()

    def is_written(self) -> bool:
        """Tell whether the tensor has been written to since."""
        return self._version is not None and self._version != self._inner._version

    def restore(self, refusal: Callable[[], StructureError]) -> None:
        """Restore the tensor's numbers, since the caller may hold the tensor."""
        tensor, original = self._tensor, self._clone_with_version
        with contextlib.suppress(RuntimeError, TypeError), torch.no_grad():
            if original is not None:
                tensor.copy_(original)
        if tensor.grad_fn is self._node:
            return
        with contextlib.suppress(RuntimeError):
            if self._node is None:
                tensor.detach_()
                return
            # The tensor's numbers are restored, but its gradient would be that of the undone
            # operation.
            for target in (tensor, tensor._base):
                if target is not None:
                    hook_gradient(target, partial(_refuse_gradient, refusal))


def _undo_writes(before: list[_TensorSnapshot], refusal: Callable[[], StructureError]) -> bool:
    written = [copy for copy in before if copy.is_written()]
    for copy in written:
        copy.restore(refusal)
    return bool(written)


def _refuse_gradient(refusal: Callable[[], StructureError], grad: Tensor) -> Tensor:
    raise refusal()
