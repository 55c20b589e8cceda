"""The cache of earlier tokens among the inputs of a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hookline.verbs.shared.kv_cache import cache_in, n_cached

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
    assert n_cached(cache) == expected


def test_a_cache_is_found_by_its_name():
    assert cache_in({"past_key_values": KEYS}) is KEYS
    assert cache_in({"cache": None, "mems": KEYS}) is KEYS
    assert cache_in({"state": KEYS}) is None
    assert cache_in({"input_ids": KEYS, "state": KEYS}) is KEYS
