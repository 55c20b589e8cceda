"""The loss, outside the model: its operation is named from its graph, where the graph knows."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.engine.torch_private.graph.nodes import next_number
from hookline.verbs.check.loss_graph import NodeNumbers, _RunNodes

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 1
IGNORED = torch.full((3,), -100)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def finding_of(model, work):
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        work()
    return caught.value.finding


def test_the_message_names_the_loss_and_its_operation():
    model = linear()
    finding = finding_of(model, lambda: (model(X) * 0).log().sum().backward())
    first, second = finding.message.splitlines()
    assert first.startswith(
        "the gradient of the output (root) must be finite, got 12 NaN of 12 values in step 0: the"
        f" loss made it, by log at {__file__}:"
    )
    assert second == "Look at the loss; print(error.finding) says more."
    assert "the loss was -inf" in finding.notes


def test_a_finite_loss_is_told_from_its_gradient():
    model = linear()

    def work():
        y = model(X)
        (y - y.detach()).square().sum().sqrt().backward()

    finding = finding_of(model, work)
    assert (finding.function, finding.operation) == ("SqrtBackward0", "aten.sqrt")
    assert "the loss was 0" in finding.notes


def test_the_message_of_a_nan_loss_with_finite_gradients():
    model = linear()
    finding = finding_of(model, lambda: F.cross_entropy(model(X), IGNORED).backward())
    assert (finding.site, finding.n_nan, finding.n_total) == ("loss", 1, 1)
    assert finding.message.startswith("the loss must be finite, got 1 NaN of 1 value in step 0")
    assert "the gradients are finite, so the step would hide it" in finding.notes
    assert str(finding.inputs[1]) == f"[1] int64[{len(IGNORED)}]  from -100 to -100, mean -100"


def test_a_loss_with_an_autograd_function_is_explained():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    model = linear()
    finding = finding_of(model, lambda: (-Square.apply(model(X))).log().sum().backward())
    assert (finding.site, finding.operation) == ("loss", "aten.log")


def test_a_loss_that_keeps_too_little_names_no_operation():
    model, bad = linear(), torch.tensor(math.nan)

    def work():
        (model(X).sum() + bad + 1).backward()

    finding = finding_of(model, work)
    assert (finding.kind, finding.operation, finding.line) == ("loss", None, None)
    assert "set_detect_anomaly" in finding.notes[-2]


def test_an_input_that_the_graph_does_not_keep_is_mentioned():
    model = linear()
    finding = finding_of(model, lambda: (model(X) - 100).sqrt().sum().backward())
    assert finding.function == "sqrt"
    assert "does not keep the operation's input" in str(finding)


def test_a_loss_of_many_operations_names_none():
    model = linear()

    def work():
        loss = (model(X) * 0).log().sum()
        for _ in range(70):
            loss = loss + 1
        loss.backward()

    finding = finding_of(model, work)
    assert (finding.kind, finding.operation) == ("loss", None)
    assert "the operation is not known: the loss is of more than 64 operations" in finding.notes


def test_a_label_that_is_nan_is_mentioned():
    model = linear()
    finding = finding_of(model, lambda: F.mse_loss(model(X), X * math.nan).backward())
    assert finding.function == "mse_loss"
    assert "an input of the operation that needs no gradient was not finite" in finding.notes


def test_a_weight_of_a_loss_is_an_input_of_it():
    model, scale = linear(), nn.Parameter(torch.zeros(()))

    def work():
        (model(X).sum() / scale).backward()

    finding = finding_of(model, work)
    assert finding.function == "div"
    assert [one.name for one in finding.inputs] == ["gradient of the output", "[0]", "[1]"]


def test_a_gradient_that_backward_is_given():
    model = linear()
    finding = finding_of(model, lambda: model(X).backward(torch.full((3, 4), math.nan)))
    assert (finding.kind, finding.function) == ("loss", None)


def test_a_nan_loss_is_kept_while_gradients_accumulate():
    model, labels = linear(), torch.zeros(3, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work():
        for target in (labels, IGNORED, labels):
            F.cross_entropy(model(X), target).backward()
        optimizer.step()

    assert finding_of(model, work).step == 1


def test_a_nan_loss_stops_the_step_and_clipping_does_not_hide_it():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def work():
        F.cross_entropy(model(X), IGNORED).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert finding_of(model, work).is_loss
    assert torch.equal(model.weight, before)


def test_between_two_calls_of_the_model():
    model = linear()
    finding = finding_of(model, lambda: model((model(X) * 0).sqrt() + X).sum().backward())
    assert (finding.kind, finding.step) == ("loss", 0)


def test_a_backward_that_raises_leaves_nothing():
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("refused")

    model = linear()
    with hl.check(model) as line:
        for _ in range(20):
            with pytest.raises(ValueError, match="refused"):
                (Refuse.apply(model(X)).sum() + model(X).sum()).backward()
        model(X).sum().backward()
    assert line.findings == []


def test_torch_is_left_as_it_was():
    before = torch.autograd._engine_run_backward
    with hl.check(linear()), hl.check(linear()):
        assert torch.autograd._engine_run_backward is not before
    assert torch.autograd._engine_run_backward is before


def test_a_later_patch_of_torch_stays_and_is_called(monkeypatch):
    model, n_calls = linear(), [0]
    before = torch.autograd._engine_run_backward
    with hl.check(model):
        run = torch.autograd._engine_run_backward

        def later(*args, **kwargs):
            n_calls[0] += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", later)
        with hl.check(model):
            model(X).sum().backward()
    with pytest.raises(hl.NonFiniteError, match="the loss made it, by log"), hl.check(model):
        (model(X) * 0).log().sum().backward()
    assert n_calls == [2]
    monkeypatch.undo()
    with hl.check(model):
        assert torch.autograd._engine_run_backward is not before
    assert torch.autograd._engine_run_backward is before


def test_a_loss_of_sparse_tensors_is_left_alone():
    model = linear()
    with hl.check(model) as line:
        model(X).to_sparse().backward(torch.ones(3, 4).to_sparse())
    assert line.findings == []


def test_a_thread_with_the_identifier_of_another_is_told_from_it():
    numbers = NodeNumbers()

    def nodes(n):
        first = next_number()
        for _ in range(n):
            torch.ones(1, requires_grad=True).sum()
        return first

    first = nodes(5)
    here = threading.get_ident()
    numbers._runs[here] = [_RunNodes(first + 2, 10**9, True, None)]
    numbers.add_run(first, is_finite=False)
    assert numbers.is_run_finite(first, here) is False
    assert numbers.is_run_finite(next_number(), here) is None


def test_the_line_of_an_operation_under_anomaly_mode():
    model = linear()

    def loss_of(y):
        y = y - 100
        return y.log().sum()

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        finding = finding_of(model, lambda: loss_of(model(X)).backward())
    assert finding.line.text == "return y.log().sum()"
