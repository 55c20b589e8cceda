"""Texts as items: the index is the number of the line, and lines stay on disk."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import version

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import hookline as hl
from data_source_checks import run, said, source_of, whole
from hookline.data import texts
from thoroughness import examples

LINES = ["one", "zwei drei", "", "vier", "fünf", "  "]


def tokenize(lines) -> dict:
    """Code points, padded with zeros; refuses a text with an x."""
    if any("x" in line for line in lines):
        raise ValueError("an x is too long.")
    width = max(map(len, lines))
    return {"ids": torch.tensor([[*map(ord, line), *[0] * (width - len(line))] for line in lines])}


def texts_of(batches) -> dict:
    """The text of each item."""
    return {
        item: "".join(chr(code) for code in row if code)
        for batch in batches
        if batch.items
        for item, row in zip(batch.items, batch.data["ids"].tolist(), strict=True)
    }


def is_utf8(text) -> bool:
    """Whether UTF-8 has bytes for a text: not for half of a pair of UTF-16."""
    return text == text.encode("utf-8", "ignore").decode()


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(lines=["\ud800", "a"], form=("\n", False, False, False), piece=4, size=2)
@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\rx\0"), max_size=6), min_size=1),
    form=st.tuples(st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.booleans()),
    piece=st.integers(4, 40),
    size=st.integers(1, 7),
)
def test_each_line_is_the_item_of_its_number(tmp_path, monkeypatch, lines, form, piece, size):
    ending, is_ended, has_bom, as_json = form
    monkeypatch.setattr(texts, "_PIECE_BYTES", piece)
    written = [json.dumps({"id": 1, "text": one}) for one in lines] if as_json else lines
    text = ending.join(written) + ending * is_ended
    path = tmp_path / ("a.jsonl" if as_json else "a.txt")
    path.write_bytes(b"\xef\xbb\xbf" * has_bom + text.encode("utf-8", "surrogatepass"))
    if not text or text.startswith("\ufeff"):
        return
    source = source_of(path, batch_size=size, tokenize=tokenize, on_error="skip")
    # A last line that is empty and unended is not a line.
    n = len(lines) - (not as_json and not is_ended and not lines[-1])
    assert source.n_items == n
    batches = whole(source)
    readable = [line.strip() and (as_json or is_utf8(line)) for line in lines[:n]]
    wanted = {number: lines[number] for number in range(n) if readable[number]}
    assert texts_of(batches) == wanted
    skipped = [item for batch in batches for item, _ in batch.skipped]
    assert skipped == [i for i in range(n) if i not in wanted]


def test_blank_lines_keep_their_number_and_are_listed(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join([*LINES, ""]), encoding="utf-8")
    batches = whole(source_of(tmp_path / "a.txt", batch_size=2, tokenize=tokenize))
    assert texts_of(batches) == {0: "one", 1: "zwei drei", 3: "vier", 4: "fünf"}
    assert batches[1].skipped == [(2, "EmptyText: a text must have more than white space")]
    assert whole(source_of(LINES, batch_size=2, tokenize=tokenize))[1].items == [3]


def test_padding_is_that_of_the_batch():
    source = source_of(["a", "bb", "c"], batch_size=2, tokenize=tokenize)
    assert [batch.data["ids"].tolist() for batch in whole(source)] == [[[97, 0], [98, 98]], [[99]]]


def test_lines_that_cannot_be_read_or_tokenized_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\xff\nsix\n")
    assert said(lambda: run(source_of(path, tokenize=tokenize), [0])).startswith(
        "item 1 must load, got UnicodeDecodeError:"
    )
    (batch,) = run(source_of(path, tokenize=tokenize, on_error="skip"), [0])
    assert batch.items == [0]
    assert batch.skipped[1] == (2, "ValueError: an x is too long")


def test_json_lines_that_are_broken_or_lack_the_key_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "one"}\n{"body": "b"}\n{"text"\n{"text": null}\n{"text": 3}\n[]\n')
    (batch,) = run(source_of(path, tokenize=tokenize, on_error="skip"), [0])
    assert batch.items == [1]
    assert [text.partition(":")[0] for _, text in batch.skipped] == [
        "EmptyText", "ValueError", "JSONDecodeError", "EmptyText", "TypeError", "ValueError",
    ]  # fmt: skip
    assert batch.skipped[1][1] == (
        "ValueError: a line must be an object with the key \"text\", got the keys 'body'"
    )


@pytest.mark.parametrize("line", ['{"body": "b", "id": 3}', "[1]", '"text"', "{}"])
def test_a_file_of_other_keys_is_refused_at_once(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f"\n{line}\n")
    message = said(lambda: source_of(tmp_path / "a.jsonl", tokenize=tokenize))
    assert 'must have objects with the key "text", got' in message
    assert "in line 2.\n" in message


def test_a_file_that_has_changed_is_refused_also_when_skipping(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    source = source_of(path, tokenize=tokenize, on_error="skip")
    path.write_text("one\ntwo\nthree\n")
    assert said(lambda: run(source, [0])).startswith(
        f"{path} must have 8 bytes, as when the job began, got 14."
    )


def test_a_source_of_lines_holds_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 1000 + "\n" + "b\n")
    assert len(pickle.dumps(source_of(tmp_path / "a.txt", tokenize=tokenize))) < 2000


def test_the_identity_of_lines_is_their_content(tmp_path):
    found = []
    for folder, content in [("1", "one\n"), ("2", "one\n"), ("3", "two\n")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(content)
        found.append(source_of(tmp_path / folder / "a.txt", tokenize=tokenize).identity())
    assert found[0] == found[1] != found[2]
    assert (found[0]["kind"], found[0]["name"], found[0]["length"]) == ("lines", "a.txt", 1)
    assert str(tmp_path) not in json.dumps(found)


def test_texts_need_a_tokenizer_that_returns_tensors(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    assert said(lambda: source_of(path)) == (
        "tokenize must convert the texts of a.txt to tensors, got None."
        "\nGive the model's tokenizer: transformers.AutoTokenizer.from_pretrained(NAME). A"
        " model without one takes tensors."
    )
    assert "got int" in said(lambda: source_of(path, tokenize=3))
    for wrong, got in [
        (lambda t: [[1]], "got list."),
        (lambda t: {"ids": [[1]]}, "got a dict with ids=list(list(1))."),
        (lambda t: {"ids": torch.zeros(1), "modality": "text"}, "got a dict with modality=str."),
    ]:
        source = source_of(path, tokenize=wrong, on_error="skip")
        assert got in said(lambda source=source: run(source, [0]))


@pytest.fixture
def tokenizer():
    """A real tokenizer of transformers, of words."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"[PAD]": 0, "[UNK]": 1, "one": 2, "two": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=3
    )


def test_a_tokenizer_of_transformers_is_taken_as_it_is(tokenizer, tmp_path):
    if version("tokenizers") == "0.23.2":
        pytest.skip("its encodings do not tell what was cut")
    (tmp_path / "a.txt").write_text("one\ntwo one\ntwo two two two\n")
    source = source_of(tmp_path / "a.txt", batch_size=2, tokenize=tokenizer)
    with pytest.warns(hl.HooklineWarning, match="more than 3 tokens and are cut there"):
        batches = whole(source)
    assert type(batches[0].data) is dict
    assert batches[0].data["input_ids"].tolist() == [[2, 0], [3, 2]]
    assert batches[0].data["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batches[1].data["input_ids"].tolist() == [[3, 3, 3]]  # cut at model_max_length


def test_texts_that_fit_are_not_warned_of(tokenizer):
    (batch,) = run(source_of(["one two one", "one"], tokenize=tokenizer), [0])
    assert batch.data["attention_mask"].sum(1).tolist() == [3, 1]


def test_a_tokenizer_without_a_padding_token_is_refused(tokenizer):
    tokenizer.pad_token = None
    message = said(lambda: source_of(["one"], tokenize=tokenizer))
    assert "without a padding token.\nGive it one" in message
