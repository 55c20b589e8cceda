"""Faults of every kind are named at their module, operation and line; what is meant raises none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine import backward_number
from second_thread import in_autograds_thread

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom"),
    pytest.mark.filterwarnings("ignore:Mean of empty"),
]

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 1
INF, NAN = math.inf, math.nan


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Around(nn.Module):
    """A function between two linear layers: in the module `mid`, by default."""

    def __init__(self, function, at="leaf"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mid, self.at = Applied(function), at

    def forward(self, x, is_on=True):
        x, at, mid = self.first(x), self.at, self.mid
        if not is_on:
            return self.last(x)
        if at == "root":
            return self.last(mid.function(x))
        if at == "checkpointed":
            return self.last(checkpoint(mid, x, use_reentrant=False))
        if at == "dict":
            before, mid.function = mid.function, lambda x: {"a": x, "b": (before(x),)}
            try:
                return self.last(mid(x)["b"][0])
            finally:
                mid.function = before
        if at == "second call":
            before, mid.function = mid.function, torch.sin
            x = mid(x)
            mid.function = before
        return self.last(mid(x))


def masked(x):
    return torch.full_like(x, -INF)


# The functions, all of x, that make a NaN or an infinity in their last operation.
FORWARD = {
    "log of negatives": (lambda x: (x - 100).log(), "log.default"),  # log of negatives
    "log of zeros": (lambda x: (x * 0).log(), "log.default"),  # log of zeros
    "log2": (lambda x: (x - 100).log2(), "log2.default"),  # log2
    "log1p": (lambda x: (x - 100).log1p(), "log1p.default"),  # log1p
    "sqrt": (lambda x: (x - 100).sqrt(), "sqrt.default"),  # sqrt
    "rsqrt": (lambda x: (x * 0).rsqrt(), "rsqrt.default"),  # rsqrt
    "reciprocal": (lambda x: (x * 0).reciprocal(), "reciprocal.default"),  # reciprocal
    "0 / 0": (lambda x: x * 0 / (x * 0), "div.Tensor"),  # 0 / 0
    "1 / 0": (lambda x: x / (x * 0), "div.Tensor"),  # 1 / 0
    "/ number": (lambda x: x / 0, "div.Tensor"),  # / number
    "pow": (lambda x: (x - 100) ** 0.5, "pow.Tensor_Scalar"),  # pow
    "exp": (lambda x: (x * 0 + 1000).exp(), "exp.default"),  # exp
    "expm1": (lambda x: (x * 0 + 1000).expm1(), "expm1.default"),  # expm1
    "cosh": (lambda x: (x * 0 + 1000).cosh(), "cosh.default"),  # cosh
    "softmax": (lambda x: masked(x).softmax(-1), "_softmax.default"),  # softmax
    "log_softmax": (lambda x: masked(x).log_softmax(-1), "_log_softmax.default"),  # log_softmax
    "mask - mask": (lambda x: x + (masked(x) - masked(x)), "sub.Tensor"),  # mask - mask
    "0 * mask": (lambda x: x + masked(x) * 0, "mul.Tensor"),  # 0 * mask
    "half": (lambda x: ((x.half() * 0 + 6e4) * 2).float(), "mul.Tensor"),  # half
    "to half": (lambda x: (x * 0 + 1e6).half().float(), "_to_copy.default"),  # to half
    "acos": (lambda x: (x * 0 + 2).acos(), "acos.default"),  # acos
    "atanh": (lambda x: (x * 0 + 2).atanh(), "atanh.default"),  # atanh
    "erfinv": (lambda x: (x * 0 + 2).erfinv(), "erfinv.default"),  # erfinv
    "lgamma": (lambda x: (x * 0).lgamma(), "lgamma.default"),  # lgamma
    "fmod": (lambda x: x.fmod(0), "fmod.Scalar"),  # fmod
    "mm": (lambda x: (x * 0 + 1e30) @ (x.T * 0 + 1e30) @ x, "mm.default"),  # mm
    "sum": (lambda x: x + (x * 0 + 3e38).sum(), "sum.default"),  # sum
    "mean of nothing": (lambda x: x + x[:0].mean(), "mean.default"),  # mean of nothing
    "var of one": (lambda x: x + x[:1].var(0), "var.correction"),  # var of one
    "std of one": (lambda x: x + x[:1].std(0), "std.correction"),  # std of one
    "in place": (lambda x: (x - 100).log_(), "log_.default"),  # in place
    "by a constant": (lambda x: x * NAN, "mul.Tensor"),  # by a constant
    "of a constant": (lambda x: x + torch.tensor(NAN), "add.Tensor"),  # of a constant
    "of a written NaN": (lambda x: written(x) * 2, "mul.Tensor"),  # of a written NaN
    "cross entropy": (
        lambda x: x + F.cross_entropy(x, torch.full((3,), -100)),  # cross entropy
        "nll_loss_forward.default",
    ),
}


def written(x):
    x = x.clone()
    x[:, 0] = NAN
    return x


def finding_of(model, work):
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        work()
    return caught.value.finding


def named(finding, name):
    """The operation that a finding names, once its line has been looked at."""
    assert finding.line.text.endswith(f"# {name}")
    assert finding.inputs
    return finding.operation.removeprefix("aten.")


@pytest.mark.parametrize("at", ["leaf", "root", "checkpointed", "dict", "second call"])
@pytest.mark.parametrize("name", FORWARD)
def test_a_value_made_in_forward(name, at):
    function, operation = FORWARD[name]
    model = Around(function, at)
    finding = finding_of(model, lambda: model(X))
    path, call = ("", 0) if at == "root" else ("mid", int(at == "second call"))
    assert (finding.kind, finding.path, finding.call) == ("forward", path, call)
    assert named(finding, name) == operation
    assert (finding.step, finding.vanished) == (0, False)


@pytest.mark.parametrize("name", FORWARD)
def test_a_value_made_in_a_later_run_without_gradients(name):
    function, operation = FORWARD[name]
    model = Around(function)

    def work():
        model(X, is_on=False)
        model(X)

    with torch.no_grad():
        finding = finding_of(model, work)
    assert (finding.kind, finding.path, finding.step) == ("forward", "mid", 1)
    assert named(finding, name) == operation


OVERFLOWS = {
    "exp": (lambda x: (x * 0 + 1000).exp(), "exp.default"),  # exp
    "half": (lambda x: x.half() * 0 + 6e4 + 6e4, "add.Tensor"),  # half
    "log": (lambda x: (x - 100).log(), "log.default"),  # log
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_value_made_under_autocast(name, dtype):
    function, operation = OVERFLOWS[name]
    model = Around(function)
    with torch.autocast("cpu", dtype=dtype):
        finding = finding_of(model, lambda: model(X))
    assert (finding.kind, finding.path) == ("forward", "mid")
    assert named(finding, name) == operation


# The functions, all of x, whose values are finite, and whose gradients are not.
BACKWARD = {
    "root": (lambda x: (x * 0).sqrt(), "SqrtBackward0", "div.Tensor"),  # root
    "power": (lambda x: (x * 0) ** 0.5, "PowBackward0", "pow.Tensor_Scalar"),  # power
    "masked log": (
        lambda x: torch.where(x.isnan(), (x * 0).log(), x),  # masked log
        "LogBackward0",
        "div.Tensor",
    ),
    "acos of one": (lambda x: (x * 0 + 1).acos(), "AcosBackward0", "rsqrt.default"),  # acos of one
    "asin of one": (lambda x: (x * 0 + 1).asin(), "AsinBackward0", "rsqrt.default"),  # asin of one
    "small divisor": (
        lambda x: 1e-30 / (x * 0 + 1e-30),  # small divisor
        "ReciprocalBackward0",
        "mul.Tensor",
    ),
    "large factor": (
        lambda x: x * 1e-30 * 1e-8 * 1e30 * 1e30,  # large factor
        "MulBackward0",
        "mul.Tensor",
    ),
}


@pytest.mark.parametrize("at", ["leaf", "root", "checkpointed", "first of two", "second of two"])
@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_made_in_backward(name, at):
    function, node, operation = BACKWARD[name]
    model = Around(function, at)

    def work():
        calls = {"first of two": (True, False), "second of two": (False, True)}.get(at, (True,))
        sum(model(X, is_on=is_on).sum() for is_on in calls).backward()

    finding = finding_of(model, work)
    path = "" if at == "root" else "mid"
    step = int(at == "second of two")
    assert (finding.kind, finding.path, finding.step) == ("backward", path, step)
    assert (named(finding, name), finding.function) == (operation, node)


def poison_parameter(model):
    with torch.no_grad():
        model.last.weight[0, 0] = NAN
    return "parameter", "last.weight"


def poison_bias(model):
    with torch.no_grad():
        model.last.bias[0] = INF
    return "parameter", "last.bias"


def poison_buffer(model):
    model.mid.register_buffer("scale", torch.tensor([1.0, NAN, 1, 1]))
    model.mid.function = lambda x: x * model.mid.scale
    return "buffer", "mid.scale"


def poison_attribute(model):
    model.mid.scale = torch.tensor([1.0, NAN, 1, 1])
    model.mid.function = lambda x: x * model.mid.scale
    return "constant", ""


def poison_written_attribute(model):
    scale = torch.tensor(NAN)

    def write(x):
        x = x.clone()
        x[:, 0] = scale
        return x

    model.mid.function = write
    return "constant", ""


@pytest.mark.parametrize(
    "poison",
    [poison_parameter, poison_bias, poison_buffer, poison_attribute, poison_written_attribute],
)
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_value_that_the_model_holds(poison, has_grad):
    model, expected = Around(torch.tanh), []

    def work():
        model(X)
        expected.extend(poison(model))
        model(X)

    with torch.set_grad_enabled(has_grad):
        finding = finding_of(model, work)
    assert [finding.kind, finding.path, finding.step] == [*expected, 1]
    assert finding.operation


@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_value_in_the_input(number, has_grad):
    x = X.clone()
    x[0, 0] = number
    model = Around(torch.neg)
    with torch.set_grad_enabled(has_grad):
        finding = finding_of(model, lambda: model(x))
    assert (finding.kind, finding.path) == ("input", "(root):input")
    assert finding.line.text == "x, at, mid = self.first(x), self.at, self.mid"


# -- the loss --------------------------------------------------------------------------------------


# The losses that are not finite, and the operation.
LOSSES = {
    "log": (lambda y: -(y.softmax(-1) * 0).log().mean(), "log"),
    "log of negatives": (lambda y: (y - 1000).log().sum(), "log"),
    "sqrt": (lambda y: (y - 1000).sqrt().sum(), "sqrt"),
    "0 / 0": (lambda y: (y * 0).sum() / (y.detach() * 0).sum(), "div"),
    "by no labels": (lambda y: y.square().sum() / torch.zeros(()), "div"),
    "exp": (lambda y: (y * 0 + 1000).exp().mean(), "exp"),
    "pow": (lambda y: ((y - 1000) ** 0.5).mean(), "pow"),
    "std of one": (lambda y: y[:1].std(0).sum(), "std"),
    "mean of nothing": (lambda y: y[y > 1e9].mean() + y.sum(), "mean"),
    "log of a ratio": (lambda y: (y.square() / (y.square() * 0)).log().sum(), "div"),
    "softmax": (lambda y: y.masked_fill(y < 1e9, -INF).softmax(-1).sum(), "softmax"),
    "acos": (lambda y: (y * 0 + 2).acos().mean(), "acos"),
}


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_a_value_made_in_the_loss(name, has_optimizer):
    function, operation = LOSSES[name]
    model = Around(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work():
        function(model(X)).backward()
        if has_optimizer:
            optimizer.step()

    finding = finding_of(model, work)
    assert (finding.kind, finding.step) == ("loss", 0)
    assert (finding.function, finding.operation) == (operation, f"aten.{operation}")
    assert finding.line.text == "function(model(X)).backward()"


# The losses that are finite, and whose gradients are not: the node of the graph.
FINITE_LOSSES = {
    "distance of equals": (lambda y: (y - y.detach()).square().sum().sqrt(), "SqrtBackward0"),
    "masked log": (lambda y: torch.where(y.isnan(), (y * 0).log(), y).sum(), "LogBackward0"),
    "power": (lambda y: ((y * 0) ** 0.5).sum(), "PowBackward0"),
    "acos of one": (lambda y: (y * 0 + 1).acos().sum(), "AcosBackward0"),
}


@pytest.mark.parametrize("name", FINITE_LOSSES)
def test_a_gradient_made_in_the_loss(name):
    function, node = FINITE_LOSSES[name]
    model = Around(torch.tanh)
    finding = finding_of(model, lambda: function(model(X)).backward())
    assert (finding.kind, finding.function) == ("loss", node)
    assert f"the loss made it, by {node} at {__file__}" in finding.message


@pytest.fixture
def gpus_thread(monkeypatch):
    """Let autograd run in a thread of its own, as on a GPU."""
    engine = torch.autograd._engine_run_backward

    def elsewhere(*args, **kwargs):
        if backward_number() != -1:  # inside another backward
            return engine(*args, **kwargs)
        return in_autograds_thread(lambda: engine(*args, **kwargs))

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", elsewhere)


@pytest.mark.usefixtures("gpus_thread")
def test_a_backward_in_a_gpus_thread_has_a_line():
    test_a_gradient_made_in_the_loss("masked log")


@pytest.mark.usefixtures("gpus_thread")
def test_a_repeated_run_in_a_gpus_thread_is_no_pass():
    model = Around(lambda x: (x * 0).sqrt() + x)
    with hl.record(model) as run:
        finding = finding_of(model, lambda: model(X).sum().backward())
    assert (finding.kind, finding.path) == ("backward", "mid")
    assert len(run.passes) == 1


@pytest.mark.parametrize("name", ["cross entropy", "by labels"])
def test_a_nan_loss_with_finite_gradients(name):
    ignored = torch.full((3,), -100)
    losses = {
        "cross entropy": lambda y: F.cross_entropy(y, ignored),
        "by labels": lambda y: F.nll_loss(y.log_softmax(-1), ignored),
    }
    model = Around(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work():
        losses[name](model(X)).backward()
        assert all(one.grad.isfinite().all() for one in model.parameters())
        optimizer.step()

    finding = finding_of(model, work)
    assert (finding.kind, finding.path, finding.function) == ("loss", "loss", "nll_loss")
    assert finding.message.startswith(
        "the loss must be finite, got 1 NaN of 1 value in step 0, made by nll_loss"
    )


# -- runs that do not repeat themselves ------------------------------------------------------------


class Counting(nn.Module):
    """Makes a NaN in its second run, by a counter or by a generator that nobody knows of."""

    def __init__(self, by):
        super().__init__()
        self.first, self.last, self.n = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.drawn = iter([1.0, 0.0, 1.0, 1.0, 1.0]) if by == "iterator" else None

    def forward(self, x):
        self.n += 1
        factor = float(self.n != 2) if self.drawn is None else next(self.drawn)
        return self.last(self.first(x) * factor / factor if factor else self.first(x) / 0)


@pytest.mark.parametrize("by", ["counter", "iterator"])
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_run_that_does_not_repeat_itself(by, has_grad):
    model = Counting(by)
    outputs = []

    def work():
        for _ in range(4):
            outputs.append(model(X))

    with torch.set_grad_enabled(has_grad):
        finding = finding_of(model, work)
    assert len(outputs) == 1
    assert (finding.kind, finding.path, finding.step) == ("forward", "last", 1)
    assert (finding.operation, finding.line) == (None, None)
    assert "the run did not repeat itself, first at last" in str(finding)


def test_another_nan_of_the_repeated_run_in_the_same_module():
    n = iter(range(9))
    model = Around(lambda x: x.log() if next(n) else x * 0 / (x * 0))
    finding = finding_of(model, lambda: model(X - 100))
    # The NaNs of both runs are in the same module; the layer's own numbers were the same.
    assert finding.path == "mid"


def test_a_backward_of_a_run_that_does_not_repeat_itself():
    n = iter(range(9))
    model = Around(lambda x: x if next(n) else (x * 0).sqrt() + x)
    finding = finding_of(model, lambda: model(X).sum().backward())
    assert (finding.kind, finding.operation) == ("gradient", None)
    assert "the run did not repeat itself" in str(finding)


def test_a_nan_that_vanishes_in_such_a_run():
    n = iter(range(9))
    model = Around(lambda x: x, at="leaf")
    model.mid.function = lambda x: x / 0 * 0 if next(n) in (1, 3) else x
    model.last = Applied(torch.nan_to_num)
    with torch.no_grad(), hl.check(model) as line:
        for _ in range(3):
            model(X)
    assert all(one.vanished for one in line.findings)


# -- what is no fault ------------------------------------------------------------------------------


def upper(x):
    return torch.ones(3, 3).triu(1).bool()


def scores(x):
    return x @ x.T


LEGAL = torch.tensor([1.0, 0, 1, 1])
PAD = torch.tensor([False, True, False, False])


def empty(x):
    memory = torch.empty(5, 4)
    memory[:3] = x
    return memory[:3]


def set_item(number):
    def write(x):
        x = x.clone()
        x[:, 1] = number
        return x

    return write


def set_tensor(x):
    return set_item(torch.tensor(NAN))(x)


# What the model does with its last values; the model's output may hold infinities or NaN.
MEANT = {
    "masked attention": lambda x: scores(x).masked_fill(upper(x), -INF).softmax(-1) @ x,
    "where attention": lambda x: torch.where(upper(x), -INF, scores(x)).softmax(-1) @ x,
    "added attention": lambda x: (scores(x) + torch.full((3, 3), -INF).triu(1)).softmax(-1) @ x,
    "log attention": lambda x: (scores(x) + (~upper(x)).float().log()).softmax(-1) @ x,
    "masked scores": lambda x: x.masked_fill(PAD, -INF),
    "where scores": lambda x: torch.where(PAD, torch.tensor(-INF), x),
    "set scores": set_item(-INF),
    "log mask": lambda x: x + LEGAL.log(),
    "log2 mask": lambda x: x + LEGAL.log2(),
    "log mask, normed": lambda x: (x + LEGAL.log()).log_softmax(-1),
    "top scores": lambda x: x.masked_fill(x < x.topk(2)[0][:, -1:], -INF),
    "scores and choice": lambda x: (x.masked_fill(PAD, -INF), x.masked_fill(PAD, -INF).argmax(-1)),
    "masked NaN": lambda x: x.masked_fill(PAD, NAN),
    "where number": lambda x: torch.where(PAD, NAN, x),
    "where full": lambda x: torch.where(PAD, torch.full((), NAN), x),
    "where tensor": lambda x: torch.where(PAD, torch.tensor(NAN), x),
    "where list": lambda x: torch.where(PAD, torch.tensor([0, NAN, 0, 0]), x),
    "set NaN": set_item(NAN),
    "set tensor": set_tensor,
    "index fill": lambda x: x.index_fill(1, torch.tensor([1]), NAN),
    "full": lambda x: (x, torch.full((2,), NAN)),
    "new tensor": lambda x: (x, x.new_tensor([NAN, 1])),
    "filled": lambda x: (x, torch.empty(3).fill_(NAN)),
    "padded": lambda x: F.pad(x, (0, 1), value=NAN)[:, :4],
    "moved NaN": lambda x: torch.cat([x.masked_fill(PAD, NAN)] * 2).T.contiguous()[:, :3].double(),
    "nanmean": lambda x: x.masked_fill(PAD, NAN).nanmean(-1, keepdim=True) + x,
    "replaced": lambda x: torch.nan_to_num(x.masked_fill(PAD, NAN)),
    "unused": lambda x: ((x - 100).log(), x)[1],
    "branch not taken": lambda x: torch.where(x > -1e9, x, (x - 1e9).log()).detach() + x,
    "overflowing sum": lambda x: x * 0 + 3e38,
    "infinite bound": lambda x: x.clamp(-INF, INF),
    "least of all": lambda x: torch.minimum(torch.full_like(x, INF), x),
    "empty memory": empty,
    "no rows": lambda x: x[:0],
    "integers": lambda x: x.argmax(-1),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_raises_nothing(name, has_grad):
    model = nn.Sequential(nn.Linear(4, 4), Applied(MEANT[name]))
    with torch.set_grad_enabled(has_grad), hl.check(model) as line:
        for _ in range(3):
            model(X)
    assert [one for one in line.findings if not one.vanished] == []


def distances():
    model = nn.Sequential(nn.Linear(4, 4), Applied(lambda x: (x, torch.full((2,), INF))))
    model.register_buffer("bound", torch.tensor([INF, -INF]))
    with hl.check(model):
        model(X)


def skipped_loss():
    """The loop looks at the loss, and steps no optimizer with it."""
    model = Around(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.check(model):
        for factor in (1.0, NAN, 1.0):
            loss = model(X).sum() * factor
            optimizer.zero_grad()
            if loss.isfinite():
                loss.backward()
                optimizer.step()


def dropped_loss():
    """The loop looks at the loss after its backward, and drops the gradients."""
    ignored, labels = torch.full((3,), -100), torch.zeros(3, dtype=torch.long)
    for set_to_none in (True, False):
        model = Around(torch.tanh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hl.check(model):
            for target in (labels, ignored, labels):
                loss = F.cross_entropy(model(X), target)
                loss.backward()
                if loss.isfinite():
                    optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)


def evaluated_loss():
    model = Around(torch.tanh)
    with hl.check(model), torch.no_grad():
        F.cross_entropy(model(X), torch.full((3,), -100))


def loss_of_another_model():
    model, other = Around(torch.tanh), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.check(model):
        model(X).sum().backward()
        F.cross_entropy(other(X), torch.full((3,), -100)).backward()
        optimizer.step()


def infinite_loss_with_finite_gradients():
    model = Around(torch.tanh)
    with hl.check(model):
        (model(X).sum() + INF).backward()


@pytest.mark.parametrize(
    "work",
    [distances, skipped_loss, dropped_loss, evaluated_loss, loss_of_another_model,
     infinite_loss_with_finite_gradients],
)  # fmt: skip
def test_steps_and_losses_that_are_no_fault(work):
    work()
