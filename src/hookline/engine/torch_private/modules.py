"""Private names of `nn.Module`: children, parameters, buffers, wrappers."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from hookline.util.walk_stack import walk_stack

# Wrappers that add a segment to every path below them, by the name of their module and class.
# Importing `torch._dynamo` or `torch.distributed` to compare classes would cost a second.
_WRAPPERS: dict[tuple[str, str], str] = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.optim.swa_utils", "AveragedModel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): (
        "_fsdp_wrapped_module"
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper",
    ): "_checkpoint_wrapped_module",
}
_WRAPPER_NAMES = frozenset(name for _, name in _WRAPPERS)


# The class of nodes whose backward is written in Python, as that of compiled code is.
PYTHON_NODE = torch.autograd.function.BackwardCFunction


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the direct children by name; `named_children` would drop a second name."""
    table: dict[str, nn.Module | None] | None = module.__dict__.get("_modules")
    return module._modules if table is None else table


def is_uncompiled_leaf(module: nn.Module) -> bool:
    """Tell whether a module has no children and does not hold its compiled call."""
    attributes = module.__dict__
    return not attributes.get("_modules", True) and "_compiled_call_impl" not in attributes


def unwrap_to_children(
    module: nn.Module, plain_types: set[type]
) -> tuple[nn.Module, list[nn.Module], dict[str, nn.Module | None]]:
    """Return the module inside wrappers, those that hold their compiled call, and the children.

    `plain_types` holds the types that are not wrappers. It grows, since checking each type once
    halves the time of a walk over a model.
    """
    if type(module) in plain_types:
        return module, [module] if holds_compiled_call(module) else [], children(module)
    layers = wrapper_chain(module)
    if len(layers) == 1:
        plain_types.add(type(module))
    return layers[-1], list(filter(holds_compiled_call, layers)), children(layers[-1])


def holds_compiled_call(module: nn.Module) -> bool:
    """Tell whether `module.compile()` was called: the module then holds its compiled call."""
    return module.__dict__.get("_compiled_call_impl") is not None


def tensor_tables(
    model: nn.Module,
) -> list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]]:
    """Return the modules of a model, each once, with their own parameters and buffers."""
    modules = {id(model): model}  # by id: a module may define == and lose its hash
    waiting = [model]
    while waiting:
        for child in children(waiting.pop()).values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return [(module, own_parameters(module), own_buffers(module)) for module in modules.values()]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters by name; `named_parameters` would drop a tied name."""
    table: dict[str, nn.Parameter | None] | None = module.__dict__.get("_parameters")
    return module._parameters if table is None else table  # a traced module holds another table


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers by name; assigning to the dict replaces a buffer."""
    table: dict[str, torch.Tensor | None] | None = module.__dict__.get("_buffers")
    return module._buffers if table is None else table


def table_holder(module: nn.Module, name: str) -> dict[str, Any]:
    """Return a dictionary that holds a module's table under its name, also after a new table came.

    Args:
        name: "_modules" or "_parameters".
    """
    attributes = module.__dict__
    return attributes if name in attributes else {name: getattr(module, name)}


def in_functional_call() -> bool:
    """Tell whether `torch.func.functional_call` has put other parameters into a model for now."""
    return any(frame.f_code is _FUNCTIONAL for frame in walk_stack(sys._getframe(1)))


_FUNCTIONAL = stateless._functional_call.__code__

# Tells the value of a parameter from another value that `torch.utils.swap_tensors` has put into the
# same object. The hooks on its gradient go with the value.
value_address: attrgetter[Any] = attrgetter("_cdata")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside torch's wrappers.

    The wrappers are those of compiled, parallel, averaged, checkpointed and sharded modules.
    """
    return wrapper_chain(module)[-1]


def wrapper_chain(module: nn.Module) -> list[nn.Module]:
    """Return torch's wrappers around a module, the outermost first, and then the module itself."""
    layers = [module]
    while (inner := _wrapped_in(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _wrapped_in(module: nn.Module) -> nn.Module | None:
    """Return the module directly inside one of torch's wrappers; None for any other module."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPER_NAMES:
            attribute = _WRAPPERS.get((kind.__module__, kind.__name__))
            if attribute is not None:
                return children(module).get(attribute)
    return None


def is_scripted(module: nn.Module) -> bool:
    """Tell whether a module is a ScriptModule, whose hooks torch refuses or never calls."""
    return isinstance(module, torch.jit.ScriptModule)


def has_forward(module: nn.Module) -> bool:
    """Tell whether a module can be called: `ModuleList` and other containers cannot."""
    return not lacks_forward(type(module)) or "forward" in module.__dict__


def lacks_forward(kind: type) -> bool:
    """Tell whether a class has no forward. A scripted module's forward belongs to its instances."""
    return getattr(kind, "forward", None) is nn.Module.forward


def parts_of_sparse(tensor: Tensor) -> list[Tensor]:
    """Return the indices and the values of a sparse tensor; nothing for other layouts."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
