"""Files of tensors: as safetensors reads them, checked, each tensor with a history of its own."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hookline.errors import OverwrittenError
from hookline.files.folder_or_url import LocalPlace
from hookline.files.safetensors_file import DTYPES, TensorFile, encode_tensors
from hookline.files.sealed_json import checksum
from thoroughness import examples


def write_tensors(path, tensors):
    """Write a file of tensors, and return its checksums."""
    chunks, sums = encode_tensors(tensors)
    LocalPlace(path.parent).write_new(path.name, chunks)
    return sums


def opened(path, sums):
    return TensorFile(LocalPlace(path.parent).open(path.name), sums)


def same(one, other):
    """Whether two tensors are equal to the last bit."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@st.composite
def some_tensors(draw):
    """A few tensors of any dtype that can be stored, of any shape, empty ones too."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(DTYPES.values(), key=str)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = torch.empty(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
        found.append(raw.view(dtype).reshape(shape))
    return found


@settings(max_examples=examples(60), deadline=None)
@given(some_tensors())
def test_a_file_is_read_here_and_by_safetensors(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    sums = write_tensors(path, tensors)
    file = opened(path, sums)
    by_library = load_file(path)
    assert len(by_library) == len(tensors)
    for number, tensor in enumerate(tensors):
        read = file.tensor(str(number))
        assert same(read, tensor)
        assert same(by_library[str(number)], tensor)
        assert read.data_ptr() % tensor.dtype.itemsize == 0
        outline = file.meta_tensor(str(number))
        assert (outline.dtype, outline.shape) == (tensor.dtype, tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_one_element_of_any_stride_is_written(tmp_path, dtype):
    # It counts as contiguous, and torch refuses to view it as bytes.
    tensor = torch.arange(6.0).to(dtype).view(3, 2)[2:, :1].squeeze(1)
    assert (tensor.is_contiguous(), tensor.stride()) == (True, (2,))
    file = opened(tmp_path / "x", write_tensors(tmp_path / "x", [tensor]))
    assert file.tensor("0").float().tolist() == [4]


def test_a_file_of_safetensors_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"0": torch.arange(3.0), "1": torch.tensor([True])}, path)
    raw = path.read_bytes()
    head = raw[: 8 + int.from_bytes(raw[:8], "little")]
    sums = [checksum(head), checksum(torch.arange(3.0).numpy()), checksum(b"\1")]
    file = opened(path, sums)
    assert file.tensor("0").tolist() == [0, 1, 2]
    assert file.tensor("1").tolist() == [True]


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_tensor_written_to_is_noticed_its_neighbours_are_not(tmp_path, is_inference):
    path = tmp_path / "x.safetensors"
    file = opened(path, write_tensors(path, [torch.zeros(2), torch.zeros(2)]))
    with torch.inference_mode(is_inference):
        file.tensor("0").add_(1)
        with pytest.raises(OverwrittenError):
            file.tensor("0")
        assert file.tensor("1").tolist() == [0, 0]
    assert load_file(path)["0"].tolist() == [0, 0]  # the file is as it was
    assert file.tensor("1") is file.tensor("1")


def test_bytes_are_compared_once_and_heads_at_once(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    sums = write_tensors(path, [torch.zeros(2), torch.ones(2)])
    seen = []

    def counted(data):
        seen.append(len(data))
        return checksum(data)

    monkeypatch.setattr("hookline.files.safetensors_file.checksum", counted)
    file = opened(path, sums)
    assert len(seen) == 1
    for _ in range(3):
        file.tensor("0")
        file.read_verified_bytes("0")
        file.meta_tensor("1")
    assert seen[1:] == [8]


HEADS = [
    {"0": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    {"0": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}},
    {"0": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    {"0": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
    {"0": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
    {"0": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
    {"0": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}},
    {"0": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}},
    {"0": {"dtype": "F32", "shape": [10**30, 0], "data_offsets": [0, 0]}},
    {"0": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}},
    {"0": {}},
    {"0": None},
    {"1": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
def test_a_head_that_lies_is_refused_even_with_a_right_checksum(tmp_path, head):
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    sums = [checksum(data[:-8]), *[checksum(bytes(size)) for size in (8, 8)]]
    file = opened(path, sums)
    for look in (file.tensor, file.meta_tensor, file.read_verified_bytes):
        with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)):
            look("0")


@pytest.mark.parametrize("size", [0, 4, 12, 40])
def test_a_file_that_is_cut_off_is_refused(tmp_path, size):
    path = tmp_path / "x.safetensors"
    sums = write_tensors(path, [torch.zeros(2)])
    os.truncate(path, size)
    with pytest.raises(ValueError, match=r"x\.safetensors|empty file"):
        opened(path, sums)


def test_what_lies_before_a_cut_is_still_read(tmp_path):
    path = tmp_path / "x.safetensors"
    sums = write_tensors(path, [torch.ones(2), torch.ones(2)])
    os.truncate(path, path.stat().st_size - 4)
    file = opened(path, sums)
    assert file.tensor("0").tolist() == [1, 1]
    with pytest.raises(ValueError, match="must hold '1' where its header says"):
        file.tensor("1")
