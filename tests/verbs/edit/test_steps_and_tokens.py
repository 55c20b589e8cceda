"""Edits of some tokens and of some steps of generate."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tiny_transformers import tiny

BLOCKS = {"gpt2": "transformer.h.*", "llama": "model.layers.*"}
IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
PADDED_LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
STEER = hl.edits.steer(torch.randn(32, generator=torch.Generator().manual_seed(1)), 9.0)


@pytest.fixture(params=BLOCKS)
def model(request):
    return tiny(request.param)


@pytest.fixture
def blocks(model):
    return BLOCKS["gpt2" if hasattr(model, "transformer") else "llama"]


def moved(run, clean, site):
    """Which tokens of a value differ in any bit."""
    return (run[site] != clean[site]).any(-1)


def at_padded(mask, position):
    """The columns of a position: the reference, in plain Python."""
    columns = [row.nonzero().flatten().tolist() for row in mask]
    return [row[position] if -len(row) <= position < len(row) else None for row in columns]


@pytest.mark.parametrize("at", [0, 3, -1, -2, [0, -1]])
@pytest.mark.parametrize("mask", [torch.ones(2, 7), PADDED_LEFT, PADDED_LEFT.flip(1)])
@torch.no_grad()
def test_only_the_asked_tokens_change_and_earlier_ones_stay(model, blocks, at, mask):
    mask = mask.long()
    first, second = (blocks.replace("*", str(k)) for k in range(2))
    with hl.record(model, blocks) as clean:
        model(IDS, attention_mask=mask)
    with hl.edit(model, first, STEER, at=at), hl.record(model, blocks) as run:
        model(IDS, attention_mask=mask)
    changed = torch.zeros(2, 7, dtype=torch.bool)
    for position in at if isinstance(at, list) else [at]:
        for row, column in enumerate(at_padded(mask, position)):
            changed[row, column] = True
    assert torch.equal(moved(run, clean, first), changed)
    earliest = changed.long().argmax(1)
    later = moved(run, clean, second)
    for row in range(2):
        assert later[row, changed[row]].all()
        assert not later[row, : earliest[row]].any()


@torch.no_grad()
def test_a_position_is_the_absolute_one_behind_a_cache(model, blocks):
    site = blocks.replace("*", "1")
    options = {"attention_mask": PADDED_LEFT, "max_new_tokens": 4, "do_sample": False}
    with hl.record(model, site) as clean:
        model.generate(IDS, **options)
    with hl.edit(model, site, STEER, at=6), hl.record(model, site) as run:
        model.generate(IDS, **options)
    # Row 0 has 5 tokens: its token 6 comes in step 2. That of row 1 is in the prompt.
    assert run.passes[0][site].shape == (2, 7, 32)
    assert moved(run.passes[0], clean.passes[0], site).nonzero().tolist() == [[1, 6]]
    with hl.edit(model, site, hl.edits.replace(0), at=6), hl.record(model, site) as run:
        model.generate(IDS, **options)
    zeros = [(~record[site].any(-1)).nonzero().tolist() for record in run.passes]
    assert zeros == [[[1, 6]], [], [[0, 0]], []]


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_the_last_token_is_the_newest_of_each_step(model, blocks, use_cache):
    site = blocks.replace("*", "1")
    with hl.edit(model, site, hl.edits.replace(0), at=-1), hl.record(model, site) as run:
        model.generate(
            IDS, attention_mask=PADDED_LEFT, max_new_tokens=3, do_sample=False, use_cache=use_cache
        )
    zeros = [(~record[site].any(-1)).nonzero().tolist() for record in run.passes]
    widths = [1, 1] if use_cache else [8, 9]
    assert zeros == [[[0, 6], [1, 6]]] + [[[0, width - 1], [1, width - 1]] for width in widths]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(0, [0]), (2, [2]), ([1, 3], [1, 3]), (slice(1, None), [1, 2, 3]), (slice(0, 4, 2), [0, 2])],
)
@torch.no_grad()
def test_steps_of_generate_count_from_the_prompt(model, blocks, steps, expected):
    site = blocks.replace("*", "0")
    with hl.edit(model, site, hl.edits.replace(0), steps=steps), hl.record(model, site) as run:
        for _ in range(2):  # an empty cache begins a new count
            model.generate(IDS, attention_mask=PADDED_LEFT, max_new_tokens=4, do_sample=False)
    zeros = [k for k, record in enumerate(run.passes) if not record[site].any()]
    assert zeros == [*expected, *(step + 4 for step in expected)]


@torch.no_grad()
def test_beams_are_steered_each_by_its_own_tokens(model, blocks):
    site = blocks.replace("*", "1")
    options = {"attention_mask": PADDED_LEFT, "max_new_tokens": 4, "do_sample": False}
    with pytest.warns(hl.HooklineWarning, match="3 beams"):
        with hl.edit(model, site, hl.edits.replace(0), at=5), hl.record(model, site) as run:
            model.generate(IDS, num_beams=3, **options)
    zeros = [(~record[site].any(-1)).nonzero().tolist() for record in run.passes]
    assert zeros == [[[3, 5], [4, 5], [5, 5]], [[0, 0], [1, 0], [2, 0]], [], []]


@torch.no_grad()
def test_two_edits_of_one_site_compose_in_order(model, blocks):
    site = blocks.replace("*", "1")
    changes = {site: hl.edits.add(1.0), blocks: hl.edits.scale(0.0), (site,): hl.edits.add(2.0)}
    with hl.edit(model, changes, at=2) as line, hl.record(model, blocks) as run:
        model(IDS)
    assert (run[site][:, 2] == 2).all()
    assert (run[site][:, 1] != 2).any()
    assert not run[blocks.replace("*", "0")][:, 2].any()
    assert [count for _, count in line.report().fired] == [1, 1, 1, 1]


class Net(nn.Module):
    """A plain net with ids of tokens, and a head for each row."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.fails = False

    def forward(self, x, mask=None):
        hidden = self.block(self.embedding(x))
        if self.fails:
            raise ValueError("on purpose")
        return self.head(hidden[:, -1])


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return Net()


X = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_numbers_that_never_occur_are_told(plain):
    with pytest.warns(hl.HooklineWarning, match=r"^hl.edit never met at=5 and steps=3: no run"):
        with hl.edit(plain, "block", lambda t: t * 0, at=[1, 5], steps=[0, 3]) as line:
            plain(X)
    assert "note: hl.edit never met at=5 and steps=3" in str(line.report())
    with pytest.warns(hl.HooklineWarning, match=r"never met at=slice\(4, 9\): no"):
        with hl.edit(plain, "block", lambda t: t * 0, at=slice(4, 9)):
            plain(X)


def test_a_failed_run_is_no_step(plain):
    with hl.edit(plain, "block", hl.edits.replace(0), steps=1), hl.record(plain, "block") as run:
        plain(X)
        plain.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            plain(X)
        plain.fails = False
        for _ in range(2):
            plain(X)
    assert [bool(record["block"].any()) for record in run.passes] == [True, False, False, True]


def test_the_change_gets_the_whole_value_where_it_is_wanted(plain):
    seen = []

    def change(value):
        seen.append([*value.shape])
        return value * 0

    with hl.edit(plain, "block", change, at=2):
        plain(X)
        plain(X[:, :2])
    assert seen == [[2, 3, 4]]


def test_a_value_without_tokens_is_refused(plain):
    with hl.edit(plain, "head", hl.edits.scale(0), at=0), pytest.raises(hl.StructureError) as error:
        plain(X)
    said = r"at needs a value at head whose dimension 1 holds the tokens ([2, 3] as first"
    assert str(error.value).startswith(said)
    with hl.edit(plain.block, "(root)", hl.edits.scale(0), at=0):
        with pytest.raises(hl.StructureError, match="3 dimensions or more"):
            plain.block(torch.ones(2, 4))


