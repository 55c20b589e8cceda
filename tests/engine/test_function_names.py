"""The names of torch's functions and of their arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hookline.engine.function_names import (
    argument_names,
    functions_by_name,
    is_tensor_attribute,
    selector_name,
)


class _Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


X, Y = torch.randn(3, 3), torch.randn(3, 3)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda: X + Y, "add"),
        (lambda: 1 + X, "add"),
        (lambda: 1 - X, "rsub"),
        (lambda: 1 / X, "div"),
        (lambda: X // 2, "floor_divide"),
        (lambda: X @ Y, "matmul"),
        (lambda: -X, "neg"),
        (lambda: X > 0, "gt"),
        (lambda: ~(X > 0), "invert"),
        (lambda: X[0], "getitem"),
        (lambda: X**2, "pow"),
        (lambda: F.relu(X), "relu"),
        (lambda: X.softmax(-1), "softmax"),
        (lambda: X.clone().relu_(), "relu_"),
        (lambda: F.scaled_dot_product_attention(X, X, X), "scaled_dot_product_attention"),
        (lambda: X.unflatten(1, (3, 1)), "unflatten"),
    ],
)
def test_what_code_calls_has_the_name_that_selects_it(run, name):
    with _Seen() as seen:
        run()
    assert selector_name(seen.functions[-1]) == name
    assert any(seen.functions[-1] is function for function in functions_by_name()[name])


def test_the_functions_of_one_name_are_found_in_each_space():
    found = functions_by_name()["relu"]
    assert all(any(f is g for g in found) for f in (torch.relu, F.relu, Tensor.relu))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (F.scaled_dot_product_attention, ("query", "key", "value", "attn_mask")),
        (torch.matmul, ("input", "other")),
        (Tensor.matmul, ("input", "other")),
        (Tensor.__getitem__, ("input", "key")),
        (Tensor.split, ("input", "split_size", "dim")),
        (F.softmax, ("input", "dim")),
        (torch.baddbmm, ("input", "batch1", "batch2")),
    ],
)
def test_arguments_have_the_names_of_the_documentation(function, names):
    assert argument_names(function).names[: len(names)] == names


def test_an_argument_that_takes_the_rest_is_named():
    def forward(x, *rest):
        return x

    assert argument_names(forward) == (("x",), "rest")
    assert argument_names(Tensor.view).rest is not None


def test_attributes_are_told_from_functions():
    assert is_tensor_attribute("mT")
    assert is_tensor_attribute("shape")
    assert not is_tensor_attribute("relu")
    assert not is_tensor_attribute("nothing_like_it")
