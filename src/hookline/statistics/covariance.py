"""The mean and the covariance of the features of values, which add up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.pytree import describe
from hookline.errors import StructureError
from hookline.statistics.flat_numbers import (
    CHUNK_NUMEL,
    check_slots,
    check_tensor,
    numeric_strided_parts,
    slot_device,
    to_real_float,
)


@final
@dataclass(frozen=True, eq=False)
class Covariance:
    """The mean and the covariance of features, over rows: the result of `covariance()`.

        >>> statistic = hl.stats.covariance()
        >>> x = torch.tensor([[0.0, 0.0], [2.0, -2.0]])
        >>> result = statistic.result(statistic.update(statistic.start(x), x))
        >>> print(result)
        covariance of 2 features over 2 rows, 0 of them non-finite
        >>> result.correlation.tolist()
        [[1.0, -1.0], [-1.0, 1.0]]

    `correlation` is the matrix of correlations, with NaN for a feature that is constant.
    `second_moment` is the mean of `x xᵀ` over the rows x. If x are the inputs of a linear layer,
    this is half the Hessian of the layer's squared error, as in Frantar et al., "GPTQ", ICLR 2023.
    Both have the shape `(features, features)`.

    Args:
        count: how many rows there are.
        non_finite: how many of them have a NaN or infinity. `mean` and `matrix` leave these out.
        mean: the mean of each feature, shape `(features,)`, float64; NaN without rows.
        matrix: the covariance, shape `(features, features)`, float64. It is divided by the number
            of rows n, not by n - 1; NaN without rows.
    """

    count: int
    non_finite: int
    mean: Tensor
    matrix: Tensor

    @property
    def second_moment(self) -> Tensor:
        """The mean of `x xᵀ` over rows, shape `(features, features)`."""
        return self.matrix + torch.outer(self.mean, self.mean)

    @property
    def correlation(self) -> Tensor:
        """The correlation, shape `(features, features)`; NaN for a feature that is constant."""
        variance = self.matrix.diagonal()
        rounding = 16 * torch.finfo(torch.float64).eps * self.mean.abs()  # of a constant's mean
        deviation = torch.where(variance > rounding.square(), variance.sqrt(), torch.nan)
        return self.matrix / torch.outer(deviation, deviation)

    def __str__(self) -> str:
        return (
            f"covariance of {len(self.mean):,} features over {self.count:,} rows,"
            f" {self.non_finite:,} of them non-finite"
        )


@final
class CovarianceStatistic:
    """A `Statistic` whose result is a `Covariance`.

    The slots: the count of rows, that of non-finite rows, the means of the others, and the sums of
    products of deviations from these means.
    """

    takes_blocks = True

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def start(self, value: Tensor) -> Tensor:
        """Return empty slots on the value's device, for its number of features."""
        n = _check_features(value).shape[-1]
        return torch.zeros(2 + n + n * n, dtype=torch.float64, device=slot_device(value))

    def update(self, slots: Tensor, value: Tensor) -> Tensor:
        """Return the slots with one more value.

        Raises:
            StructureError: the value has no dimension, another number of features, or is complex.
        """
        n = _check_features(value).shape[-1]
        check_slots(slots, None)
        if slots.shape[0] != 2 + n + n * n:
            raise StructureError(
                "a value of hl.stats.covariance must have as many features as the first one, got"
                f" {describe.shape(value)}.\nGive each site slots of its own."
            )
        traces = torch.compiler.is_compiling()
        for part in numeric_strided_parts(value):
            rows = part.reshape(math.prod(part.shape[:-1]), n)  # -1 cannot be told where n is 0
            for piece in [rows] if traces else torch.split(rows, max(1, CHUNK_NUMEL // max(1, n))):
                slots = self.merge(slots, _rows_to_slots(to_real_float(piece).to(torch.float64)))
        return slots

    def merge(self, slots: Tensor, other: Tensor) -> Tensor:
        """Merge two sets of slots, by the formula of Chan, Golub and LeVeque."""
        n = _n_features(slots)
        check_slots(other, slots.shape[0])
        count, other_count = slots[0] - slots[1], other[0] - other[1]
        share = other_count / (count + other_count).clamp(min=1)
        apart = other[2 : 2 + n] - slots[2 : 2 + n]
        between = torch.outer(apart, apart) * (count * share)
        return torch.cat(
            [
                slots[:2] + other[:2],
                slots[2 : 2 + n] + apart * share,
                slots[2 + n :] + other[2 + n :] + between.reshape(-1),
            ]
        )

    def result(self, slots: Tensor) -> Covariance:
        """Read slots."""
        n = _n_features(slots)
        count, non_finite = int(slots[0]), int(slots[1])
        finite = count - non_finite
        mean = slots[2 : 2 + n].clone() if finite else slots.new_full((n,), torch.nan)
        matrix = slots[2 + n :].reshape(n, n) / finite
        return Covariance(count, non_finite, mean, matrix)


def _rows_to_slots(rows: Tensor) -> Tensor:
    is_finite = (rows.abs() < torch.inf).all(dim=-1, keepdim=True)
    finite = is_finite.sum(dtype=torch.float64)
    mean = torch.where(is_finite, rows, 0.0).sum(dim=0) / finite.clamp(min=1)
    apart = torch.where(is_finite, rows - mean, 0.0)
    count = torch.full_like(finite, rows.shape[0])
    counts = torch.stack([count, count - finite])
    return torch.cat([counts, mean, (apart.T @ apart).reshape(-1)])


def _n_features(slots: Tensor) -> int:
    """Return n, where the slots are 2 + n + n².

    Raises:
        StructureError: there is no such n.
    """
    check_slots(slots, None)
    n = int(max(slots.shape[0] - 1.75, 0) ** 0.5)
    check_slots(slots, 2 + n + n * n)
    return n


def _check_features(value: Tensor) -> Tensor:
    check_tensor(value)
    if value.dim() == 0 or value.is_complex():
        raise StructureError(
            "a value of hl.stats.covariance must be real and have a dimension of features, got"
            f" {describe.in_full(value)}.\nGive a view of it, such as value.reshape(-1, 1)."
        )
    return value