class Experts(nn.Module):
    """Each expert gets the tokens that chose it: first those of first choice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        order = torch.tensor([2, 0, 1])
        return x.index_add(1, order, self.experts[0](x[0, order])[None])


def test_the_tokens_of_an_expert_are_not_guessed():
    model, ids = Experts(), torch.tensor([[1, 2, 3]])
    with (
        hl.edit(model, "experts.0", hl.edits.scale(0), at=0),
        pytest.raises(hl.StructureError, match=r"at needs a value at experts.0"),
    ):
        model(input_ids=ids)
    with hl.edit(model, "experts.0", hl.edits.scale(0), at=slice(None)):
        assert torch.equal(model(input_ids=ids), model.embed(ids))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(50, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, input_ids):
        lengths = torch.tensor([3] * len(input_ids))
        return self.net(pack_padded_sequence(self.embed(input_ids), lengths, batch_first=True))


def test_the_tokens_of_a_packed_sequence_are_not_guessed():
    model = Packed()
    with (
        hl.edit(model, "net", hl.edits.scale(0), at=0),
        pytest.raises(hl.StructureError, match="got a PackedSequence, in which rows alternate"),
    ):
        model(input_ids=torch.ones(2, 3, dtype=torch.long))


@torch.no_grad()
def test_a_head_that_gets_the_last_token_alone_says_so():
    model = tiny("llama")
    with (
        hl.edit(model, "lm_head", hl.edits.scale(0), at=-1),
        pytest.raises(
            hl.StructureError, match=r"logits_to_keep=1, .* the last 1 token alone: leave"
        ),
    ):
        model.generate(IDS, max_new_tokens=2, do_sample=False)


class WithPattern(nn.Module):
    """Beside the tokens, each block returns a pattern, as in Bloom and T5."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(50, 4), _Pattern()

    def forward(self, input_ids, logits_to_keep=0):
        return self.block(self.embed(input_ids))[0]


class _Pattern(nn.Module):
    def forward(self, x):
        return x, torch.ones(x.shape[0], 2, x.shape[1], x.shape[1])


def test_a_pattern_beside_the_tokens_names_their_part():
    model, ids = WithPattern(), torch.ones(2, 3, dtype=torch.long)
    with hl.edit(model, "block", lambda value: value, at=0), pytest.raises(hl.StructureError) as e:
        model(ids, logits_to_keep=1)
    assert "Select the part that holds them: 'block:output[0]'." in str(e.value).splitlines()
    with hl.edit(model, "block:output[0]", hl.edits.scale(0), at=0):
        assert not model(ids)[:, 0].any()


@torch.no_grad()
@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_of_the_cache_are_not_taken_for_the_new_token(part):
    model = tiny("llama")
    model.config.num_key_value_heads = 1
    model = type(model)(model.config).eval()
    site = f"model.layers.0.self_attn@{part}"
    with (
        hl.edit(model, site, hl.edits.scale(0), at=-1, steps=slice(1, None)),
        pytest.raises(hl.StructureError, match=rf"got Tensor\[2, 1, {IDS.shape[1] + 1}, 8\]"),
    ):
        model.generate(IDS, max_new_tokens=2, do_sample=False)


