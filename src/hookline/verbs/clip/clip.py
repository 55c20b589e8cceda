"""Clip gradients in backward, and report how often that was needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never, Self, final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_

from hookline.engine import (
    Consequence,
    GradientCallback,
    Order,
    Pass,
    PendingGradient,
    Selection,
    Selector,
    Site,
    check_ports,
    gradient_split_groups,
    has_process_group,
    hide_from_dir,
    is_dtensor,
    is_flat_parameter,
    local_part,
    path_text,
    tensor_parallel_parameters,
)
from hookline.errors import AttachError, warn
from hookline.verbs.attach.raw_line import RawLine
from hookline.verbs.clip.limit import Limit, largest_element
from hookline.verbs.clip.parameter_gradients import (
    ClipAfterBackward,
    ClipOnAccumulate,
    check_same_sites_on_ranks,
    clip_norm,
    grad_holder,
)
from hookline.verbs.clip.report import ClipReport, Tally
from hookline.verbs.shared.finalizing_line import FinalizingLine


@final
@hide_from_dir("start")
class ClipLine(FinalizingLine[RawLine]):
    """A line that clips: a context manager, or ended by `remove()`. `report()` counts the clips."""

    def __init__(self, line: RawLine, limit: Limit) -> None:
        super().__init__(line)
        self._limit = limit
        self._tallies: list[Tally] = []
        self._has_warned = False

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def report(self) -> ClipReport:
        """Report how often, and how much, gradients were clipped at each site."""
        rows = tuple(tally.row(self._limit.bound) for tally in self._tallies)
        return ClipReport(self._line.report(), rows)

    def _after_removal(self, error: BaseException | None) -> None:
        if error is not None:
            return
        bad = [row for row in self.report().rows if row.nonfinite]
        if bad and not self._has_warned:
            self._has_warned = True
            warn(
                f"hl.clip: {sum(row.nonfinite for row in bad)} gradients had inf or NaN, which"
                f" clipping does not mend: {', '.join(row.site for row in bad[:4])}."
                "\nFind where they begin: hl.record(model, ports=('output', 'grad_output'))."
            )

    # -- attaching ------------------------------------------------------------------------------

    def start(self, selection: Selection) -> None:
        """Register the hooks at the selected sites."""
        places = list(selection.places)
        weights = [place for place in places if place[0].port == "grad"]
        between = [place for place in places if place[0].port != "grad"]
        is_total = self._limit.kind == "total_norm"
        if is_total and between:
            raise AttachError(
                "total_norm must be given parameters, got gradients between modules"
                f" ({between[0][0]}): it needs all gradients before it can change any, and these"
                " are used up by then.\nUse norm= for each of them, or total_norm= for parameters."
            )
        if weights and self._limit.kind != "value":
            tensors = [node.tensor for _, node in weights]  # type: ignore[union-attr]
            if any(map(is_flat_parameter, tensors)):
                raise AttachError(
                    "hl.clip by a norm must be given whole gradients or DTensors, got a flat"
                    " parameter of FSDP1: each rank would clip by the norm of its own part."
                    "\nShard by fully_shard; or call model.clip_grad_norm_(...) after backward()."
                )
            check_same_sites_on_ranks([site for site, _ in weights], tensors)
        if between and self._limit.kind == "norm" and isinstance(self._line.root, nn.Module):
            split = tensor_parallel_parameters(self._line.root)
            self._limit.is_split = bool(split)
            check_same_sites_on_ranks([site for site, _ in between], split)
        with self._line.undo_on_error():
            if is_total:
                self._tallies.append(Tally("total"))
                self._hook_total_norm(selection)
            elif weights:
                self._hook_each_parameter(Selection(self._line.module_tree, weights))
            if between:
                self._line.attach_taps(
                    Selection(self._line.module_tree, between),
                    lambda site: _ClipGradient(site, self._new_tally(site), self._limit),
                    Order.EDIT,
                )

    def _new_tally(self, site: Site) -> Tally:
        self._tallies.append(Tally(str(site)))
        return self._tallies[-1]

    def _hook_each_parameter(self, selection: Selection) -> None:
        tallies = {id(node.tensor): self._new_tally(site) for site, node in selection.places}  # type: ignore[union-attr]
        limit = self._limit

        def clip_parameter(parameter: Tensor) -> None:
            holder = grad_holder(parameter)
            if limit.kind == "value":
                tallies[id(parameter)].add(largest_element(holder.grad), limit.bound)
                clip_grad_value_([holder], limit.bound)
            else:
                norm = clip_norm([holder], limit.bound, limit.norm_type)
                tallies[id(parameter)].add(norm, limit.bound)

        def clip_each(parameters: dict[int, Tensor]) -> None:
            # Each norm is a collective, so all ranks must compute norms in the same order.
            for key in tallies:
                if key in parameters:
                    clip_parameter(parameters[key])

        at_end = ClipAfterBackward(clip_each)
        when_whole = ClipOnAccumulate(clip_parameter)

        def on_accumulated(parameter: Tensor) -> None:
            if (
                has_process_group()
            ):  # DDP writes its reduced gradients into .grad at the end of backward
                at_end.add_accumulated(parameter)
            else:
                when_whole.clip_or_queue(parameter)

        self._line.accumulated_in_order(selection, on_accumulated, Order.ACCUMULATED_EDIT)

    def _hook_total_norm(self, selection: Selection) -> None:
        parameters = [node.tensor for _, node in selection.places]  # type: ignore[union-attr]
        limit, tally = self._limit, self._tallies[0]

        def clip_all(_: dict[int, Tensor]) -> None:
            holders = [grad_holder(p) for p in parameters if p.grad is not None]
            tally.add(clip_norm(holders, limit.bound, limit.norm_type), limit.bound)

        at_end = ClipAfterBackward(clip_all)
        self._line.accumulated_in_order(selection, at_end.add_accumulated, Order.ACCUMULATED_EDIT)


@final
class _ClipGradient(GradientCallback):
    """Clip the gradients of values between modules."""

    __slots__ = ("_limit", "_site", "_tally", "awaits", "before_inside", "inside")
    changes = True

    def __init__(self, site: Site, tally: Tally, limit: Limit) -> None:
        self._site = site
        self._tally = tally
        self._limit = limit
        self.inside = limit.clip_in_graph
        self.before_inside = self._measure_and_count
        self.awaits = self._keep_process_groups if limit.is_split else None

    def _keep_process_groups(
        self, current: Pass, pending: PendingGradient, slot: int, tensor: Tensor
    ) -> None:
        if is_dtensor(tensor):  # torch computes the norm over all ranks itself
            return
        groups, unknown = gradient_split_groups(tensor)
        if unknown == "partial" or (unknown and current.recomputation is not None):
            why = "is a partial sum" if unknown == "partial" else "is in a reentrant checkpoint"
            raise AttachError(
                f"{self._site} must have a gradient whose norm can be computed, got one that {why}."
                "\nGive value=, which needs no norm; or checkpoint with use_reentrant=False."
            )
        pending.gathered["groups", slot] = list(groups.values())

    def on_gradient(
        self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor
    ) -> Tensor:
        """Clip the gradient of one tensor."""
        if grad.is_nested and grad.layout is torch.strided:
            return grad  # torch allows no changed gradient of a nested tensor: the tap refuses it
        if grad.is_sparse:
            sums = grad.coalesce()
            new = self.on_gradient(current, pending, slot, sums.values())
            return torch.sparse_coo_tensor(
                sums.indices(), new, sums.size(), is_coalesced=True, check_invariants=False
            )
        groups = pending.gathered.get(("groups", slot), ())
        return self._limit.clip(grad, self._measure_and_count(grad, groups))

    def _measure_and_count(self, grad: Tensor, groups: Sequence[Any] = ()) -> Tensor:
        size = self._limit.norm_or_largest(local_part(grad) if groups else grad)
        size = self._limit.norm_over_ranks(size, groups)
        self._tally.add(size, self._limit.bound)
        return size


def _wrong_argument_message(name: str) -> str:
    advice = {
        "max_norm": (
            "norm= (each gradient by itself), or total_norm= (all together, as clip_grad_norm_)"
        ),
        "clip_value": "value= (each element)",
    }.get(name, "norm=, total_norm= or value=, with norm_type=, ports= and every_thread=")
    return f"hl.clip has no {name}=.\nGive {advice}."


_CONSEQUENCE = Consequence(
    "the clip of {sites} no longer happens", "the clip of {sites} is at {now} now"
)


def clip(
    model: nn.Module,
    selector: Selector = None,
    *,
    norm: float | None = None,
    value: float | None = None,
    total_norm: float | None = None,
    norm_type: float = 2.0,
    ports: str | Sequence[str] = "grad",
    every_thread: bool = False,
    **others: Never,
) -> ClipLine:
    """Clip gradients while the block lasts: of parameters, or of values between modules.

        >>> model = nn.Linear(2, 1)
        >>> loss = model(torch.full((1, 2), 100.0)).sum()
        >>> with hl.clip(model, norm=1.0) as line:
        ...     loss.backward()
        >>> float(model.weight.grad.norm())
        1.0
        >>> line.report().clipped
        1

    A parameter's `.grad` is clipped after it has been accumulated, as `clip_grad_value_` and
    `clip_grad_norm_` do after `backward()`. So gradients from before the block count, too. To
    accumulate over several backward passes and clip the sum, put the block around the last one.

    In a distributed job, `.grad` is clipped at the end of backward, after DDP and FSDP2 have
    reduced it. Where a gradient is split over ranks, its norm is over all ranks, and all of them
    must clip. This holds for sharded parameters, and for values under tensor parallelism.

    A gradient between modules is clipped as it arrives, and everything before it in the model gets
    the clipped gradient (Pascanu et al., 2013, "On the difficulty of training recurrent neural
    networks").

    Args:
        model: the model.
        selector: which parameters, by their paths or by the modules that hold them. With module
            ports, which modules. None selects all.
        norm: the largest norm of each gradient. A larger gradient is scaled down to this norm. Give
            exactly one of the three bounds `norm`, `value` and `total_norm`. A bound of
            `float("inf")` measures, and clips nothing.
        value: the largest absolute value of an element. A larger element becomes plus or minus this
            value.
        total_norm: the largest norm over the gradients of all selected parameters together, as one
            vector. If it is larger, one factor scales all of them down.
        norm_type: the p of the p-norm; `float("inf")` is the largest absolute element.
        ports: "grad" (of parameters), "grad_output" or "grad_input", for selectors that name no
            port.
        every_thread: True clips in every thread and async task. False clips in the calling thread
            or task, and in code that runs in a copy of its context.
        **others: none are allowed. For one of torch's names (`max_norm`, `clip_value`), the error
            says which argument to give here.

    Returns:
        A line. Use it in a `with` block, or end it with `line.remove()`. `line.report()` says how
        often and how much it clipped. Gradients that are not finite are counted, and a warning at
        the end names their sites.

    Raises:
        AttachError: not exactly one of the three bounds is given, or the bound is not a number >=
            0. Or `total_norm` is given with module ports, a selected site is no gradient, all
            selected parameters are frozen, or FSDP1 shards them.
        SelectionError: the selector matches nothing, or a port is unknown.
        RanksError: parameters are sharded, and another rank does not clip at the same sites.
        TypeError: another argument is given.
    """
    if others:
        raise TypeError(_wrong_argument_message(next(iter(others))))
    bounds = {"norm": norm, "value": value, "total_norm": total_norm}
    given_bounds = {kind: bound for kind, bound in bounds.items() if bound is not None}
    if len(given_bounds) != 1:
        raise AttachError(
            f"hl.clip must be given one bound, got {', '.join(given_bounds) or 'none'}."
            "\nGive norm= (each gradient), total_norm= (all together) or value= (each element)."
        )
    ((kind, bound),) = given_bounds.items()
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not bound >= 0:
        raise AttachError(
            f"{kind} must be a number >= 0, got {bound!r}."
            f"\nGive {kind}=1.0, for instance; float('inf') measures and clips nothing."
        )
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float):
        raise AttachError(
            f"norm_type must be a number, got {norm_type!r}.\nGive norm_type=2.0, or float('inf')."
        )
    line = RawLine(model, name="clip", every_thread=every_thread)
    line.options.lenient = selector is None
    line.originals.consequence = _CONSEQUENCE
    selection = line.select(selector, check_ports(ports))
    for site in selection:
        if not site.is_gradient:
            raise AttachError(
                f"hl.clip must be given gradients, got {str(site)!r}."
                f"\nWrite '{path_text(site.path)}:grad_output', or hl.edit(model, selector,"
                " hl.edits.clamp(...)) for values."
            )
    clipping = ClipLine(line, Limit(kind, float(bound), float(norm_type)))
    clipping.start(selection)
    return clipping
