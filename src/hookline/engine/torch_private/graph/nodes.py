"""Nodes of autograd's graph: the order in which they were made, and what they keep.

torch numbers the nodes that a thread makes. In backward, a thread runs the nodes that are ready by
descending number, and before these the nodes that accumulate the gradients of leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.torch_private.modules import parts_of_sparse

# Returns the number that the next node of this thread gets.
next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

_ACCUMULATES = 2**63  # nodes that accumulate gradients have a number above
_KEPT = "_raw_saved_"


def node_number(node: Any) -> int:
    """Return the number of a node."""
    return int(node._sequence_nr())


def nodes_from(
    roots: Iterable[Any], is_last: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """Yield the nodes of a graph, each once, from some nodes on.

    Args:
        roots: the nodes; None stands for no graph.
        is_last: tells of a node that was yielded whether the graph behind it is left out.
    """
    visited: set[Any] = set()  # holds the nodes, so that no other one gets an id of theirs
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        if not is_last(node):
            waiting += [below for below, _ in node.next_functions]


def nodes_below(roots: Iterable[Any], lowest_number: int) -> tuple[list[tuple[int, Any]], Any]:
    """Walk over the graph below some nodes.

    Returns:
        The nodes and their numbers, the highest number first. And the node with the highest number
        below `lowest_number`, where the graph goes on; None if the graph ends.
    """
    numbered: list[tuple[int, Any]] = []
    before: tuple[int, Any] = (-1, None)
    for node in nodes_from(roots, lambda node: node._sequence_nr() < lowest_number):
        number = node._sequence_nr()
        if lowest_number <= number < _ACCUMULATES:
            numbered.append((number, node))
        elif before[0] < number < lowest_number:
            before = number, node
    numbered.sort(key=lambda entry: entry[0], reverse=True)
    return numbered, before[1]


def gradient_split_groups(tensor: Tensor) -> tuple[dict[str, Any], str]:
    """Find the process groups over whose ranks the gradient of a plain tensor is split.

    A plain tensor computed from a DTensor's shards (tensor parallelism with
    `use_local_output=True`) is one rank's part. torch knows the placement at the node that made the
    plain tensor.

    Returns:
        The groups by name, and the reason why they cannot be told, or "".
    """
    groups: dict[str, Any] = {}
    unknown = ""

    def makes_plain(node: Any) -> bool:
        return type(node).__name__ == "_ToTorchTensorBackward"

    for node in nodes_from([tensor.grad_fn], makes_plain):
        if not makes_plain(node):
            variable = getattr(node, "variable", None)
            if variable is not None and not isinstance(variable, nn.Parameter):
                unknown = unknown or "leaf"
            continue
        placements = node.grad_placements or node.dtensor_spec.placements
        if node.grad_placements and any(part.is_partial() for part in placements):
            unknown = "partial"
        for dim, placement in enumerate(placements):
            if not (placement.is_replicate() or placement.is_partial()):
                group = node.dtensor_spec.mesh.get_group(dim)
                groups[group.group_name] = group
    return groups, unknown


def raw_tensors_saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node keeps for backward, without unpacking what was packed."""
    for name in _raw_saved_names(node.__class__):
        saved = getattr(node, name)
        for part in saved if isinstance(saved, tuple | list) else (saved,):
            tensor = None if part is None else _raw_tensor(part)
            if isinstance(tensor, Tensor):
                yield tensor


def rnn_workspace_bytes(node: Any) -> int | None:
    """Return the bytes of the workspace that a fused recurrent layer keeps; None for other nodes.

    Tensors without numbers do not show this size. What was packed, as in a checkpoint, has none.
    """
    if node.name() not in _WITH_WORKSPACE:
        return None
    workspace = _raw_tensor(node._raw_saved_result3)
    return workspace.nbytes if isinstance(workspace, Tensor) else None


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


def nodes_from_loss_to_model(
    roots: Iterable[Any], is_of_run: Callable[[int], bool], most: int
) -> list[Any]:
    """Walk over the graph below some nodes, down to the nodes that were made in runs of a model.

    Args:
        is_of_run: tells whether the node of a number was made in such a run.

    Returns:
        The nodes, the lowest number first: each behind those that its operation got values from.
        Nothing if there are more.
    """
    nodes: list[Any] = []
    for node in nodes_from(roots, lambda node: is_of_run(node._sequence_nr())):
        number = node._sequence_nr()
        if number < _ACCUMULATES and not is_of_run(number):
            nodes.append(node)
        if len(nodes) > most:
            return []
    return sorted(nodes, key=node_number)


def tensors_saved_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a node keeps for backward, with the names of its arguments.

    A tensor that was overwritten since is left out.
    """
    for raw_name in _raw_saved_names(node.__class__):
        name = raw_name.removeprefix(_KEPT)
        try:
            # A node of an autograd.Function calls them saved_tensors.
            tensors = node.saved_tensors if name == "tensors" else getattr(node, f"_saved_{name}")
        except RuntimeError:
            continue
        for tensor in tensors if isinstance(tensors, tuple | list) else (tensors,):
            if isinstance(tensor, Tensor):
                yield name, tensor
