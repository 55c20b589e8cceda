"""Steps of a training: who tells them, and which values are theirs."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine import Site
from hookline.util import fork_safe_lock
from hookline.verbs.monitor import training_steps
from hookline.verbs.monitor.slots import Slots
from second_thread import Meanwhile, ToldLock, in_autograds_thread

X = torch.ones(1, 2)
PASSES = (4, training_steps._MOST_WAITING + 4)


@pytest.fixture(autouse=True)
def told_locks(monkeypatch):
    monkeypatch.setattr(fork_safe_lock, "threading", SimpleNamespace(RLock=ToldLock))


def test_a_new_optimizer_is_looked_at_between_steps():
    model, found = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    line = hl.monitor(model, every_thread=True)
    lock = line._steps._lock
    meanwhile = Meanwhile(lambda: found.append(line._steps.trains(optimizer)), lock)
    with lock:
        meanwhile()
        assert not found
    meanwhile.end()
    assert found == [True]
    with pytest.warns(hl.HooklineWarning, match="reported no step"):
        line.remove()


def test_a_reader_runs_the_model_while_a_pass_begins():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def read(step, numbers):
        begins()
        with torch.no_grad():
            model(X)

    def train():
        model(X).sum().backward()
        optimizer.step()

    line = hl.monitor(model, to=read, every_thread=True)
    begins, trains = Meanwhile(lambda: model(X), line._steps._lock), Meanwhile(train)
    trains()
    trains.end()
    begins.end()
    line.remove()
    assert line.curves.steps.tolist() == [0]


class Appears:
    """A site without a value, at which is looked while another site appears."""

    order = 0, 0

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    @property
    def widths(self):
        self.meanwhile()
        return ()


def with_a_site_that_appears():
    slots = Slots((hl.stats.moments(),), 2)
    slots.lock = ToldLock()

    def appear():
        slots.slots_of_site(Site("late"), (1, 0)).merge([torch.zeros(8)])

    slots._sites["slow"] = Appears(Meanwhile(appear, slots.lock))
    return slots, slots._sites["slow"].meanwhile


def test_a_site_may_appear_while_sites_are_listed():
    slots, meanwhile = with_a_site_that_appears()
    assert slots.sites_and_version()[0] == []
    meanwhile.end()
    assert [one.name for one in slots.sites_and_version()[0]] == ["late"]


def test_a_site_that_appears_meanwhile_has_a_later_version():
    slots, meanwhile = with_a_site_that_appears()
    _, version = slots.sites_and_version()
    meanwhile.end()
    sites, later = slots.sites_and_version()
    assert [one.name for one in sites] == ["late"]
    assert later > version


# -- what counts before it is known who tells ----------------------------------------------------


@pytest.mark.parametrize("n_passes", PASSES)
@pytest.mark.parametrize("every", [1, 3])
def test_a_pass_without_optimizers_has_its_own_weights(n_passes, every):
    model = nn.Linear(2, 2, bias=False)
    with hl.monitor(model, ports=("output", "value"), every=every) as seen:
        for k in range(n_passes):
            model.weight.data.fill_(k)  # as the average of another model's weights
            model(X)
        model.weight.data.fill_(-1)
    assert seen["weight"].mean.tolist() == list(range(0, n_passes, every))
    assert seen["(root)"].mean.tolist() == list(range(0, 2 * n_passes, 2 * every))


@pytest.mark.slow
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("n_passes", PASSES)
def test_passes_without_gradients_are_steps_on_their_own(n_passes, grad_mode):
    model = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), hl.monitor(model) as seen:
        for k in range(n_passes):
            with grad_mode():
                model(torch.ones(k + 1, 2))
        raise ZeroDivisionError
    assert seen["(root)"].count.tolist() == list(range(2, 2 * n_passes + 1, 2))
    assert seen["weight"].count.tolist() == [4] * n_passes


def test_a_pass_that_raises_at_once_is_no_step():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), hl.monitor(model) as seen:
        model(X)
        model(torch.ones(1, 3))
    assert seen.steps.tolist() == [0]


def target_first(model, optimizer):
    with torch.no_grad():
        model(torch.ones(100, 2))
    model(X).sum().backward()
    optimizer.step()


def target_between(model, optimizer):
    loss = model(X).sum()
    with torch.inference_mode():
        model(torch.ones(100, 2))
    loss.backward()
    optimizer.step()


def metric_last(model, optimizer):
    model(X).sum().backward()
    with torch.no_grad():
        model(torch.ones(100, 2))
    optimizer.step()


def validation_before_a_closure(model, optimizer):
    def closure():
        loss = model(X).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        model(torch.ones(100, 2))
    optimizer.step(closure)


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize(
    "run", [target_first, target_between, metric_last, validation_before_a_closure]
)
def test_the_first_step_has_the_values_of_training_alone(run, n_parts):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, ports=("output", "grad_output", "value")) as seen:
        for _ in range(3):
            for _ in range(n_parts - 1):
                run(model, Accumulates())
            run(model, optimizer)
    assert seen["(root)"].count.tolist() == [2 * n_parts] * 3
    assert seen["(root):grad_output"].count.tolist() == [2 * n_parts] * 3
    assert seen["weight"].count.tolist() == [4] * 3


class Accumulates:
    """Stands for an optimizer where gradients go on to accumulate."""

    def step(self, closure=None):
        if closure is not None:
            closure()


@pytest.mark.parametrize("run", [target_first, target_between])
def test_an_optimizer_after_many_passes_measures_weights_once(run):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n = training_steps._MOST_WAITING + 4
    with hl.monitor(model, ports=("output", "value")) as seen:
        for _ in range(n):
            model(X)
        for _ in range(2):
            run(model, optimizer)
    assert seen["weight"].count.tolist() == [4] * len(seen)
    assert seen["(root)"].count.tolist()[-1] == 2


def test_weights_that_the_first_run_makes_are_measured_then():
    model = nn.LazyLinear(2)
    with hl.monitor(model, ports=("output", "value")) as seen:
        for _ in range(3):
            model(X)
    assert seen["weight"].count[1:].tolist() == [4, 4]


# -- optimizers inside optimizers ----------------------------------------------------------------


class Outer(torch.optim.Optimizer):
    """An optimizer that steps others."""

    def __init__(self, parameters, raises=False):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.raises = raises

    def step(self, closure=None):
        self.base.step()
        if self.raises:
            raise ZeroDivisionError


class Lookahead(Outer):
    """Goes half of the way that another optimizer goes."""

    def step(self, closure=None):
        weights = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            slow = [weight.clone() for weight in weights]
            self.base.step()
            for weight, before in zip(weights, slow, strict=True):
                weight.lerp_(before, 0.5)


class Sharpness(Outer):
    """Takes the gradients elsewhere, as SAM does."""

    def step(self, closure=None):
        weights = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for weight in weights:
                weight.add_(0.5)
        with torch.enable_grad():
            self.zero_grad()
            closure()
        with torch.no_grad():
            for weight in weights:
                weight.sub_(0.5)
        self.base.step()


class Inherits(torch.optim.SGD):
    """Calls the step of its class, which torch has hooked, too."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        return super().step(closure)


