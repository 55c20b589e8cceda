from __future__ import annotations

import pickle
import struct
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hookline.data import load_input
from hookline.errors import InputError
from hookline.models import LoadedModel

ONE = np.arange(6, dtype=np.float32).reshape(1, 2, 3)


def test_one_array_is_the_argument(linear, tmp_path):
    np.save(tmp_path / "x.npy", ONE)
    np.savez(tmp_path / "x.npz", anything=ONE)
    torch.save(torch.from_numpy(ONE), tmp_path / "x.pt")
    save_file({"anything": torch.from_numpy(ONE)}, tmp_path / "x.safetensors")
    for suffix in (".npy", ".npz", ".pt", ".safetensors"):
        batch = load_input(str(tmp_path / f"x{suffix}"), linear)
        assert batch.kwargs == {}
        assert len(batch.args) == 1
        assert torch.equal(batch.args[0], torch.from_numpy(ONE))
        assert batch.description == f"x{suffix}, 1x2x3 float32"


def test_an_array_is_the_argument_however_many_rows_it_has(linear, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 2), np.float32))
    assert load_input(str(tmp_path / "x.npy"), linear).args[0].shape == (100, 2)


def test_several_named_arrays_are_keyword_arguments(linear, tmp_path):
    tensors = {"ids": torch.ones(1, 8, dtype=torch.int64), "mask": torch.zeros(1, 8)}
    np.savez(tmp_path / "x.npz", **{key: value.numpy() for key, value in tensors.items()})
    torch.save(tensors, tmp_path / "x.pt")
    save_file(tensors, tmp_path / "x.safetensors")
    for suffix in (".npz", ".pt", ".safetensors"):
        batch = load_input(str(tmp_path / f"x{suffix}"), linear)
        assert batch.args == ()
        assert set(batch.kwargs) == {"ids", "mask"}
        assert torch.equal(batch.kwargs["ids"], tensors["ids"])
        assert batch.description == f"x{suffix}, ids 1x8 int64, mask 1x8 float32"


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_tuple_or_list_is_the_positional_arguments(linear, tmp_path, kind):
    torch.save(kind([torch.zeros(2), torch.ones(3), None]), tmp_path / "x.pt")
    batch = load_input(str(tmp_path / "x.pt"), linear)
    assert [getattr(value, "shape", value) for value in batch.args] == [(2,), (3,), None]
    assert batch.description == "x.pt, 2 float32, 3 float32, NoneType"


def test_float64_of_numpy_becomes_the_models_float32_and_is_said(linear, tmp_path):
    np.save(tmp_path / "x.npy", ONE.astype(np.float64))
    batch = load_input(str(tmp_path / "x.npy"), linear)
    assert batch.args[0].dtype is torch.float32
    assert batch.description == "x.npy, 1x2x3 float32 (float64 in the file)"


@pytest.mark.parametrize("model", [nn.Linear(2, 2).double(), nn.Linear(2, 2).half(), nn.ReLU()])
def test_float64_of_numpy_stays_for_any_other_model(tmp_path, model):
    np.save(tmp_path / "x.npy", ONE.astype(np.float64))
    batch = load_input(str(tmp_path / "x.npy"), LoadedModel("other", model))
    assert batch.args[0].dtype is torch.float64
    assert batch.description == "x.npy, 1x2x3 float64"


def test_float64_of_torch_is_left_alone(linear, tmp_path):
    torch.save(torch.zeros(2, dtype=torch.float64), tmp_path / "x.pt")
    assert load_input(str(tmp_path / "x.pt"), linear).args[0].dtype is torch.float64


@pytest.mark.parametrize("dtype", ["float16", "int64", "uint8", "bool", "complex64", ">i4"])
def test_other_types_keep_their_type_and_values(linear, tmp_path, dtype):
    array = np.array([[0, 1], [1, 0]]).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    tensor = load_input(str(tmp_path / "x.npy"), linear).args[0]
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(tensor.numpy(), array)


