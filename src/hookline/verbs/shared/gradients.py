"""Gradients that leave every `.grad` as it is, also through reentrant checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hookline.engine import has_process_group, nodes_from, tensor_hook_dict
from hookline.verbs.shared.model_state import clear_and_restore_grads


class ReentrantError(RuntimeError):
    """A graph with a reentrant checkpoint has hooks that only a real backward may call."""


def compute_gradients(
    outputs: Sequence[Tensor],
    tensors: Sequence[Tensor] | None = None,
    grads: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """Compute gradients of outputs, and leave every `.grad` as it is.

    Without `tensors`, return the gradients of all leaf tensors of the graph.

    Raises:
        ReentrantError: a part of the graph is checkpointed with use_reentrant=True, and there are
            hooks on accumulated gradients.
    """
    leaves, is_reentrant = leaves_and_reentrancy(outputs)
    tensors = leaves if tensors is None else tensors
    if not is_reentrant:
        return list(torch.autograd.grad(outputs, tensors, grads, allow_unused=True))
    # A reentrant checkpoint refuses torch.autograd.grad.
    if has_process_group() or any(tensor_hook_dict(leaf, "accumulated") for leaf in leaves):
        raise ReentrantError(
            "a checkpoint with use_reentrant=True only allows backward(), which would also run the"
            " hooks after gradient accumulation"
        )
    with clear_and_restore_grads({id(tensor): tensor for tensor in (*leaves, *tensors)}.values()):
        torch.autograd.backward(outputs, grads)
        return [tensor.grad for tensor in tensors]


def leaves_and_reentrancy(outputs: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """Return the leaf tensors of a graph, and whether it holds reentrant checkpoints."""
    outputs = list(outputs)
    leaves = [output for output in outputs if output.grad_fn is None]
    nodes = list(nodes_from([output.grad_fn for output in outputs]))
    variables = [getattr(node, "variable", None) for node in nodes]
    leaves += [variable for variable in variables if isinstance(variable, Tensor)]
    return leaves, any(node.name() == "CheckpointFunctionBackward" for node in nodes)
