"""`hl.compare` compares the same tokens, and says what it cannot align."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from aligned import chunked, ids, model, recorded

pytestmark = pytest.mark.filterwarnings("ignore:hl.record. .* never fired")


def padded(rows, lengths=(9, 6, 4)):
    """Rows of several lengths, padded on the left, without position ids."""
    filled = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(filled)
    for row, length in enumerate(lengths):
        filled[row, -length:], mask[row, -length:] = rows[row, :length], 1
    return {"input_ids": filled, "attention_mask": mask}


def texts(comparison):
    return [finding.text for finding in comparison.findings]


@pytest.fixture(scope="module")
def gpt2():
    return model("gpt2")


def test_a_row_of_a_padded_batch_is_the_sequence_alone(gpt2, tmp_path):
    rows = ids(3, 9)
    batch = padded(rows)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    alone, whole = recorded(gpt2, {"input_ids": rows[1:2, :6]}), recorded(gpt2, batch)
    found = hl.compare(alone, whole)
    assert found.ok
    assert texts(found) == ["2 sequences only in b: 0, 2"]
    assert found["(root):input"].form == "6 tokens"
    assert found["transformer.h.1"].form == "[6, 32] float32"
    folders = [str(run.save(tmp_path / name)) for name, run in (("a", alone), ("b", whole))]
    opened = hl.compare(*folders)  # without the cache, which is not saved
    assert len(opened) > 30
    assert all(row.verdict == found[row.site].verdict for row in opened)
    as_they_are = hl.compare(alone, whole, tokens=None)
    assert as_they_are["transformer.h.1"].verdict == "not comparable"


def test_left_padding_without_positions_is_named_before_a_layer(gpt2):
    rows = ids(3, 9)
    alone = recorded(gpt2, {"input_ids": rows[1:2, :6]})
    found = hl.compare(alone, recorded(gpt2, padded(rows)))
    assert texts(found)[0] == (
        "the inputs differ: position_ids are 0 in a and 3 in b at token 0 of sequence 0"
    )
    assert found.suspect is None
    assert found.first.site == "transformer.wpe"


def test_passes_with_a_cache_are_compared_with_one_pass(gpt2):
    rows = ids(2, 9)
    found = hl.compare(chunked(gpt2, rows, 4, 4, 1), recorded(gpt2, {"input_ids": rows}))
    assert found.ok
    assert texts(found) == []
    assert found["lm_head"].form == "[18, 50] float32"


def test_equal_layouts_are_compared_as_they_are(gpt2):
    run = recorded(gpt2, {"input_ids": ids(2, 5)})
    other = recorded(gpt2, {"input_ids": ids(2, 5, seed=9)})
    assert hl.compare(run, run)["lm_head"].form == "[2, 5, 50] float32"
    found = hl.compare(run, other)
    assert texts(found)[0].startswith("the inputs differ: (root):input (")
    assert found.first.site == "(root):input"


def test_inputs_of_other_tokens_are_said_not_to_be_aligned(gpt2):
    run = recorded(gpt2, {"input_ids": ids(2, 5)})
    found = hl.compare(run, recorded(gpt2, {"input_ids": ids(3, 4, seed=9)}))
    assert "rows and tokens are not aligned: the inputs differ" in texts(found)[1]
    assert found.counts["differs"] == 0
    assert not found.ok


def test_tokens_that_were_not_recorded_can_be_given(gpt2):
    rows = ids(3, 6)
    runs = [recorded(gpt2, {"input_ids": part}, sites=("**",)) for part in (rows[1:2], rows)]
    assert not hl.compare(*runs).ok
    found = hl.compare(*runs, tokens=({"input_ids": rows[1:2]}, {"input_ids": rows}))
    assert found.ok
    parts = chunked(gpt2, rows, 4, 2)
    alone = hl.compare(
        parts, runs[1], tokens=([{"input_ids": rows[:, :4]}, {}], {"input_ids": rows})
    )
    assert alone.ok


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ("left", 'must be "auto", None, a dict of inputs or a tuple of two'),
        (({},), 'must be "auto", None, a dict of inputs or a tuple of two'),
        ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens must go from 0 to the 10 tokens"),
    ],
)
def test_tokens_of_another_form_are_refused(gpt2, tokens, why):
    run = recorded(gpt2, {"input_ids": ids(2, 5)})
    with pytest.raises(hl.InputError, match="tokens must") as caught:
        hl.compare(run, run, tokens=tokens)
    assert why in str(caught.value)


def test_tokens_of_arrays_are_refused():
    with pytest.raises(hl.InputError, match="tokens must be left out for arrays and arrays"):
        hl.compare({"x": torch.ones(2)}, {"x": torch.ones(2)}, tokens={"input_ids": ids(1, 2)})


def test_images_of_another_order_are_the_same_rows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    images = torch.randn(4, 3, 6, 6)
    runs = [recorded(net, {"input": part}) for part in (images, images[[3, 0, 2, 1]])]
    assert hl.compare(*runs).ok
    assert not hl.compare(*runs, tokens=None).ok


def test_an_input_that_is_no_token_is_still_compared():
    bert, rows = model("bert"), ids(3, 6)
    kinds = torch.ones(3, 6, dtype=torch.long)
    one = recorded(bert, {"input_ids": rows[:1], "token_type_ids": kinds[:1] * 0})
    found = hl.compare(one, recorded(bert, {"input_ids": rows, "token_type_ids": kinds}))
    assert found.first.site == "(root):input.token_type_ids"
    assert texts(found)[0].startswith("the inputs differ: (root):input.token_type_ids")
