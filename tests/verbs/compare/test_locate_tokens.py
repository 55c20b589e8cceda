"""Which token lies where is read from the inputs of each pass, or said to be unknown."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.compare.locate_tokens import ROWS, locate_tokens


class Named(nn.Module):
    """Takes what a transformers model takes, and gives it back."""

    def forward(self, **inputs):
        return dict(inputs)


def run_of(*passes, **options):
    model = Named()
    with hl.record(model, "(root):input", **options) as run:
        for inputs in passes:
            model(**inputs)
    return run


def bare(*passes):
    """A run whose inputs were not recorded"""
    model = Named()
    with hl.record(model, "(root)") as run:
        for inputs in passes:
            model(**inputs)
    return run


def rows_of(*rows):
    return torch.tensor(rows)


IDS = rows_of([5, 6, 7, 8], [9, 3, 2, 1])


def test_each_row_is_a_sequence_and_padding_belongs_to_none():
    mask = rows_of([0, 1, 1, 1], [1, 1, 0, 0])
    tokens = locate_tokens(run_of({"input_ids": IDS, "attention_mask": mask}))
    grid = tokens.grids[0][""]
    assert grid.owner.tolist() == [[-1, 0, 0, 0], [1, 1, -1, -1]]
    assert grid.order.tolist() == [[-1, 0, 1, 2], [0, 1, -1, -1]]
    assert grid.position.tolist() == [[0, 1, 2, 3]] * 2  # none are given: a model counts columns
    assert [streams[""] for streams in tokens.contents] == [[6, 7, 8], [9, 3]]


@pytest.mark.parametrize(
    "told",
    [
        {"position_ids": rows_of([0, 1, 2, 0])},
        {"cu_seqlens": torch.tensor([0, 3, 4], dtype=torch.int32)},
        {"cu_seq_lens_q": torch.tensor([0, 3, 4])},
    ],
)
def test_packed_sequences_are_cut_where_positions_or_borders_say(told):
    tokens = locate_tokens(run_of({"input_ids": IDS[:1], **told}))
    assert tokens.grids[0][""].owner.tolist() == [[0, 0, 0, 1]]
    assert [streams[""] for streams in tokens.contents] == [[5, 6, 7], [8]]
    assert tokens.grids[0][""].row_owner.tolist() == [-1]  # the row holds several


def test_torchs_masks_and_masks_to_add_mark_the_padding():
    padding = rows_of([1, 0, 0, 0], [0, 0, 1, 1]).bool()
    expected = [[-1, 0, 0, 0], [1, 1, -1, -1]]
    for mask in (
        {"src_key_padding_mask": padding},
        {"attention_mask": torch.zeros(2, 4).masked_fill(padding, -torch.inf)},
    ):
        tokens = locate_tokens(run_of({"input_ids": IDS, **mask}))
        assert tokens.grids[0][""].owner.tolist() == expected


def test_positions_of_left_padding_do_not_cut_a_sequence():
    mask, places = rows_of([0, 0, 1, 1]), rows_of([1, 1, 0, 1])
    tokens = locate_tokens(
        run_of({"input_ids": IDS[:1], "attention_mask": mask, "position_ids": places})
    )
    assert tokens.grids[0][""].owner.tolist() == [[-1, -1, 0, 0]]


CACHE = [[torch.zeros(2, 1, 4, 3)]]


@pytest.mark.parametrize(
    "told",
    [
        {"attention_mask": torch.ones(2, 5, dtype=torch.long)},
        {"cache_position": torch.tensor([4])},
        {"position_ids": rows_of([4], [4])},
        {"past_key_values": CACHE},
        {"past_key_values": "a cache that was not saved"},
    ],
)
def test_a_pass_with_a_cache_goes_on_with_the_sequences_before(told):
    tokens = locate_tokens(run_of({"input_ids": IDS}, {"input_ids": rows_of([7], [8]), **told}))
    assert tokens.grids[1][""].owner.tolist() == [[0], [1]]
    assert tokens.grids[1][""].order.tolist() == [[4], [4]]
    assert tokens.grids[1][""].position.tolist() == [[4], [4]]
    assert tokens.grids[1][""].key_order.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert [streams[""] for streams in tokens.contents] == [[5, 6, 7, 8, 7], [9, 3, 2, 1, 8]]


def test_passes_without_a_cache_are_other_sequences():
    tokens = locate_tokens(run_of({"input_ids": IDS}, {"input_ids": IDS[:1]}))
    assert tokens.grids[1][""].owner.tolist() == [[2] * 4]


def test_the_streams_of_encoder_and_decoder_share_their_rows():
    run = run_of({"input_ids": IDS, "decoder_input_ids": IDS[:, :2]})
    tokens = locate_tokens(run)
    assert tokens.grids[0]["decoder_"].owner.tolist() == [[0, 0], [1, 1]]
    assert tokens.contents[1] == {"": [9, 3, 2, 1], "decoder_": [9, 3]}


def test_embeddings_and_lone_inputs_are_told_apart():
    embeddings = torch.randn(2, 3, 4)
    tokens = locate_tokens(run_of({"inputs_embeds": embeddings, "use_cache": False}))
    assert tokens.grids[0][""].owner.shape == (2, 3)
    again = locate_tokens(run_of({"inputs_embeds": embeddings.flip(0), "use_cache": False}))
    assert again.contents == tokens.contents[::-1]
    row = locate_tokens(run_of({"inputs_embeds": embeddings[0], "use_cache": False}))
    assert row.contents == tokens.contents[:1]
    model = nn.Embedding(10, 2)
    with hl.record(model, "(root):input") as run:
        model(IDS)
    assert locate_tokens(run).contents[0] == {"": [5, 6, 7, 8]}


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"types": torch.zeros(2, 4).long()}])
def test_ids_of_another_name_come_first(settings):
    assert locate_tokens(run_of({"idx": IDS, **settings})).contents[0] == {"": [5, 6, 7, 8]}
    assert ROWS in locate_tokens(run_of({"idx": IDS, "images": torch.ones(2, 3)})).grids[0]


def test_images_are_rows_without_tokens():
    images = torch.randn(2, 3, 4, 4)
    tokens = locate_tokens(run_of({"pixel_values": images}))
    assert tokens.grids[0][ROWS].row_owner.tolist() == [0, 1]
    assert tokens.contents[0] != tokens.contents[1]


def test_inputs_that_were_not_recorded_are_taken_as_given():
    run = bare({"input_ids": IDS}, {"input_ids": IDS})
    text = locate_tokens(run)
    assert text == "pass 0: the inputs of the model were not recorded"
    tokens = locate_tokens(run, [{"input_ids": IDS}, {"input_ids": IDS[:1]}])
    assert [len(grids[""].owner) for grids in tokens.grids.values()] == [2, 1]
    assert locate_tokens(bare({"input_ids": IDS}), {"input_ids": IDS}).contents[1][""] == [
        9,
        3,
        2,
        1,
    ]
    assert locate_tokens(run, [{}]) == "tokens must have a dict for each of 2 passes, got 1"


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)},
            "attention_mask must have a number for each token, [2, 4], got [2, 1, 4, 4]",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 3, dtype=torch.long)},
            "attention_mask must have a number for each token, [2, 4], got [2, 3]",
        ),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must go from 0 to"),
        (
            {"input_ids": IDS[None], "use_cache": False},
            "ids of tokens must be (rows, tokens), got [1, 2, 4]",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 9, dtype=torch.long)},
            "the cache held 5 tokens of each row that the recording does not have",
        ),
        ({"flag": True}, "the inputs hold no tensor with rows"),
    ],
)
def test_inputs_that_do_not_tell_are_said(inputs, why):
    assert locate_tokens(run_of(inputs)).startswith(why)


def test_an_input_that_was_overwritten_is_said():
    model = nn.Embedding(10, 2)
    given = IDS.clone()
    with hl.record(model, "(root):input", copy=False) as run:
        model(given)
    given.zero_()
    assert "overwritten in place" in locate_tokens(run)
