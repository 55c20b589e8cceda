"""Naming the module an exception came from."""

from __future__ import annotations

import pytest
import torch

from hookline.verbs.shared.failing_module import find_failing_module


def test_the_innermost_module_is_named_with_what_it_got(net):
    with pytest.raises(RuntimeError) as caught:
        net(torch.zeros(1, 7, 8, 8))
    assert (
        str(find_failing_module(net, caught.value)) == "stem (Conv2d), which got Tensor[1, 7, 8, 8]"
    )


def test_keyword_arguments_are_shown(holder):
    with pytest.raises(TypeError) as caught:
        holder("not a tensor")
    assert str(find_failing_module(holder, caught.value)) == "(root) (Holder), which got str"


def test_an_exception_from_elsewhere_blames_nobody(net):
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert find_failing_module(net, caught.value) is None


def test_dtypes_are_named_where_the_error_is_about_them(net):
    with pytest.raises(RuntimeError, match="type") as caught:
        net(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert str(find_failing_module(net, caught.value)) == (
        "stem (Conv2d), which got Tensor[1, 3, 8, 8] uint8 on cpu"
        " and has parameters of float32 on cpu"
    )
