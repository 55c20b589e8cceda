"""A recording in a search of transformers says, once, that rows are beams, or tokens drafts."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import hookline as hl

SEARCH = """
def _beam_search(run, num_beams):
    return [run() for _ in range(3)]

def _sample(run, num_beams):
    return run()

def _assisted_decoding(run):
    return [_sample(run, 1), run()]
"""


@pytest.fixture
def generation():
    """Functions as those of transformers' generate."""
    names: dict[str, object] = {}
    exec(compile(SEARCH, "/any/transformers/generation/utils.py", "exec"), names)
    return names


class PreTrainedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.decoder(x)


X = torch.ones(6, 2)


def said(run):
    """The warnings of a function."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


def test_a_beam_search_is_said_once(generation):
    model = type("Lm", (PreTrainedModel,), {})()
    with hl.record(model, "decoder") as run:
        said_by_model = said(lambda: model(X))
        first = said(lambda: generation["_beam_search"](lambda: model(X), 3))
        again = said(lambda: generation["_beam_search"](lambda: model(X), 3))
    assert said_by_model == again == []
    assert first == [
        "hl.record sees generate() search with 3 beams: values have 3 rows for each input, one for"
        " each beam, and the search may reorder them between passes.\nGive num_beams=1 to"
        " generate(), or record one run of the model on the sequences that it returns."
    ]
    assert len(run.passes) == 7


def test_drafted_tokens_are_said_once(generation):
    model = PreTrainedModel()
    with hl.record(model, "decoder"):
        first, again = (
            said(lambda: generation["_assisted_decoding"](lambda: model(X))) for _ in range(2)
        )
    assert again == []
    assert first == [
        "hl.record sees generate() check drafted tokens: a pass has values of several tokens, and"
        " of some that are dropped again.\nGenerate without an assistant, or record one run of the"
        " model on the sequences that it returns."
    ]


def test_what_has_no_beams_is_not_said(generation):
    model, other = PreTrainedModel(), nn.Linear(2, 2)

    def runs():
        with hl.record(model, "decoder"):
            generation["_sample"](lambda: model(X), 3)
            generation["_beam_search"](lambda: model(X), 1)
        with hl.record(model, "encoder"):  # its values come from before the search
            model.encoder(X)
            generation["_beam_search"](lambda: model(X), 3)
        with hl.record(other):
            generation["_beam_search"](lambda: other(X), 3)

        def _beam_search(num_beams):
            return model(X)

        with hl.record(model, "decoder"):
            _beam_search(3)

    assert said(runs) == []


def test_a_line_of_such_a_model_is_freed_at_once(generation):
    model = PreTrainedModel()
    gc.disable()
    try:
        line = hl.record(model, "decoder")
        said(lambda: generation["_beam_search"](lambda: model(X), 3))
        held = weakref.ref(line.recording)
        line.remove()
        del line
        assert held() is None
    finally:
        gc.enable()
