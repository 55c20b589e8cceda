"""A GPU that multiplies in TF32: what it rounds is noise, and the flag that ends it is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine import model_fingerprint
from hookline.verbs.compare import tf32
from hookline.verbs.compare.read_sides import read_side

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
FLAG = "torch.backends.cudnn.allow_tf32"


def rounded(tensor):
    """Keep 10 bits of the mantissa."""
    return (tensor.detach().view(torch.int32) & ~0x1FFF).view(torch.float32)


class Conv2dOfGpu(nn.Conv2d):
    """A convolution that rounds as cuDNN does."""

    def forward(self, x):
        if x.dtype is not torch.float32 or not torch.backends.cudnn.allow_tf32:
            return super().forward(x)
        return self._conv_forward(rounded(x), rounded(self.weight), self.bias)


def net(kind=Conv2dOfGpu):
    torch.manual_seed(0)
    layers = kind(3, 8, 3), nn.ReLU(), kind(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    return nn.Sequential(*layers).eval()


def run_of(model, x=X, **options):
    with hl.record(model, ["**", "(root):input"], **options) as run:
        model(x)
    return run


@pytest.fixture
def gpu(monkeypatch):
    """Have the CPU pass for a GPU."""
    monkeypatch.setattr(tf32, "has_tf32", lambda device: True)


@pytest.mark.usefixtures("gpu")
def test_what_tf32_rounds_is_noise_and_its_flag_is_named():
    comparison = hl.compare(run_of(net()), run_of(net(nn.Conv2d)))
    assert comparison.first is None
    assert comparison["0"].why.endswith(f": {tf32.IN_TF32}")
    (floor,) = [finding.text for finding in comparison.findings if finding.kind == "floor"]
    assert floor.endswith(f"because {tf32.IN_TF32}: to see smaller ones, set {FLAG} = False")


def test_elsewhere_a_difference_as_large_is_a_fault():
    assert hl.compare(run_of(net()), run_of(net(nn.Conv2d))).first.site == "0"


@pytest.mark.usefixtures("gpu")
def test_without_tf32_the_floor_is_that_of_float32(monkeypatch):
    coarse = run_of(net())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    off = [run_of(net()), run_of(net(nn.Conv2d))]
    assert tf32.tf32_flags_of(read_side(off[0], "a")) == []
    assert hl.compare(*off).findings == []
    assert hl.compare(coarse, off[1]).first is None  # one of the two is enough


@pytest.mark.usefixtures("gpu")
def test_a_fault_above_tf32_is_found():
    faulty = net()
    with torch.no_grad():
        faulty[2].weight.mul_(1.1)
    assert hl.compare(run_of(faulty), run_of(net(nn.Conv2d))).first.site == "2"


@pytest.mark.usefixtures("gpu")
def test_invariance_blames_no_model_for_tf32():
    row = hl.invariance(net(), X, only=["float64"])["float64"]
    assert (row.outcome, row.first) == ("holds", "")
    assert row.relative > 1e-5
    assert FLAG in row.why
    assert hl.invariance(net(), X, only=["twice"])["twice"].why == ""


@pytest.mark.usefixtures("gpu")
def test_products_are_in_tf32_only_if_asked_for(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4))
    assert tf32.tf32_flags_of(read_side(run_of(model, torch.ones(2, 4)), "a")) == []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        side = read_side(run_of(model, torch.ones(2, 4)), "a")
    finally:
        torch.set_float32_matmul_precision(before)
    assert tf32.tf32_flags_of(side) == ["torch.backends.cuda.matmul.allow_tf32"]


def test_the_gpu_of_a_folder_is_known_by_its_name(tmp_path, monkeypatch):
    model, opened = net(), []
    for device in ("cuda:0 (NVIDIA H100)", "cpu"):
        monkeypatch.setattr(model_fingerprint, "device_of", lambda model, device=device: device)
        opened.append(hl.open(run_of(model).save(tmp_path / device[:3])))
    assert [tf32.tf32_flags_of(read_side(run, "a")) for run in opened] == [[FLAG], []]


def test_a_gpu_is_told_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not tf32.has_tf32(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tf32.has_tf32(torch.device("cuda", 0))
    assert not tf32.has_tf32(torch.device("cpu"))
