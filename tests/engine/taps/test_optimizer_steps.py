"""Functions are called around the work of an optimizer, not around its closure."""

import pytest
import torch
from torch import nn

from hookline.engine.line.registration import Registrations
from hookline.engine.taps.optimizer_steps import OptimizerSteps, parameter_ids


@pytest.fixture
def events():
    """What happened, while the hooks listen to the optimizers of a model."""
    return []


@pytest.fixture
def listening(events):
    def is_mine(optimizer):
        return not isinstance(optimizer, torch.optim.Adam)

    registrations = Registrations()
    steps = OptimizerSteps(
        is_mine,
        lambda optimizer, has_gradients: events.append(f"begin {has_gradients}"),
        lambda: events.append("end"),
    )
    registrations.register_globally("step_pre", steps.begin_step)
    registrations.register_globally("step_post", steps.end_step)
    yield
    registrations.remove()


@pytest.mark.usefixtures("listening")
def test_a_step_begins_with_gradients_and_ends(events):
    torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).step()
    assert events == ["begin True", "end"]


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("as_keyword", [True, False])
def test_the_work_pauses_while_the_closure_runs(events, as_keyword):
    def closure():
        """Be the closure."""
        events.append("closure")
        return 2.0

    step = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).step
    assert (step(closure=closure) if as_keyword else step(closure)) == 2.0
    assert events == ["begin False", "end", "closure", "begin True", "end"]


@pytest.mark.usefixtures("listening")
def test_other_optimizers_are_not_listened_to(events):
    torch.optim.Adam(nn.Linear(1, 1).parameters()).step(lambda: 1.0)
    assert events == []


def test_parameter_ids_are_of_all_groups():
    model = nn.Linear(1, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 1.0}]
    ids = set(parameter_ids(torch.optim.SGD(groups, 0.1)))
    assert ids == {id(model.weight), id(model.bias)}