class OneHead(nn.Module):
    """Attention without heads, whose keys are (rows, tokens, features)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 4)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return nn.functional.scaled_dot_product_attention(x, x + 1, x, is_causal=True)


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_keys_without_heads_have_tokens_in_dimension_1(part):
    model, site = OneHead(), f"@{part}"
    with hl.record(model, site) as clean:
        model(IDS)
    with hl.edit(model, site, hl.edits.scale(0), at=-1), hl.record(model, site) as run:
        model(IDS)
    assert torch.equal(run[site][:, :-1], clean[site][:, :-1])
    assert not run[site][:, -1].any()


def test_a_token_of_the_input_is_changed(plain):
    with hl.edit(plain, "(root):input", lambda ids: ids * 0 + 9, at=-1):
        with hl.record(plain, "embedding:input") as run:
            plain(X)
    assert run["embedding:input"].tolist() == [[1, 2, 9], [4, 5, 9]]


def test_without_ids_a_position_is_an_index(plain):
    x = torch.randn(2, 5, 4)
    clean = plain.block(x)
    with hl.edit(plain.block, "(root)", hl.edits.scale(0), at=[1, -1]):
        edited = plain.block(x)
    assert (edited != clean).any(-1).nonzero().tolist() == [[0, 1], [0, 4], [1, 1], [1, 4]]


class Heads(nn.Module):
    """Attention of features, with two heads."""

    def forward(self, x):
        x = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("part", ["q", "k", "pattern", "z"])
def test_without_ids_heads_are_not_taken_for_tokens(part):
    model, x = Heads(), torch.randn(2, 5, 4)
    with (
        hl.edit(model, f"@{part}", hl.edits.scale(0), at=-1),
        pytest.raises(hl.StructureError, match=r"tokens .*, with heads\.\nWhere heads come first"),
    ):
        model(x)


def test_a_call_outside_a_run_of_the_model_is_refused(plain):
    for places in ({"at": 0}, {"steps": 0}):
        with hl.edit(plain, "block", hl.edits.scale(0), **places):
            with pytest.raises(hl.AttachError, match="needs a run of the edited model, but block"):
                plain.block(torch.ones(2, 3, 4))
            plain(X)


def test_gradients_of_some_tokens_and_steps(plain):
    with hl.record(plain, "block:grad_output") as clean:
        plain(X).sum().backward()
    with hl.edit(plain, "block:grad_output", lambda g: g + 1, at=1, steps=1):
        with hl.record(plain, "block:grad_output") as run:
            for _ in range(2):
                plain(X).sum().backward()
    first, second = (record["block:grad_output"] for record in run.passes)
    difference = second - clean["block:grad_output"]
    assert torch.equal(first, clean["block:grad_output"])
    assert (difference[:, 1] == 1).all()
    assert not difference[:, [0, 2]].any()


@pytest.mark.parametrize("places", [{"at": 0}, {"steps": 0}])
def test_gradients_of_parameters_have_no_place(plain, places):
    with pytest.raises(hl.AttachError, match=r"got block.weight:grad, the gradient of a parameter"):
        hl.edit(plain, "block.weight:grad", torch.zeros_like, **places)
    assert not hl.inventory(plain)


class Regions(nn.Module):
    """Blocks in a checkpoint, and a cache of one token at a time."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.block = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, input_ids, position_ids=None):
        x = self.embedding(input_ids)
        return checkpoint(self.twice, x, use_reentrant=self.use_reentrant)

    def twice(self, x):
        return self.block(self.block(x).tanh())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_is_edited_at_the_same_tokens(use_reentrant):
    torch.manual_seed(0)
    model = Regions(use_reentrant)
    x = model.embedding(X)
    hidden = model.block(x).tanh()
    expected = model.block(hidden * torch.tensor([1.0, 0.0, 1.0])[:, None])
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    site = "block#0"
    with hl.edit(model, site, hl.edits.scale(0), at=8, steps=1):
        positions = torch.tensor([[7, 8, 9]])
        model(X)
        y = model(X, position_ids=positions)
        model(X)  # another pass begins before the backward
        y.square().sum().backward()
    # tanh(0) is 0, so the edit of the first call is the same as that of its tanh.
    assert torch.equal(y, expected)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_no_run_is_kept_alive(plain):
    with hl.edit(plain, "block", hl.edits.scale(0.5), at=0) as line:
        x = X.clone()
        plain(x)
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert alive() is None
    del line


def test_an_encoder_and_its_decoder():
    import transformers as tf

    torch.manual_seed(0)
    config = tf.T5Config(
        d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=4, vocab_size=50, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config).eval()
    sites = ["encoder.block.0.layer.1", "decoder.block.0.layer.2"]
    with torch.no_grad(), hl.edit(model, sites, hl.edits.replace(0), at=-1):
        with hl.record(model, sites) as run:
            model(input_ids=IDS, attention_mask=PADDED_LEFT.flip(1), decoder_input_ids=IDS[:, :3])
    zeros = [(~run[site].any(-1)).nonzero().tolist() for site in sites]
    assert zeros == [[[0, 4], [1, 6]], [[0, 2], [1, 2]]]


