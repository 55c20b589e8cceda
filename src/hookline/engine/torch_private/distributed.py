"""Every private name of torch.distributed that hookline uses.

Nothing here loads DTensor or FSDP. While they are not loaded, no object of theirs exists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The holder of torch's process group, read in every pass; None if torch was built without
# distributed.
_WORLD: Any = dist.distributed_c10d._world if dist.is_available() else None
# The nodes of the tensors with which FSDP2 and tensor parallelism replace a module's inputs.
_OF_FSDP = "RegisterPostBackwardFunctionBackward"
_OF_LOCAL = "_FromTorchTensorBackward"


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    kind = getattr(loaded, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain tensor, without a collective.

    If a collective is still computing the tensor, wait for it.
    """
    if type(tensor) is Tensor:
        return tensor
    if is_dtensor(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        arrived: Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
        return arrived
    return tensor


def clone_locally(tensor: Tensor) -> Tensor:
    """Copy a tensor without communication between ranks.

    `clone()` of a DTensor with partial placements would compute the sum over ranks: a collective.
    """
    if not is_partial_dtensor(tensor):
        return tensor.clone()
    return ShardLayout.of(tensor).to_dtensor(tensor.to_local().clone())  # type: ignore[attr-defined]


def is_partial_dtensor(tensor: Any) -> bool:
    """Tell whether a tensor is a DTensor that torch has not yet summed over ranks."""
    return is_dtensor(tensor) and any(part.is_partial() for part in tensor.placements)


class ShardLayout(NamedTuple):
    """The placement of a DTensor's parts."""

    kind: Any
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> ShardLayout:
        """Return the layout of a DTensor."""
        return cls(
            type(tensor), tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        )

    def to_dtensor(self, local: Tensor) -> Tensor:
        """Make a DTensor from this rank's part."""
        whole: Tensor = self.kind.from_local(
            local, self.mesh, self.placements,
            run_check=False, shape=self.shape, stride=self.stride,
        )  # fmt: skip
        return whole

    def call_hook(self, hook: Callable[[Tensor], Any], local_grad: Tensor) -> Any:
        """Call a hook with a DTensor of this rank's part. Return this rank's part of its result."""
        new = hook(self.to_dtensor(local_grad))
        if is_dtensor(new):
            return local_part(new.redistribute(placements=self.placements))
        return new


def layout_json(tensor: Any) -> dict[str, Any]:
    """Describe the placement of a DTensor's part on this rank, as JSON.

    Returns:
        `shape` of the whole, `mesh` (its sizes), `names` of its dimensions, its `first` rank, the
        coordinates `at` which this rank lies, and the `placements`. A rank outside of the mesh has
        no coordinates.
    """
    mesh = tensor.device_mesh
    return {
        "shape": list(tensor.shape),
        "mesh": list(mesh.shape),
        "names": list(mesh.mesh_dim_names or ()),
        "first": int(mesh.mesh.flatten()[0]),
        "at": list(mesh.get_coordinate() or ()),
        "placements": [_placement_json(placement) for placement in tensor.placements],
    }


def _placement_json(placement: Any) -> list[Any]:
    """Describe a placement along one dimension of a mesh, as JSON."""
    match type(placement).__name__:
        case "Shard":
            return ["shard", placement.dim]
        case "_StridedShard":
            return ["strided", placement.dim, placement.split_factor]
        case "Replicate":
            return ["replicate"]
        case "Partial":
            return ["partial", str(placement.reduce_op)]
    return ["unknown", str(placement)]


class ReplacedTensor(NamedTuple):
    """The tensor that a parallel library replaced before it called a module."""

    node: Any  # the node of the graph that computed the tensor
    number: int  # the index of the tensor among the node's results
    tensor: Tensor | None  # the tensor; None where it is a view, of which only the base is known
    alias: Tensor  # a tensor that shares its memory
    # The placement of the replacement, if only the replacement is a DTensor.
    layout: ShardLayout | None


def find_replaced_tensor(tensor: Tensor) -> ReplacedTensor | None:
    """Find the tensor that FSDP2 or tensor parallelism has replaced; None if it replaced none.

    FSDP2 calls a module with the results of its own function, and tensor parallelism with DTensors.
    The gradient of these is the share of one module, not of all uses. A leaf has no source. A leaf
    outlives the pass, so the share is the gradient that is due.
    """
    node, number, layout = tensor.grad_fn, tensor.output_nr, None
    while (name := type(node).__name__) in (_OF_FSDP, _OF_LOCAL):
        if name == _OF_LOCAL:
            layout = ShardLayout.of(tensor)
            gradient_placements = getattr(node, "grad_placements", None)  # absent in torch 2.11
            if gradient_placements is not None or is_partial_dtensor(tensor):
                return None
        node, number = node.next_functions[number]  # type: ignore[union-attr]
    if node is tensor.grad_fn or node is None or hasattr(node, "variable"):
        return None
    alias = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    base = alias._base
    is_whole = base is not None and base.grad_fn is node and base.output_nr == number
    return ReplacedTensor(node, number, base if is_whole else None, alias, layout)


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, on all ranks of its mesh: a collective; others as they are."""
    if not is_dtensor(tensor):
        return tensor
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    # A tensor kept on another device (device="cpu") must move to a device on which its mesh
    # communicates.
    whole: Tensor = tensor.to(mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return local_part(whole)


def fsdp2_parameter_pairs(module: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Return the parameters that FSDP2 shards at this module, sharded and (or None) unsharded.

    Between forward and backward, and after a forward without backward, a module holds the unsharded
    parameters.
    """
    return [
        _sharded_and_unsharded(parameter)
        for group in _fsdp2_groups(module)
        for parameter in group.fsdp_params
    ]


def unreduced_gradients(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return shards of FSDP2 at this module, with whole gradients that it has not reduced yet."""
    parts = [parameter for group in _fsdp2_groups(module) for parameter in group.fsdp_params]
    grads = [
        (part.sharded_param, getattr(_sharded_and_unsharded(part)[1], "grad", None))
        for part in parts
    ]
    grads += [(part.sharded_param, part.unsharded_accumulated_grad) for part in parts]
    return [(shard, local_part(grad)) for shard, grad in grads if grad is not None]


def _fsdp2_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 shards at this module: one before torch 2.12."""
    if not hasattr(type(module), "_get_fsdp_state"):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reshard(model: nn.Module) -> None:
    """Make FSDP2 hold shards again, in a model whose forward was interrupted."""
    if not has_process_group():
        return
    for module in model.modules():
        for group in _fsdp2_groups(module):
            group._training_state = type(group._training_state).IDLE  # the state after a forward
            if id(group) not in _held:
                group.reshard()


_held: set[int] = set()  # the ids of the groups whose weights `keep_unsharded` holds


@contextmanager
def keep_unsharded(model: nn.Module) -> Iterator[None]:
    """Gather the weights that FSDP2 shards. Forwards then leave them whole."""
    modules = [module for module in model.modules() if _fsdp2_groups(module)]
    for module in modules:
        module._get_fsdp_state()._lazy_init()  # type: ignore[operator]
    groups = [group for module in modules for group in _fsdp2_groups(module)]
    before = [(group, group.post_forward_mesh_info, group.is_sharded) for group in groups]
    held = {id(group) for group in groups} - _held
    _held.update(held)
    try:
        for group in groups:
            group.post_forward_mesh_info = None  # a forward then leaves the weights whole
        for module in modules:
            module.unshard()  # type: ignore[operator]
        yield
    finally:
        _held.difference_update(held)
        for group, mesh, was_sharded in before:
            group.post_forward_mesh_info = mesh
            group._training_state = type(group._training_state).IDLE
            if was_sharded:
                group.reshard()


def wraps_fsdp1(module: nn.Module) -> bool:
    """Tell whether a module is the wrapper with which FSDP1 shards what is in it."""
    return "FullyShardedDataParallel" in {kind.__name__ for kind in type(module).__mro__}


def is_flat_parameter(parameter: Tensor) -> bool:
    """Tell whether a parameter holds all parameters of an FSDP1 wrapper, or this rank's part."""
    return hasattr(parameter, "_is_flat_param")


def is_in_flat_parameter(parameter: Tensor) -> bool:
    """Tell whether a parameter is in a flat one, with `use_orig_params=True` of FSDP1.

    The model then computes with views of the flat parameter, and never with this one.
    """
    return hasattr(parameter, "_fsdp_flattened") and not is_flat_parameter(parameter)


def ranks_by_fsdp1_parameter(model: nn.Module) -> dict[int, list[int]]:
    """Return the parameters of which FSDP1 gives each rank a part: flat ones or others.

    A wrapper gives each rank all of them with `NO_SHARD`, and leaves ignored parameters alone.

    Returns:
        By the id of each, the ranks that share it.
    """
    ranks: dict[int, list[int]] = {}
    for handle in _fsdp1_handles(model):
        if handle.uses_sharded_strategy:
            flat, of_group = handle.flat_param, dist.get_process_group_ranks(handle.process_group)
            parts = (flat, *(flat._params or ()), *(flat._shared_params or ()))
            ranks.update((id(part), of_group) for part in parts)
    return ranks


def class_before_fsdp2(module: nn.Module) -> type:
    """Return the class of a module as it was before FSDP2 derived one from it."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the module within a DistributedDataParallel; another module itself.

    The wrapper's forward may broadcast buffers, in eval mode as well: a collective.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def allows_uneven_inputs(model: nn.Module) -> bool:
    """Tell whether a model runs in its `join()`, in which ranks may make no more steps."""
    return isinstance(model, nn.parallel.DistributedDataParallel) and model._join_config.enable


def sharding_kind(model: nn.Module) -> str:
    """Tell how the weights of a model are sharded.

    Returns:
        "" for weights that each rank has; "FSDP1"; "FSDP2"; "split" for tensor parallelism, whether
        or not FSDP2 shards the parts.
    """
    by_fsdp: set[int] = set()
    is_split = has_fsdp = False
    for module in model.modules():
        if wraps_fsdp1(module):
            return "FSDP1"
        has_fsdp |= bool(_fsdp2_groups(module))
        for group in _fsdp2_groups(module):
            is_split |= any(parameter.is_dtensor for parameter in group.fsdp_params)
            by_fsdp.update(
                id(part)
                for parameter in group.fsdp_params
                for part in _sharded_and_unsharded(parameter)
            )
    is_split |= any(
        is_dtensor(parameter) and id(parameter) not in by_fsdp for parameter in model.parameters()
    )
    return "split" if is_split else "FSDP2" if has_fsdp else ""


def is_tensor_parallel(model: nn.Module) -> bool:
    """Tell whether tensor parallelism splits weights, whether or not FSDP shards the parts."""
    return sharding_kind(model) == "split" or bool(fsdp1_dtensor_layouts(model))


def fsdp1_dtensor_layouts(model: nn.Module) -> list[Any]:
    """Return the layouts of the DTensors that tensor parallelism made before FSDP1 wrapped them.

    FSDP1 flattens the weights of each wrapper, and notes how to make DTensors of them again.
    """
    notes = [note for h in _fsdp1_handles(model) for note in h.flat_param._param_extensions]
    return [note for note in notes if note is not None]


def fsdp1_groups(model: nn.Module) -> list[tuple[Any, torch.device]]:
    """Return the process groups of FSDP1's wrappers, each with the device of the weights."""
    return [(handle.process_group, handle.device) for handle in _fsdp1_handles(model)]


def _fsdp1_handles(model: nn.Module) -> list[Any]:
    handles: list[Any] = [module._handle for module in model.modules() if wraps_fsdp1(module)]
    return [handle for handle in handles if handle]


@contextmanager
def list_fsdp2_gathers(model: nn.Module) -> Iterator[list[Any]]:
    """Note the modules whose weights FSDP2 gathers, in the order in which they are called.

    Yields:
        The modules that were called. The caller may clear the list.
    """
    called: list[Any] = []
    handles = [
        module.register_forward_pre_hook(lambda module, _: called.append(module))
        for module in model.modules()
        if _fsdp2_groups(module)
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _sharded_and_unsharded(parameter: Any) -> tuple[Any, Any]:
    return parameter.sharded_param, getattr(parameter, "_unsharded_param", None)


def default_store() -> Any:
    """Return the store over which the ranks found each other; all ranks share its keys."""
    return dist.distributed_c10d._get_default_store()


def is_distributed_job(model: nn.Module | None) -> bool:
    """Tell whether this process is one of several ranks, or its model's weights are sharded."""
    if not has_process_group():
        return False
    if dist.get_world_size() > 1:
        return True
    return model is not None and any(_is_sharded(module) for module in model.modules())


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(type(module), "_get_fsdp_state") or wraps_fsdp1(module)


def has_process_group() -> bool:
    """Tell whether this process has a process group: `init_process_group` was called."""
    return _WORLD is not None and _WORLD.default_pg is not None
