"""The identities that prove the names, and their errors on recorded values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hookline.verbs.anatomy.identity_errors import error, error_of_rescale
from hookline.verbs.anatomy.parts import KINDS, Layer, site_of, stream_site
from hookline.verbs.anatomy.trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """One identity between values, which some names need.

    Attributes:
        text: the identity, for people.
        names: the names that it proves.
        sites: the sites of its values.
        measure: returns the error from the values of these sites.
    """

    text: str
    names: tuple[str, ...]
    sites: tuple[str, ...]
    measure: Callable[..., float]


def _sum_error(after: Tensor, before: Tensor, *terms: Tensor) -> float:
    total = before
    for term in terms:
        total = total + on_stream(term, before.shape)
    return error(total, after)


def on_stream(term: Tensor, shape: torch.Size) -> Tensor:
    """Return a term in the shape of the stream that it is added to, and has fewer tokens than."""
    return term.reshape(shape) if term.numel() == shape.numel() else term.expand(shape)


def claims_of(trace: Trace, layer: Layer) -> list[Claim]:
    """Return the identities of a layer; a stream without a site is a claim that fails."""
    block = layer.block
    claims = []
    streams = ("resid_pre", "resid_mid", "resid_post")
    sums = [prefix + "_out" for prefix in KINDS.values()]
    for step in block.steps:
        before, after = (stream_site(trace, value, block) for value in (step.before, step.after))
        terms = [site_of(trace, term.value, block.path) for term in step.terms]
        sites = (after, before, *terms)
        measure = _sum_error if step.kind == "sum" else _rescale_error
        names = (*streams, *(name for name in sums if layer.sites.get(name) in terms))
        text = " + ".join(map(str, sites[1:]))
        text = text if step.kind == "sum" else f"a scale or norm of {text}"
        claims.append(claim(text, names, sites, measure))
    for kind, prefix in KINDS.items():
        for part in layer.of_kind(kind)[:1]:
            got = layer.sites.get(f"{prefix}_in")
            if got is not None and part.term.reads:
                read = stream_site(trace, part.term.reads[-1], block)
                claims.append(claim("norm", (f"{prefix}_in",), (got, read), _rescale_error))
            raw, added = layer.sites.get(f"{prefix}_out_raw"), layer.sites.get(f"{prefix}_out")
            if raw is not None and added is not None and raw != added:
                names = (f"{prefix}_out_raw",)
                claims.append(claim("rescale", names, (added, raw), _rescale_error))
    return claims


def _rescale_error(after: Tensor, before: Tensor) -> float:
    return min(error(before, after), error_of_rescale(before, after))


def claim(
    text: str, names: Sequence[str], sites: Sequence[str | None], measure: Callable[..., float]
) -> Claim:
    """Return the claim of an identity; it fails if one of the values has no site."""
    known = tuple(site for site in sites if site is not None)
    if len(known) < len(sites):
        return Claim(text, tuple(names), known, lambda *_: float("inf"))
    return Claim(text, tuple(names), known, measure)
