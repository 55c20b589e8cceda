"""Findings of recordings: healthy models raise no alarm, planted faults are named at their site."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from healthy_models import FAMILIES, VARIANTS, healthy_run, plain
from hookline.findings.forward_rules import never_called
from hookline.findings.survey import Survey, template_of
from hookline.findings.tensor_reading import measure_numbers
from planted_faults import FAULTS, Net
from thoroughness import tries

# A cross-section for the gate; `make full` tries all.
FEW_HEALTHY = [("llama", "eval"), ("bert", "train"), ("digits", "perturbed"), ("plain", "bf16")]
FEW_FAULTS = [
    "zeroed projection", "x100 init of a plain layer", "small init from layer 6 on",
    "NaN in a second leaf", "overflow in float16", "gradient cut by detach",
    "saturated softmax by x50 query", "one value head zero", "bfloat16 cast in one block",
    "MLP of one block never called", "block tied by mistake",
]  # fmt: skip
HEALTHY = tries([(name, variant) for name in FAMILIES for variant in VARIANTS], gate=FEW_HEALTHY)
NAMED = tries([fault.name for fault in FAULTS], gate=FEW_FAULTS)
BY_NAME = {fault.name: fault for fault in FAULTS}
# It has no siblings, and sixteen times the spread before it is usual for heads.
MISSED = "x100 head"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("family", "variant"), HEALTHY)
def test_a_healthy_model_raises_no_alarm(family, variant):
    findings = healthy_run(family, variant).findings()
    assert [str(finding) for finding in findings if finding.level != "note"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_the_first_finding_names_the_planted_fault(name, request):
    if name == MISSED:
        request.applymarker(pytest.mark.xfail(strict=True))
    fault = BY_NAME[name]
    findings = fault.run().findings()
    assert fault.is_named(findings), str(findings)


@pytest.mark.parametrize(
    ("name", "why", "advice"),
    [
        (
            "saturated softmax by x50 query",
            "Its standard deviation is 29.8; that at its place in the other blocks is 0.586."
            " blocks.2.norm1 before it has 1.",
            "Look at the initialisation and the weights of blocks.2.query.",
        ),
        (
            "small init from layer 6 on",
            "Its standard deviation is 0.0735; that at its place in the blocks before is 1.43."
            " 5 before it has 0.883. 1 later value deviates by itself, too.",
            "Look at the initialisation and the weights of 6.",
        ),
        (
            "residual branch lost and shrunk",
            "Standard deviation 1.12 after blocks.2, 0.000203 after blocks.3. No value inside has"
            " such a spread.",
            "Look at the forward of blocks.3 itself, such as at its residual sum.",
        ),
        (
            "no norms in a residual stack",
            "Standard deviation 2.13 after 0, 1.59e+04 after 11.",
            "Look at the initialisation, and for a norm that is missing, in 1.",
        ),
    ],
)
def test_a_spread_is_told_beside_that_of_which_others(name, why, advice):
    first = BY_NAME[name].run().findings()[0]
    assert (first.why, first.advice) == (why, advice)


@pytest.fixture(scope="module")
def broken():
    """A recording with an error, a warning and notes."""
    torch.manual_seed(0)
    model = plain(6)
    with torch.no_grad():
        model[2].bias.fill_(-1e3)
        model[8].weight[0, 0] = math.nan
    with hl.record(model) as run:
        model(torch.randn(64, 64))
    return run


def test_findings_are_sorted_worst_first(broken):
    levels = [finding.level for finding in broken.findings()]
    assert levels[:2] == ["error", "warning"]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)


def test_the_imaginary_part_of_a_conjugate_is_read():
    numbers = measure_numbers(torch.tensor([1 + 2j, 3 - 4j]).conj().imag, "Linear")
    assert (numbers.low, numbers.high, numbers.mean) == (-2, 4, 1)


def test_all_of_a_value_is_a_hundred_per_cent():
    model = nn.Linear(4, 4)
    with hl.record(model) as run:
        model(torch.full((8, 4), math.nan))
    assert run.findings()[0].number == "100 % NaN"


def test_an_error_names_its_site_number_and_followers(broken):
    finding = broken.findings()[0]
    assert (finding.kind, finding.site, finding.number) == ("non-finite", "8", "1.56 % NaN")
    assert finding.follows[:2] == ("9", "10")


def test_the_text_has_level_site_and_advice(broken):
    text = str(broken.findings())
    assert text.splitlines()[0].startswith("Findings: 1 error, 1 warning")
    assert "hl.check names the operation" in " ".join(text.split())


def test_findings_are_plain_values_a_table_and_html(broken):
    findings = broken.findings()
    data = json.loads(json.dumps(findings.to_dict()))
    assert (data["ok"], data["findings"][0]["site"]) == (False, "8")
    assert list(findings.to_pandas()["kind"])[:2] == ["non-finite", "dead"]
    assert "<table>" in findings._repr_html_()


def test_levels_are_reached_from_below(broken):
    findings = broken.findings()
    assert (findings.worst, findings.reaches("note"), findings.ok) == ("error", True, False)
    assert (hl.Findings([]).reaches("note"), hl.Findings([]).ok) == (False, True)


def test_a_saved_recording_has_the_same_findings(broken, tmp_path):
    opened = hl.open(broken.save(tmp_path / "run"))
    assert opened.findings().to_dict() == broken.findings().to_dict()


def test_a_finding_of_several_passes_is_told_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nn.init.constant_(model[0].bias, -1e3)
    with hl.record(model) as run:
        for _ in range(3):
            model(torch.rand(4, 8))
    findings = run.findings()
    assert [finding.site for finding in findings] == ["1"]
    assert "In pass 0 and 2 more of 3." in findings[0].why
    assert findings[0].passes == (0, 1, 2)


def test_overwritten_values_are_a_note():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    with hl.record(model) as run:
        model(torch.rand(4, 8))
    finding = run.findings()[0]
    assert (finding.kind, finding.site, finding.level) == ("overwritten", "0", "note")
    assert (finding.number, finding.why, finding.passes) == ("1 value", "", (0,))


def test_a_recording_without_a_pass_is_said_to_be_unjudged():
    with pytest.warns(hl.HooklineWarning), hl.record(nn.Linear(2, 2)) as run:
        pass
    assert "has not run" in run.findings().notes[0]


def test_a_mask_of_minus_infinity_is_no_fault():
    class Mask(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)

    model = nn.Sequential(nn.Linear(8, 8), Mask(), nn.Softmax(-1))
    with hl.record(model) as run:
        model(torch.rand(8, 8))
    assert run.findings().ok


class Student(nn.Module):
    """A student, and a teacher that runs under `no_grad`."""

    def __init__(self, *, is_frozen):
        super().__init__()
        self.teacher, self.student = plain(4), plain(4)
        self.teacher.requires_grad_(not is_frozen)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


@pytest.mark.parametrize(
    ("is_frozen", "ports", "levels"),
    [
        (True, ("output", "grad_output", "grad"), []),
        (False, ("output", "grad_output", "grad"), ["warning"]),
        (True, ("output", "grad_output"), ["note"]),
    ],
)
def test_a_frozen_part_under_no_grad_cuts_nothing(is_frozen, ports, levels):
    torch.manual_seed(0)
    model = Student(is_frozen=is_frozen)
    with hl.record(model, ports=ports) as run:
        model(torch.randn(64, 64)).backward()
    assert [finding.level for finding in run.findings() if finding.kind == "cut"] == levels


class Spiking(nn.Module):
    """A spiking layer in a loop over time, whose potential decays after `alive` steps."""

    def __init__(self, alive):
        super().__init__()
        self.alive = alive
        self.charge, self.spike = nn.Linear(4, 16), nn.Threshold(1.5, 0.0)

    def forward(self, x):
        total = potential = 0.0
        for step in range(4):
            potential = (potential + self.charge(x)) * (step < self.alive)
            total = total + self.spike(potential)
        return total


@pytest.mark.parametrize(("alive", "sites"), [(4, []), (3, ["spike#3"])])
def test_a_step_of_a_loop_before_the_first_spike_is_not_dead(alive, sites):
    model = Spiking(alive)
    nn.init.ones_(model.charge.bias)
    nn.init.zeros_(model.charge.weight)
    with hl.record(model) as run:
        model(torch.ones(2, 4))
    findings = run.findings()
    assert [finding.site for finding in findings if finding.kind == "dead"] == sites


def test_weights_that_modules_tie_on_purpose_are_a_note():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    with hl.record(model, ports=("output", "grad")) as run:
        model(torch.randn(64, 8)).sum().backward()
    (finding,) = [finding for finding in run.findings() if finding.kind == "shared"]
    assert (finding.level, finding.site) == ("note", "0.weight")
    assert finding.text == "0.weight is also 2.weight: one weight of 2 modules."
    assert finding.why == "Modules of their own share 2 weights."
    model[2] = model[0]
    with hl.record(model, ports="grad") as run:
        model(torch.randn(64, 8)).sum().backward()
    assert {f.level for f in run.findings() if f.kind == "shared"} == {"warning"}


class Heads(nn.Module):
    """Several heads, of which a slice leaves the first one out, as SAM does with its masks."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return torch.stack([head(x) for head in self.heads])[1:]


