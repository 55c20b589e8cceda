"""Identities between values, which prove names: what they claim, and how far they are off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from hookline.statistics.flat_numbers import to_float64

NO_SITE = "no module gets or returns it, and no function of torch makes it of the input"


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """One identity between values, which some names need."""

    text: str  # the identity, for people
    names: tuple[str, ...]  # the names that it proves
    sites: tuple[str, ...]  # the sites of its values
    measure: Callable[..., float]  # returns the error from the values of these sites


@final
@dataclass(slots=True)
class Names:
    """The names of one block, or those that belong to no block."""

    sites: dict[str, str] = field(default_factory=dict)  # the sites by name
    refused: dict[str, str] = field(default_factory=dict)  # the reason for each name without a site
    claims: list[Claim] = field(default_factory=list)  # the identities that the names need

    def add_or_refuse(self, name: str, site: str | None, why: str = NO_SITE) -> bool:
        """Add a site; a value without a site is refused for a reason."""
        if site is None:
            self.refused[name] = why
        else:
            self.sites[name] = site
        return site is not None

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Refuse names for one reason."""
        self.refused.update(dict.fromkeys(names, why))

    def add_claim(
        self,
        text: str,
        names: Iterable[str],
        sites: Sequence[str | None],
        measure: Callable[..., float],
    ) -> None:
        """Claim an identity; it fails if one of the values has no site."""
        known = tuple(site for site in sites if site is not None)
        is_whole = len(known) == len(sites)
        of_known = measure if is_whole else lambda *_: math.inf
        self.claims.append(Claim(text, tuple(names), known, of_known))


# -- errors ---------------------------------------------------------------------------------------

CLOSE = 1e-5
# What norms add to the square before they divide by its root, the most frequent first.
_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1.1920929e-07, 1.5625e-07, 1e-7, 1e-30, 1e-4, 1e-3, 1e-2)
_EQUAL = CLOSE / 10  # no better form is looked for
_WORSE = float("inf")


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest error that counts as equal: 1e-5, or more in coarser dtypes."""
    return max(CLOSE, 8 * torch.finfo(dtype).eps)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest of the relative error, that of the largest element, and the norm ratio's.

    >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    0.0
    >>> round(relative_error(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])), 3)
    0.5
    """
    if got.numel() != expected.numel() or not got.numel():
        return _WORSE
    got, expected = to_float64(got).flatten(), to_float64(expected).flatten()
    is_same = got.isinf() & (got == expected)  # such as of words that are masked
    got, expected = got.masked_fill(is_same, 0.0), expected.masked_fill(is_same, 0.0)
    norm, largest = expected.norm(), expected.abs().max()
    if not norm:
        return _WORSE if got.any() else 0.0
    off = got - expected
    errors = off.norm() / norm, off.abs().max() / largest, (got.norm() / norm - 1).abs()
    worst = float(torch.stack(errors).max())
    return _WORSE if math.isnan(worst) else worst


def rescale_fit_error(after: Tensor, before: Tensor) -> float:
    """Return the error of the best scale, norm, or scaled norm that makes one value of another.

    A scale has one factor, or one for each channel. A norm divides each token by its root mean
    square, or subtracts its mean and divides by its standard deviation, and then has a factor and
    an offset for each channel. There must be more tokens than these.
    """
    if before.shape != after.shape:
        if before.numel() != after.numel():
            return _WORSE
        before = before.reshape(after.shape)
    x, y = to_float64(before).flatten(0, -2), to_float64(after).flatten(0, -2)
    if len(x) < 4:
        return _WORSE
    least = _WORSE
    for values in _unchanged_and_normalized(x):
        least = min(least, _affine_fit_error(values, y))
        if least < _EQUAL:
            break
    return least


def equal_or_rescale_error(after: Tensor, before: Tensor) -> float:
    """Return the error of two values as equal ones, or of the best scale or norm between them."""
    return min(relative_error(before, after), rescale_fit_error(after, before))


def _unchanged_and_normalized(x: Tensor) -> Iterator[Tensor]:
    """Yield the numbers themselves, and their norms."""
    yield x
    for values in (x - x.mean(-1, keepdim=True), x):
        square = (values * values).mean(-1, keepdim=True)
        yield from (values / (square + eps).sqrt() for eps in _EPS)


def _affine_fit_error(x: Tensor, y: Tensor) -> float:
    """Return the error of the best factor and offset for each channel."""
    x0, y0 = x - x.mean(0), y - y.mean(0)
    factor = (x0 * y0).sum(0) / (x0 * x0).sum(0).clamp(min=1e-30)
    return relative_error(factor * x0 + y.mean(0), y)
