"""The user's own numbers: what may be logged, and how they are read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import StepReport
from hookline.curves.logged_numbers import check_logged, logged_curves


@pytest.mark.parametrize(
    "value",
    [
        1, 0.5, np.float32(0.5), np.int64(3), np.array([2.0]), torch.tensor(0.5), torch.ones(1, 1),
        torch.ones((), requires_grad=True), torch.tensor(2, dtype=torch.int64),
        torch.tensor(0.5, dtype=torch.bfloat16), math.inf,
    ],
)  # fmt: skip
def test_a_single_number_is_taken(value):
    found = check_logged(None, {"loss": value})
    expected = torch.as_tensor(value).detach().item()
    assert found == {"loss": expected}
    assert type(found["loss"]) is float


def test_nan_is_a_number():
    assert math.isnan(check_logged({"a b": torch.tensor(math.nan)}, {})["a b"])


@pytest.mark.parametrize(
    ("numbers", "named", "message"),
    [
        (None, {"loss": torch.ones(4)},
         r"must be a number or a tensor of one element, got loss=.*\[4\].*"
         r"\nGive one number: seen.log\(loss=loss.mean\(\)\)."),
        (None, {"loss": "0.5"}, r"got loss=str.\n.*seen.log\(loss=float\(loss\)\)."),
        (None, {"is_best": True}, "got is_best="),
        (None, {"loss": torch.ones((), dtype=torch.complex64)}, "got loss="),
        (None, {"loss": torch.ones((), device="meta")}, "got loss="),
        (None, {"loss": None}, "got loss=None"),
        (None, {"loss": 10**400},
         r"must fit into a float, got a larger loss.\nLog its logarithm: seen.log\(loss="),
        (None, {}, "seen.log must get a number, got none"),
        (0.5, {}, "numbers must be a dict of names and numbers"),
        ({1: 0.5}, {}, "a name of seen.log must be a text, got 1"),
        ({"": 0.5}, {}, "a name of seen.log must be a text, got ''"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_what_to_do(numbers, named, message):
    with pytest.raises(hl.InputError, match=message):
        check_logged(numbers, named)


def test_curves_without_a_monitor_refuse_to_log(tmp_path):
    model = nn.Linear(2, 3)
    with hl.monitor(model, ports="output", to=tmp_path / "run") as seen:
        model(torch.ones(4, 2))
    for curves, got in ((seen, "a monitor that has ended"), (hl.open(tmp_path / "run"), "curves")):
        with pytest.raises(hl.InputError, match=f"while hl.monitor runs, got {got}"):
            curves.log(loss=1.0)


@pytest.mark.parametrize("step", ["3", -1, 0.5])
def test_a_step_that_is_no_number_is_named_as_it_was_given(step):
    model = nn.Linear(2, 2)
    with hl.monitor(model, ports="output") as seen:
        model(torch.ones(1, 2))
        with pytest.raises(hl.AttachError) as caught:
            seen.log(loss=1.0, step=step)
    assert str(caught.value) == (
        f"step= must be an integer from 0 to 2**62, got {step!r}."
        "\nGive the number of a step: seen.log(loss=loss, step=12)."
    )
    with pytest.raises(hl.NotRecordedError, match="step '0' was not reported"):
        seen.at("0")


def test_a_name_that_was_not_logged_is_explained():
    with pytest.raises(hl.NotRecordedError, match=r"^'loss' was not logged\.\nUse .*: none; log"):
        logged_curves([])["loss"]
    logged = logged_curves([StepReport.from_logged(0, 0.0, {"loss": 1.0})])
    with pytest.raises(hl.NotRecordedError, match=r"\nUse one of the names that were: loss\.$"):
        logged["typo"]
    assert "typo" not in logged