def step_updates(model, optimizer, n_steps=3, closes=False):
    """Train; return the norms of the true updates, and of the gradients after each step."""
    updates, grads = [], []
    torch.manual_seed(0)
    for _ in range(n_steps):
        x = torch.randn(5, 2)

        def closure(x=x):
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.zero_grad()
        before = model.weight.detach().clone()
        if closes:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        updates.append((model.weight.detach() - before).norm().item())
        grads.append(model.weight.grad.norm().item())
    return updates, grads


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", [Outer, Lookahead, Sharpness, Inherits])
def test_an_optimizer_that_steps_another_makes_one_step(make, every):
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # has torch hook the class
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    with hl.monitor(model, every=every) as seen:
        updates, grads = step_updates(model, optimizer, closes=make is Sharpness)
    assert seen.steps.tolist() == list(range(0, 3, every))
    assert seen["weight:update"].norm.tolist() == pytest.approx(updates[::every], rel=1e-6)
    assert seen["weight:grad"].norm.tolist() == pytest.approx(grads[::every], rel=1e-6)
    for kind in ("value", "grad", "update"):
        assert seen[f"weight:{kind}"].count.tolist() == [4] * len(seen)
    assert seen["(root)"].count.tolist() == [10] * len(seen)
    assert len(seen["weight:update"].ratio) == len(seen)


def test_a_step_that_raises_hides_no_later_one():
    model = nn.Linear(2, 2)
    optimizer = Outer(model.parameters(), raises=True)
    with hl.monitor(model) as seen:
        with pytest.raises(ZeroDivisionError):
            step_updates(model, optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        updates, _ = step_updates(model, other)
    assert seen["weight:update"].norm.tolist()[-2:] == pytest.approx(updates[-2:], rel=1e-6)
    assert len(seen) == 3


def test_another_optimizer_in_a_closure_counts():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer, inner = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)

    def closure():
        loss = model(X).sum()
        loss.backward()
        inner.step()
        return loss

    with hl.monitor(model) as seen:
        for _ in range(3):
            outer.step(closure)
    assert seen.steps.tolist() == [0, 1, 2]
    assert seen["1.weight:update"].count.tolist() == [4] * 3
    assert seen["0.weight:update"].count.tolist() == [4] * 3


