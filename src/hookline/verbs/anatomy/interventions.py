"""Tell the parts of each block apart by interventions: sums are symmetric, and cannot.

All blocks are changed in one run. Each block gets the stream that it had in the undisturbed run,
so no change of one block reaches another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.recordings import Recording
from hookline.statistics.flat_numbers import to_float64
from hookline.verbs.anatomy.identities import CLOSE
from hookline.verbs.anatomy.parts import (
    Layer,
    Part,
    is_cross_attention,
    output_site,
    reshape_or_expand,
    side_inputs,
    stream_site,
)
from hookline.verbs.anatomy.trace import Trace
from hookline.verbs.edit.edit import edit
from hookline.verbs.record.features import features
from hookline.verbs.shared.run_model import copy_inputs

_Numbers = Callable[[str], Tensor]  # what a site gets


class _RecordedRuns(NamedTuple):
    """The terms of three runs; those about a pattern are None in a model without one."""

    without: Recording  # some tokens of each stream are changed, and what the patterns mix is zero
    # The streams are kept, and what the patterns mix is zero but for one token.
    alone: Recording | None
    # Some tokens of each stream are changed, and what the patterns mix is kept.
    kept: Recording | None


@final
class Interventions:
    """Runs of a model with changed streams and patterns.

    Args:
        model: the model, in eval mode.
        trace: its trace.
        inputs: the input of the trace.
        layers: the layers, whose parts have no kinds yet.
    """

    def __init__(self, model: nn.Module, trace: Trace, inputs: Any, layers: list[Layer]) -> None:
        self._model, self._inputs, self._layers = model, inputs, layers
        parts = [(layer, part) for layer in layers for part in layer.parts]
        self._term_sites = {
            id(part): output_site(trace, part.term.value, layer.block.path) for layer, part in parts
        }
        self._terms = _distinct_sites(self._term_sites.values())
        self._reads = _distinct_sites(
            stream_site(trace, read, layer.block)
            for layer, part in parts
            for read in part.term.reads
        )
        # Of each pattern, what it mixes.
        self._mixed = _distinct_sites(
            next(iter(trace.sites_of_kind(core.call.outputs[0], "operation")), None)
            for _, part in parts
            for core in part.cores
        )
        self._undisturbed = trace.tensor_by_site()

    def determine_kinds(self) -> None:
        """Give each part its kind.

        An MLP takes a change of some tokens to no other token. An attention without what its
        pattern mixes adds the same to all streams; one mixed token moves it at one token; and if
        what it mixes is kept, a change of some tokens reaches no other token.
        """
        without = self._record_terms_after_edits(self._noise_on_some_tokens, self._zeros_like_value)
        alone = (
            self._record_terms_after_edits(self._unchanged_value, self._zeros_but_one_token)
            if self._mixed
            else None
        )
        kept = (
            self._record_terms_after_edits(self._noise_on_some_tokens, self._unchanged_value)
            if self._mixed
            else None
        )
        for layer in self._layers:
            for part in layer.parts:
                part.kind = self._determine_kind(layer, part, _RecordedRuns(without, alone, kept))

    def _record_terms_after_edits(
        self, new_stream: Callable[[str], Tensor], new_mixed: Callable[[str], Tensor]
    ) -> Recording:
        """Run the model with other streams and other mixed values, and record the terms."""
        values = {site: new_stream(site) for site in self._reads}
        values |= {site: new_mixed(site) for site in self._mixed}
        with edit(self._model, {site: _make_replacement(value) for site, value in values.items()}):
            return features(self._model, copy_inputs(self._inputs), self._terms, copy=True)

    def _unchanged_value(self, site: str) -> Tensor:
        return self._undisturbed[site]

    def _zeros_like_value(self, site: str) -> Tensor:
        return torch.zeros_like(self._undisturbed[site])

    def _noise_on_some_tokens(self, site: str) -> Tensor:
        stream = self._undisturbed[site].clone()
        is_changed = _mask_of_tokens_to_change(stream)
        stream[is_changed] += _noise_like(stream)[is_changed]
        return stream

    def _zeros_but_one_token(self, site: str) -> Tensor:
        mixed = self._zeros_like_value(site)
        place = tuple(min(1, size - 1) for size in mixed.shape[:-1])
        mixed[place] = (self._undisturbed[site] + _noise_like(mixed + 1))[place]
        return mixed

    def _determine_kind(self, layer: Layer, part: Part, runs: _RecordedRuns) -> str:
        site = self._term_sites[id(part)]
        if site is None or not part.term.reads:
            return "side"
        shape = layer.block.pre.tensor.shape
        before = self._undisturbed[site]
        if not before.any() or not before.isfinite().all():
            what = "NaN or infinity" if before.any() else "nothing but zeros"
            part.why = f"{site} adds {what}, which does not tell what it is"
            return "unknown"
        changed = _mask_of_tokens_to_change(layer.block.pre.tensor).cpu()  # it indexes float64
        reach = float(
            _relative_change_by_token(before, runs.without[site], shape, before)[~changed].max()
        )
        if part.cores and runs.alone is not None and runs.kept is not None:
            leak = float(
                _relative_change_by_token(before, runs.kept[site], shape, before)[~changed].max()
            )
            moved = _relative_change_by_token(runs.alone[site], runs.without[site], shape, before)
            most, next_most = moved.flatten().topk(2).values.tolist()
            if most > 0 and max(leak, next_most) <= CLOSE:
                begin = self._layers[0].block.call.begin
                return "cross" if is_cross_attention(part, layer.block, begin) else "attention"
            past = "a change of one token reaches others past the pattern"
            part.why = f"at {site} {past}, by {leak:.1e}"
            if leak <= CLOSE:
                part.why = f"{site} adds more than what its pattern mixes, by {next_most:.1e}"
            if leak <= CLOSE and math.isinf(next_most):
                part.why = f"{site} is NaN where its pattern mixes zeros"
            reach = max(reach, most)
        if reach > CLOSE:
            return "mixer"
        return "side" if side_inputs(part, layer.block) else "mlp"


def _distinct_sites(sites: Iterable[str | None]) -> list[str]:
    return sorted({site for site in sites if site is not None})


def _make_replacement(new: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a change that puts a tensor in the place of a value."""
    return lambda value: new.to(value.dtype, copy=True)


