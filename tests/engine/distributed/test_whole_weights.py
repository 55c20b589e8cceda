"""Whole weights of models that FSDP1, FSDP2 and tensor parallelism shard, on a mesh of one rank."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hookline.engine.distributed.whole_weights import gather_last_dim, whole_weights
from hookline.engine.torch_private.distributed import is_dtensor


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Tied(nn.Sequential):
    """Two layers of one weight, the first of which keeps a buffer."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self[1].weight = self[0].weight
        self[0].register_buffer("kept", torch.ones(2))


def split(model, mesh):
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model[1].weight = model[0].weight
    model[0].kept = distribute_tensor(model[0].kept, mesh, [Replicate()])
    return model


def hooks_of(model):
    return [
        list(table.items())
        for module in model.modules()
        for table in (module._forward_pre_hooks, module._forward_hooks)
    ]


def test_splitting_is_undone_in_the_block_alone(mesh):
    plain, model = Tied(), split(Tied(), mesh)
    tensors, hooks = [*model.parameters(), *model.buffers()], hooks_of(model)
    plain.load_state_dict({key: value.full_tensor() for key, value in model.state_dict().items()})
    with pytest.raises(KeyError), whole_weights(model):
        assert model[0].weight is model[1].weight
        assert not any(map(is_dtensor, [*model.parameters(), *model.buffers()]))
        assert torch.equal(model(torch.eye(2)), plain(torch.eye(2)))
        raise KeyError
    assert all(map(operator.is_, tensors, [*model.parameters(), *model.buffers()]))
    assert hooks_of(model) == hooks


def test_hooks_that_come_in_the_block_stay_behind_the_old_ones(mesh):
    model = split(Tied(), mesh)
    own = model[0].register_forward_hook(lambda *_: None)
    before = list(model[0]._forward_hooks)
    with whole_weights(model):
        assert list(model[0]._forward_hooks) == [own.id]
        late = model[0].register_forward_hook(lambda *_: None)
    assert list(model[0]._forward_hooks) == [*before, late.id]


def test_forwards_that_split_values_are_taken_off_in_the_block(mesh):
    def forward(x):
        raise AssertionError

    forward.__module__ = "transformers.distributed.tensor_parallel"  # which replaces forwards
    model, x = split(Tied(), mesh), torch.eye(2)
    own = model[1].forward
    model[0].forward, model[1].forward = forward, own
    with whole_weights(model) as dtensors:
        assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
        assert model[1].forward is own
        assert set(dtensors) >= {id(model[0].weight), id(model[0].bias), id(model[0].kept)}
        weight = dtensors[id(model[0].weight)]
    assert weight is model[0].weight
    assert (model[0].forward, model[1].forward) == (forward, own)


@pytest.mark.filterwarnings("ignore:.*FSDP.*")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrappers_of_fsdp1_call_what_they_wrap(mesh, use_orig_params):
    torch.manual_seed(0)
    options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.load_state_dict(plain.state_dict())
    model[0] = FullyShardedDataParallel(model[0], **options)
    model = FullyShardedDataParallel(model, **options)
    with torch.no_grad():
        for _ in range(2):  # before the first forward, and after
            with whole_weights(model):
                assert torch.equal(model(torch.eye(2)), plain(torch.eye(2)))
                with whole_weights(model):
                    shapes = [parameter.shape for parameter in model.parameters()]
            assert shapes == [parameter.shape for parameter in plain.parameters()]
            assert not any("forward" in module.__dict__ for module in model.modules())
            assert torch.equal(model(torch.eye(2)), plain(torch.eye(2)))


def test_fsdp2_and_splitting_together_are_undone(mesh):
    plain, both = Tied(), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = split(Tied(), both["tp"])
    fully_shard(model, mesh=both["dp"])
    tensors = list(model.parameters())
    plain.load_state_dict({key: value.full_tensor() for key, value in model.state_dict().items()})
    with torch.no_grad(), whole_weights(model):
        assert torch.equal(model(torch.eye(2)), plain(torch.eye(2)))
    assert all(map(operator.is_, tensors, model.parameters()))


def test_parts_of_a_value_are_joined_as_the_weight_is_split(mesh):
    part = torch.randn(3, 2)
    weight = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
    assert gather_last_dim(part, weight, 2) is part
    assert gather_last_dim(part, None, 4) is part
    assert torch.equal(gather_last_dim(part, weight, 4), part)  # all parts of one rank
    assert torch.equal(gather_last_dim(distribute_tensor(part, mesh, [Shard(1)]), weight, 4), part)