def test_a_gradient_of_zeros_is_not_laid_to_requires_grad():
    model = Heads()
    with hl.record(model, ports=("output", "grad")) as run:
        model(torch.randn(4, 8)).square().sum().backward()
    (finding,) = [finding for finding in run.findings() if finding.kind == "frozen"]
    assert finding.site == "heads.0.bias:grad"
    assert finding.why == "Its gradient is all zero."
    assert finding.advice == "Look at what uses heads.0, such as a slice, and at its input."


@pytest.mark.parametrize(("frozen", "level"), [((0, 1), "note"), ((2,), "warning")])
def test_first_blocks_that_are_frozen_are_meant_to_be(frozen, level):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    for index in frozen:
        model[index].requires_grad_(False)
    with hl.record(model, ports="grad") as run:
        model(torch.ones(2, 4)).square().sum().backward()
    (finding,) = [finding for finding in run.findings() if finding.kind == "frozen"]
    assert (finding.site, finding.level) == (f"{frozen[0]}.weight:grad", level)
    assert finding.advice == "Look at what froze it, unless that was on purpose."


def test_near_uniform_attention_is_no_outlier():
    weights = torch.full((2, 4, 64, 64), 1 / 64)
    weights[0, 0, 0, 0] += 0.01
    model = nn.Sequential(nn.Identity(), nn.Softmax(-1))
    with hl.record(model, "1") as run:
        model(weights.log())
    assert len(run.findings()) == 0


