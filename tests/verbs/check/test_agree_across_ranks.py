"""Two ranks: what one of them makes is named on both, and both stop."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from processes import on_ranks

pytestmark = pytest.mark.processes


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x).square()
        return self.last((x - self.limit(x)).sqrt())  # planted

    def limit(self, x):
        return 0 * x.detach()


def train(model, x, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@on_ranks
def test_a_nan_of_one_rank_is_named_on_both(rank, folder):
    model = DistributedDataParallel(Root())
    model.module.limit = lambda x: (1e3 if rank == 1 else 0) + 0 * x.detach()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model, torch.ones(2, 4))
    finding = caught.value.finding
    assert (finding.rank, finding.kind, finding.step) == (1, "forward", 0)
    assert (finding.operation, finding.function) == ("aten.sqrt.default", "sqrt")
    assert finding.line.text.endswith("# planted")
    assert "on rank 1" in str(caught.value)


@on_ranks
def test_a_gradient_of_one_rank_is_named_on_both(rank, folder):
    model = DistributedDataParallel(Root())
    model.module.limit = lambda x: x.detach() if rank == 0 else 0 * x.detach()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model, torch.ones(2, 4))
    finding = caught.value.finding
    assert (finding.rank, finding.kind, finding.step) == (0, "backward", 0)
    assert (finding.operation, finding.function) == ("aten.div.Tensor", "SqrtBackward0")


@on_ranks
def test_the_earliest_of_both_ranks_counts(rank, folder):
    model = DistributedDataParallel(Root())
    x = torch.ones(2, 4)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model, x)
        train(model, x * (math.nan if rank == 1 else 1))
    assert (caught.value.finding.rank, caught.value.finding.step) == (1, 3)
    assert caught.value.finding.kind == "input"


class Log(nn.Module):
    """A NaN in the output: of negative inputs. The gradient of the logarithm is finite there."""

    def __init__(self, last=None):
        super().__init__()
        self.last = last or nn.Linear(2, 1)
        self.first = nn.Linear(2, 2)
        nn.init.ones_(self.first.weight)

    def forward(self, x):
        return self.last(self.first(x).log())


def inputs(*, is_bad):
    return torch.full((1, 2), -5.0 if is_bad else 5.0)


@on_ranks
def test_ranks_stop_together_at_the_end_without_a_step(rank, folder):
    for n_runs in (1, 3):
        model = DistributedDataParallel(Log())
        with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
            for step in range(n_runs):
                model.zero_grad()
                model(inputs(is_bad=rank == 1 and step == 0)).sum().backward()
        finding = caught.value.finding
        assert (finding.rank, finding.kind, finding.step) == (1, "forward", 0)
        assert finding.operation == "aten.log.default"


@on_ranks
def test_skipped_gradients_of_healthy_outputs_raise_on_no_rank(rank, folder):
    model = DistributedDataParallel(nn.Linear(2, 1))
    with hl.check(model) as line:
        for scale in (math.inf if rank == 1 else 1.0, 1.0):
            model.zero_grad()
            (model(inputs(is_bad=False)).sum() * scale).backward()
    assert line.findings == []


@on_ranks
def test_what_other_ranks_cannot_know_is_a_warning(rank, folder):
    without_a_trace = DistributedDataParallel(Log(nn.Identity()))
    unreduced = DistributedDataParallel(Log())
    for model in (without_a_trace, unreduced):
        with warnings.catch_warnings(record=True) as said, hl.check(model) as line:
            warnings.simplefilter("always")
            with model.no_sync():
                model(inputs(is_bad=rank == 1)).sum().backward()
            model.zero_grad()
            model(inputs(is_bad=False)).sum().backward()
        assert [finding.kind for finding in line.findings if finding.path != "loss"] == (
            ["forward"] * rank
        )
        texts = [str(warning.message) for warning in said if "output" in str(warning.message)]
        assert len(texts) == rank
        assert not any("caught on its way" in text for text in texts)


@on_ranks
def test_a_rank_may_evaluate_alone(rank, folder):
    model = DistributedDataParallel(Root())
    with hl.check(model) as line:
        train(model, torch.ones(2, 4))
        if rank == 0:
            with torch.no_grad():
                model.module(torch.ones(2, 4))
        train(model, torch.ones(2, 4))
    assert line.findings == []


def sharded(limit=None):
    model = Root()
    if limit is not None:
        model.limit = limit
    for part in (model.first, model.last, model):
        fully_shard(part)
    return model


@on_ranks
def test_ranks_of_sharded_weights_stop_together(rank, folder):
    model = sharded(lambda x: (1e3 if rank == 1 else 0) + 0 * x.detach())
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model, torch.ones(2, 4))
    finding = caught.value.finding
    assert (finding.rank, finding.kind, finding.step) == (1, "forward", 0)
    assert "weights are sharded" in finding.notes[0]
    with torch.no_grad(), pytest.raises(hl.NonFiniteError), hl.check(model):
        model(torch.ones(2, 4))


@on_ranks
def test_a_gradient_in_one_shard_stops_all_ranks(rank, folder):
    # The square root of 0 in the first feature: its row of the weight lies on rank 0 alone.
    model = sharded(lambda x: x.detach() * torch.tensor([1.0, 0, 0, 0]))
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model) as line:
        train(model, torch.ones(2, 4))
    assert model.first.weight.grad.to_local().isfinite().all() == (rank == 1)
    finding = caught.value.finding
    assert (finding.rank, finding.kind, finding.path) == (None, "gradient", "first.bias")
    assert "rank 0 holds it; the rank that made it is not known" in finding.notes
    assert line.findings == [finding]


@on_ranks
def test_sharded_training_that_is_well_is_left_alone(rank, folder):
    model = sharded()
    with hl.check(model) as line:
        train(model, torch.ones(2, 4) + rank)
    assert line.findings == []


class Gathering(Root):
    """Its forward is a collective, as a contrastive loss over all ranks is."""

    def forward(self, x):
        output = super().forward(x)
        parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, output.detach())
        return output + sum(parts) * 0


@on_ranks
def test_a_forward_that_talks_to_other_ranks_is_not_repeated(rank, folder):
    model = DistributedDataParallel(Gathering())
    # Finite numbers whose sum overflows, on one rank only: a repetition there would wait.
    model.module.last.register_forward_hook(
        lambda module, args, output: output * 0 + (3e38 if rank == 1 else 0)
    )
    with hl.check(model) as line, torch.no_grad():
        for _ in range(2):
            model(torch.ones(8, 4))
    assert line.findings == []


@on_ranks
def test_a_shard_that_is_spoilt_after_the_backward(rank, folder):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(torch.ones(3, 4)).sum().backward()
        if rank == 0:
            for one in model.parameters():
                one.grad.to_local().div_(0)
        optimizer.step()
    finding = caught.value.finding
    assert (finding.kind, finding.path, finding.rank) == ("gradient", "1.bias", None)
    assert "rank 0 holds it; the rank that made it is not known" in finding.notes


@on_ranks
def test_a_backward_of_one_rank_in_sharded_weights(rank, folder):
    model = sharded(lambda x: x.detach() if rank == 1 else 0 * x.detach())
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        train(model, torch.ones(2, 4))
    assert (caught.value.finding.rank, caught.value.finding.kind) == (None, "gradient")
    assert "on rank" not in str(caught.value)


@on_ranks
def test_a_loss_on_values_inside_the_model_of_one_rank(rank, folder):
    model, inner = DistributedDataParallel(Root()), []
    model.module.first.register_forward_hook(lambda module, args, output: inner.append(output))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        loss = model(torch.ones(2, 4)).sum()
        (loss + (inner[0] * 0).sqrt().sum() if rank == 1 else loss).backward()
        optimizer.step()
    assert (caught.value.finding.rank, caught.value.finding.kind) == (None, "gradient")
    assert "on rank" not in str(caught.value)


@on_ranks
def test_a_loss_of_one_rank_is_named_on_both(rank, folder):
    model = DistributedDataParallel(Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        output = model(torch.ones(2, 4))
        (output * 0 if rank == 1 else output).abs().log().sum().backward()
        optimizer.step()
    finding = caught.value.finding
    assert (finding.rank, finding.kind, finding.function) == (1, "loss", "log")


@on_ranks
def test_a_nan_loss_with_finite_gradients_warns_on_its_rank(rank, folder):
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.full((2,), -100 if rank == 1 else 0)
    with warnings.catch_warnings(record=True) as said, hl.check(model) as line:
        warnings.simplefilter("always")
        nn.functional.cross_entropy(model(torch.ones(2, 4)), target).backward()
        optimizer.step()
    assert [one.rank for one in line.findings] == [1] * rank
    assert ["the loss must be finite" in str(one.message) for one in said] == [True] * rank


@on_ranks
def test_a_nan_loss_with_finite_gradients_of_sharded_weights(rank, folder):
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.full((2,), -100 if rank == 1 else 0)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        nn.functional.cross_entropy(model(torch.ones(2, 4)), target).backward()
        optimizer.step()
    assert (caught.value.finding.rank, caught.value.finding.path) == (1, "loss")


@pytest.mark.parametrize("is_reduced_later", [False, True])
def test_gradients_that_are_not_reduced_yet_are_judged(ranks, tmp_path, is_reduced_later):
    ranks.run(__file__, "check_unreduced", str(tmp_path), is_reduced_later)


def check_unreduced(rank, folder, is_reduced_later):
    model = sharded(lambda x: x.detach() if rank == 1 else 0 * x.detach())
    model.set_requires_gradient_sync(False)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        if is_reduced_later:
            model.set_requires_gradient_sync(True)
            model.limit = lambda x: 0 * x.detach()
            train(model, torch.ones(2, 4))
    finding = caught.value.finding
    assert (finding.step, finding.rank, finding.kind) == (0, 1, "gradient")
    assert ("set_requires_gradient_sync(False)" in finding.notes[-1]) is not is_reduced_later


@on_ranks
def test_ranks_with_shards_of_other_models_wait_for_none(rank, folder):
    # Each rank is a stage of a pipeline: its weights are sharded over itself alone.
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    model = fully_shard(Root(), mesh=mesh)
    with hl.check(model) as line:
        for _ in range(1 + rank):
            model(torch.ones(2, 4))
    assert line.findings == []


@on_ranks
def test_a_check_of_shards_on_one_rank_is_an_error(rank, folder):
    model = sharded()
    with pytest.raises(hl.RanksError, match=r"rank 0: hl\.check of sharded weights; rank 1: hl\."):
        hl.check(model) if rank == 0 else hl.clip(model, norm=1.0)
    train(model, torch.ones(2, 4))


@on_ranks
def test_gradients_that_are_reduced_by_hand_are_judged(rank, folder):
    model = Root()
    model.limit = lambda x: (1e3 if rank == 1 else 0) + 0 * x.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(torch.ones(2, 4)).sum().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        raise AssertionError("the optimizer has stepped with a NaN")
    finding = caught.value.finding
    assert (finding.rank, finding.kind, finding.step) == (1, "forward", 0)
