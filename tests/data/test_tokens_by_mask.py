"""The tokens of a batch: by the mask that belongs to them, with the ids that belong to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hookline as hl

IDS = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6], [2, 1, 0], [1, 1, 1], [2, 3, 0]])
IS_TOKEN = IDS != 0
ITEMS = [{"input_ids": ids, "attention_mask": (ids != 0).long(), "label": 0} for ids in IDS]
EMBED = nn.Embedding(9, 4)


class Reader(nn.Module):
    """Takes a dict of tokens."""

    def __init__(self):
        super().__init__()
        self.embed = EMBED

    def forward(self, input_ids, attention_mask):
        return self.embed(input_ids)


def assert_tokens(column, ids, is_token):
    """Check that a column has a row for each token, and none for padding."""
    assert column.lengths[:].tolist() == is_token.sum(1).tolist()
    assert torch.equal(column[:], EMBED(ids)[is_token].detach())


@pytest.mark.parametrize("of_items", [IS_TOKEN, IS_TOKEN.sum(1)])
def test_a_function_takes_the_batch_and_not_the_inputs(tmp_path, of_items):
    store = hl.extract(
        EMBED, TensorDataset(IDS, of_items), "", tmp_path / "s", batch_size=4,
        inputs=lambda batch: batch[0], mask=lambda batch: batch[1],
    )  # fmt: skip
    assert_tokens(store[""], IDS, IS_TOKEN)
    assert torch.equal(store.tokens[:], IDS[IS_TOKEN])


@pytest.mark.parametrize("options", [{}, {"mask": "attention_mask"}])
@pytest.mark.parametrize("inputs", [lambda ids: ids, lambda ids: EMBED(ids).detach()])
def test_a_key_counts_also_where_inputs_leaves_it_out(tmp_path, options, inputs):
    model = nn.Identity() if inputs(IDS).ndim == 3 else EMBED
    store = hl.extract(
        model, ITEMS, "", tmp_path / "s", inputs=lambda batch: inputs(batch["input_ids"]), **options
    )
    assert_tokens(store[""], IDS, IS_TOKEN)
    assert torch.equal(store.tokens[:], IDS[IS_TOKEN])


def test_what_inputs_cuts_has_the_mask_and_ids_of_the_inputs(tmp_path):
    def cut(batch):
        return {key: batch[key][:, :2] for key in ("input_ids", "attention_mask")}

    store = hl.extract(Reader(), ITEMS, "embed", tmp_path / "s", inputs=cut)
    assert_tokens(store["embed"], IDS[:, :2], IS_TOKEN[:, :2])
    assert torch.equal(store.tokens[:], IDS[:, :2][IS_TOKEN[:, :2]])


def test_ids_of_other_tokens_than_the_masks_are_left_out(tmp_path):
    store = hl.extract(
        nn.Identity(), ITEMS, "", tmp_path / "s", mask=lambda batch: torch.ones(6, 5),
        inputs=lambda batch: torch.ones(6, 5, 4),
    )  # fmt: skip
    assert store[""].shape == (30, 4)
    with pytest.raises(hl.NotRecordedError, match="token ids"):
        assert store.tokens


def test_the_usual_mask_is_not_of_inputs_of_another_shape(tmp_path):
    store = hl.extract(
        nn.Identity(), ITEMS, "", tmp_path / "s", inputs=lambda batch: torch.ones(6, 2, 3, 4)
    )
    assert store[""].shape == (6, 2, 3, 4)


def test_a_key_that_is_given_must_be_there_also_if_it_is_usual(tmp_path):
    with pytest.raises(hl.InputError, match="mask must be a key of the batch, got 'attention_mask"):
        hl.extract(EMBED, IDS, "", tmp_path / "s", mask="attention_mask")


# -- an encoder and a decoder ---------------------------------------------------------------------

THEIRS = torch.tensor([[7, 8, 1], [7, 8, 8], [7, 1, 0], [7, 7, 1], [8, 1, 0], [7, 3, 0]])


class Translator(nn.Module):
    """The signature of T5, BART and Marian."""

    def __init__(self, config=None):
        super().__init__()
        self.config, self.encoder, self.decoder = config, EMBED, nn.Embedding(9, 4)
        self.decoder.weight = EMBED.weight

    def forward(self, input_ids, attention_mask, labels=None, **decoder):
        ids = labels if labels is not None else decoder["decoder_input_ids"]
        return self.encoder(input_ids).mean(1) + self.decoder(ids.clamp(0)).mean(1)


BOTH = {"input_ids": IDS, "attention_mask": IS_TOKEN}
DECODER = {"decoder_input_ids": THEIRS, "decoder_attention_mask": THEIRS != 0}
WITH_DECODER = SimpleNamespace(is_encoder_decoder=True)


@pytest.mark.parametrize(
    ("decoder", "config", "named"),
    [
        (DECODER, None, "'decoder_attention_mask' have one shape"),
        ({"decoder_input_ids": THEIRS}, None, "'decoder_input_ids' have one shape"),
        ({"labels": THEIRS}, WITH_DECODER, "'labels' have one shape"),
    ],
)
def test_tokens_of_which_side_is_asked_and_not_guessed(tmp_path, decoder, config, named):
    with pytest.raises(hl.StructureError, match=named) as caught:
        hl.extract(Translator(config), {**BOTH, **decoder}, "decoder", tmp_path / "s")
    assert "mask='attention_mask' for sites of the encoder" in str(caught.value)
    store = hl.extract(Translator(config), {**BOTH, **decoder}, "", tmp_path / "s")
    assert store[""].shape == (6, 4)  # a row an item is clear


@pytest.mark.parametrize(
    ("site", "mask", "ids"),
    [("encoder", "attention_mask", IDS), ("decoder", "decoder_attention_mask", THEIRS)],
)
def test_a_mask_by_its_key_has_the_ids_of_its_side(tmp_path, site, mask, ids):
    data = {**BOTH, **DECODER}
    store = hl.extract(Translator(), data, site, tmp_path / "s", batch_size=4, mask=mask)
    assert_tokens(store[site], ids, ids != 0)
    assert torch.equal(store.tokens[:], ids[ids != 0])


def test_a_function_names_no_side_so_there_are_no_ids(tmp_path):
    data = {**BOTH, "labels": THEIRS}
    model = Translator(WITH_DECODER)
    store = hl.extract(
        model, data, "decoder", tmp_path / "s", mask=lambda batch: batch["labels"] != 0
    )
    assert_tokens(store["decoder"], THEIRS, THEIRS != 0)
    with pytest.raises(hl.NotRecordedError, match="token ids"):
        assert store.tokens
    with pytest.raises(hl.InputError, match="for a model with a decoder, got a length"):
        hl.extract(model, data, "decoder", tmp_path / "t", mask=lambda batch: torch.ones(6).long())


@pytest.mark.parametrize(("config", "labels"), [(None, THEIRS), (WITH_DECODER, torch.arange(6))])
def test_labels_of_tokens_that_are_read_or_of_items_ask_nothing(tmp_path, config, labels):
    class Classifier(Reader):
        def forward(self, input_ids, attention_mask, labels):
            return self.embed(input_ids)

    model = Classifier()
    model.config = config
    store = hl.extract(model, {**BOTH, "labels": labels}, "embed", tmp_path / "s")
    assert_tokens(store["embed"], IDS, IS_TOKEN)
    assert torch.equal(store.tokens[:], IDS[IS_TOKEN])