# -- parts of a model that run on their own ------------------------------------------------------


class Adversaries(nn.Module):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, z):
        return self.d(self.g(z))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "ports", ["output", "input", "grad_output", ("grad_input", "grad"), ("output", "update")]
)
def test_a_part_that_runs_alone_parts_the_optimizers(ports, every):
    model = Adversaries()
    of_g, of_d = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.g, model.d))
    with hl.monitor(model, ports=ports, every=every) as seen:
        for _ in range(5):
            model.d(model.g(torch.ones(5, 2)).detach().requires_grad_()).mean().backward()
            of_d.step()
            model(torch.ones(50, 2)).mean().backward()
            of_g.step()
    assert seen.steps.tolist() == list(range(0, 5, every))
    site = next(site for site in seen.sites if site.startswith("d"))
    features = 4 if "input" in site else 1
    assert seen[site].count.tolist() == [55 * features] * len(seen)


def test_a_number_belongs_to_the_step_whose_part_has_run():
    model = nn.ModuleDict({"net": nn.Linear(2, 2)})  # never called itself
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model) as seen:
        for k in range(4):
            loss = model["net"](X).sum()
            seen.log(loss=k)
            loss.backward()
            optimizer.step()
            seen.log(after=k)
    for name in ("loss", "after"):
        assert seen.logged[name].steps.tolist() == [0, 1, 2, 3]
        assert seen.logged[name].values.tolist() == [0, 1, 2, 3]


# -- optimizers in the backward ------------------------------------------------------------------


def gradients_of_inputs(model, n_steps, run):
    """Train; return the norms of the gradients of the inputs. `run` calls each backward."""
    norms = []
    torch.manual_seed(0)
    for _ in range(n_steps):
        x = torch.randn(5, 2, requires_grad=True)
        run(model(x).square().mean().backward)
        norms.append(x.grad.norm().item())
    return norms


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("has_unused", [False, True])
@pytest.mark.parametrize("run", [operator.call, in_autograds_thread])
def test_optimizers_in_the_backward_step_with_all_of_it(run, has_unused, every):
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    if has_unused:
        model[0].register_parameter("unused", nn.Parameter(torch.ones(1)))
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}
    used = [weight for name, weight in model.named_parameters() if "unused" not in name]

    def step(weight):
        optimizers[weight].step()
        weight.grad = None

    for weight in used:
        weight.register_post_accumulate_grad_hook(step)
    with hl.monitor(model, ports=("output", "grad_input", "grad", "update"), every=every) as seen:
        norms = gradients_of_inputs(model, 4, run)
    assert seen.steps.tolist() == list(range(0, 4, every))
    assert seen["0:grad_input"].norm.tolist() == pytest.approx(norms[::every], rel=1e-6)
    assert seen["0.weight:update"].count.tolist() == [8] * len(seen)
    assert seen["2.weight:grad"].count.tolist() == [8] * len(seen)
    assert seen["0"].count.tolist() == [20] * len(seen)


@pytest.mark.parametrize("run", [operator.call, in_autograds_thread])
def test_a_backward_that_raises_ends_its_step_later(run):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises = [False, True, False, False]

    def step(weight):
        optimizer.step()
        if raises.pop(0):
            raise ZeroDivisionError

    model.weight.register_post_accumulate_grad_hook(step)
    with hl.monitor(model) as seen:
        for k in range(4):
            try:
                run(model(X).sum().backward)
            except ZeroDivisionError:
                assert k == 1
    assert seen.steps.tolist() == [0, 1, 2, 3]
    assert seen["weight:update"].count.tolist() == [4] * 4


def test_optimizers_that_share_a_parameter_are_told_once():
    model = nn.Linear(2, 2)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    part = torch.optim.Adam([model.bias], lr=0.1)
    with pytest.warns(hl.HooklineWarning, match="got SGD and Adam, which step the same") as told:
        with hl.monitor(model, ports="update") as seen:
            for _ in range(3):
                model(X).sum().backward()
                whole.step()
                part.step()
    assert len(told) == 1
    assert seen["bias:update"].count.tolist() == [2] * 6
