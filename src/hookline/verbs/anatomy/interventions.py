"""Tell the parts of each block apart by interventions: sums are symmetric, and cannot.

All blocks are changed in one run. Each block gets the stream that it had in the undisturbed run,
so no change of one block reaches another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.engine.pytree import tree
from hookline.recordings import Recording
from hookline.verbs.anatomy.identity_errors import CLOSE
from hookline.verbs.anatomy.parts import Layer, Part, is_cross, side_inputs, site_of, stream_site
from hookline.verbs.anatomy.trace import Event, Trace
from hookline.verbs.edit.edit import edit
from hookline.verbs.record.features import features

_TOKEN = 1  # the token that is changed


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
        self._model, self._trace, self._inputs, self._layers = model, trace, inputs, layers
        self._term_sites = {
            id(part): site_of(trace, part.term.value, layer.block.path)
            for layer in layers
            for part in layer.parts
        }
        reads = [
            stream_site(trace, read, layer.block)
            for layer in layers
            for part in layer.parts
            for read in part.term.reads
        ]
        self._reads = sorted({site for site in reads if site is not None})
        cores = [
            self._core_site(core.call)
            for layer in layers
            for part in layer.parts
            for core in part.cores
        ]
        self._cores = sorted({site for site in cores if site is not None})
        self._undisturbed = trace.by_site()

    def tell_apart(self) -> None:
        """Give each part its kind.

        Three runs are compared with the undisturbed one. In the first, one token of each stream is
        changed. In the second, one token of what the patterns mix is changed, and the streams are
        kept: only attention moves, and only at this token. In the third, one token of each stream
        is changed and what the patterns mix is kept: an attention reaches no other token.
        """
        disturbed = dict.fromkeys(self._reads, self._disturbed)
        by_token = self._with(disturbed)
        by_core = kept_core = None
        if self._cores:
            kept = dict.fromkeys(self._reads, self._kept)
            by_core = self._with(kept | dict.fromkeys(self._cores, self._disturbed_core))
            kept_core = self._with(disturbed | dict.fromkeys(self._cores, self._kept))
        for layer in self._layers:
            for part in layer.parts:
                part.kind = self._kind(layer, part, (by_token, by_core, kept_core))

    def _with(self, changed: Mapping[str, Callable[[str], Any]]) -> Recording:
        """Run the model with changed values, and record the terms."""
        changes = {site: change(site) for site, change in changed.items()}
        terms = sorted(set(filter(None, self._term_sites.values())))
        with edit(self._model, changes):
            return features(self._model, self._inputs, terms, copy=True)

    def _kept(self, site: str) -> Callable[[Tensor], Tensor]:
        return lambda value: self._undisturbed[site].to(value.dtype).clone()

    def _disturbed(self, site: str) -> Callable[[Tensor], Tensor]:
        stream = self._undisturbed[site].clone()
        _disturb(self._by_token(stream)[_TOKEN])
        return lambda value: stream.clone()

    def _disturbed_core(self, site: str) -> Callable[[Tensor], Tensor]:
        mixed = self._undisturbed[site].clone()
        n_tokens = len(self._by_token(self._layers[0].block.pre.tensor))
        dims = [dim for dim in (-2, 1, 0) if mixed.shape[dim] == n_tokens]
        _disturb(mixed.select(dims[0], _TOKEN) if dims else mixed)
        return lambda value: mixed.clone()

    def _by_token(self, stream: Tensor) -> Tensor:
        return by_token(stream, self._inputs)

    def _core_site(self, core: Event) -> str | None:
        places = [p for p in core.outputs[0].places if p.kind == "operation"]
        return self._trace.text(places[0]) if places else None

    def _kind(self, layer: Layer, part: Part, runs: Sequence[Any]) -> str:
        site = self._term_sites[id(part)]
        if site is None or not part.term.reads:
            return "side"
        by_token, by_core, kept_core = runs
        is_mixing = self._reach(by_token, site, layer) > CLOSE
        if part.cores and by_core is not None:
            is_moved = not torch.equal(by_core[site], self._undisturbed[site])
            part.leak = max(self._reach(run, site, layer) for run in (by_core, kept_core))
            if is_moved and part.leak <= CLOSE:
                begin = self._layers[0].block.call.begin
                return "cross" if is_cross(part, layer.block, begin) else "attention"
        if is_mixing:
            return "mixer"
        return "side" if side_inputs(part, layer.block) else "mlp"

    def _reach(self, run: Recording, site: str, layer: Layer) -> float:
        """Return how far the change of one token reaches other tokens of a term."""
        shape = layer.block.pre.tensor.shape
        before = self._by_token(self._undisturbed[site].reshape(shape)).double().flatten(1)
        after = self._by_token(run[site].reshape(shape)).double().flatten(1)
        off = (after - before).abs().amax(1) / before.abs().max()
        return float(torch.cat([off[:_TOKEN], off[_TOKEN + 1 :]]).max())


def by_token(stream: Tensor, inputs: Any) -> Tensor:
    """Return a view of a stream with its tokens first.

    Most streams are (rows, tokens, features). XLNet's is (tokens, rows, features), which its ids
    tell, of shape (rows, tokens).
    """
    if stream.dim() < 3:
        return stream
    first_two = stream.shape[:2]
    shapes = [tensor.shape for _, tensor in tree.tensors(inputs)]
    has_tokens_first = first_two not in shapes and first_two[::-1] in shapes
    return stream if has_tokens_first else stream.transpose(0, 1)


def _disturb(numbers: Tensor) -> None:
    """Add noise to numbers, of their own size."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(numbers.shape, generator=generator).to(numbers)
    numbers += noise * numbers.std().clamp(min=1e-3)
