"""Private names of autograd: nodes, versions, views, hooks on gradients and saved tensors."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.engine.torch_private.hooks import HookDict
from hookline.engine.torch_private.modes import is_wrapped
from hookline.engine.torch_private.modules import PYTHON_NODE

# Numbers for the keys of tensor hooks: (owner, number), where torch has a number.
_keys = itertools.count()


# Returns the number of the run of autograd that calls a hook; -1 outside autograd. Each run has
# another number. Without torch's counter all runs have the same number, so several runs over one
# forward are ambiguous. This is torch's own function, because it is called in each pass and for
# each gradient.
backward_number: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)


class _OuterBackward(threading.local):
    # The number of the backward in which a checkpoint runs another backward.
    number: int | None = None
    at_end: tuple[Callable[[], None], ...] = ()


OUTER = _OuterBackward()


def outer_backward_number() -> int:
    """Return the `backward_number` of the user's run; a reentrant checkpoint has runs inside."""
    return backward_number() if OUTER.number is None else OUTER.number


class _LastHookKey(tuple[int, int]):
    """The key of a hook that stays behind its owner's later hooks."""

    __slots__ = ()


def hook_gradient(
    tensor: Tensor,
    hook: Callable[[Tensor], Any],
    owner: int = 0,
    trace_order: int | None = None,
    *,
    is_last: bool = False,
) -> Any:
    """Register a hook on a tensor of the graph; the hook is freed with the graph.

    This takes a third of the time of `tensor.register_hook`, because it makes no handle for each
    value of each pass. Hooks of one owner are called in the order of registration. Hooks of a later
    owner are called before hooks of an earlier owner. A container often returns its last child's
    output, and the gradient reaches the container first. A hook with `is_last` stays behind the
    owner's later hooks without `is_last`. Hooks with a `trace_order` come first, in this order.

    Returns:
        The key with which `unhook_gradient` removes the hook.
    """
    if tensor.grad_fn is None or (type(tensor) is not Tensor and not is_traced_tensor(tensor)):
        return tensor.register_hook(hook).id  # type: ignore[no-untyped-call]
    key: Any = (owner, next(_keys)) if trace_order is None else (owner, next(_keys), trace_order)
    key = _LastHookKey(key) if is_last else key
    hooks: HookDict | None = tensor._backward_hooks  # type: ignore[assignment]
    if hooks is None:
        # An in-place operation starts a new dictionary: torch resets it with the tensor's grad_fn.
        tensor._backward_hooks = hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)
    elif hooks or trace_order is not None:
        _add_in_order(hooks, key, hook, trace_order)
        return key
    hooks[key] = hook
    return key


def _add_in_order(hooks: HookDict, key: Any, hook: Callable[..., Any], order: int | None) -> None:
    """Add a hook behind its owner's earlier hooks, and before the hooks of earlier owners."""
    if order is not None:
        _insert_by_trace_order(hooks, key, hook)
        return
    # torch uses the plain dictionary's order, so later hooks must be put in again.
    is_last = type(key) is _LastHookKey
    later_hooks = [
        (k, h) for k, h in hooks.items()
        if (type(k) is tuple and k[0] != key[0])
        or (type(k) is _LastHookKey and (k[0] != key[0] or not is_last))
    ]  # fmt: skip
    for later_key, _ in later_hooks:
        del hooks[later_key]
    hooks[key] = hook
    hooks.update(later_hooks)


def _insert_by_trace_order(hooks: HookDict, key: Any, hook: Callable[..., Any]) -> None:
    """Insert a numbered hook by its number; numbered hooks come before the others."""
    numbered = [(k, h) for k, h in hooks.items() if type(k) is tuple and len(k) == 3]
    numbered = sorted([*numbered, (key, hook)], key=lambda item: item[0][2])
    owners = list(dict.fromkeys(k[0] for k, _ in numbered))
    before = [(k, h) for k, h in hooks.items() if not (type(k) is tuple and len(k) == 3)]
    hooks.clear()
    for owner in reversed(owners):  # later owners are called first
        hooks.update((k, h) for k, h in numbered if k[0] == owner)
    hooks.update(before)


def unhook_gradient(tensor: Tensor, key: Any) -> None:
    """Remove a hook that `hook_gradient` registered on a tensor."""
    hooks: HookDict = tensor._backward_hooks or OrderedDict()  # type: ignore[assignment]
    hooks.pop(key, None)


def grad_fn_saves_output(tensor: Tensor) -> bool:
    """Tell whether the function that computed a tensor saved it for its own backward, as tanh does.

    In a second derivative, such a tensor gets a further gradient, which does not come from its
    uses.
    """
    function = tensor.grad_fn
    return function is not None and _may_save_result(type(function), tensor.output_nr)


