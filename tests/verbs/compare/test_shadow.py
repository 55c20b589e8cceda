"""`hl.shadow`: the local error beside the accumulated one, and who is at fault."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hookline as hl
from ported_transformer import FAULTS, IDS, Renamed, net

IN_EVAL = [fault for fault in FAULTS if fault != "batch norm in training"]


@pytest.fixture(scope="module")
def model():
    return net()


def texts(comparison):
    return [finding.text for finding in comparison.findings]


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_EVAL)
def test_the_module_with_a_local_error_is_the_suspect(model, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    comparison = hl.shadow(model, port, IDS)
    assert comparison.suspect == path
    culprits = [finding.site for finding in comparison.findings if finding.kind == "site"]
    assert culprits == [path]
    later = comparison["head"]
    if path != "head":
        assert later.relative > later.floor.relative > later.local
        assert later.verdict == "noise"


def without_decoder(path):
    return path.removeprefix("decoder.")


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_EVAL)
def test_a_renamed_port_is_shadowed_by_its_names(model, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    comparison = hl.shadow(model, Renamed(port), IDS, names=without_decoder)
    assert comparison.suspect == path
    (finding,) = [finding for finding in comparison.findings if finding.kind == "site"]
    assert finding.text.startswith(f"{path} (decoder.{path} in b) computes otherwise")
    assert comparison[path].other == f"decoder.{path}"


def test_a_batch_of_a_loader_is_its_tensor(model):
    assert hl.shadow(model, copy.deepcopy(model), [IDS]).ok


def test_modes_are_compared_by_names(model):
    port = copy.deepcopy(model)
    FAULTS["batch norm in training"][0](port)
    comparison = hl.shadow(model, Renamed(port), IDS, names=without_decoder)
    assert "in eval mode in both: bn" in texts(comparison)[0]


def test_names_that_name_nothing_are_refused(model):
    with pytest.raises(hl.InputError, match="names of b, got 'encoder'"):
        hl.shadow(model, Renamed(model), IDS, names={"encoder": "blocks"})
    with pytest.raises(hl.InputError, match="must have modules in common"):
        hl.shadow(model, Renamed(model), IDS)


class Unwilling(nn.Linear):
    def forward(self, x):
        raise ValueError("no such input")


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_model_that_does_not_run_is_named(name):
    models = {"a": nn.Sequential(nn.Linear(4, 2)), "b": nn.Sequential(nn.Linear(4, 2))}
    models[name] = nn.Sequential(Unwilling(4, 2))
    with pytest.raises(hl.InputError, match=f"got ValueError from {name}: no such input"):
        hl.shadow(models["a"], models["b"], torch.ones(1, 4))
    assert not any(len(hl.inventory(model)) for model in models.values())


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_EVAL)
def test_a_port_in_bfloat16_is_run_again_in_float64(model, fault):
    plant, path = FAULTS[fault]
    port = copy.deepcopy(model)
    plant(port)
    for a in (model, copy.deepcopy(model).bfloat16()):
        assert hl.shadow(a, copy.deepcopy(port).bfloat16(), IDS).suspect == path


def test_two_faults_are_told_apart(model):
    port = copy.deepcopy(model)
    for fault in ("bias dropped", "base of RoPE"):
        FAULTS[fault][0](port)
    comparison = hl.shadow(model, port, IDS)
    assert [finding.site for finding in comparison.findings] == ["blocks.0.attn", "blocks.1.mlp.up"]
    assert "local" in str(comparison)


def unfused(model):
    port = copy.deepcopy(model)
    for block in port.blocks:
        block.attn.is_fused = False
    return port


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [copy.deepcopy, unfused, lambda model: copy.deepcopy(model).bfloat16(),
     lambda model: copy.deepcopy(model).double()],
)  # fmt: skip
def test_clean_ports_have_no_suspect(model, change):
    comparison = hl.shadow(model, change(model), IDS)
    assert comparison.ok
    assert comparison.suspect is None


class Masked(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.part, self.dtype = Scaled(), dtype

    def forward(self, x):
        return self.part(x, torch.ones(x.shape[-1]).to(self.dtype))


class Scaled(nn.Module):
    factor = 1.0

    def forward(self, x, mask):
        return x * mask * self.factor


def test_inputs_of_another_form_give_no_local_error():
    x = torch.randn(4, 8)
    a, b = Masked(torch.bool), Masked(torch.int64)
    comparison = hl.shadow(a, b, x)
    assert comparison["part"].local is None
    assert comparison.ok
    assert "no local error at part: its inputs have another form in b" in texts(comparison)[0]
    b.part.factor = 2.0
    told = hl.shadow(a, b, x)
    assert told.suspect == ""
    assert told["part"].verdict == "differs"


class InFloat32(nn.Module):
    def forward(self, x):
        if x.dtype is torch.float64:
            raise RuntimeError("no kernel for float64")
        return x.relu()


def test_a_model_that_does_not_run_in_float64_keeps_its_dtype():
    model = nn.Sequential(nn.Linear(8, 8), InFloat32())
    comparison = hl.shadow(model, copy.deepcopy(model), torch.randn(4, 8))
    assert "floors are of float32: no kernel for float64" in texts(comparison)[0]
    assert comparison.ok


def test_a_module_that_refuses_the_inputs_is_said(model):
    class Picky(nn.ReLU):
        def forward(self, x):
            if float(x.sum()) > 0.5:
                raise ValueError("too large")
            return super().forward(x)

    a = nn.Sequential(nn.Identity(), nn.ReLU())
    b = nn.Sequential(nn.Hardtanh(-1.0, 0.0), Picky())
    comparison = hl.shadow(a, b, torch.ones(2, 2))
    assert "no local error at 1: it refuses the inputs of a: too large" in texts(comparison)
    assert comparison.suspect == "0"


def test_the_models_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    port = copy.deepcopy(model)
    port[1].eval()
    x, states = torch.randn(8, 4), [copy.deepcopy(part.state_dict()) for part in (model, port)]
    before = torch.get_rng_state()
    comparison = hl.shadow(model, port, x)
    (text,) = texts(comparison)
    assert text == "in training mode in one model alone, and run in eval mode in both: 1"
    assert torch.equal(before, torch.get_rng_state())
    assert (model.training, model[1].training, port[1].training) == (True, True, False)
    for part, state in zip((model, port), states, strict=True):
        assert hl.compare(part.state_dict(), state).counts["identical"] == 7
        assert len(hl.inventory(part)) == 0


def test_calls_of_a_shared_module_have_their_own_rows():
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Linear(4, 4), relu)
    sites = [row.site for row in hl.shadow(model, copy.deepcopy(model), torch.randn(2, 4))]
    assert sites == ["0", "1", "0#1", "(root)"]


def test_what_cannot_be_shadowed_is_refused(model):
    with pytest.raises(hl.InputError, match="must have modules in common"):
        hl.shadow(nn.Sequential(nn.ReLU()), nn.Sequential(), torch.ones(2))
    with pytest.raises(hl.InputError, match="inputs must be the arguments of both models"):
        hl.shadow(model, model, lambda: model(IDS))
    with pytest.raises(hl.InputError, match="of both models, got a generator"):
        hl.shadow(model, model, (ids for ids in [IDS]))
    with pytest.raises(hl.InputError, match=r"TypeError from a.*\nan array of NumPy is given"):
        hl.shadow(model, model, IDS.numpy())
    with pytest.raises(hl.AttachError, match="must be given a model"):
        hl.shadow(model, "model", IDS)


class Filter(nn.Module):
    """Turns the phase of frequencies, which complex parameters hold."""

    def __init__(self, angle):
        super().__init__()
        self.w = nn.Parameter(torch.polar(torch.ones(5), angle * torch.arange(5.0)))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.w)


def test_another_phase_of_a_complex_parameter_differs():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    models = [nn.Sequential(nn.Linear(8, 8), Filter(angle)) for angle in (0.1, 0.1, -0.1)]
    for model in models[1:]:
        model[0].load_state_dict(models[0][0].state_dict())
    assert hl.shadow(*models[:2], x).ok
    comparison = hl.shadow(models[0], models[2], x)
    assert comparison.suspect == "1"
    assert not any(finding.kind == "floor" for finding in comparison.findings)


class Unsupported(nn.Module):
    def forward(self, x):
        raise NotImplementedError


class WithFallback(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.fast, self.slow, self.factor = Unsupported(), nn.Linear(4, 4), factor

    def forward(self, x):
        try:
            return self.fast(x)
        except NotImplementedError:
            return self.slow(x) * self.factor


def test_a_module_that_catches_an_error_is_itself():
    reference = nn.Sequential(*(WithFallback() for _ in range(3)))
    port = copy.deepcopy(reference)
    assert hl.shadow(reference, port, torch.randn(3, 4)).ok
    port[1].factor = 2.0
    comparison = hl.shadow(reference, port, torch.randn(3, 4))
    assert comparison.suspect == "1"
    assert [row.site for row in comparison if row.local is not None] == [
        "0.slow", "0", "1.slow", "1", "2.slow", "2", "(root)",
    ]  # fmt: skip
    assert texts(comparison)[-1].startswith("1 computes otherwise")


class Rescaled(nn.Module):
    """Multiplies by what the module around it has set; counts all calls."""

    scale = 1.0
    n_calls = 0

    def __init__(self, factor=1.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        Rescaled.n_calls += 1
        return self.linear(x) * self.scale * self.factor


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.last = Rescaled(), nn.Linear(4, 4)

    def forward(self, x):
        for self.part.scale in (1.0, 2.0):
            x = self.part(x)
        return self.last(x)


def test_a_module_that_reads_what_changes_is_no_suspect():
    reference = Around()
    port, x = copy.deepcopy(reference), torch.randn(3, 4)
    comparison = hl.shadow(reference, port, x)
    assert comparison.ok
    assert comparison.suspect is None
    assert {row.local for row in comparison if row.site == "part#1"} == {None}
    assert {row.verdict for row in comparison} == {"identical"}
    (text,) = texts(comparison)
    assert text.startswith("no local error at part#1: it does not repeat itself")
    port.part.linear.weight.data.mul_(2)
    assert hl.shadow(reference, port, x).suspect == "part.linear"


@pytest.mark.parametrize(("factor", "n_calls"), [(1.0, 6), (2.0, 7)])
def test_only_a_module_above_the_floor_runs_once_more(factor, n_calls):
    reference = nn.Sequential(Rescaled(), Rescaled())
    port = copy.deepcopy(reference)
    port[1].factor = factor
    Rescaled.n_calls = 0
    assert hl.shadow(reference, port, torch.randn(3, 4)).ok is (factor == 1)
    assert Rescaled.n_calls == n_calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_values_have_a_local_error():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()  # padding makes the values nested
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    inputs = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": mask}
    port = copy.deepcopy(encoder)
    assert hl.shadow(encoder, port, inputs).ok
    port.layers[1].linear2.bias.data += 1
    assert not hl.shadow(encoder, port, inputs).ok


class Narrow(nn.Module):
    """A layer that computes in float32 with weights in a narrower dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).to(dtype), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))


@pytest.mark.parametrize("first", [True, False])
def test_weights_in_float8_do_not_widen_the_floors(first):
    layers = [Narrow(torch.float8_e4m3fn), nn.LayerNorm(8)]
    reference = nn.Sequential(*(layers if first else layers[::-1]))
    port = copy.deepcopy(reference)
    norm = port[first]
    norm.eps = 0.01
    comparison = hl.shadow(reference, port, torch.randn(4, 8))
    assert comparison.suspect == str(int(first))


class InBfloat16(nn.Linear):
    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def test_inputs_are_in_the_dtype_of_the_first_parameter():
    reference = nn.Sequential(nn.Linear(8, 8), InBfloat16(8, 8).bfloat16())
    port = copy.deepcopy(reference)
    x = torch.randn(4, 8)
    assert hl.shadow(reference, port, x).ok
    port[0].bias.data += 1
    assert hl.shadow(reference, port, x).suspect == "0"
