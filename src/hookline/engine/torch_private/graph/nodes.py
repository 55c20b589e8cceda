"""Nodes of autograd's graph: the order in which they were made, and what they keep.

torch numbers the nodes that a thread makes. In backward, a thread runs the nodes that are ready by
descending number, and before these the nodes that accumulate the gradients of leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hookline.engine.torch_private.modules import parts_of_sparse

# Returns the number that the next node of this thread gets.
next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

_ACCUMULATES = 2**63  # nodes that accumulate gradients have a number above
_KEPT = "_raw_saved_"


def node_number(node: Any) -> int:
    """Return the number of a node."""
    return int(node._sequence_nr())


def nodes_below(roots: Iterable[Any], lowest_number: int) -> tuple[list[tuple[int, Any]], Any]:
    """Walk over the graph below some nodes.

    Returns:
        The nodes and their numbers, the highest number first. And the node with the highest number
        below `lowest_number`, where the graph goes on; None if the graph ends.
    """
    visited: set[Any] = set()
    numbered: list[tuple[int, Any]] = []
    before: tuple[int, Any] = (-1, None)
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)  # holds the node, so that no other one gets its id
        number = node._sequence_nr()
        if number >= lowest_number:
            if number < _ACCUMULATES:
                numbered.append((number, node))
                waiting += [below for below, _ in node.next_functions if below is not None]
        elif number > before[0]:
            before = number, node
    numbered.sort(key=lambda entry: entry[0], reverse=True)
    return numbered, before[1]


def raw_saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node keeps for backward, without unpacking what was packed."""
    for name in _raw_saved_names(node.__class__):
        saved = getattr(node, name)
        for part in saved if isinstance(saved, tuple | list) else (saved,):
            tensor = None if part is None else _raw_tensor(part)
            if isinstance(tensor, Tensor):
                yield tensor


def rnn_workspace_bytes(node: Any) -> int | None:
    """Return the bytes of the workspace that a fused recurrent layer keeps; None for other nodes.

    Tensors without numbers do not show this size.
    """
    if node.name() not in _WITH_WORKSPACE:
        return None
    workspace = _raw_tensor(node._raw_saved_result3)
    return None if workspace is None else workspace.nbytes


_WITH_WORKSPACE = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0")


def _raw_tensor(saved: Any) -> Any:
    try:
        return saved.data
    except RuntimeError:  # it was freed, or nothing was saved
        return None


@functools.cache
def _raw_saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_KEPT))


def running_node() -> Any:
    """Return the node that runs in this thread's backward; None outside backward."""
    return torch._C._current_autograd_node()


def at_end_of_inner_backward(function: Callable[[], None]) -> None:
    """Call a function when the innermost run of autograd has ended; only from within a hook.

    The backward of a reentrant checkpoint is a run inside the user's run.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def memory_key_and_size(tensor: Tensor) -> tuple[int, int]:
    """Return a key for the memory of a tensor, and its size in bytes; views share the memory."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one without memory
        parts = [tensor] if tensor.layout is torch.strided else parts_of_sparse(tensor)
        return id(tensor), sum(part.nbytes for part in parts)


def running_node_traceback() -> tuple[int, str, list[str]] | None:
    """Return the number and name of the node that autograd runs, and its forward's traceback.

    Anomaly mode keeps the traceback. None outside of a backward.
    """
    node = running_node()
    if node is None:
        return None
    return node_number(node), node.name(), node.metadata.get("traceback_", [])


def nodes_of_loss(roots: Iterable[Any], is_of_run: Callable[[int], bool], most: int) -> list[Any]:
    """Walk over the graph below some nodes, down to the nodes that were made in runs of a model.

    Args:
        is_of_run: tells whether the node of a number was made in such a run.

    Returns:
        The nodes, the lowest number first: each behind those that its operation got values from.
        Nothing if there are more.
    """
    numbers: dict[Any, int] = {}
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if node in numbers or number >= _ACCUMULATES or is_of_run(number):
            continue
        numbers[node] = number
        if len(numbers) > most:
            return []
        waiting += [before for before, _ in node.next_functions if before is not None]
    return sorted(numbers, key=numbers.__getitem__)


def saved_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a node keeps for backward, with the names of its arguments.

    A tensor that was overwritten since is left out.
    """
    for name in _raw_saved_names(node.__class__):
        saved = "_saved_" + name.removeprefix(_KEPT)
        try:
            tensors = getattr(node, saved)
        except RuntimeError:
            continue
        for tensor in tensors if isinstance(tensors, tuple | list) else (tensors,):
            if isinstance(tensor, Tensor):
                yield saved.removeprefix("_saved_"), tensor
