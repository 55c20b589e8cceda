"""Tell what torch's compilers have done, and what they were told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from hookline.util.optional_imports import module_if_imported


def has_compiled_backward() -> bool:
    """Tell whether compiled autograd has compiled a backward in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["compiled_autograd"]["captures"])


def filters_guards(optimized: Any) -> bool:
    """Tell whether `torch.compile(module)` was given a function that leaves out guards."""
    hooks = getattr(getattr(optimized.dynamo_ctx, "callback", None), "hooks", None)
    return getattr(hooks, "guard_filter_fn", None) is not None


def may_use_cudagraph_memory() -> bool:
    """Tell whether values may lie in memory of CUDA graphs, which a later run overwrites.

    Code compiled with `mode="reduce-overhead"` returns tensors in such memory. A write of a later
    run raises no version.
    """
    trees = module_if_imported("torch._inductor.cudagraph_trees")
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    if trees is None or not is_initialized():
        return False
    name = "tree_manager_containers"  # one for each device
    if not hasattr(trees.local, name) and not torch._C._is_key_in_tls(name):
        return True  # a thread of its own, which may run the graphs of another thread
    containers = list(trees.get_obj(trees.local, name).values())
    return any(container.tree_manager is not None for container in containers)
