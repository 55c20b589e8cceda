"""Runs in unusual forms and unusual tensors: each NaN is found, and nothing else is said."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

import hookline as hl

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Applied(nn.Module):
    """A linear layer, and a function."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.fc(x))


def found(model, *args, run=None):
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        (run or model)(*args)
    return caught.value.finding


# -- several lines, and models that raise ----------------------------------------------------------


def test_checks_and_records_of_one_model_go_together():
    model = Applied(torch.log)
    with (
        pytest.raises(hl.NonFiniteError) as caught,
        hl.check(model),
        hl.record(model, "fc"),
        hl.check(model.fc),
        hl.check(model),
    ):
        model(X)
    assert caught.value.finding.function == "log"


def test_a_model_that_raises_after_a_nan_keeps_its_error():
    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    class Refusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = Log()

        def forward(self, x):
            raise ValueError(f"not {self.log(x).mean()}")

    model = Refusing()
    with pytest.raises(ValueError, match="not nan") as caught, hl.check(model):
        # Torch goes through these hooks while it raises.
        model.register_forward_hook(lambda module, args, output: None, always_call=True)
        model(X)
    assert "the output of log (Log)" in caught.value.__notes__[0]


# -- transforms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [vmap, lambda f: grad(lambda x: f(x).sum())])
def test_a_nan_under_transforms_of_torch_func(transform):
    model = Applied(torch.log)
    finding = found(model, X, run=transform(model))
    assert (finding.kind, finding.path) == ("forward", "")
    assert "torch.func" in str(finding)


def test_a_model_that_maps_a_part_itself_is_checked():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Applied(torch.tanh)

        def forward(self, x):
            return vmap(self.part)(x)

    model = Mapped()
    with hl.check(model, also="shapes") as line:
        model(X)
    assert line.findings == []
    model.part.function = lambda x: torch.log(-x.abs())
    finding = found(model, X)
    assert (finding.path, finding.operation) == ("part", "aten.log.default")


def test_a_nan_in_forward_mode_names_its_module():
    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, x).log()).tangent

    finding = found(Applied(lambda x: tangent(x * 0)), X)
    assert (finding.path, finding.operation) == ("", None)
    assert "forward-mode AD" in str(finding)


def test_a_nan_in_a_functional_call():
    model = Applied(torch.log)
    weights = dict(model.named_parameters())
    loss = lambda given: functional_call(model, given, (X,)).sum()  # noqa: E731
    assert found(model, weights, run=grad(loss)).kind == "forward"


@pytest.mark.parametrize("number", [3e38, -math.inf])
def test_masks_and_large_numbers_under_vmap_are_no_alarm(number):
    model = Applied(lambda x: torch.where(x > 0, number, 0.0 * x))
    with hl.check(model) as line:
        for _ in range(3):
            vmap(model)(X)
    assert line.findings == []


# -- tensors of all kinds --------------------------------------------------------------------------


def test_a_nan_in_an_imaginary_part():
    model = Applied(lambda x: (x, torch.complex(x, x.log())))
    assert found(model, X).function == "log"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "form", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda x: torch.stack([x, x])]
)
def test_a_nan_that_is_passed_on_in_another_layout(form):
    finding = found(Applied(lambda x: form(x.log())), X)
    assert (finding.kind, finding.operation) == ("forward", "aten.log.default")


def test_a_nan_in_a_jagged_tensor():
    batch = torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)
    finding = found(Applied(torch.log), batch)
    assert (finding.kind, finding.operation) == ("forward", "aten.log.default")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nan_in_a_nested_tensor_of_the_older_layout():
    batch = torch.nested.nested_tensor([X.abs(), X[:1].abs()])
    model = Applied(torch.relu)
    with torch.no_grad(), hl.check(model):
        model(batch)
    finding = found(model, torch.nested.nested_tensor([X * math.nan]))
    assert (finding.kind, finding.path) == ("forward", "fc")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_a_nan_in_float8(name):
    dtype = getattr(torch, name)
    model = Applied(lambda x: x.abs().to(dtype))
    with hl.check(model):
        model(X)
    assert found(model, X * math.nan).kind == "input"
    model.register_buffer("kept", torch.tensor([math.nan]).to(dtype))
    with pytest.raises(hl.NonFiniteError, match="buffer kept"):
        hl.check(model)


def test_a_model_without_numbers_is_no_alarm():
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with pytest.warns(hl.HooklineWarning, match="checked nothing in 1 run"):
        with hl.check(model) as line:
            model(x)
    assert line.findings == []
    with FakeTensorMode():
        model, x = nn.Linear(4, 4), torch.zeros(2, 4)
        with pytest.warns(hl.HooklineWarning, match="checked nothing in 1 run"):
            with hl.check(model) as line:
                model(x)
    assert line.findings == []


def test_parts_that_run_without_the_model_are_checked():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with hl.check(model):  # and no warning says that nothing was checked
        model[0](X)
    with pytest.raises(hl.NonFiniteError, match=r"output of 0 \(Linear\)"):
        with hl.check(model):
            model[0](X * math.nan)


def test_a_nan_written_out_in_an_operation_is_found():
    finding = found(Applied(lambda x: x * math.nan), X)
    assert (finding.function, finding.n_nan) == ("mul", 12)


def test_a_nan_that_fills_memory_is_meant():
    model = Applied(lambda x: (x, x.new_full((2,), math.nan), x.masked_fill(x > 0, math.nan)))
    with hl.check(model) as line:
        model(X)
    assert line.findings == []


# -- random numbers --------------------------------------------------------------------------------


class Random(nn.Module):
    """Draws from all generators; the sum of its output overflows, so the run is repeated."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        self.drawn = []

    def forward(self, x):
        self.drawn.append(
            (random.random(), np.random.rand(), torch.rand(1).item(),
             torch.rand(1, generator=self.generator).item())
        )  # fmt: skip
        return torch.full_like(x, 3e38)


def test_a_repeated_run_draws_the_same_random_numbers():
    def drawn(*, is_checked):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = Random()
        line = hl.check(model) if is_checked else None
        for _ in range(2):
            model(X)
        if line is not None:
            line.remove()
        return model.drawn

    plain, checked = drawn(is_checked=False), drawn(is_checked=True)
    assert checked == [plain[0], plain[0], plain[1]]


def test_a_nan_of_a_random_branch_is_found():
    class Branch(nn.Module):
        def forward(self, x):
            return x.log() if random.random() < 0.5 else x

    random.seed(0)
    model = Branch()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for _ in range(20):
            model(X)
    assert caught.value.finding.function == "log"


def test_an_output_that_is_spoilt_on_its_way_out_is_found():
    finding = found(Applied(lambda y: y.div_(y.sub_(y))), torch.ones(2, 4))
    assert (finding.path, finding.operation) == ("", "aten.div_.Tensor")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_nan_written_past_the_version_counter_is_found(needs_grad):
    def spoil(y):
        y.data.sub_(y.data).div_(y.data)
        return y

    finding = found(Applied(spoil), torch.ones(2, 4, requires_grad=needs_grad))
    assert (finding.path, finding.operation) == ("", "aten.div_.Tensor")
