"""No optimizer steps with a gradient that is not finite, whoever made it."""

from __future__ import annotations

import math
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Bent(nn.Module):
    """Finite forwards; the backward makes infinities for all that comes before."""

    def forward(self, x):
        return (0 * x).sqrt() + x


def three(middle=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), middle or nn.ReLU(), nn.Linear(4, 2))


def refused(model, work, *, lr=0.1):
    """Run `work` under a check: the step is refused, and no weight has changed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        work(model)
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    return caught.value.finding


def test_the_second_of_two_optimizers_is_stopped_too():
    model = three(Bent())
    last = torch.optim.SGD(model[2].parameters(), lr=0.1)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(X).sum().backward()
        last.step()  # its gradients are finite
        first.step()
    assert (caught.value.finding.path, caught.value.finding.kind) == ("1", "backward")
    assert all(one.isfinite().all() for one in model.parameters())


def test_gradients_that_are_spoilt_after_the_backward():
    def work(model):
        model(X).sum().backward()
        for one in model.parameters():
            one.grad.div_(0)

    finding = refused(three(), work)
    assert (finding.kind, finding.path, finding.step) == ("gradient", "2.bias", 0)
    assert "such as a division after backward()" in str(finding)
    assert "4 of 4 gradients are not finite" in str(finding)


def test_gradients_that_are_replaced_after_the_backward():
    def work(model):
        model(X).sum().backward()
        for one in model.parameters():
            one.grad = one.grad / 0

    assert refused(three(), work).kind == "gradient"


def test_a_loss_on_weights_alone():
    def work(model):
        with torch.no_grad():
            model(X)
        (0 * model[0].weight).sum().sqrt().backward()

    assert refused(three(), work).path == "0.weight"


def test_a_loss_on_weights_beside_a_good_one():
    def work(model):
        (model(X).sum() + (0 * model[0].weight).sum().sqrt()).backward()

    finding = refused(three(), work)
    assert finding.path == "0.weight"
    assert "such as a loss on weights" in str(finding)


def test_a_loss_on_values_inside_the_model():
    def work(model):
        inner = []
        model[0].register_forward_hook(lambda module, args, output: inner.append(output))
        model(X)
        (0 * inner[0]).sum().sqrt().backward()

    assert refused(three(), work).path == "0.bias"


def spoilt_afterwards(model):
    model(X).sum().backward()
    model[2].bias.grad /= 0


def of_the_weights_alone(model):
    model(X)
    (0 * model[2].bias).sum().sqrt().backward()


@pytest.mark.parametrize("work", [spoilt_afterwards, of_the_weights_alone])
def test_without_an_optimizer_the_block_ends_with_the_error(work):
    model, is_over = three(), False
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model) as line:
        work(model)
        is_over = True
    assert is_over
    assert caught.value.finding.path == "2.bias"
    assert line.findings == [caught.value.finding]


@pytest.mark.parametrize("work", [spoilt_afterwards, of_the_weights_alone])
def test_gradients_that_were_spoilt_before_or_were_dropped(work):
    model = three()
    work(model)
    with hl.check(model) as line:
        model(X)
    with hl.check(model):
        model.zero_grad()
        work(model)
        model.zero_grad()
    assert line.findings == []


def test_a_backward_through_parts_of_the_model():
    finding = refused(three(), lambda model: (0 * model[2](model[0](X))).sum().sqrt().backward())
    assert finding.path == "2.bias"


def test_gradients_of_torch_func():
    def work(model):
        weights = dict(model.named_parameters())
        loss = lambda given: (0 * functional_call(model, given, (X,))).sum().sqrt()  # noqa: E731
        found = grad(loss)(weights)
        for name, one in weights.items():
            one.grad = found[name].detach()

    assert refused(three(), work).kind == "gradient"


def test_a_part_that_was_replaced_in_the_block():
    model = three()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(X)
        model[2].bias = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(X).sum() + (0 * model[2].bias).sum().sqrt()).backward()
        optimizer.step()
    assert caught.value.finding.path == "2.bias"
    assert all(one.isfinite().all() for one in model.parameters())


def test_a_step_is_refused_again_until_the_gradients_are_dropped():
    model = three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(hl.HooklineWarning, match="caught on its way"), hl.check(model) as line:
        (model(X).sum() * math.inf).backward()
        for _ in range(2):
            with pytest.raises(hl.NonFiniteError, match="in step 0"):
                optimizer.step()
        optimizer.zero_grad()
        (model(X).sum() * math.nan).backward()
        with pytest.raises(hl.NonFiniteError, match="in step 1"):
            optimizer.step()
    assert len(line.findings) == 2
    assert all(one.isfinite().all() for one in model.parameters())


def test_a_skipped_step_is_not_blamed_for_a_later_nan():
    model = three()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        (model(X).sum() * math.inf).backward()
        model.zero_grad()  # the loop skips it
        model(X * math.nan)
    assert caught.value.finding.kind == "input"


def test_a_last_backward_that_is_skipped_after_steps():
    model = three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.check(model) as line:
        model(X).sum().backward()
        optimizer.step()
        (model(X).sum() * math.inf).backward()
    assert line.findings == []


def test_weights_that_the_last_step_poisons():
    model = three()
    optimizer = torch.optim.Adam(model.parameters(), eps=0)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        (0 * model(X)).sum().backward()
        optimizer.step()  # 0 / 0
    assert (caught.value.finding.kind, caught.value.finding.path) == ("parameter", "0.weight")
    assert "optimizer's eps" in str(caught.value.finding)


def test_weights_that_a_step_poisons_are_no_fault_of_gradients():
    model = three()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(math.nan))
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
    assert caught.value.finding.kind == "parameter"
    assert "look at the learning rate" in str(caught.value.finding)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_embeddings(sparse):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), Bent())
    finding = refused(model, lambda model: model(torch.tensor([0, 0, 2])).sum().backward(), lr=1e-3)
    assert (finding.kind, finding.path, finding.function) == ("backward", "1", "SqrtBackward0")


def test_a_nan_written_out_in_a_backward():
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.nan  # planted

    class Spoilt(nn.Module):
        def forward(self, x):
            return Spoil.apply(x)

    finding = refused(three(Spoilt()), lambda model: model(X).sum().backward())
    assert (finding.path, finding.function) == ("1", "SpoilBackward")
    assert finding.operation == "aten.mul.Tensor"


def test_a_repeated_backward_leaves_buffers_of_a_checkpoint():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    def trained(*, is_checked):
        model = three(nn.Sequential(Region(), Bent()))
        line = hl.check(model) if is_checked else None
        model(X).sum().backward()  # inf
        model.zero_grad()
        if line is not None:
            line.remove()
        return model.state_dict()

    with warnings.catch_warnings():
        plain, checked = trained(is_checked=False), trained(is_checked=True)
    assert all(torch.equal(plain[name], one) for name, one in checked.items())


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closures_gradients_are_judged_before_the_step(as_keyword):
    model, n_runs = three(Bent()), []
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    model[1].forward = lambda x: Bent.forward(None, x) if len(n_runs) == 3 else x

    def closure():
        n_runs.append(1)
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for _ in range(3):
            before = [one.detach().clone() for one in model.parameters()]
            optimizer.step(**{"closure": closure}) if as_keyword else optimizer.step(closure)
    assert len(n_runs) == 3
    assert (caught.value.finding.path, caught.value.finding.kind) == ("1", "backward")
    assert all(map(torch.equal, before, model.parameters()))


def test_what_a_closure_drops_was_skipped():
    model, n_runs = three(Bent()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        model(X).square().mean().backward()  # its gradients are not finite
        optimizer.zero_grad()
        (loss := (model[0](X) ** 2).mean()).backward()
        n_runs.append(1)
        return loss

    with hl.check(model) as line:
        optimizer.step(closure)
    assert n_runs
    assert not line.findings
    assert all(one.isfinite().all() for one in model.parameters())


def test_one_loss_is_that_of_a_device_thread_two_may_not_be():
    line = hl.check(nn.Linear(2, 2))
    checks, mine, other = line._backward, SimpleNamespace(thread=-1), SimpleNamespace(thread=-2)
    for losses, expected in (([], None), ([mine], mine), ([mine, other], None)):
        checks._losses = losses
        assert checks._current_loss() is expected
    mine.thread = threading.get_ident()
    assert checks._current_loss() is mine
    checks._losses = []
    line.remove()
