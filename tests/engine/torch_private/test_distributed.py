"""Every private name of torch.distributed that hookline touches: when one moves, a test says so."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hookline.engine.torch_private import distributed as internals


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_is_known_and_has_a_part_and_a_whole(mesh):
    """If DTensor moves, look-ups give DTensors, and what is computed from them may hang."""
    plain = torch.arange(4.0)
    tensor = distribute_tensor(plain, mesh, [Shard(0)])
    assert internals.is_dtensor(tensor)
    assert not internals.is_dtensor(plain)
    assert type(internals.local_part(tensor)) is torch.Tensor
    assert torch.equal(internals.local_part(tensor), plain)
    assert internals.local_part(plain) is plain
    assert torch.equal(internals.gather_full(tensor), plain)


def test_a_tensor_that_is_on_its_way_is_waited_for(mesh):
    """If it is renamed, recordings under tensor parallelism cannot be saved."""
    from torch.distributed import _functional_collectives as collectives

    coming = collectives.all_reduce(torch.ones(2), "sum", mesh)
    assert type(coming) is not torch.Tensor
    assert type(internals.local_part(coming)) is torch.Tensor


def test_the_parameters_that_are_sharded_are_known_in_both_forms(mesh):
    """If these move, gradients under FSDP2 are never seen, and features leave models unsharded."""
    model = nn.Linear(2, 2)
    assert internals.fsdp2_parameter_pairs(model) == []
    fully_shard(model, mesh=mesh)
    shards = [model.weight, model.bias]
    with torch.no_grad():
        model(torch.ones(1, 2))
    found = internals.fsdp2_parameter_pairs(model)
    assert [shard is mine for (shard, _), mine in zip(found, shards, strict=True)] == [True, True]
    assert found[0][1] is model.weight
    internals.reshard(model)
    assert model.weight is shards[0]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_gradients_that_fsdp2_keeps_back_are_known(mesh, dtype):
    """If these move, hl.check sees no NaN under set_requires_gradient_sync(False)."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model = fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=policy)
    weights = list(model.parameters())
    model.set_requires_gradient_sync(False)
    assert internals.unreduced_gradients(model) == []
    for n_backwards in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        pairs = internals.unreduced_gradients(model)
        assert all(pair[0] is weight for pair, weight in zip(pairs, weights, strict=True))
        assert pairs[0][1].tolist() == [[n_backwards] * 2] * 2
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    assert internals.unreduced_gradients(model) == []


def test_whole_weights_stay_whole_until_the_block_ends(mesh):
    """If the mesh of a group moves, anatomy reads freed memory and crashes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    shards = list(model.parameters())
    groups = [group for module in (model[0], model) for group in internals._fsdp2_groups(module)]
    with torch.no_grad():
        for _ in range(2):  # before the first forward, and after
            meshes = [group.post_forward_mesh_info for group in groups[:1]]
            with internals.keep_unsharded(model):
                model(torch.ones(1, 2))
                internals.reshard(model)  # as after an interrupted forward
                assert all(map(torch.equal, model.parameters(), whole))
                assert not any(map(internals.is_dtensor, model.parameters()))
            assert all(map(operator.is_, model.parameters(), shards))
            assert [group.post_forward_mesh_info for group in groups[:1]] == meshes
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in shards)


class Seeing(nn.Linear):
    """Keeps what it is called with."""

    def forward(self, x):
        self.given = x
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*FSDP.*")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_and_those_in_them_are_known(mesh, use_orig_params):
    """If the marks move, gradients that never come are awaited, and parts clipped by their norm."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    model[0] = FullyShardedDataParallel(model[0], **options)
    flat = [internals.is_flat_parameter(parameter) for parameter in model.parameters()]
    inside = [internals.is_in_flat_parameter(parameter) for parameter in model.parameters()]
    assert flat == ([False] * 4 if use_orig_params else [True, False, False])
    assert inside == ([True, True, False, False] if use_orig_params else [False] * 3)
    assert internals.ranks_by_fsdp1_parameter(model) == {}  # on one rank, torch shards nothing
    handle = model[0]._handle
    handle._sharding_strategy = handle._sharding_strategy.FULL_SHARD
    parts = {id(handle.flat_param)} | set(map(id, model[0].parameters()))
    assert internals.ranks_by_fsdp1_parameter(model) == {part: [0] for part in parts}
    ((group, device),) = internals.fsdp1_groups(model)
    assert (dist.get_process_group_ranks(group), device) == ([0], torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:.*FSDP.*")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_split_weight_is_known_within_flat_ones(mesh, use_orig_params):
    """If FSDP1's notes move, heads are counted wrongly where it shards a model that is split."""
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    options = {"device_mesh": both["dp"], "use_orig_params": use_orig_params}
    options["device_id"] = torch.device("cpu")
    model = nn.Sequential(nn.Linear(2, 2))
    assert not internals.is_tensor_parallel(model)
    assert not internals.is_tensor_parallel(FullyShardedDataParallel(nn.Linear(2, 2), **options))
    model = parallelize_module(model, both["tp"], {"0": ColwiseParallel()})
    assert internals.is_tensor_parallel(model)
    assert internals.is_tensor_parallel(FullyShardedDataParallel(model, **options))


@pytest.mark.parametrize("library", ["FSDP2", "tensor parallel"])
def test_what_a_module_is_called_with_has_its_source(mesh, library):
    """If these move, grad_input is the share of one module alone."""
    module = Seeing(2, 2)
    if library == "FSDP2":
        fully_shard(module, mesh=mesh)
    else:
        parallelize_module(module, mesh, ColwiseParallel())
    x = torch.ones(1, 2, requires_grad=True) * 2
    module(x)
    source = internals.find_replaced_tensor(module.given)
    assert source.tensor is x
    assert (source.layout is None) == (library == "FSDP2")
    assert internals.find_replaced_tensor(x) is None
    view = x.view(2, 1).view(1, 2)
    module(view)
    source = internals.find_replaced_tensor(module.given)
    assert source.tensor is None
    assert (source.node, source.number) == (view.grad_fn, 0)
    version = source.alias._version
    x.add_(1)
    assert source.alias._version > version
    module(torch.ones(1, 2, requires_grad=True))
    assert internals.find_replaced_tensor(module.given) is None


def test_a_sum_still_to_be_made_is_cloned_as_one(mesh):
    total = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    copied = internals.clone_locally(total)
    assert copied.placements == (Partial(),)
    assert copied.to_local().data_ptr() != total.to_local().data_ptr()
    assert torch.equal(copied.to_local(), total.to_local())


def test_the_store_has_what_a_meeting_needs(mesh):
    """If it moves, run.full, run.reduced and run.save cannot meet."""
    store = internals.default_store()
    assert internals.has_process_group()
    assert store.add("number", 1) == 1
    assert store.compare_set("verdict", "", "first") == b"first"
    assert store.compare_set("verdict", "", "second") == b"first"
    assert store.check(["verdict"])
    assert not store.check(["nothing"])