@functools.cache
def _may_save_result(node_type: type, output_nr: int) -> bool:
    # A function written in Python does not tell, so it is assumed to save its result.
    is_of_python = issubclass(node_type, PYTHON_NODE)
    names = "_saved_result", "_saved_output", "_saved_out", f"_saved_result{output_nr}"
    return is_of_python or any(hasattr(node_type, name) for name in names)


def version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares a tensor's `_version`, and if possible not its memory."""
    counter = tensor.detach()
    # Inside a transform of torch.func, a tensor's memory cannot be replaced.
    if not is_wrapped(tensor) and not is_traced_tensor(tensor):
        counter.data = tensor.new_empty(0)
    return counter


def base_in_graph(tensor: Tensor) -> Tensor | None:
    """Return the tensor of the graph whose memory a view shares; None if the tensor is not a view.

    Also None where an in-place operation cannot take the view's place in the graph. These are views
    of a leaf, which refuse the operation, and views whose numbers are of another kind than the
    base's.
    """
    base = tensor._base if tensor._is_view() else None
    if base is None or base.grad_fn is None:
        return None
    if type(base) is not Tensor and not is_traced_tensor(base):
        return None
    is_one_kind = base.dtype is tensor.dtype and base.is_conj() == tensor.is_conj()
    return base if is_one_kind and base.is_neg() == tensor.is_neg() else None


def holds_base_alone(view: Tensor) -> bool:
    """Tell whether this view alone holds its base, made inside an operation such as `linear`.

    Without torch's use count, the answer is False.
    """
    is_counted = hasattr(view, "_use_count") and view._base is not None
    if is_counted and is_traced_tensor(view):
        return _refcounts(view) == _refcounts(view.new_ones(1).requires_grad_().neg().view(1))
    return is_counted and _refcounts(view) == _sole_view_refcounts()


def _refcounts(view: Tensor) -> tuple[int, int]:
    base = view._base
    in_python = sys.getrefcount(base)
    return in_python, base._use_count()  # type: ignore[union-attr]


@functools.cache
def _sole_view_refcounts() -> tuple[int, int]:
    # torch's versions count differently, so compare with the counts of a view of known holders.
    with torch.enable_grad():
        return _refcounts(torch.ones(1, requires_grad=True).neg().view(1))


def is_traced_tensor(tensor: Tensor) -> bool:
    """Tell whether a tensor belongs to a graph that torch.compile traces."""
    kind = type(tensor)
    return kind is not Tensor and kind.__name__ in ("FunctionalTensor", "FakeTensor")


def is_compiled_node(node: Any) -> bool:
    """Tell whether a node of the graph is a run of compiled code."""
    return isinstance(node, PYTHON_NODE) and type(node).__name__.startswith("CompiledFunction")


def is_written_by_compiled(tensor: Tensor) -> bool:
    """Tell whether compiled code was the last to write to a tensor or its base."""
    base = tensor._base if tensor._is_view() else tensor
    node = None if base is None else base.grad_fn
    if node is None or type(node).__name__ not in ("CopyBackwards", "CopySlices"):
        return False
    return any(
        type(before).__name__.startswith("CompiledFunction") for before, _ in node.next_functions
    )


def prehook_node(
    node: Any,
    hook: Callable[[tuple[Tensor | None, ...]], Any],
    owner: int = 0,
    trace_order: int | None = None,
) -> None:
    """Register a hook on the gradients that arrive at a node of the graph.

    The hook lives as long as the graph. A result other than None replaces the gradients. Owner and
    trace order sort the hooks as in `hook_gradient`.
    """
    handle = node.register_prehook(hook)
    hooks: HookDict | None = handle.hooks_dict_ref()
    if hooks is not None and hooks.pop(handle.id, None) is not None:
        key: Any = (owner, next(_keys), *(() if trace_order is None else (trace_order,)))
        _add_in_order(hooks, key, hook, trace_order)


def hook_node(node: Any, hook: Callable[[tuple[Tensor | None, ...], Any], None]) -> Any:
    """Register a hook on the gradients that flow on from a node, for as long as the graph lives.

    Returns:
        A handle, whose `remove()` removes the hook before.
    """
    return node.register_hook(hook)


def node_of_write(base: Tensor, n_writes: int) -> Any:
    """Return the node of the graph for a write to a view of this tensor, `n_writes` versions ago.

    None if the tensor was written to in another way.
    """
    node, write = base.grad_fn, None
    for _ in range(n_writes):
        if node is None or not node.name().endswith("CopySlices"):
            break
        write, node = node, node.next_functions[0][0]
    return write


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the user's run of autograd has ended; only from within a hook."""
    if OUTER.number is not None:
        OUTER.at_end = (*OUTER.at_end, function)
        return
    torch.autograd.Variable._execution_engine.queue_callback(function)


def push_saved_tensors_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Pack the tensors that autograd saves for backward, from now on and in this thread."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    """Undo the last `push_saved_tensors_hooks` of this thread."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
