"""Numbers and tensors that ready-made edits combine values with: none is changed on the way."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline.verbs.edit.operands import Operand


@pytest.mark.parametrize("change", [hl.edits.replace, hl.edits.add, hl.edits.scale, hl.edits.clamp])
@pytest.mark.parametrize(
    ("new", "dtype", "said"),
    [
        (300, torch.uint8, "300"),
        (-1, torch.uint8, "-1"),
        (torch.tensor(300), torch.uint8, "300"),
        (torch.tensor([5, 300]), torch.uint8, "300"),
        (torch.tensor([-129, 127]), torch.int8, "-129"),
        (torch.full((2,), 2**40), torch.int32, "1099511627776"),
    ],
)
def test_an_integer_that_the_dtype_cannot_hold_is_refused(change, new, dtype, said):
    with pytest.raises(hl.StructureError, match=f"which cannot hold {said}\\.\n"):
        change(new)(torch.ones(2, dtype=dtype))


def test_a_patch_with_an_integer_out_of_range_is_refused():
    model = torch.nn.Identity()
    with hl.record(model, "(root)") as run:
        model(torch.tensor([5, 300]))
    with (
        hl.edit(model, "(root)", hl.edits.patch(run)),
        pytest.raises(hl.StructureError, match="which cannot hold 300"),
    ):
        model(torch.tensor([5, 3], dtype=torch.uint8))


@pytest.mark.parametrize("new", [7, True, torch.tensor(7), torch.tensor([7, 255])])
def test_integers_in_range_of_another_dtype_are_taken(new):
    value = torch.zeros(2, dtype=torch.uint8)
    replaced = hl.edits.replace(new)(value)
    assert replaced.dtype is torch.uint8
    assert replaced.tolist() == torch.as_tensor(new).expand(2).tolist()
    Operand(torch.zeros(0, dtype=torch.int64), "replace").check_dtype_and_broadcast(value[:0])


@pytest.mark.parametrize("name", ["scale", "add", "replace"])
@pytest.mark.parametrize("number", [1.005, 1e5, 3.3e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tensor_of_one_number_gives_what_the_number_does(name, number, dtype):
    value = torch.tensor([1000.0, 1e-3, -7.0]).to(dtype)
    change = getattr(hl.edits, name)
    for of in (torch.float32, torch.float64):
        new = change(torch.tensor(number, dtype=of))(value)
        assert new.dtype is dtype
        assert torch.equal(new, change(number)(value))


def test_a_value_of_one_number_keeps_its_dtype():
    wide = torch.tensor(2.0, dtype=torch.float64)
    for change in (hl.edits.scale(wide), hl.edits.add(wide), hl.edits.replace(wide)):
        assert change(torch.tensor(1.0)).dtype is torch.float32


class OnDevice(torch.Tensor):
    """A tensor that is not on the processor."""

    is_cpu = False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_on_a_gpu_is_not_rounded_first(dtype):
    value, number = torch.tensor([[1000.0, 1e-3, -7.0]]).to(dtype), torch.tensor(1.005)
    operand = Operand(number.as_subclass(OnDevice), "scale").cast_like(value)
    assert (operand.shape, operand.dtype) == ((1, 1), torch.float32)
    for name in ("scale", "add", "replace"):
        change = getattr(hl.edits, name)
        new = change(number.as_subclass(OnDevice))(value)
        assert new.dtype is dtype
        assert torch.equal(new, change(1.005)(value))
    plain = torch.ones(3)
    assert not Operand(number.as_subclass(OnDevice), "scale").cast_like(plain).dim()
