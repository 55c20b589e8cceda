"""transformers: captured outputs, caches, generate, encoder-decoders, wrappers around them."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hookline as hl
from by_torch import (
    VALUES,
    assert_gradients_are_torchs,
    assert_values_are_torchs,
    measured,
    nth,
    seen_by_torch,
    tripled,
)
from hookline.models.torchvision_import import import_torchvision
from hookline.verbs.shared.token_inputs import CACHES

import_torchvision()  # transformers imports it, and cannot where its operators are missing


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=30, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=30,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


IDS = torch.tensor([[1, 2, 3, 4]])
OPTIONS = {"max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3}


def step(model, **given):
    out = model(IDS, labels=IDS, **given)
    out.loss.backward()
    return out.logits


@pytest.mark.slow
@pytest.mark.cell(
    "models of transformers",
    "record", "statistics", "edit", "patch", "raw hooks", "features", "watch",
)  # fmt: skip
@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.0.mlp", "lm_head"])
def test_values_are_those_of_torchs_hooks(llama, path):
    no_loss = path == "lm_head"  # of constant logits
    verbs = [verb for verb in VALUES if not (verb == "patch" and no_loss)]
    assert_values_are_torchs(lambda: llama, step, path, verbs)


@pytest.mark.cell("models of transformers", "record", "statistics", "edit", "features")
def test_a_part_of_an_output_is_that_of_torchs_hooks(llama):
    verbs = ["record", "statistics", "edit", "features"]
    assert_values_are_torchs(lambda: llama, step, "model.layers.1.self_attn", verbs, part=nth(0))


@pytest.mark.cell("models of transformers", "gradients", "edit gradients", "raw hooks", "clip")
@pytest.mark.parametrize("site", ["model.layers.1:grad_output", "model.layers.0.mlp:grad_input"])
def test_gradients_are_those_of_torchs_hooks(llama, site):
    assert_gradients_are_torchs(lambda: llama, step, site)


@pytest.mark.slow
@pytest.mark.cell("encoder-decoders of transformers", "record", "statistics", "edit", "features")
@pytest.mark.parametrize("path", ["encoder.block.0", "decoder.block.1"])
def test_values_of_an_encoder_decoder_are_torchs_hooks(t5, path):
    verbs = ["record", "statistics", "edit", "features"]
    assert_values_are_torchs(lambda: t5, step, path, verbs, part=nth(0))


@pytest.mark.slow
@pytest.mark.cell(
    "encoder-decoders of transformers", "gradients", "edit gradients", "raw hooks", "clip"
)
@pytest.mark.parametrize("site", ["encoder.block.1.layer.1:grad_output", "lm_head:grad_input"])
def test_gradients_of_an_encoder_decoder_are_torchs_hooks(t5, site):
    assert_gradients_are_torchs(lambda: t5, step, site)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:hl.record sees generate")
@pytest.mark.cell("`generate` of transformers", "record", "statistics", "edit", "raw hooks")
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_generate_does_what_it_does_under_torchs_hooks(llama, options):
    path = "model.layers.1"

    def generated():
        scores = {"output_scores": True, "return_dict_in_generate": True}
        found = llama.generate(IDS, **OPTIONS, **options, **scores)
        return [found.sequences, *found.scores]

    with seen_by_torch(llama, path) as came:
        bare = generated()
    with hl.record(llama, path, copy=True) as run, hl.record(llama, path, keep=measured) as numbers:
        assert_close(generated(), bare)
    assert_close([one[path] for one in run.passes], came)
    assert_close([one[path] for one in numbers.passes], [measured(value) for value in came])
    with seen_by_torch(llama, path, change=tripled):
        expected = generated()
    with hl.edit(llama, path, tripled):
        assert_close(generated(), expected)
    with hl.attach(llama) as line:
        line.forward(path, lambda module, args, output: tripled(output))
        assert_close(generated(), expected)
    assert not torch.equal(expected[1], bare[1])


@pytest.mark.trap(36)
@pytest.mark.cell("models of transformers", "record", "edit")
def test_hidden_states_show_the_edit_behind_transformers_hooks(llama):
    with torch.no_grad():
        llama(IDS, output_hidden_states=True)
        assert {entry.owner for entry in hl.inventory(llama)} == {"transformers"}  # they stay
        with (
            hl.edit(llama, "model.layers.1", hl.edits.scale(0.0)),
            hl.record(llama, "model.layers.*") as run,
        ):
            edited = llama(IDS, output_hidden_states=True)
        handle = llama.model.layers[1].register_forward_hook(lambda m, args, output: output * 0)
        raw = llama(IDS, output_hidden_states=True)
        handle.remove()
    assert torch.equal(raw.logits, edited.logits)
    assert raw.hidden_states[2].any()  # the raw hook changed the logits, and not this
    assert not edited.hidden_states[2].any()
    assert torch.equal(run["model.layers.0"], edited.hidden_states[1])
    assert {entry.owner for entry in hl.inventory(llama)} == {"transformers"}


def test_transformers_hooks_inside_a_block_see_the_edit_and_stay(llama):
    with torch.no_grad():
        with hl.edit(llama, "model.layers.1", hl.edits.scale(0.0)):
            first = llama(IDS, output_hidden_states=True)
            assert not first.hidden_states[2].any()
        after = llama(IDS, output_hidden_states=True)
    assert after.hidden_states[2].any()
    assert {entry.owner for entry in hl.inventory(llama)} == {"transformers"}


@pytest.mark.trap(35)
@pytest.mark.cell(
    "models of transformers",
    "record",
    note='Attention patterns need `model.set_attn_implementation("eager")`. With `sdpa`, they'
    " are None.",
)
def test_attention_patterns_are_there_under_eager_not_under_sdpa(llama):
    with torch.no_grad():
        assert llama(IDS, output_attentions=True).attentions == ()  # asked for, and not there
        with hl.record(llama, "model.layers.0.self_attn") as run:
            llama(IDS)
        assert run["model.layers.0.self_attn"][1] is None  # None is what flowed, and is kept
        llama.set_attn_implementation("eager")
        with hl.record(llama, "model.layers.0.self_attn:output[1]") as run:
            given = llama(IDS, output_attentions=True)
    pattern = run["model.layers.0.self_attn:output[1]"]
    assert torch.equal(pattern, given.attentions[0])
    assert torch.allclose(pattern.sum(-1), torch.ones(1, 2, 4))


@pytest.mark.trap(24)
@pytest.mark.cell("models of transformers", "gradients", "statistics")
def test_model_outputs_keep_their_form_with_caches_as_they_were(llama):
    by_hand = []
    name = next(name for name in CACHES if name in inspect.signature(llama.forward).parameters)
    handle = llama.model.register_forward_hook(
        lambda module, args, output: by_hand.append(output[name])
    )
    with (
        hl.record(llama, f"model:output.{name}") as caches,
        hl.record(llama, ["", "model"], ports=("output", "grad_output")) as run,
        hl.record(llama, "model.layers.*", keep=lambda t: t.norm()) as norms,
    ):
        first = llama(IDS, labels=IDS, use_cache=True)
        first.loss.backward()
        with torch.no_grad():
            llama(IDS, **{name: first[name]})
    lengths = [one[f"model:output.{name}"].get_seq_length() for one in caches.passes]
    assert lengths == [4, 8]
    handle.remove()
    assert [one.get_seq_length() for one in by_hand] == [8, 8]  # the live one, which has grown
    gradient = run.passes[0][":grad_output"]
    assert type(gradient) is type(first)
    assert gradient.loss == 1
    assert gradient.logits.shape == first.logits.shape
    assert len(norms.passes[0]) == 3


@pytest.mark.cell("`generate` of transformers", "patch", "edit at")
def test_edits_at_a_step_of_generate_are_those_of_torchs_hooks(llama):
    scores = {"output_scores": True, "return_dict_in_generate": True}

    def generated():
        return llama.generate(IDS, **OPTIONS, **scores).scores

    calls = iter(range(10))

    def last_of_the_second(value):
        changed = value.clone()
        if next(calls) == 1:
            changed[:, -1] = tripled(value[:, -1])
        return changed

    site = "model.layers.1"
    bare = generated()
    with seen_by_torch(llama, site, change=last_of_the_second):
        expected = generated()
    assert torch.equal(expected[0], bare[0])
    assert not torch.equal(expected[1], bare[1])
    with hl.edit(llama, site, tripled, at=-1, steps=1):
        assert_close(generated(), expected)
    with (
        hl.edit(llama, site, tripled, at=-1, steps=1),
        hl.record(llama, site, copy=True) as run,
    ):
        generated()
    with hl.edit(llama, site, hl.edits.patch(run)):
        assert_close(generated(), expected)


@pytest.mark.cell("`generate` of transformers", "record", "edit", "raw hooks")
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("options", "lengths", "rows"),
    [
        ({}, [4, 1, 1], 1),
        ({"use_cache": False}, [4, 5, 6], 1),
        ({"num_beams": 2}, [4, 1, 1], 2),
    ],
)
def test_each_step_of_generate_is_a_pass_of_the_given_model(llama, inner, options, lengths, rows):
    root, prefix = (llama.model, "") if inner else (llama, "model.")
    steps = []
    plain = llama.generate(IDS, **OPTIONS, **options)
    is_search = "num_beams" in options
    of_beams = pytest.warns(hl.HooklineWarning, match="search with 2 beams: values have 2 rows")
    with (
        of_beams if is_search else nullcontext(),
        hl.record(root, f"{prefix}layers.0") as run,
        hl.attach(root) as line,
    ):
        line.forward("", lambda module, args, output: steps.append(1))
        hooked = llama.generate(IDS, **OPTIONS, **options)
    assert torch.equal(plain, hooked)
    shapes = [tuple(one[f"{prefix}layers.0"].shape) for one in run.passes]
    assert shapes == [(rows, length, 16) for length in lengths]
    assert len(steps) == 3
    with hl.edit(root, f"{prefix}layers.*", hl.edits.scale(0.0)):
        steered = llama.generate(IDS, **OPTIONS, **options)
    assert not torch.equal(steered, plain)
    assert torch.equal(llama.generate(IDS, **OPTIONS, **options), plain)


def test_an_edit_of_a_pattern_that_is_only_returned_does_nothing(llama):
    llama.set_attn_implementation("eager")
    plain = llama(IDS).logits
    for leaf, is_same in ((1, True), (0, False)):
        with hl.edit(
            llama, f"model.layers.*.self_attn:output[{leaf}]", hl.edits.scale(0.0)
        ) as line:
            logits = llama(IDS).logits
        assert line.report().silent == ()
        assert torch.equal(logits, plain) is is_same


class Outer(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, ids):
        return self.lm(ids)


@pytest.mark.cell(
    "`generate` of transformers",
    "record",
    note="Each step of `generate` counts as one run of the model. If you attach to a wrapper"
    " that `generate` does not call, all steps count as one run, and a warning says so.",
)
def test_a_root_that_generate_does_not_call_is_reported(llama):
    outer = Outer(llama)
    with (
        pytest.warns(
            hl.HooklineWarning, match="the model itself was not called.*attach to the one"
        ),
        hl.record(outer, ["", "lm.model.layers.0"]) as run,
    ):
        llama.generate(IDS, **OPTIONS)
    assert "1 pass, " in " ".join(str(run.report()).split())
    assert "the model itself was not called, only modules inside it" in " ".join(
        str(run.report()).split()
    )
    assert len(run.calls("lm.model.layers.0")) == 3
    with pytest.raises(hl.AmbiguousError, match=r"lm\.model\.layers\.0#0"):
        run["lm.model.layers.0"]
    with hl.record(outer, "lm.model.layers.0") as run:
        outer(IDS)
    assert "not called" not in " ".join(str(run.report()).split())


@pytest.mark.cell("encoder-decoders of transformers", "record", "gradients", "edit", "features")
def test_an_encoder_decoder_is_recorded_whole(t5):
    given = {"input_ids": IDS, "decoder_input_ids": IDS}
    plain = t5(**given).logits
    with hl.record(t5, ports=("output", "grad_output")) as run:
        hooked = t5(**given).logits
        hooked.sum().backward()
    assert torch.equal(plain, hooked)
    assert run["encoder.block.1:output[0]"].shape == (1, 4, 16)
    assert run["decoder.block.0:grad_output[0]"].shape == (1, 4, 16)
    missing = [str(site) for site in run.sites if str(site) not in run and site.port == "output"]
    assert missing == ["shared"]  # T5 uses its embedding by other names
    feats = hl.features(t5, given, "encoder.block.0:output[0]")
    assert torch.equal(feats["encoder.block.0:output[0]"], run["encoder.block.0:output[0]"])
    encoded = (torch.zeros(1, 4, 16),)
    zeroed = t5(encoder_outputs=encoded, decoder_input_ids=IDS).logits
    with hl.edit(t5, "encoder:output.last_hidden_state", hl.edits.scale(0.0)):
        assert torch.equal(t5(**given).logits, zeroed)


def test_generate_runs_the_encoder_outside_of_the_steps(t5):
    with hl.record(t5, ["encoder.block.0", "decoder.block.0"]) as run:
        t5.generate(IDS, **OPTIONS)
    assert [list(one) for one in run.passes] == [
        ["encoder.block.0"], ["decoder.block.0"], ["decoder.block.0"], ["decoder.block.0"],
    ]  # fmt: skip
    assert run["encoder.block.0"][0].shape == (1, 4, 16)
