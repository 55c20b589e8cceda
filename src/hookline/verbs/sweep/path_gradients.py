"""Read values and gradients at sites, at points of a path from one run to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine import is_recomputing
from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import AmbiguousError, InputError
from hookline.verbs.edit.edit import edit
from hookline.verbs.shared.gradients import compute_gradients
from hookline.verbs.shared.run_model import call_model, copy_inputs
from hookline.verbs.sweep.metric import Metric, metric_number
from hookline.verbs.sweep.site_change import require_same_form

Values = Mapping[str, Any]


class PathPoint(NamedTuple):
    """A point of a path: the metric there, and the value and the gradient of each site."""

    number: float
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


@final
class PathIntegral:
    """The gradients of a site on a path, each times how far the value moves there, summed.

    The value moves from the middle between a point and the one before to the middle between it and
    the next, and at both ends of the path from the beginning and to the end.

    Args:
        start: the value at the beginning of the path.
        end: the value at its end.

    Attributes:
        total: the sum of the gradients.
        n: how many points there were.
    """

    def __init__(self, start: Tensor, end: Tensor) -> None:
        # In a half precision, a sum of many steps would round each of them.
        self._dtype = torch.promote_types(start.dtype, torch.float32)
        self._border, self._end = start.to(self._dtype), end.to(self._dtype)
        self._sum = torch.zeros_like(self._border)
        self.total: Tensor = torch.zeros_like(self._border)
        self._last: tuple[Tensor, Tensor] | None = None
        self.n: int = 0

    def add(self, value: Tensor, gradient: Tensor) -> None:
        """Take the next point."""
        value, gradient = value.to(self._dtype), gradient.to(self._dtype)
        if self._last is not None:
            border = (self._last[0] + value) / 2
            self._sum = self._sum + self._last[1] * _displacement(self._border, border)
            self._border = border
        self._last = value, gradient
        self.total = self.total + gradient
        self.n += 1

    @property
    def score(self) -> Tensor:
        """The sum over the whole path."""
        gradient = self.total if self._last is None else self._last[1]
        return self._sum + gradient * _displacement(self._border, self._end)

    @property
    def mean(self) -> Tensor:
        """The mean gradient."""
        return self.total / max(self.n, 1)


def _displacement(start: Tensor, end: Tensor) -> Tensor:
    """Return how far a value moves; 0 where it stays infinite, as a masked score does."""
    return (end - start).masked_fill(end == start, 0)


@final
class PathGradients:
    """Runs of a model on the way from its inputs to another run."""

    def __init__(self, model: nn.Module, inputs: Any, metric: Metric) -> None:
        self._model, self._inputs, self._metric = model, inputs, metric

    def compute_at(
        self, sites: Sequence[str], moved: Values | None = None, fraction: float = 0.0
    ) -> PathPoint:
        """Return the values and gradients at sites.

        Args:
            sites: the sites.
            moved: the goals of the sites that move.
            fraction: how far they have moved towards their goals.

        Raises:
            InputError: the metric has no gradient, or there is no line to a goal.
            StructureError: a goal has another form.
        """
        zeros = _AddedZeros()
        run = self._run(sites, zeros, moved or {}, fraction)
        with torch.enable_grad(), run as output:  # in a checkpoint, the backward runs sites again
            metric = self._metric(output)
            number = metric_number(lambda _: metric, None)
            if not isinstance(metric, Tensor) or not metric.requires_grad:
                raise InputError(
                    "metric must return a tensor with a gradient, got"
                    f" {describe.in_words(metric)} without one.\nCompute it from the output by"
                    " differentiable functions of torch: no argmax, .item() or torch.no_grad()."
                    " hl.sweep takes any metric."
                )
            grads = compute_gradients([metric.sum()], [zeros.leaves[site] for site in sites])
        if all(grad is None for grad in grads):
            raise InputError(
                f"metric must depend on a value at {', '.join(sites[:3])}, got one that depends on"
                " none.\nSelect sites that the metric's part of the output is computed from."
            )
        known = {
            site: torch.zeros_like(zeros.leaves[site]) if grad is None else grad
            for site, grad in zip(sites, grads, strict=True)
        }
        return PathPoint(number, zeros.values, known)

    def values_at_end(self, sites: Sequence[str], moved: Values) -> dict[str, Tensor]:
        """Return the values at sites where others have reached their goals."""
        zeros = _AddedZeros()
        with self._run(sites, zeros, moved, 1.0):
            return zeros.values

    @contextmanager
    def _run(
        self, sites: Sequence[str], zeros: _AddedZeros, moved: Values, fraction: float
    ) -> Iterator[Any]:
        is_over = False

        def in_this_run(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
            # The metric may run the model, too.
            return lambda value: None if is_over and not is_recomputing() else change(value)

        with ExitStack() as lines:
            if moved:
                moves = {
                    site: in_this_run(partial(_interpolate_to_goal, site, moved[site], fraction))
                    for site in moved
                }
                lines.enter_context(edit(self._model, moves))
            additions = {site: in_this_run(partial(zeros.add, site)) for site in sites}
            lines.enter_context(edit(self._model, additions))
            output = call_model(self._model, copy_inputs(self._inputs))
            is_over = True
            yield output


@final
class _AddedZeros:
    """Add zeros to the value at each site, and differentiate with respect to them.

    The gradient with respect to one site's zeros is that of this site alone, also where another
    site lies behind it, and the model's parameters may be frozen.

    Attributes:
        leaves: the zeros by site.
        values: the values by site, before the zeros were added.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def add(self, site: str, value: Any) -> Tensor:
        """Return the value at a site with its zeros."""
        tensor = require_floating(site, value)
        if site in self.leaves and is_recomputing():
            return tensor + self.leaves[site]
        if site in self.leaves:
            raise AmbiguousError(
                f"{site} must run once in a forward, got a second call.\nName the call:"
                f" {site + '#0'!r}."
            )
        zero = self.leaves[site] = torch.zeros_like(tensor).requires_grad_()
        self.values[site] = tensor.detach().clone()
        return tensor + zero


def _interpolate_to_goal(site: str, goal: Any, fraction: float, value: Any) -> Any:
    """Return the value at a site, moved by a fraction of the way to its goal."""
    require_same_form(site, value, goal)
    for (leaf, now), (_, then) in zip(tree.tensors(value), tree.tensors(goal), strict=True):
        if now.is_floating_point():
            value = leaves.put(value, leaf, now + fraction * _displacement(now, then), site)
        elif not torch.equal(now, then):
            raise InputError(
                f"along must name values with a line between them, got {site}, which has other"
                f" {describe.in_words(now)} in the clean run.\nName a site with numbers that"
                " follow from it, such as the embedding."
            )
    return value


def require_floating(site: str, value: Any) -> Tensor:
    """Return a value that is one floating tensor.

    Raises:
        InputError: it is something else.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    raise InputError(
        f"{site} must have one floating tensor, to be differentiated, got"
        f" {describe.in_words(value)}.\nSelect another site, or a leaf such as"
        f" {site + ':output[0]'!r}."
    )
