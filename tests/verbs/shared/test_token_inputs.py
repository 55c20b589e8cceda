"""The cache of earlier tokens among the inputs of a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hookline.verbs.shared.token_inputs import find_cache, n_cached_tokens

KEYS = torch.zeros(2, 4, 5, 8)


def raises():
    raise ValueError("no attention")


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (SimpleNamespace(get_seq_length=lambda: 0), 0),
        (SimpleNamespace(get_seq_length=lambda: 3), 3),
        (SimpleNamespace(get_seq_length=raises, has_previous_state=lambda: False), 0),
        (SimpleNamespace(get_seq_length=raises, has_previous_state=lambda: True), None),
        (SimpleNamespace(get_seq_length=raises), None),
        ((), 0),
        (((KEYS, KEYS),), 5),
        ((KEYS,), None),
        ({}, None),
        (None, None),
    ],
)
def test_a_cache_has_so_many_tokens_or_does_not_tell(cache, expected):
    assert n_cached_tokens(cache) == expected


def test_a_cache_is_found_by_its_name():
    assert find_cache({"past_key_values": KEYS}) is KEYS
    assert find_cache({"cache": None, "mems": KEYS}) is KEYS
    assert find_cache({"state": KEYS}) is None
    assert find_cache({"input_ids": KEYS, "state": KEYS}) is KEYS
