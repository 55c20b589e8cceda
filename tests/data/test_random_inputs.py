from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hookline.data import load_input
from hookline.errors import InputError
from hookline.models import LoadedModel

LINEAR = LoadedModel("linear", nn.Linear(2, 2))


@pytest.mark.usefixtures("rng_unchanged")
def test_the_numbers_are_the_same_each_time():
    first, second = (load_input("random:1x3x224x224", LINEAR) for _ in range(2))
    assert torch.equal(first.args[0], second.args[0])
    assert first.description == "random, 1x3x224x224 float32"
    assert first.images == ()
    assert abs(first.args[0].mean()) < 0.01
    assert abs(first.args[0].std() - 1) < 0.01


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_any_shape_is_drawn(shape):
    spec = "random:" + "x".join(str(size) for size in shape)
    assert list(load_input(spec, LINEAR).args[0].shape) == shape


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int64", torch.int64), ("long", torch.int64), ("int32", torch.int32), ("uint8", torch.uint8),
     ("bool", torch.bool), ("float16", torch.float16), ("bfloat16", torch.bfloat16),
     ("float64", torch.float64), ("float", torch.float32)],
)  # fmt: skip
def test_the_type_can_be_given(name, dtype):
    assert load_input(f"random:4x1000:{name}", LINEAR).args[0].dtype is dtype


@pytest.mark.parametrize("kind", ["", ":int64"])
def test_a_default_device_changes_no_number(kind):
    spec = f"random:2x3{kind}"
    with torch.device("meta"):
        drawn = load_input(spec, LINEAR).args[0]
    assert torch.equal(drawn, load_input(spec, LINEAR).args[0])


def test_integers_are_from_0_to_99():
    tokens = load_input("random:100x100:int64", LINEAR).args[0]
    assert (tokens.min(), tokens.max()) == (0, 99)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 2)

    def get_input_embeddings(self):
        return self.embed


class Without(nn.Module):
    def get_input_embeddings(self):
        raise NotImplementedError


def test_integers_stay_in_a_smaller_vocabulary():
    tokens = load_input("random:100x100:long", LoadedModel("small", Small())).args[0]
    assert (tokens.min(), tokens.max()) == (0, 6)
    tokens = load_input("random:100x100:long", LoadedModel("without", Without())).args[0]
    assert tokens.max() == 99


def test_tokens_can_be_given_to_a_model_of_text(minilm):
    batch = load_input("random:1x16:int64", minilm)
    with torch.inference_mode():
        assert minilm.model(*batch.args).last_hidden_state.shape == (1, 16, 384)


@pytest.mark.parametrize(
    "spec",
    ["random:", "random:x", "random:1x", "random:1xx2", "random:1,3", "random:-1x3", "random:1x3:",
     "random:axb", "random:1 x 3", "random:1x3:int64:2"],
)  # fmt: skip
def test_a_malformed_shape_is_an_error_with_examples(said, spec):
    with pytest.raises(InputError) as raised:
        load_input(spec, LINEAR)
    assert said(raised) == (
        f"the input must be random:SHAPE or random:SHAPE:DTYPE, got {spec}.\n"
        "For instance random:1x3x224x224 for a picture, random:1x128:int64 for tokens."
    )


def test_an_unknown_type_is_an_error_that_lists_them(said):
    with pytest.raises(
        InputError, match=r"the type in '.*' must be one of .*, got 'token'"
    ) as raised:
        load_input("random:1x3:token", LINEAR)
    assert "int64" in said(raised)


@pytest.mark.parametrize("shape", ["9" * 5000, "1x" * 64 + "1", "9" * 19])
def test_a_shape_that_no_tensor_has_is_an_error(said, shape):
    with pytest.raises(InputError, match="got random:") as raised:
        load_input(f"random:{shape}", LINEAR)
    assert len(said(raised)) < 300


def test_more_numbers_than_fit_are_an_error(said):
    with pytest.raises(InputError, match="must have at most 2,147,483,648 numbers") as raised:
        load_input("random:1000000x1000000", LINEAR)
    assert "Give a smaller shape." in said(raised)
