"""The line of the loss is named where the variables prove it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 1


def helper(y):
    return (y - 100).log()


def one_statement(model):
    helper(model(X)).sum().backward()  # bad


def one_assignment(model):
    loss = helper(model(X)).sum()  # bad
    loss.backward()


def after_the_output(model):
    output = model(X)
    loss = helper(output).sum()  # bad
    loss.backward()


def step_by_step(model):
    output = model(X)
    logs = helper(output)  # bad
    weighted = logs * 2
    loss = weighted.mean()
    loss.backward()


def last_step(model):
    output = model(X)
    shifted = output - 100
    total = shifted.log().sum()  # bad
    loss = total / 3
    loss.backward()


def with_words_between(model):
    output = model(X)
    print(output.shape)
    loss = helper(output).sum()  # bad
    loss.backward()


def over_several_lines(model):
    output = model(X)
    loss = (  # bad
        helper(output)
        .sum()
    )  # fmt: skip
    loss.backward()


def in_a_loop(model):
    for _ in range(2):
        output = model(X)
        loss = helper(output).sum()  # bad
        loss.backward()


PROVEN = [
    one_statement, one_assignment, after_the_output, step_by_step, last_step, with_words_between,
    over_several_lines, in_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("train", PROVEN)
def test_the_line_is_named_where_it_is_sure(train):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model)
    finding = caught.value.finding
    assert finding.function == "log"
    assert finding.line.text.endswith("# bad")
    assert finding.line.function == train.__name__


def stored_twice(model):
    output = model(X)
    loss = output.sum()
    loss = loss + helper(output).sum()
    loss.backward()


def kept_elsewhere(model):
    kept = []
    output = model(X)
    kept = [helper(output)]
    extra = kept[0].sum()
    loss = output.sum() + extra
    loss.backward()


def kept_beside_the_output(model):
    kept = [output := model(X), helper(output)]
    extra = output.mean()
    loss = kept[1].sum() + extra
    loss.backward()


def trained_elsewhere(model):
    def backward(loss):
        loss.backward()

    backward(helper(model(X)).sum())


@pytest.mark.parametrize(
    "train", [stored_twice, kept_elsewhere, kept_beside_the_output, trained_elsewhere]
)
def test_no_line_is_named_where_several_may_be_meant(train):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model)
    assert (caught.value.finding.function, caught.value.finding.line) == ("log", None)
