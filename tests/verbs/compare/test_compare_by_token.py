"""`hl.compare` compares the same tokens, and says what it cannot align."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from aligned_models import chunked, ids, model, recorded

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


@pytest.mark.slow
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


class Pooled(nn.Module):
    """Returns a value for each row."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embed(input_ids)[:, 0])


def test_values_of_rows_are_compared_where_one_batch_is_square():
    model, rows = Pooled(), ids(5, 5)
    longer = {"input_ids": nn.functional.pad(rows, (0, 2)),
              "attention_mask": nn.functional.pad(torch.ones_like(rows), (0, 2))}  # fmt: skip
    assert hl.compare(recorded(model, longer), recorded(model, {"input_ids": rows})).ok


class Window(nn.Module):
    """Returns a cache of the last two tokens, and its width."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 4)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        return {"x": x, "past_key_values": [x[:, None, -2:], torch.tensor(2)]}


def test_a_cache_of_the_last_tokens_is_not_that_of_padding():
    model, rows = Window(), ids(3, 6)
    alone, mask = {"input_ids": rows}, torch.ones_like(rows)
    padded = {name: nn.functional.pad(t, (0, 1)) for name, t in
              {**alone, "attention_mask": mask}.items()}  # fmt: skip
    comparison = hl.compare(recorded(model, padded), recorded(model, alone))
    assert comparison.first is None
    cache = comparison["(root):output.past_key_values[0]"]
    assert cache.why == "a cache of the last tokens, which are others in a than in b"
    assert comparison["(root):output.past_key_values[1]"].verdict == "identical"
    assert hl.compare(recorded(model, {"input_ids": rows.flip(0)}), recorded(model, alone)).ok


def test_caches_of_rows_with_the_same_padding_are_compared():
    model, rows, mask = Window(), ids(3, 6), torch.ones(3, 6, dtype=torch.long)
    mask[0, -2:] = 0
    run = recorded(model, {"input_ids": rows, "attention_mask": mask})
    assert hl.compare(run, recorded(model, {"input_ids": rows, "attention_mask": mask})).ok
    turned = {"input_ids": rows.flip(0), "attention_mask": mask.flip(0)}
    assert hl.compare(run, recorded(model, turned)).ok


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


def test_a_lone_token_and_a_row_of_one_token_agree(gpt2):
    one = ids(1, 1)
    batch = recorded(gpt2, {"input_ids": torch.cat([one, one + 1])})
    assert hl.compare(recorded(gpt2, {"input_ids": one}), batch).ok


def test_equal_rows_are_matched_once_and_passes_may_be_batches(gpt2):
    rows = ids(2, 5)
    twice = recorded(gpt2, {"input_ids": rows[[0, 0, 1]]})
    found = hl.compare(recorded(gpt2, {"input_ids": rows[:1]}), twice)
    assert texts(found) == ["2 sequences only in b: 1, 2"]
    assert found.ok
    parts = recorded(gpt2, {"input_ids": rows[:1]}, {"input_ids": rows[1:]})
    assert hl.compare(parts, recorded(gpt2, {"input_ids": rows})).ok


def test_square_batches_in_another_order_are_refused(gpt2):
    rows = ids(4, 4)
    runs = [recorded(gpt2, {"input_ids": part}) for part in (rows, rows[[2, 0, 1, 3]])]
    found = hl.compare(*runs)
    assert found.counts["differs"] == 0
    assert found["lm_head"].why == (
        "[4, 4, 50] may be (rows, tokens, …) or (tokens, rows, …): compare runs whose batch, length"
        " and width differ"
    )


def test_a_loss_of_other_rows_is_not_compared(gpt2):
    rows = ids(2, 5)
    runs = [recorded(gpt2, {"input_ids": part, "labels": part}) for part in (rows, rows[:1])]
    found = hl.compare(*runs)
    assert found["(root):output.loss"].why == "no dimensions of rows and tokens in []"
    assert found["lm_head"].verdict in ("identical", "noise")


@pytest.mark.slow
def test_the_decoder_of_t5_is_aligned_with_its_steps_of_generate():
    t5, rows = model("t5"), ids(3, 6)
    with torch.no_grad(), hl.record(t5, ["**", "(root):input"]) as steps:
        text = t5.generate(rows, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    found = hl.compare(steps, recorded(t5, {"input_ids": rows, "decoder_input_ids": text}))
    assert found.counts["differs"] == 0
    assert found["lm_head"].verdict == "noise"
    assert found["lm_head"].form == "[12, 50] float32"
    # The encoder is called by itself, with inputs that are not those of the model.
    assert "no dimensions" in found["encoder.final_layer_norm"].why
    assert "no dimensions" in found["decoder.block.0.layer.1.EncDecAttention.k"].why


def test_a_vit_gives_an_image_alone_what_it_gives_it_in_a_batch():
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        image_size=16, patch_size=4,
    )  # fmt: skip
    vit, images = transformers.ViTModel(config).eval(), torch.randn(3, 3, 16, 16)
    runs = [recorded(vit, {"pixel_values": part}) for part in (images[1:2], images)]
    assert hl.compare(*runs).ok


def test_flat_tokens_of_one_engine_are_the_rows_of_another():
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 8), nn.Linear(8, 5)
    rows = ids(3, 4)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = table, head

        def forward(self, input_ids, cu_seqlens=None):
            return self.head(self.table(input_ids))

    packed = {"input_ids": rows.flatten(), "cu_seqlens": torch.tensor([0, 4, 8, 12])}
    runs = [recorded(Flat(), given) for given in ({"input_ids": rows}, packed)]
    found = hl.compare(*runs)
    assert found.ok
    assert found["head"].form == "[12, 5] float32"


def test_tokens_are_aligned_under_a_default_device():
    model, rows = nn.Sequential(nn.Embedding(50, 8)), ids(3, 4)
    with hl.record(model) as run:
        model(rows)
        model(rows[[2, 0, 1]])
    found = hl.compare(*run.passes)
    with torch.device("meta"):
        assert hl.compare(*run.passes).to_dict() == found.to_dict()


def test_gradients_of_parameters_are_over_the_same_tokens(gpt2):
    def trained(rows):
        gpt2.zero_grad()
        with hl.record(gpt2, ["lm_head", "(root):input", "**:grad"]) as run:
            gpt2(input_ids=rows).logits.square().sum().backward()
        return run

    rows = ids(3, 6)
    run, other = trained(rows), trained(rows.flip(0))
    site = "transformer.h.0.mlp.c_fc.weight:grad"
    assert hl.compare(run, other)[site].verdict in ("identical", "noise")
    fewer = hl.compare(trained(rows[:2]), other)[site]
    assert (fewer.verdict, fewer.why) == (
        "not comparable", "a gradient over other tokens in a than in b"
    )  # fmt: skip


class Graph(nn.Module):
    """A layer of a graph network, whose adjacency may be of any kind of tensor."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, nodes, edges):
        return (edges.dequantize() if edges.is_quantized else edges) @ self.lin(nodes)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "CSR", "quantised"],
)
def test_inputs_without_rows_to_read_hinder_no_comparison(make):
    net, nodes = Graph(), torch.randn(3, 4)
    graphs = [{"nodes": nodes, "edges": make(torch.eye(3) * k)} for k in (1, 1, 2)]
    first, again, other = (recorded(net, graph) for graph in graphs)
    assert hl.compare(again, first).counts["identical"] == 4
    assert hl.compare(other, first).first.site == "(root):input.edges"