@pytest.mark.parametrize("places", [{"at": -1}, {"at": slice(-2, None)}, {"steps": 0}], ids=str)
def test_places_from_the_end_are_refused_with_drafted_tokens(places):
    model, ids = tiny("llama"), IDS[:1].repeat(1, 3)
    # Transformers 5.3 looks no tokens up without eos_token_id.
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 49}
    options["prompt_lookup_num_tokens"] = 3
    with hl.edit(model, "model.layers.0", hl.edits.scale(0.5), **places):
        with pytest.raises(
            hl.AttachError, match=r"in assisted decoding(.|\n)*without an assistant"
        ):
            model.generate(ids, **options)


def test_steps_are_refused_in_continuous_batching(plain):
    names: dict[str, object] = {}
    path = "/any/transformers/generation/continuous_batching/model_runner.py"
    exec(compile("def step(model, x): return model(x)", path, "exec"), names)
    with hl.edit(plain, "block", hl.edits.scale(0), steps=0):
        with pytest.raises(hl.AttachError, match=r"continuous batching(.|\n)*Call generate"):
            names["step"](plain, X)


def test_positions_from_the_start_work_with_drafted_tokens():
    model, ids = tiny("llama"), IDS[:1].repeat(1, 3)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 49}
    with hl.edit(model, "model.layers.0", hl.edits.scale(0.5), at=slice(ids.shape[1], None)):
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)


@pytest.mark.parametrize("steps", [0, 1, slice(1, None)], ids=str)
@pytest.mark.parametrize("chunk", [2, 3, 7], ids=str)
def test_the_chunks_of_a_prompt_are_one_step(steps, chunk):
    model, site = tiny("llama"), "model.layers.0"
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    with hl.edit(model, site, STEER, steps=steps):
        expected = [model.generate(IDS, **options) for _ in range(2)]
    with hl.edit(model, site, STEER, steps=steps):
        got = [model.generate(IDS, prefill_chunk_size=chunk, **options) for _ in range(2)]
    assert all(map(torch.equal, got, expected))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_prompt_in_chunks_goes_on_from_a_full_cache():
    model, site = tiny("llama"), "model.layers.0"
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    with hl.edit(model, site, hl.edits.replace(0), steps=[2, 3]), hl.record(model, site) as run:
        first = model.generate(IDS[:1], prefill_chunk_size=4, **options)
        ids = torch.cat([first.sequences, IDS[:1]], 1)
        model.generate(ids, past_key_values=first.past_key_values, prefill_chunk_size=4, **options)
    # Steps 0 and 1 are those of the first generate, the second prompt of two chunks is step 2.
    shapes = [(record[site].shape[1], bool(record[site].any())) for record in run.passes]
    assert shapes[:3] == [(4, True), (3, True), (1, True)]
    # Transformers 5.17 runs the whole prompt, though the cache holds half of it.
    assert shapes[3:] in ([(4, False)] * n + [(1, False)] for n in (2, 4))


@pytest.mark.parametrize("at", [-1, slice(-2, None)], ids=str)
def test_a_prompt_in_chunks_does_not_tell_its_end(at):
    model, site = tiny("llama"), "model.layers.0"
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    with (
        hl.edit(model, site, STEER, at=at),
        pytest.raises(hl.AttachError, match=r"prompt in chunks(.|\n)*steps=slice\(1, None\)"),
    ):
        model.generate(IDS, prefill_chunk_size=3, **options)
    with hl.edit(model, site, STEER, at=at, steps=slice(1, None)):
        expected = model.generate(IDS, **options)
        assert torch.equal(model.generate(IDS, prefill_chunk_size=3, **options), expected)
    with hl.edit(model, site, STEER, at=at):
        expected = model.generate(IDS, **options)
        assert torch.equal(model.generate(IDS, prefill_chunk_size=7, **options), expected)
