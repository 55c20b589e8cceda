"""The order in which the sites of a step had their first values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.curves import NO_TURN

X = torch.ones(3, 4)


class Net(nn.Module):
    """A net whose modules run in another order than they are made."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x, takes_head=True):
        x = self.body(x)
        return self.head(x) if takes_head else x


def ranks(seen, step=-1):
    report = seen._source.read()[step]
    return dict(zip(report.layout.by_site, report.order.tolist(), strict=True))


def in_order(seen):
    found = ranks(seen)
    return [site for site in sorted(found, key=found.get) if found[site] != NO_TURN]


def train(model, n_steps=2, n_parts=1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, **options) as seen:
        for _ in range(n_steps):
            for part in X.split(len(X) // n_parts):
                model(part).sum().backward()
            optimizer.step()
    return seen


@pytest.mark.parametrize("n_parts", [1, 3])
def test_forward_comes_first_then_backward_then_parameters(n_parts):
    model = Net()
    seen = train(model, n_parts=n_parts)
    assert seen.sites[:3] == ("(root)", "(root):grad_output", "head")
    assert in_order(seen)[:3] == ["body", "head", "(root)"]
    assert in_order(seen)[3:6] == ["(root):grad_output", "head:grad_output", "body:grad_output"]
    found = ranks(seen)
    assert found["head.weight:value"] == found["body.bias:grad"] == 6  # measured together


def test_a_site_without_a_value_has_no_turn():
    model = Net()
    with hl.monitor(model, ports="output") as seen:
        model(X)
        model(X, takes_head=False)
    assert ranks(seen)["head"] == NO_TURN
    assert in_order(seen) == ["body", "(root)"]


def test_equal_orders_are_kept_once():
    seen = train(Net(), 5)
    orders = [report.order for report in seen._source.read()]
    assert all(order is orders[1] for order in orders[1:])


def test_two_optimizers_of_a_step_keep_the_order():
    model = Net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model.head, model.body)]
    with hl.monitor(model) as seen:
        for _ in range(3):
            model(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert in_order(seen)[:4] == ["body", "head", "(root)", "(root):grad_output"]
    assert seen.steps.tolist() == [0, 1, 2]


def test_an_order_is_read_from_the_folder(tmp_path):
    model = Net()
    with hl.monitor(model, ports="output", to=tmp_path / "run") as seen:
        for takes_head in (True, True, False, True):
            model(X, takes_head)
    found = hl.open(tmp_path / "run")
    assert [ranks(found, k) for k in range(4)] == [ranks(seen, k) for k in range(4)]
    assert found.sites == seen.sites == ("(root)", "head", "body")  # of registration


@pytest.mark.compiles
def test_values_that_leave_a_compiled_graph_share_a_turn():
    model = Net()
    run = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, ports=("output", "grad_output")) as seen:
        for _ in range(2):
            run(X).sum().backward()
            optimizer.step()
    found = ranks(seen)
    assert found["head"] == found["body"]
    assert found["head:grad_output"] == found["body:grad_output"] > found["head"]
