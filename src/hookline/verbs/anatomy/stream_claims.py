"""The identities of a block: how its stream is summed, scaled and normalised."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.verbs.anatomy.identity_errors import error, error_up_to_rescale
from hookline.verbs.anatomy.parts import KINDS, Layer, site_of, stream_site
from hookline.verbs.anatomy.trace import Trace


def _sum_error(after: Tensor, before: Tensor, *terms: Tensor) -> float:
    total = before
    for term in terms:
        total = total + reshape_or_expand(term, before.shape)
    return error(total, after)


def reshape_or_expand(term: Tensor, shape: torch.Size) -> Tensor:
    """Return a term in the shape of the stream that it is added to, and has fewer tokens than."""
    return term.reshape(shape) if term.numel() == shape.numel() else term.expand(shape)


def claim_stream_identities(trace: Trace, layer: Layer) -> None:
    """Claim the identities of a layer's stream; a stream without a site is a claim that fails."""
    block, names = layer.block, layer.names
    streams = ("resid_pre", "resid_mid", "resid_post")
    sums = [prefix + "_out" for prefix in KINDS.values()]
    for step in block.steps:
        before, after = (stream_site(trace, value, block) for value in (step.before, step.after))
        terms = [site_of(trace, term.value, block.path) for term in step.terms]
        sites = (after, before, *terms)
        proven = (*streams, *(name for name in sums if names.sites.get(name) in terms))
        if terms:
            names.claim(" + ".join(map(str, sites[1:])), proven, sites, _sum_error)
        else:
            names.claim(f"a scale or norm of {before}", proven, sites, error_up_to_rescale)
    for kind, prefix in KINDS.items():
        for part in layer.of_kind(kind)[:1]:
            got = names.sites.get(f"{prefix}_in")
            if got is not None and part.term.reads:
                read = stream_site(trace, part.term.reads[-1], block)
                names.claim("norm", (f"{prefix}_in",), (got, read), error_up_to_rescale)
            raw, added = names.sites.get(f"{prefix}_out_raw"), names.sites.get(f"{prefix}_out")
            if raw is not None and added is not None and raw != added:
                names.claim("rescale", (f"{prefix}_out_raw",), (added, raw), error_up_to_rescale)