def test_a_single_number_is_a_scalar(linear, tmp_path):
    np.save(tmp_path / "x.npy", np.float32(3))
    batch = load_input(str(tmp_path / "x.npy"), linear)
    assert batch.args[0].shape == ()
    assert batch.description == "x.npy, scalar float32"


def test_python_objects_are_never_unpickled(linear, tmp_path, said):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", a=np.array([{}], dtype=object))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(
            InputError, match=f"{name} must be a file .* got ValueError: Python objects"
        ) as raised:
            load_input(str(tmp_path / name), linear)
        assert "np.save(FILE" in said(raised)
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt needs unpickling") as raised:
        load_input(str(tmp_path / "x.pt"), linear)
    said(raised)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.pt", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not arrays at all", b"PK\x03\x04 cut"])
def test_a_broken_file_is_an_error(linear, tmp_path, said, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        InputError, match=f"{name} (cannot be read as a|must be a file that np.save)"
    ) as raised:
        load_input(str(tmp_path / name), linear)
    assert "unpickle" not in said(raised)


def header(shape: str, descr: str = "'<f4'") -> bytes:
    """The beginning of a `.npy` file, with 64 bytes of numbers."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        header("(1000000000, 1000000000)"),
        header(f"({2**62},)"),
        header(f"({10**30},)"),
        header("(-1, 3)"),
        header("('a',)"),
        header("(4,)", "'zz'"),
        header("(" * 2000),
        header("(4,)", "-" * 3000 + "1"),
    ],
    ids=["10^18", "2^62", "10^30", "negative", "a text", "dtype", "nested", "deep"],
)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_header_that_lies_is_an_error(linear, tmp_path, said, content, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    if suffix == ".npz":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", content)
    with pytest.raises(InputError, match=f"x{suffix} must be a file that np.save") as raised:
        load_input(str(path), linear)
    assert "Write it anew, as numbers: np.save(" in said(raised)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 1), (10, 99), (10, 9), (10, 12), (10, 14), (10, 8), (6, 255)],
    ids=["encrypted", "unknown", "deflate64", "bzip2", "lzma", "deflate", "version"],
)
def test_an_oddly_packed_archive_is_an_error(linear, tmp_path, said, offset, value):
    np.savez(tmp_path / "x.npz", x=ONE)
    content = bytearray((tmp_path / "x.npz").read_bytes())
    local, central = content.find(b"PK\x03\x04"), content.find(b"PK\x01\x02")
    content[central + offset] = value
    if offset != 6:
        content[local + offset - 2] = value
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.npz must be a file that np.save") as raised:
        load_input(str(tmp_path / "x.npz"), linear)
    said(raised)


def test_a_nested_tensor_is_described(linear, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    torch.save(nested, tmp_path / "x.pt")
    try:
        torch.load(tmp_path / "x.pt", weights_only=True)
    except pickle.UnpicklingError:  # torch 2.15 unpickles none of this layout
        with pytest.raises(InputError, match="needs unpickling"):
            load_input(str(tmp_path / "x.pt"), linear)
        return
    assert load_input(str(tmp_path / "x.pt"), linear).description == "x.pt, nested float32"


def test_a_file_cut_short_is_an_error(linear, tmp_path):
    np.save(tmp_path / "x.npy", ONE)
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"x\.npy must be a file that np.save"):
        load_input(str(tmp_path / "x.npy"), linear)


def test_words_are_no_numbers(linear, tmp_path, said):
    np.save(tmp_path / "x.npy", np.array(["a", "b"]))
    with pytest.raises(InputError, match="of a dtype that torch has, got <U1") as raised:
        load_input(str(tmp_path / "x.npy"), linear)
    said(raised)


@pytest.mark.parametrize("content", [3, {}, (), {"epoch": 3}])
def test_a_file_without_a_tensor_is_an_error(linear, tmp_path, said, content):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt must hold a tensor") as raised:
        load_input(str(tmp_path / "x.pt"), linear)
    assert "a dict of keyword arguments" in said(raised)
