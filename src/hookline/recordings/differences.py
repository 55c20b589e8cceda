"""Compute the differences between two recordings, site by site."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hookline.engine.pytree import describe
from hookline.errors import InputError
from hookline.recordings.figure_arguments import Source
from hookline.recordings.walk import Value, one_pass, tensors_of
from hookline.statistics.moments_statistic import measure
from hookline.statistics.to_numbers import pieces

_ROUNDING = 1e-13


@final
@dataclass(frozen=True)
class Difference:
    """The difference between two values of a site, over elements that are finite in both."""

    label: str  # the site
    # the L2 norm of the difference over the norm of the second value; infinite if the second
    # value is zero
    relative: float = math.inf
    # 1 - cosine between the two: 0 for the same direction, 2 for opposite ones
    cosine: float = math.nan
    # the reason why they cannot be compared: different shapes, or elements that are finite in
    # one value only. Otherwise empty
    problem: str = ""

    @property
    def differs(self) -> bool:
        """True if the values are not equal to the last bit."""
        return bool(self.problem) or self.relative > 0


def differences(a: Source, b: Source) -> tuple[list[Difference], list[str]]:
    """Compute the differences of the sites in both recordings, in the firing order of the first.

    Returns:
        The differences, and remarks on values that could not be compared.

    Raises:
        InputError: the recordings have no site in common.
    """
    firsts, seconds = (
        dict(tensors_of(one_pass(source, name))) for source, name in ((a, "a"), (b, "b"))
    )
    gaps, unread = [], []
    for key, first in firsts.items():
        second = seconds.get(key)
        if isinstance(first, Value) and isinstance(second, Value):
            gaps.append(difference(key, first.tensor, second.tensor))
        elif second is not None:
            unread.append(key)
    if unread and not gaps:
        raise InputError(
            f"the two recordings have no value that can be compared: {unread[0]} was overwritten in"
            " place, or holds no numbers that can be read."
            "\nRecord sites with tensors, and give copy=True."
        )
    if not gaps:
        raise InputError(
            "the two recordings have no value in common:"
            f" the first holds {', '.join(list(firsts)[:3])}, …; the second"
            f" {', '.join(list(seconds)[:3])}, ….\nRecord the same sites in both."
        )
    remarks = [
        f"{len(keys)} {reason} ({keys[0]}{', …' if len(keys) > 1 else ''})"
        for keys, reason in (
            ([key for key in firsts if key not in seconds], "only in the first"),
            ([key for key in seconds if key not in firsts], "only in the second"),
            (unread, "overwritten in place or without numbers that can be read"),
        )
        if keys
    ]
    return gaps, remarks


def difference(label: str, a: Tensor, b: Tensor) -> Difference:
    """Compute the difference between two tensors, read in chunks of float64."""
    if a.is_nested or b.is_nested or a.shape != b.shape:
        return Difference(label, problem=f"shapes {describe.shape(a)} and {describe.shape(b)}")
    if a.is_complex() or b.is_complex():  # chunks hold the magnitude only, and phases may differ
        a, b = (torch.view_as_real(t.detach().to(torch.complex128).resolve_conj()) for t in (a, b))
    gap, dot, norm_a, norm_b, n_odd, is_equal = _sums(a, b, 1.0)
    if n_odd:
        return Difference(label, problem=f"{n_odd:,} NaN or infinite in one of the two")
    if is_equal and not _are_other_integers(a, b):
        return Difference(label, 0.0, 0.0)
    if not (gap and math.isfinite(gap + norm_a + norm_b)):  # squares underflowed or overflowed
        gap, dot, norm_a, norm_b, *_ = _sums(a, b, max(measure(x).max_abs for x in (a, b)) or 1.0)
    relative = math.sqrt(gap / norm_b) if norm_b else math.inf
    relative = max(relative, sys.float_info.min)  # unequal values never have a difference of 0
    product = math.sqrt(norm_a) * math.sqrt(norm_b)
    cosine = 1 - dot / product if product else math.nan
    # Smaller numbers are rounding errors of the sums.
    return Difference(label, relative, 0.0 if abs(cosine) < _ROUNDING else cosine)


def _sums(a: Tensor, b: Tensor, scale: float) -> tuple[float, float, float, float, int, bool]:
    """Sum squares and products of `a / scale` and `b / scale` over elements finite in both.

    Returns:
        The sum of squares of the difference, of the products, of the squares of `a` and of `b`;
        the number of elements that are finite in one only; and whether all elements are equal.
    """
    gap = dot = norm_a = norm_b = 0.0
    n_odd, is_equal = 0, True
    for x, y in zip(pieces(a), pieces(b), strict=True):
        x, y = x.cpu(), y.cpu()  # noqa: PLW2901
        same = (x == y) | (x.isnan() & y.isnan())
        finite = x.isfinite() & y.isfinite()
        n_odd += int((~finite & ~same).sum())
        is_equal = is_equal and bool(same.all())
        x, y = (t.where(finite, 0.0) / scale for t in (x, y))  # noqa: PLW2901
        gap += float((x - y).square().sum())
        dot += float((x * y).sum())
        norm_a += float(x.square().sum())
        norm_b += float(y.square().sum())
    return gap, dot, norm_a, norm_b, n_odd, is_equal


def _are_other_integers(a: Tensor, b: Tensor) -> bool:
    """Return whether two int64 tensors differ in a way that float64 cannot represent."""
    return a.dtype == b.dtype == torch.int64 and not torch.equal(a.cpu(), b.cpu())
