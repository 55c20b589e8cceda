"""What a check looks for by choice is warned of, once, kept as a finding, and raises nothing."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

import hookline as hl
from float32_device import Float32Device
from hookline.engine import Site
from hookline.verbs.check import unusual_outputs
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.check.pending_findings import PendingFindings
from second_thread import Meanwhile, ToldLock

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return x * self.factor


def said(model, also, *factors, part=1, x=X, run=None):
    """The warnings of runs in which a part scales by these factors; each is a finding, too."""
    texts, findings = observed(model, also, *factors, part=part, x=x, run=run)
    assert [f"hl.check: {finding.message}" for finding in findings] == texts
    assert all(finding.also in also and not finding.is_error for finding in findings)
    for finding in findings:
        assert CheckFinding.from_json(json.loads(json.dumps(finding.as_json()))) == finding
        assert str(finding) == finding.message
    return texts


def observed(model, also, *factors, part=1, x=X, run=None):
    """The warnings and the findings of runs in which a part scales by these factors."""
    run = run or model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), hl.check(model, also=also) as line:
            for factor in factors:
                model[part].factor = factor
                run(x)
    return [str(warning.message) for warning in caught], line.findings


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaled())


def test_values_that_explode_or_vanish(model):
    (text,) = said(model, "magnitude", 1.0, 1e3, 1e5, 1e6)
    assert "the output of 1 (Scaled) explodes: from" in text
    (text,) = said(model, "magnitude", 1.0, 1e-3, 1e-5)
    assert "vanishes" in text
    assert said(model, ("dead", "shapes"), 1.0, 1e5) == []


def test_an_output_that_is_constant(model):
    (text,) = said(model, "constant", 1.0, 0.0, 0.0)
    assert text == "hl.check: the output of 1 (Scaled) is 0 everywhere."


def test_units_that_are_dead():
    model = nn.Sequential(nn.Linear(4, 5), Scaled(), nn.ReLU())
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, -1.0
        model[0].weight[1], model[0].bias[1] = 0.0, -1.0
        model[0].bias[0] += 10
    found = said(model, "dead", *[1.0] * 12)
    dead = [text for text in found if "2 (ReLU)" in text]
    assert dead
    assert "of 5 units" in dead[0]
    assert "0 in all of 12 runs" in dead[0]
    assert said(model, "dead", *[1.0] * 9) == []  # too few to tell


def test_dead_units_are_named_by_index():
    model = nn.Sequential(nn.Linear(4, 7), Scaled())
    with torch.no_grad():
        for unit in (0, 2, 3, 5, 6):
            model[0].weight[unit], model[0].bias[unit] = 0.0, 0.0
    texts, findings = observed(model, "dead", *[1.0] * 10)
    units = "5 dead of 7 units (indices 0, 2, 3, 5, …): 0 in all of 10 runs"
    assert texts == [
        f"hl.check: the output of {name} has {units}." for name in ("0 (Linear)", "1 (Scaled)")
    ]
    assert [(one.path, one.also, one.units, one.step) for one in findings] == [
        ("0", "dead", (0, 2, 3, 5, 6), None),
        ("1", "dead", (0, 2, 3, 5, 6), None),
    ]


def test_a_finding_has_the_number_of_its_run(model):
    _, findings = observed(model, ("magnitude", "constant"), 1.0, 1.0, 1e5, 0.0)
    steps = {(one.observation.split()[0], one.step) for one in findings}
    assert steps == {("explodes:", 2), ("vanishes:", 3), ("is", 3)}


def test_findings_by_choice_displace_no_nan(model):
    outcome = PendingFindings(None)
    for number in range(150):
        outcome.add(
            CheckFinding("forward", str(number), also="constant", observation="is 0 everywhere")
        )
    nan = outcome.add(CheckFinding("forward", "fc", n_nan=1))
    assert len(outcome.all) == 101
    assert outcome.all[-1] == nan


def test_an_error_is_told_also_after_findings_by_choice(model):
    with pytest.warns(hl.HooklineWarning) as caught, hl.check(model, also="constant") as line:
        model[1].factor = 0.0
        model(X)
        with pytest.raises(hl.NonFiniteError):
            model(X * float("nan"))
    assert [one.also for one in line.findings] == ["constant", None]
    assert any("The error was caught on its way" in str(one.message) for one in caught)


def test_a_finding_of_an_older_file_is_read():
    data = CheckFinding("forward", "fc").as_json()
    for name in ("also", "observation", "units"):
        del data[name]
    assert CheckFinding.from_json(data) == CheckFinding("forward", "fc")
    del data["file"]
    with pytest.raises(KeyError):
        CheckFinding.from_json(data)


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 5, 3, 4), (2, 5, 3, 4, 2)])
def test_units_are_channels_of_pictures_else_the_last_dimension(shape):
    unit = 1 if len(shape) > 3 else 2
    mask = torch.ones(shape)
    mask.select(unit, 1).zero_()
    found = said(nn.Sequential(nn.Identity(), Scaled()), "dead", *[mask] * 10, x=torch.ones(shape))
    (text,) = [text for text in found if "1 (Scaled)" in text]
    assert f"has 1 dead of {shape[unit]} units (index 1)" in text


@pytest.mark.parametrize("shape", [(2, 3, 9), (3, 9), (3, 9, 9)])
def test_units_of_a_convolution_are_its_channels(shape):
    kind = nn.Conv2d if len(shape) == 3 and shape[-1] == shape[-2] else nn.Conv1d
    model = nn.Sequential(kind(3, 5, 3), nn.Identity())
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 0.0
    (text,) = [t for t in said(model, "dead", *[1.0] * 10, x=torch.ones(shape)) if "0 (Conv" in t]
    assert "has 1 dead of 5 units (index 3)" in text


def test_shapes_and_dtypes_that_change(model):
    (text,) = said(model, "shapes", 1.0, torch.tensor(1.0, dtype=torch.float64).expand(4))
    assert "has changed from float32[:, 4] to float64[:, 4] since the first run" in text
    with torch.no_grad(), hl.check(model, also="shapes"):
        model(X)
        model(X[:2])  # the last batch may be smaller


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_a_nested_tensor_have_shapes_of_their_own(layout):
    model = nn.Identity()
    with hl.check(model, also="shapes"):
        for _ in range(2):
            model(torch.nested.nested_tensor([X, X[:1]], layout=layout))


class Levels(nn.Module):
    """A small U-Net: its levels share the pooling, and its weights are used at each of them."""

    def __init__(self):
        super().__init__()
        self.pool, self.relu = nn.MaxPool1d(2), nn.ReLU()

    def forward(self, x):
        high = self.relu(self.pool(x))
        low = self.relu(self.pool(high) * 1e-6)
        return high.sum() + low.sum()


def test_a_module_is_compared_with_the_same_call_of_other_runs():
    model, x = Levels(), torch.ones(2, 3, 8)
    x[:, 1] = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), hl.check(model, also=("shapes", "magnitude", "dead")) as line:
            for _ in range(9):
                model(x)
        assert line.findings == []  # 18 calls are not ten runs
        with torch.no_grad(), hl.check(model, also=("shapes", "magnitude", "dead")) as line:
            for _ in range(10):
                model(x)
            model(x[:, :, :4])
    texts = [str(warning.message).split(") ")[1] for warning in caught]
    assert texts == [
        *["has changed from float32[:, 3, 4] to float32[:, 3, 2] since the first run."] * 2,
        "has 1 dead of 3 units (index 1): 0 in all of 11 runs.",
    ]


def test_compiled_code_warns_of_the_same_in_the_same_words(fresh_dynamo):
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.ReLU())
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, -1.0
    also = ("magnitude", "dead", "constant", "shapes")
    # Tensors, since dynamo compiles anew for each number.
    one, large, none = (torch.full((1,), number) for number in (1.0, 1e5, 0.0))
    factors = (one, large, *[one] * 9, none, one.double())
    eager = said(model, also, *factors)
    assert len(eager) > 5
    assert {text.split()[6] for text in eager} >= {"explodes:", "vanishes:", "is", "has"}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert said(model, also, *factors, run=compiled) == eager


def test_a_look_at_outputs_leaves_compiled_code_whole(fresh_dynamo):
    from torch._dynamo.utils import counters

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.check(model, also=("magnitude", "dead", "constant", "shapes")):
        for _ in range(3):
            run(X)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompile"]


def test_gradients_that_are_missing():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.forgotten = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.used(x)

    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(hl.HooklineWarning, match=r"2 parameters had no gradient") as caught:
        findings = step(model, optimizer)
    assert len(caught) == 1
    assert "forgotten.weight, forgotten.bias" in str(caught[0].message)
    assert [(one.kind, one.path, one.also, one.step) for one in findings] == [
        ("gradient", "forgotten.weight", "missing_grad", 0),
        ("gradient", "forgotten.bias", "missing_grad", 0),
    ]
    assert findings[0].message == (
        "parameter forgotten.weight had no gradient when the optimizer stepped."
    )
    model.forgotten.requires_grad_(False)
    assert step(model, optimizer) == []


def step(model, optimizer):
    with hl.check(model, also="missing_grad") as line:
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
    return line.findings


def test_an_unknown_choice_names_the_others(model):
    with pytest.raises(hl.AttachError, match=r"also= must name some of magnitude, dead"):
        hl.check(model, also="explosions")


class Alive:
    """Units of which none was alive so far; another thread looks while they are compared."""

    shape = torch.Size([1])

    def __or__(self, other):
        self.meanwhile()
        return other


def test_a_unit_alive_in_another_thread_at_once_is_not_dead(monkeypatch):
    lock = ToldLock()
    monkeypatch.setattr(unusual_outputs, "_lock", lock, raising=False)
    habits = unusual_outputs.OutputHistory(Site("fc"), frozenset({"dead"}), [].append)
    dead, alive = (unusual_outputs.Traits((), torch.tensor([one]), None) for one in (False, True))
    first = Alive()
    first.meanwhile = Meanwhile(lambda: habits.compare_with_earlier_runs(alive, 0, 1), lock)
    habits.compare_with_earlier_runs(unusual_outputs.Traits((), first, None), 0, 0)
    habits.compare_with_earlier_runs(dead, 0, 2)
    first.meanwhile.end()
    for step in range(3, 13):
        habits.compare_with_earlier_runs(dead, 0, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        habits.judge_dead_units()


@pytest.mark.parametrize("also", [None, 3])
def test_what_is_no_name_of_a_check_is_refused(also):
    with pytest.raises(hl.AttachError) as caught:
        hl.check(nn.Linear(1, 1), also=also)
    assert str(caught.value) == (
        "also= must name some of magnitude, dead, constant, shapes, missing_grad, got"
        f" {also}.\nGive for instance also=('dead', 'shapes')."
    )


def test_magnitudes_are_compared_on_a_device_without_float64(model):
    with Float32Device():
        (text,) = said(model, "magnitude", 1.0, 1e3, 1e5, 1e6)
    assert "the output of 1 (Scaled) explodes: from" in text
