from __future__ import annotations

import pytest
import torch

from hookline.data import load_input
from hookline.errors import InputError


def test_the_demo_has_an_input_of_its_own(digits):
    batch = load_input("demo", digits)
    assert batch.args[0].shape == (8, 1, 8, 8)
    assert batch.kwargs == {}
    assert batch.description == "eight digits, 8x1x8x8 float32"
    assert len(batch.images) == 8
    assert {image.size for image in batch.images} == {(8, 8)}


def test_the_demos_input_is_the_demos_alone(linear, said):
    with pytest.raises(InputError, match="'demo' is an input of demo:digits only") as raised:
        load_input("demo", linear)
    said(raised)


def test_text_is_what_names_no_file(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = load_input("who took x.png?", minilm)
    assert batch.args == ()
    assert set(batch.kwargs) == {"input_ids", "token_type_ids", "attention_mask"}
    assert batch.description.startswith('text "who took x.png?", input_ids 1x')
    assert batch.images == ()


def test_a_text_longer_than_a_path_can_be_is_text(minilm):
    batch = load_input("a cat " * 120, minilm)
    assert 'text "a cat a cat a cat a cat' in batch.description
    assert len(batch.description) < 200


def test_a_text_file_has_one_text_a_line(minilm, tmp_path):
    (tmp_path / "lines.txt").write_text("a cat sat\n\n  \na dog\n", encoding="utf-8")
    batch = load_input(str(tmp_path / "lines.txt"), minilm)
    assert batch.kwargs["input_ids"].shape == (2, 5)
    assert batch.kwargs["attention_mask"].sum(dim=1).tolist() == [5, 4]
    assert batch.description.startswith("lines.txt (2 texts), input_ids 2x5 int64")


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_an_empty_text_file_is_an_error(minilm, tmp_path, said, content):
    (tmp_path / "lines.txt").write_bytes(content)
    with pytest.raises(
        InputError, match=r"lines\.txt.* must have at least one text, got none"
    ) as raised:
        load_input(str(tmp_path / "lines.txt"), minilm)
    said(raised)


def test_a_text_file_that_is_no_text_is_an_error(minilm, tmp_path, said):
    (tmp_path / "lines.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="Save it as UTF-8") as raised:
        load_input(str(tmp_path / "lines.txt"), minilm)
    said(raised)


def test_json_lines_and_folders_in_folders_are_inputs_too(minilm, digits, picture, tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "a cat sat"}\n{"text": "a dog"}\n')
    batch = load_input(str(tmp_path / "lines.jsonl"), minilm)
    assert batch.description.startswith("lines.jsonl (2 texts), input_ids 2x5 int64")
    (tmp_path / "photos" / "inside").mkdir(parents=True)
    picture.rename(tmp_path / "photos" / "inside" / "a.png")
    batch = load_input(str(tmp_path / "photos"), digits)
    assert batch.description == "photos/ (1 picture), 1x1x8x8 float32"


def test_an_empty_text_is_an_error(minilm, said):
    with pytest.raises(InputError, match="the text must not be empty") as raised:
        load_input(" ", minilm)
    said(raised)


def test_text_for_a_model_without_a_tokenizer_is_an_error(linear, tmp_path, said):
    with pytest.raises(InputError) as raised:
        load_input("a cat on a mat", linear)
    assert said(raised) == (
        "the input must be a path that exists, got 'a cat on a mat'."
        "\nGive .npy, .npz, .pt, .safetensors or random:SHAPE (random:1x3x224x224); linear has no"
        " tokenizer for text."
    )
    (tmp_path / "lines.txt").write_text("a cat")
    with pytest.raises(InputError, match=r"tokenize must convert the texts of lines\.txt"):
        load_input(str(tmp_path / "lines.txt"), linear)


def test_a_file_that_is_not_there_is_an_error_with_close_matches(digits, minilm, picture, said):
    for loaded in (digits, minilm):
        with pytest.raises(InputError, match="must be a path that exists") as raised:
            load_input(str(picture.with_name("rmap.png")), loaded)
        assert f"Did you mean '{picture}'?" in said(raised)


def test_what_ends_like_a_file_is_a_file_for_a_text_model_too(minilm, tmp_path, said):
    with pytest.raises(InputError, match="must be a path that exists") as raised:
        load_input(str(tmp_path / "tokens.npy"), minilm)
    assert "give a text with a space in it" in said(raised)


def test_an_unknown_suffix_is_an_error_that_lists_the_known_ones(digits, tmp_path, said):
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(InputError, match=r"a file of \.png, .* got data\.csv") as raised:
        load_input(str(tmp_path / "data.csv"), digits)
    assert ".png" in said(raised)
    assert ".safetensors, .txt, .jsonl" in said(raised)


def test_a_batch_can_be_given_to_its_model_as_it_is(digits, minilm):
    with torch.inference_mode():
        batch = load_input("random:2x1x8x8", digits)
        assert digits.model(*batch.args, **batch.kwargs).shape == (2, 10)
        batch = load_input("a cat", minilm)
        states = minilm.model(*batch.args, **batch.kwargs).last_hidden_state
    assert states.shape == (1, 4, 384)