def _relative_change_by_token(
    before: Tensor, after: Tensor, shape: torch.Size, scale: Tensor
) -> Tensor:
    """Return how far each token of a term is moved, of the largest number of the term.

    A term may have fewer dimensions than the stream to which it is added.
    """
    off = reshape_or_expand((to_float64(after) - to_float64(before)).abs(), shape)
    share = off.amax(-1) / to_float64(scale).abs().max()
    return share.nan_to_num(nan=math.inf)


def _mask_of_tokens_to_change(stream: Tensor) -> Tensor:
    """Tell which tokens of a stream are changed: about half of them.

    Which dimension the tokens have is not known. Whatever it is, and however far a part carries
    the numbers of a token, one that is changed is followed by one that is not, and the reverse:
    along each dimension they are a Thue-Morse sequence.
    """
    places = torch.zeros(stream.shape[:-1], dtype=torch.long, device=stream.device)
    for dim, size in enumerate(places.shape):
        shape = [1] * dim + [size] + [1] * (places.dim() - dim - 1)
        places += torch.arange(size, device=stream.device).reshape(shape)
    n_ones = sum((places >> bit) & 1 for bit in range(int(places.max()).bit_length()))
    return (torch.as_tensor(n_ones, device=stream.device) % 2 == 0).expand(places.shape)


def _noise_like(numbers: Tensor) -> Tensor:
    """Return noise of the size of some numbers."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(numbers.shape, generator=generator, device="cpu").to(numbers)
    return noise * numbers.std().clamp(min=1e-3)
