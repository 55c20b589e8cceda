from __future__ import annotations

import json
import os
import pickle
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from PIL import Image

from hookline.data import load_input
from hookline.errors import InputError, ModelError
from hookline.models import load_model
from hookline.models.packages import import_package
from warm import DYNAMO, run_python


@pytest.fixture(scope="module")
def transformers():
    return import_package("transformers", "the tests")


@pytest.fixture(scope="module")
def vit_folder(transformers, tmp_path_factory):
    """A vision transformer, small and random, saved as its library saves one."""
    folder = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=8, id2label={0: "cat", 1: "dog", 2: "eel"},
        label2id={"cat": 0, "dog": 1, "eel": 2},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_a_sentence_model_loads_with_its_weights_and_tokenizer(transformers, minilm):
    assert type(minilm.model) is transformers.BertModel
    assert not minilm.model.training
    assert minilm.preprocess is None
    assert minilm.labels is None  # its configuration has LABEL_0 and LABEL_1, which say nothing
    batch = load_input("a cat sits on a mat", minilm)
    assert batch.args == ()
    assert batch.description.startswith('text "a cat sits on a mat", input_ids 1x8 int64')


def test_its_sentences_mean_what_they_should(minilm):
    tokens = minilm.tokenize(["a cat sits on a mat", "a kitten on a rug", "the stock market fell"])
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape
    shared = pickle.loads(pickle.dumps(minilm.tokenize))  # for processes that load texts
    assert torch.equal(shared(["a cat sits on a mat"])["input_ids"], tokens["input_ids"][:1])
    with torch.inference_mode():
        states = minilm.model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    assert means[0] @ means[1] > 0.4 > means[0] @ means[2]


@pytest.mark.slow
@pytest.mark.usefixtures("rng_unchanged")
def test_random_weights_need_the_configuration_alone(minilm_folder, minilm, tmp_path):
    shutil.copy(minilm_folder / "config.json", tmp_path)
    first, second = (load_model(f"hf:{tmp_path}", weights="none").model for _ in range(2))
    weights = [m.embeddings.word_embeddings.weight for m in (first, second, minilm.model)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_gets_none(minilm_folder, tmp_path, said):
    # transformers itself makes up an empty tokenizer for it, to which each word is unknown.
    shutil.copy(minilm_folder / "config.json", tmp_path)
    loaded = load_model(f"hf:{tmp_path}", weights="none")
    assert loaded.tokenize is None
    with pytest.raises(
        InputError, match=r"path that exists(.|\n)* has no tokenizer for text"
    ) as raised:
        load_input("a cat", loaded)
    assert "random:SHAPE" in said(raised)


@pytest.mark.slow
def test_a_checkpoint_file_is_loaded(minilm_folder, minilm):
    loaded = load_model(f"hf:{minilm_folder}", weights=minilm_folder / "model.safetensors")
    weight = loaded.model.encoder.layer[5].output.dense.weight
    assert torch.equal(weight, minilm.model.encoder.layer[5].output.dense.weight)


def test_a_vision_model_comes_with_its_preparation_and_labels(vit_folder, tmp_path):
    loaded = load_model(f"hf:{vit_folder}")
    assert type(loaded.model).__name__ == "ViTForImageClassification"
    assert loaded.tokenize is None
    assert loaded.labels == ("cat", "dog", "eel")
    Image.new("L", (100, 50), 255).save(tmp_path / "white.png")
    batch = load_input(str(tmp_path / "white.png"), loaded)
    assert batch.kwargs["pixel_values"].shape == (1, 3, 32, 32)
    assert batch.kwargs["pixel_values"].unique().tolist() == pytest.approx([1.0])
    assert loaded.model(**batch.kwargs).logits.shape == (1, 3)


def test_a_text_too_long_for_the_model_is_an_error(minilm, said):
    with pytest.raises(InputError, match="tokens, got 602") as raised:
        load_input("word " * 600, minilm)
    assert "must have at most 512" in said(raised)


@pytest.mark.slow
def test_an_encoder_and_decoder_gets_its_first_token(transformers, minilm_folder, tmp_path):
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=30522,
        decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm_folder / name, tmp_path)
    loaded = load_model(f"hf:{tmp_path}", weights="none")
    batch = load_input("a cat", loaded)
    assert loaded.model(**batch.kwargs).logits.shape == (1, 1, 30522)


