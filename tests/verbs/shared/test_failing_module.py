"""Naming the module an exception came from."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hookline as hl
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


class Adding(nn.Module):
    """Adds a bias that may not fit, in an operation."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return torch.add(self.inner(x), torch.ones(3))


@pytest.mark.parametrize(("site", "wanted"), [
    ("1@add", "1@add (operation), which got Tensor[1, 2], Tensor[3]"),
    ("0", "1 (Adding), which got Tensor[1, 2]"),
])  # fmt: skip
def test_an_operation_with_a_hook_is_named_by_its_site(site, wanted):
    model = nn.Sequential(nn.Identity(), Adding())
    with pytest.raises(RuntimeError) as caught, hl.record(model, site):
        model(torch.zeros(1, 2))
    assert str(find_failing_module(model, caught.value)) == wanted


def test_a_part_of_attention_is_named_by_its_site():
    def fail(pattern):
        raise ZeroDivisionError

    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    x = torch.zeros(3, 1, 4)
    with pytest.raises(ZeroDivisionError) as caught, hl.edit(model, "0@pattern", fail):
        model[0](x, x, x)
    text = str(find_failing_module(model, caught.value))
    assert text == "0@pattern (operation), which got Tensor[1, 2, 3, 3]"


def test_features_and_watch_name_the_operation():
    model, out = nn.Sequential(nn.Identity(), Adding()), io.StringIO()
    with pytest.raises(RuntimeError) as caught:
        hl.features(model, torch.zeros(1, 2), "1@add")
    assert "the model failed in 1@add (operation)" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError), hl.watch(model, "1@add", file=out):
        model(torch.zeros(1, 2))
    assert "!! 1@add (operation), which got Tensor[1, 2], Tensor[3], raised" in out.getvalue()
