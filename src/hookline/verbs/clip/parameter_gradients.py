"""Clip parameters' gradients: at the right time, and over the right ranks.

A norm over many ranks is a collective, so all of these ranks must clip.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from hookline.display.text import listed
from hookline.engine import (
    TIMEOUT_S,
    Site,
    at_end_of_backward,
    backward_number,
    format_by_rank,
    gather_full,
    gather_json,
    is_dtensor,
    norms_of_each,
    outer_backward_number,
)
from hookline.errors import AttachError, RanksError, warn
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.verbs.clip.limit import EPSILON


class _AccumulatedParameters(dict[int, Tensor]):
    """The parameters whose gradients were accumulated in a run of autograd, by their id.

    Attributes:
        versions: the version of each parameter at that time, by its id.
    """

    __slots__ = ("__weakref__", "versions")

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[int, int] = {}

    def add(self, parameter: Tensor) -> None:
        """Note a parameter."""
        self[id(parameter)] = parameter
        self.versions[id(parameter)] = parameter._version

    def refuse_used_before_clip(self) -> None:
        """Refuse gradients that an optimizer has used before they are clipped.

        Raises:
            AttachError: a gradient is gone, or its parameter has been written to.
        """
        n_used = sum(
            parameter.grad is None or parameter._version != self.versions[key]
            for key, parameter in self.items()
        )
        if n_used:
            raise AttachError(
                f"hl.clip must get gradients at the end of backward, got {n_used} of {len(self)}"
                " that were used or removed before, as by an optimizer that steps in backward."
                "\nStep after backward(). In one process, and without use_reentrant=True, norm= and"
                " value= clip before such a step."
            )


@final
class ClipAfterBackward:
    """Call a function after backward, with the parameters whose gradients were accumulated, by id.

    The function runs after other callbacks at the end of backward, because only there DDP writes
    the reduced gradients into `.grad`.
    """

    def __init__(self, act: Callable[[dict[int, Tensor]], None]) -> None:
        self._act = act
        # By the run of autograd, since several threads may run backward at once. The callback at
        # the end of a run holds its parameters. torch drops the callback of a run that raised.
        self._by_run: weakref.WeakValueDictionary[int, _AccumulatedParameters] = (
            weakref.WeakValueDictionary()
        )
        self._lock = fork_safe_lock()

    def add_accumulated(self, parameter: Tensor) -> None:
        """Note a parameter whose gradient has been accumulated."""
        run = outer_backward_number()
        with self._lock:  # autograd has a thread for each device
            parameters = self._by_run.get(run)
            if parameters is None:
                parameters = self._by_run[run] = _AccumulatedParameters()
                at_end_of_backward(partial(self._queue_behind_others, run, parameters))
            parameters.add(parameter)

    def _queue_behind_others(self, run: int, parameters: _AccumulatedParameters) -> None:
        at_end_of_backward(partial(self._clip_accumulated, run, parameters))

    def _clip_accumulated(self, run: int, parameters: _AccumulatedParameters) -> None:
        self._by_run.pop(run, None)
        parameters.refuse_used_before_clip()
        self._act(parameters)


@final
class ClipOnAccumulate:
    """Call a function with a parameter after its gradient has been accumulated.

    Inside a reentrant checkpoint, more parts of the gradient may follow. There the function is
    called after the whole backward.
    """

    def __init__(self, act: Callable[[Tensor], None]) -> None:
        self._act = act
        # By parameter, the run of autograd in which it was clipped, or will be.
        self._clipped: dict[int, int] = {}
        self._queued: dict[int, int] = {}

    def clip_or_queue(self, parameter: Tensor) -> None:
        """Clip a parameter whose gradient has been accumulated, or queue it."""
        run, key = outer_backward_number(), id(parameter)
        if self._queued.get(key) == run:
            return
        if run == backward_number():
            self._clipped[key] = run
            self._act(parameter)
            return
        if self._clipped.get(key) == run:
            warn(
                f"hl.clip: the gradient of a parameter of shape {list(parameter.shape)} arrived in"
                " parts, because it is used inside and outside of a reentrant checkpoint. One"
                " part was clipped before the sum was.\nCheckpoint with use_reentrant=False."
            )
        self._queued[key] = run
        parameters = _AccumulatedParameters()
        parameters.add(parameter)
        at_end_of_backward(partial(self._clip_queued, parameters))

    def _clip_queued(self, parameters: _AccumulatedParameters) -> None:
        parameters.refuse_used_before_clip()
        for parameter in parameters.values():
            self._act(parameter)


def clip_norm(parameters: Sequence[Tensor], bound: float, norm_type: float) -> Tensor:
    """Clip gradients to a norm over all of them, on all ranks that hold a part.

    Returns:
        The norm before clipping, as a plain tensor.
    """
    # Of several norms, torch's norm 0 is the number of those that are not 0: also of one.
    if len(parameters) == 1 and norm_type and type(grad := parameters[0].grad) is Tensor:
        return _clip_plain_gradient(grad, bound, norm_type)
    meshes: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.grad.device_mesh if is_dtensor(parameter.grad) else None  # type: ignore[arg-type, union-attr]
        meshes.setdefault(mesh, []).append(parameter)
    if len(meshes) < 2:
        return gather_full(clip_grad_norm_(parameters, bound, norm_type))
    # torch's own function refuses gradients on several meshes, or on a mesh and on none.
    norms = [
        gather_full(get_total_norm([p.grad for p in group if p.grad is not None], norm_type))
        for group in meshes.values()
    ]
    first = norms[0].device
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(first) for n in norms]), norm_type)
    for group in meshes.values():
        clip_grads_with_norm_(group, bound, norm)
    return norm


def _clip_plain_gradient(grad: Tensor, bound: float, norm_type: float) -> Tensor:
    """Clip one gradient as `clip_grad_norm_` does, without the lists that it makes for many."""
    norm: Tensor = norms_of_each([grad.detach()], norm_type)[0]
    grad.detach().mul_((bound / (norm + EPSILON)).clamp(max=1.0))
    return norm


def check_same_sites_on_ranks(sites: Sequence[Site], parameters: Sequence[Tensor]) -> None:
    """Check that all ranks that hold parts of these parameters clip at the same sites.

    Raises:
        RanksError: a rank clips at other sites. Without this check, backward would wait for it.
    """
    ranks: set[int] = set()
    for parameter in parameters:
        if is_dtensor(parameter):
            ranks.update(parameter.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
    if len(ranks) < 2:
        return
    question = "hl.clip(model, ...) by a norm over ranks"
    sites_by_rank = gather_json(question, [str(site) for site in sites], sorted(ranks), TIMEOUT_S)
    texts = [listed([repr(name) for name in names], 8) for names in sites_by_rank]
    if any(names != sites_by_rank[0] for names in sites_by_rank):
        raise RanksError(
            f"{question} must select the same sites on every rank, got"
            f" {format_by_rank(sorted(ranks), texts)}."
            "\nSelect the same on every rank: the norm is over all of them."
        )


def grad_holder(parameter: Tensor) -> Tensor:
    """Return the tensor whose `.grad` torch's clipping functions can change.

    For a sparse gradient, as of an embedding, this is a tensor whose `.grad` is the values of the
    gradient. Otherwise it is the parameter.
    """
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    parameter.grad = parameter.grad.coalesce()  # entries at one index are added up first
    values = parameter.grad.values()
    holder = torch.empty_like(values)
    holder.grad = values
    return holder
