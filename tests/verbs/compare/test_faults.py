"""Planted porting faults are named at their module, and clean copies are quiet."""

from __future__ import annotations

import copy

import pytest
import torch

import hookline as hl
from ported_transformer import FAULTS, IDS, Renamed, net, run_of, with_functions

# Modules that a function stands for.
pytestmark = pytest.mark.filterwarnings("ignore:hl.record. [26] of .* sites never fired")


@pytest.fixture(scope="module")
def model():
    return net()


@pytest.fixture(scope="module")
def run(model):
    return run_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_module_at_fault_is_named(model, run, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    assert hl.compare(run_of(port), run).suspect == path
    renamed = hl.compare(
        run, run_of(Renamed(port)), names=lambda name: name.removeprefix("decoder.")
    )
    assert renamed.suspect == path


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_functions_for_modules_hide_no_fault(model, run, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    path = path.removesuffix(".act")  # whose forward calls the function now
    assert hl.compare(run_of(with_functions(port)), run).suspect == path
    if fault != "batch norm in training":
        assert hl.shadow(model, port, IDS).suspect == path


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_in_float64_against_float32_the_module_is_named_too(model, run, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    assert hl.compare(run_of(port.double()), run).suspect == path


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_bfloat16_names_the_module_or_says_that_it_may_not(model, run, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    comparison = hl.compare(run_of(port.bfloat16()), run)
    assert comparison.suspect in (path, None)
    below = [finding.text for finding in comparison.findings if finding.kind == "floor"]
    assert bool(below) == (comparison.suspect is None)
    cast = run_of(copy.deepcopy(model).bfloat16())
    exact = hl.compare(run_of(port), cast, floor=hl.compare(cast, cast))
    if fault == "eps of an RMS norm":  # rounded away: every value is the same
        assert exact.counts["identical"] == len(exact)
        assert "round away what is below 0.004 of a value" in exact.findings[-1].text
    else:
        assert exact.suspect == path


def fused_off(model):
    for block in model.blocks:
        block.attn.is_fused = False
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: copy.deepcopy(model).bfloat16(),
        lambda model: copy.deepcopy(model).half(),
        lambda model: copy.deepcopy(model).double(),
        lambda model: fused_off(copy.deepcopy(model)),
        lambda model: fused_off(copy.deepcopy(model).bfloat16()),
    ],
)
def test_clean_copies_are_quiet(model, run, change):
    comparison = hl.compare(run_of(change(model)), run)
    assert comparison.ok
    assert comparison.first is None
    assert comparison.suspect is None


@pytest.mark.slow
@pytest.mark.parametrize("cast", [torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.float])
def test_gradients_of_clean_copies_are_quiet(model, cast):
    runs = []
    for port in (copy.deepcopy(model), model):
        if port is not model:
            port.to(cast(torch.ones(1)).dtype)
        with hl.record(port, ports=("output", "grad_output", "grad"), copy=True) as run:
            port(IDS).float().square().mean().backward()
        port.zero_grad()
        runs.append(run)
    assert hl.compare(*runs).ok


BROKEN = {
    "a row of 64 a quarter off": lambda x: x.index_copy(0, torch.tensor([5]), x[5:6] * 1.25),
    "all 6 % too large": lambda x: x * 1.06,
    "the largest flipped": lambda x: torch.where(x.abs() == x.abs().max(), -x, x),
    "channels permuted": lambda x: x.roll(1, 1),
    "scaled": lambda x: x * 0.22,
    "one row of zeros": lambda x: x.index_fill(0, torch.tensor([3]), 0.0),
    "one infinity": lambda x: x.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(1e39)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", BROKEN)
def test_no_fault_passes_as_the_noise_of_a_dtype(fault, dtype):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for pair in ((BROKEN[fault](x).to(dtype), x), (x.to(dtype), BROKEN[fault](x))):
        (row,) = hl.compare(*({"x": side} for side in pair))
        assert row.verdict == "differs"
    assert hl.compare({"x": x.to(dtype)}, {"x": x}).ok
