"""How far two recordings lie apart, site by site. Imports values, statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hookline.engine import tree
from hookline.engine.errors import InputError
from hookline.views.plots.values import Source, Value, one_pass, walk
from hookline.views.statistics import pieces

_ROUNDING = 1e-13


@final
@dataclass(frozen=True)
class Difference:
    """How far two values of a site lie apart; NaN and infinity are left out and counted.

    Args:
        label: the site.
        relative: the L2 norm of the difference, over that of the second; infinite over zero.
        cosine: 1 less the cosine between the two: 0 for one direction, 2 for opposite ones.
        problem: why they cannot be compared: different shapes, or one is not finite where the
            other is; empty if they can.
    """

    label: str
    relative: float = math.inf
    cosine: float = math.nan
    problem: str = ""

    @property
    def differs(self) -> bool:
        """Whether anything at all is different."""
        return bool(self.problem) or self.relative > 0


def differences(a: Source, b: Source) -> tuple[list[Difference], list[str]]:
    """The differences of the sites that both hold, in the order in which they fired in the first.

    Returns:
        The differences; and remarks on what could not be compared.

    Raises:
        InputError: the two have no site in common.
    """
    ours, theirs = dict(walk(one_pass(a))), dict(walk(one_pass(b)))
    found, unread = [], []
    for key, one in ours.items():
        other = theirs.get(key)
        if isinstance(one, Value) and isinstance(other, Value):
            found.append(difference(key, one.tensor, other.tensor))
        elif other is not None:
            unread.append(key)
    if not found:
        raise InputError(
            "the two recordings have no value in common:"
            f" the first holds {', '.join(list(ours)[:3])}, …; the second"
            f" {', '.join(list(theirs)[:3])}, ….\nRecord the same sites in both."
        )
    remarks = [
        f"{len(keys)} {what} ({keys[0]}{', …' if len(keys) > 1 else ''})"
        for keys, what in (
            ([key for key in ours if key not in theirs], "only in the first"),
            ([key for key in theirs if key not in ours], "only in the second"),
            (unread, "overwritten in place or without a tensor"),
        )
        if keys
    ]
    return found, remarks


def difference(label: str, a: Tensor, b: Tensor) -> Difference:
    """How far two tensors lie apart, read in pieces of float64."""
    if a.is_nested or b.is_nested or a.shape != b.shape:
        return Difference(label, problem=f"shapes {tree.shape(a)} and {tree.shape(b)}")
    if a.is_complex() or b.is_complex():  # a piece is the magnitude, and phases differ, too
        a, b = (torch.view_as_real(t.detach().to(torch.complex128).resolve_conj()) for t in (a, b))
    gap = dot = norm_a = norm_b = 0.0
    n_odd = 0
    for x, y in zip(pieces(a), pieces(b), strict=True):
        x, y = x.cpu(), y.cpu()  # noqa: PLW2901
        same_odd = (x == y) | (x.isnan() & y.isnan())
        finite = x.isfinite() & y.isfinite()
        n_odd += int((~finite & ~same_odd).sum())
        x, y = x.where(finite, 0.0), y.where(finite, 0.0)  # noqa: PLW2901
        gap += float((x - y).square().sum())
        dot += float((x * y).sum())
        norm_a += float(x.square().sum())
        norm_b += float(y.square().sum())
    if n_odd:
        return Difference(label, problem=f"{n_odd:,} NaN or infinite in one of the two")
    if not gap:
        return Difference(label, 0.0, 0.0)
    relative = math.sqrt(gap / norm_b) if norm_b else math.inf
    product = math.sqrt(norm_a) * math.sqrt(norm_b)
    cosine = 1 - dot / product if product else math.nan
    # Below that it is the rounding of the sums.
    return Difference(label, relative, 0.0 if abs(cosine) < _ROUNDING else cosine)