def test_a_tokenizer_without_padding_pads_with_its_end(transformers, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "cat": 1, "<e>": 2, "<u>": 3}, unk_token="<u>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<e>", unk_token="<u>"
    )
    tokenizer.save_pretrained(tmp_path)
    transformers.GPT2Config(
        n_layer=1, n_head=1, n_embd=8, vocab_size=4, eos_token_id=2, bos_token_id=2,
        architectures=["GPT2LMHeadModel"],
    ).save_pretrained(tmp_path)  # fmt: skip
    loaded = load_model(f"hf:{tmp_path}", weights="none")
    assert loaded.tokenize(["a", "a cat"])["input_ids"].tolist() == [[0, 2], [0, 1]]


@pytest.mark.slow
def test_a_configuration_without_a_model_is_read_by_its_type(minilm_folder, tmp_path):
    config = json.loads((minilm_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["pipeline"]}))
    assert type(load_model(f"hf:{tmp_path}", weights="none").model).__name__ == "BertModel"


def test_a_name_that_is_not_cached_needs_a_network(said):
    with pytest.raises(ModelError, match="the hub cannot be reached") as raised:
        load_model("hf:hookline/never-there", weights="none")
    assert "need its config.json" in said(raised)


@pytest.mark.parametrize("place", ["./never", "/never/there", "a/b/c", "has space"])
def test_a_folder_that_is_not_there_is_an_error(said, place):
    with pytest.raises(ModelError, match="hf:NAME must be a folder, or OWNER/NAME") as raised:
        load_model(f"hf:{place}")
    assert "save_pretrained()" in said(raised)


def test_a_folder_without_a_configuration_is_an_error(tmp_path, said):
    with pytest.raises(ModelError, match=r"has no config\.json") as raised:
        load_model(f"hf:{tmp_path}")
    assert "save_pretrained()" in said(raised)


def test_a_broken_configuration_is_an_error(tmp_path, said):
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match=r"config\.json cannot be read") as raised:
        load_model(f"hf:{tmp_path}")
    said(raised)


def test_weights_are_never_unpickled_and_the_safe_way_is_said(minilm_folder, tmp_path, said):
    shutil.copy(minilm_folder / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no weights as \.safetensors") as raised:
        load_model(f"hf:{tmp_path}")
    assert f"--weights {tmp_path / 'pytorch_model.bin'}" in said(raised)


def test_broken_weights_are_an_error(minilm_folder, tmp_path, said):
    shutil.copy(minilm_folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safe")
    with pytest.raises(ModelError, match="cannot be built as BertModel") as raised:
        load_model(f"hf:{tmp_path}")
    said(raised)


def test_code_in_a_repository_is_never_run(tmp_path, said):
    code = f"open({str(tmp_path / 'was_run')!r}, 'w')"
    (tmp_path / "mine.py").write_text(code)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="which hookline never runs") as raised:
        load_model(f"hf:{tmp_path}")
    assert "path/to/file.py:FACTORY" in said(raised)
    assert not (tmp_path / "was_run").exists()


def test_a_model_type_that_is_not_known_is_an_error(tmp_path, said):
    (tmp_path / "config.json").write_text('{"model_type": "of_next_year"}')
    with pytest.raises(ModelError, match="does not know its model_type") as raised:
        load_model(f"hf:{tmp_path}")
    assert "pip install -U transformers" in said(raised)


class _Empty(BaseHTTPRequestHandler):
    """A hub that is there, and has nothing."""

    def do_HEAD(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.mark.processes
def test_a_hub_that_has_no_such_model_is_an_error():
    code = (
        "import os\n"
        "os.environ.pop('HF_HUB_OFFLINE')\n"
        "from hookline.models import load_model\n"
        "try:\n    load_model('hf:hookline/never-there')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        env = os.environ | {"HF_ENDPOINT": address, "no_proxy": "127.0.0.1"}
        result = run_python("-c", code, env=env, of=DYNAMO)
    finally:
        server.shutdown()
        server.server_close()
    assert "hf:hookline/never-there: the hub does not know this model" in result.stdout, (
        result.stderr
    )
    assert len(result.stdout.splitlines()) <= 3