def test_two_faults_in_two_blocks_are_both_named():
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.blocks[1].down.weight.zero_()
        model.blocks[1].down.bias.zero_()
        model.blocks[4].query.weight.mul_(100)
    with hl.record(model) as run:
        model(torch.randint(3, 100, (2, 16)))
    sites = [finding.site for finding in run.findings() if finding.level == "warning"]
    assert sites[:2] == ["blocks.1.down", "blocks.4.query"]


@pytest.mark.parametrize(
    ("dead", "where"), [([4, 5, 6, 7], "4 to 7"), ([4, 5, 6, 9], "4, 5, 6, 9")]
)
def test_dead_channels_in_a_row_are_told_as_a_row(dead, where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    with torch.no_grad():
        model[0].weight[dead], model[0].bias[dead] = 0.0, 0.0
    with hl.record(model) as run:
        model(torch.randn(64, 16))
    [finding] = [finding for finding in run.findings() if finding.site == "0"]
    assert finding.text == f"4 of 16 channels of 0 are zero: {where}."
    assert ("stand in a row" in finding.why) == (" to " in where)


def test_ranks_are_asked_for_one_by_one(broken):
    several = hl.Recording((), broken.report())
    several.ranks = (broken, broken)
    with pytest.raises(hl.AmbiguousError, match=r"ranks\[0\]\.findings\(\)"):
        several.findings()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_numbers_of_a_tensor_are_those_of_numpy(dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(4, 16, 9) * 3 + 1).to(dtype)
    tensor[:, :, 4] = 0
    numbers, exact = measure_numbers(tensor, "Linear"), tensor.double().numpy()
    assert numbers.mean == pytest.approx(exact.mean(), rel=1e-4)
    assert numbers.std == pytest.approx(exact.std(), rel=1e-4)
    assert (numbers.low, numbers.high) == (exact.min(), exact.max())
    assert (numbers.dead, numbers.n_channels, numbers.zeros) == ((4,), 9, np.sum(exact == 0))


def test_numbers_that_are_not_finite_are_counted_apart():
    tensor = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0])
    numbers = measure_numbers(tensor, "")
    assert (numbers.n_nan, numbers.n_inf, numbers.n_masked, numbers.mean) == (1, 1, 1, 2.0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3), torch.arange(4), torch.tensor(2.0), torch.full((3,), 1e30),
        torch.ones(2, 2, dtype=torch.complex64), torch.ones(3).to_sparse(),
        torch.full((2, 3), math.nan), torch.ones(4, dtype=torch.bool),
    ],
)  # fmt: skip
def test_any_tensor_is_read_without_a_warning(tensor):
    numbers = measure_numbers(tensor, "Conv2d")
    assert numbers.shape == tuple(tensor.shape)


def test_a_spread_is_exact_beside_a_large_mean():
    numbers = measure_numbers(torch.randn(4096) + 1e4, "")
    assert numbers.std == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("path", "template"),
    [("h.3.mlp", "h.#.mlp"), ("layer2.0.conv1", "layer#.#.conv1"), ("4", "#"), ("fc1", "fc#")],
)
def test_numbers_of_blocks_are_left_out_of_templates(path, template):
    assert template_of(path) == template


def test_of_many_silent_modules_the_topmost_are_named():
    experts = [f"experts.{k}" for k in range(4000)]
    paths = [path for expert in experts for path in (f"{expert}.up", expert)]
    silent = [(path, "output", "no token was routed to it") for path in paths]
    (finding,) = never_called(Survey([], silent=silent))
    assert (finding.site, finding.number) == (experts[0], "8000")
    assert finding.follows == tuple(experts[1:])
