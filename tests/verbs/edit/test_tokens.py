"""Which token each column of a pass is, as the root's inputs tell."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline.verbs.edit.indices import parse_indices
from hookline.verbs.edit.tokens import read_tokens

IDS = torch.ones(2, 4, dtype=torch.long)


class Cache:
    def __init__(self, n):
        self.n = n

    def get_seq_length(self):
        return self.n


def main(**inputs):
    return read_tokens(inputs).main


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), min_size=1))
def test_padding_on_either_side_is_no_token(rows):
    width = max(sum(row) for row in rows) or 1
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (left, n, _) in zip(mask, rows, strict=True):
        row[left : left + n] = 1
    tokens = main(input_ids=torch.ones_like(mask), attention_mask=mask)
    for k, (left, n, _) in enumerate(rows):
        expected = [-1] * left + list(range(n)) + [-1] * (width - left - n)
        assert tokens.positions[k].tolist() == expected
        assert tokens.lengths[k][mask[k] == 1].tolist() == [n] * n


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": torch.ones(2, 9)},
        {"past_key_values": Cache(5)},
        {"cache": Cache(5)},
        {"past_key_values": ((torch.ones(2, 1, 5, 3), torch.ones(2, 1, 5, 3)),)},
        {"cache_position": torch.arange(5, 9)},
        {"position_ids": torch.arange(5, 9)[None]},
        {"past_key_values": Cache(5), "attention_mask": torch.ones(2, 9, dtype=torch.bool)},
    ],
)
def test_cached_tokens_are_counted(inputs):
    tokens = main(input_ids=IDS, **inputs)
    assert tokens.positions.tolist() == [[5, 6, 7, 8]] * 2
    assert tokens.lengths.tolist() == [[9] * 4] * 2
    assert not tokens.is_numbered_by_column


def test_a_padded_row_keeps_its_own_positions_behind_a_cache():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    tokens = main(input_ids=IDS[:, :1], attention_mask=mask, past_key_values=Cache(4))
    assert tokens.positions.tolist() == [[2], [4]]
    assert tokens.lengths.tolist() == [[3], [5]]


def test_packed_sequences_end_each_on_their_own():
    tokens = main(input_ids=IDS, position_ids=torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]))
    assert tokens.lengths.tolist() == [[3, 3, 3, 1], [1, 3, 3, 3]]
    last = parse_indices("at", -1, allows_negative=True)
    assert tokens.chosen_mask(last).tolist() == [
        [False, False, True, True],
        [True, False, False, True],
    ]


def test_borders_tell_packed_sequences_without_positions():
    tokens = main(input_ids=IDS[:1], cu_seqlens=torch.tensor([0, 3, 4], dtype=torch.int32))
    assert tokens.positions.tolist() == [[0, 1, 2, 0]]
    assert tokens.lengths.tolist() == [[3, 3, 3, 1]]
    two = main(input_ids=IDS, cu_seqlens=torch.tensor([0, 2, 4, 8]))
    assert two.positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [
        ({"": IDS}, (2, 4)),
        ({"tokens": IDS, "mask": IDS}, (2, 4)),
        ({"inputs_embeds": torch.ones(2, 4, 8)}, (2, 4)),
        ({"batch": {"input_ids": IDS, "attention_mask": IDS}}, (2, 4)),
        ({"src": torch.ones(2, 4, 8), "src_key_padding_mask": IDS == 0}, (2, 4)),
        ({"x": torch.ones(2, 4, 8)}, None),
        ({"pixel_values": torch.ones(2, 3, 8, 8)}, None),
        ({"attention_mask": None, "x": torch.ones(2, 3)}, None),
    ],
)
def test_ids_are_found_by_name_or_as_integers_of_two_dimensions(inputs, sizes):
    tokens = read_tokens(inputs).main
    assert (None if tokens is None else tuple(tokens.positions.shape)) == sizes
    assert tokens is None or tokens.is_numbered_by_column


def test_torchs_masks_and_masks_to_add_mark_the_padding():
    padding = torch.tensor([[False, False, True], [False, True, True]])
    expected = [[0, 1, -1], [0, -1, -1]]
    assert main(src_key_padding_mask=padding).positions.tolist() == expected
    addend = torch.zeros(2, 3).masked_fill(padding, -torch.inf)
    assert main(input_ids=IDS[:, :3], attention_mask=addend).positions.tolist() == expected


def test_encoder_and_decoder_have_their_own():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    both = read_tokens({
        "attention_mask": mask, "decoder_input_ids": IDS[:, :1], "past_key_values": Cache(2),
    })  # fmt: skip
    assert both.main.positions.tolist() == [[0, 1, -1], [0, 1, 2]]
    assert both.decoder.positions.tolist() == [[2], [2]]


def test_inputs_that_do_not_tell_are_refused():
    with pytest.raises(hl.StructureError, match=r"attention_mask .*\[2, 4\], got \[2, 1, 4, 4\]"):
        main(input_ids=IDS, attention_mask=torch.ones(2, 1, 4, 4))
    with pytest.raises(hl.StructureError, match=r"a number for each token, \[2, 9\], got \[2, 4\]"):
        main(input_ids=IDS, attention_mask=IDS, past_key_values=Cache(5))
    with pytest.raises(hl.StructureError, match=r"how many tokens are cached, got a object"):
        main(input_ids=IDS, past_key_values=object())


LAYER = torch.ones(2, 8, 3)


@pytest.mark.parametrize(
    "cache",
    [{"state": [LAYER, LAYER]}, {"mems": [LAYER]}, {"past_buckets_states": [(LAYER, LAYER)]}],
)
def test_a_cache_without_a_length_is_refused(cache):
    with pytest.raises(hl.StructureError, match=r"got a list that does not tell.\n.*steps=0"):
        main(input_ids=IDS, **cache)
    assert main(input_ids=IDS, **dict.fromkeys(cache)).is_numbered_by_column  # as the prompt has


def test_the_state_of_a_recurrent_net_is_no_cache():
    assert main(tokens=IDS, state=[LAYER, LAYER]).is_numbered_by_column


class States(Cache):
    def get_seq_length(self):
        raise ValueError("no attention")

    def has_previous_state(self):
        return self.n > 0


def test_a_cache_of_states_tells_only_whether_it_is_empty():
    assert main(input_ids=IDS, cache_params=States(0)).is_numbered_by_column
    with pytest.raises(hl.StructureError, match=r"got a States .*\n.*choose the prompt: steps=0"):
        main(input_ids=IDS, cache_params=States(3))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 4, 8), torch.float, [2, 4, 1]),
        ((2, 4, 3, 8), torch.float, [2, 4, 1, 1]),
        ((8, 5), torch.float, [8, 1]),
        ((8,), torch.float, [8]),
        ((8, 5, 3), torch.float, [8, 1, 1]),
        ((8, 4), torch.float, [8, 1]),
        ((8, 4, 5), torch.float, None),  # rows and four heads in a row, or tokens
        ((8, 5, 4), torch.float, None),
        ((8, 4, 4), torch.float, None),
        ((1, 4, 8), torch.float, [1, 4, 1]),
        ((2, 4), torch.long, [2, 4]),
        ((2, 4), torch.float, None),  # features, or one number for each token
        ((2, 4, 4, 8), torch.float, None),  # heads, or tokens
        ((2, 3, 4, 8), torch.float, None),
        ((2, 5, 8), torch.float, None),
        ((), torch.float, None),
    ],
)
def test_a_mask_fits_a_value_whose_tokens_are_clear(shape, dtype, expected):
    at = parse_indices("at", 1, allows_negative=True)
    mask = main(input_ids=IDS).broadcast_mask(torch.zeros(shape, dtype=dtype), at)
    assert (None if mask is None else [*mask.shape]) == expected


@pytest.mark.parametrize(("n_heads", "n_queries", "is_clear"), [(3, 5, False), (3, 1, True)])
def test_all_keys_of_a_row_are_not_its_new_token(n_heads, n_queries, is_clear):
    value = torch.zeros(1, n_heads, n_queries, 8)
    mask = main(input_ids=IDS[:1, :1]).broadcast_mask(
        value, parse_indices("at", -1, allows_negative=True)
    )
    assert (mask is not None) is is_clear


@pytest.mark.parametrize(("at", "is_clear"), [(slice(None), True), (9, True), (1, False)])
def test_tokens_out_of_order_are_clear_if_all_or_none_are_chosen(at, is_clear):
    chosen = parse_indices("at", at, allows_negative=True)
    mask = main(input_ids=IDS).broadcast_mask(torch.zeros(8, 5), chosen, in_order=False)
    assert (mask is not None) is is_clear
