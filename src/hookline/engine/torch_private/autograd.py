"""Autograd's nodes, versions, views, hooks on gradients and on saved tensors."""

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

from hookline.engine.torch_private.functorch import is_wrapped
from hookline.engine.torch_private.hooks import HookDict
from hookline.engine.torch_private.modules import PYTHON_NODE, _Last

# Keys for hooks that are never taken off one by one: (owner, number), where torch has a number.
_keys = itertools.count()


_current_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)


def backward_number() -> int:
    """Which run of autograd this is, from within a hook: different for each; -1 outside of one.

    Without torch's counter all runs look like one: several over one forward are then ambiguous.
    """
    return _current_task()


class _Outer(threading.local):
    number: int | None = None  # of the backward in which a checkpoint runs another
    at_end: tuple[Callable[[], None], ...] = ()


OUTER = _Outer()


def outer_backward() -> int:
    """`backward_number` of the run that the user began: a reentrant checkpoint has runs inside."""
    return _current_task() if OUTER.number is None else OUTER.number


def hook_gradient(
    tensor: Tensor,
    hook: Callable[[Tensor], Any],
    owner: int = 0,
    number: int | None = None,
    *,
    is_last: bool = False,
) -> Any:
    """`tensor.register_hook` for a tensor of the graph: the hook goes when the graph goes.

    Without a handle, of which there would be one for each value of each pass, it takes a third of
    the time. Hooks of one owner are called in the order in which they came, and those of a later
    owner before them: what a container returns is often what its last child returned, and the
    gradient comes to the container first. One that `is_last` stays behind those of its owner that
    come later and are not.

    Returns:
        The key by which `unhook_gradient` takes it off again.
    """
    if tensor.grad_fn is None or (type(tensor) is not Tensor and not is_of_trace(tensor)):
        return tensor.register_hook(hook).id  # type: ignore[no-untyped-call]
    key: Any = (owner, next(_keys)) if number is None else (owner, next(_keys), number)
    key = _Last(key) if is_last else key
    hooks: HookDict | None = tensor._backward_hooks  # type: ignore[assignment]
    if hooks is None:
        # Not kept from before an in-place operation: torch resets it with the tensor's grad_fn.
        tensor._backward_hooks = hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)
    elif number is not None:
        _insert(hooks, key, hook)
        return key
    elif hooks:
        # torch goes by the plain dictionary's order, so what comes later has to be put in again.
        others = [
            (k, h) for k, h in hooks.items()
            if (type(k) is tuple and k[0] != owner)
            or (type(k) is _Last and (k[0] != owner or not is_last))
        ]  # fmt: skip
        for other, _ in others:
            del hooks[other]
        hooks[key] = hook
        hooks.update(others)
        return key
    hooks[key] = hook
    return key


def _insert(hooks: HookDict, key: Any, hook: Callable[..., Any]) -> None:
    """Insert a hook that came before the others, or among them, by its number."""
    numbered = [(k, h) for k, h in hooks.items() if type(k) is tuple and len(k) == 3]
    numbered = sorted([*numbered, (key, hook)], key=lambda one: one[0][2])
    owners = list(dict.fromkeys(k[0] for k, _ in numbered))
    before = [(k, h) for k, h in hooks.items() if not (type(k) is tuple and len(k) == 3)]
    hooks.clear()
    for owner in reversed(owners):  # what came later is called first
        hooks.update((k, h) for k, h in numbered if k[0] == owner)
    hooks.update(before)


def unhook_gradient(tensor: Tensor, key: Any) -> None:
    """Take a hook that `hook_gradient` put on a tensor off it again."""
    hooks: HookDict = tensor._backward_hooks or OrderedDict()  # type: ignore[assignment]
    hooks.pop(key, None)


def saves_itself(tensor: Tensor) -> bool:
    """Tell whether the function that computed a tensor saved it for its own backward, as tanh does.

    More then comes back to it in a second derivative, past all that was computed from it.
    """
    function = tensor.grad_fn
    return function is not None and _saves_result(type(function), tensor.output_nr)


@functools.cache
def _saves_result(function: type, number: int) -> bool:
    # A function written in Python does not say; what it may well do is taken for done.
    is_of_python = issubclass(function, torch.autograd.function.BackwardCFunction)
    names = "_saved_result", "_saved_output", "_saved_out", f"_saved_result{number}"
    return is_of_python or any(hasattr(function, name) for name in names)


def version_counter(tensor: Tensor) -> Tensor:
    """An empty tensor that shares a tensor's `_version`, and where it can be, not its memory."""
    counter = tensor.detach()
    # Inside a transform of torch.func no memory can be exchanged.
    if not is_wrapped(tensor) and not is_of_trace(tensor):
        counter.data = tensor.new_empty(0)
    return counter


def base_of_view(tensor: Tensor) -> Tensor | None:
    """The tensor of the graph whose memory this one shows, if it is a view.

    None where an in-place operation cannot take the view's place in the graph: on views of a leaf,
    which refuse it, and where the two do not hold numbers of one kind.
    """
    base = tensor._base if tensor._is_view() else None
    if base is None or base.grad_fn is None:
        return None
    if type(base) is not Tensor and not is_of_trace(base):
        return None
    is_one_kind = base.dtype is tensor.dtype and base.is_conj() == tensor.is_conj()
    return base if is_one_kind and base.is_neg() == tensor.is_neg() else None


def is_held_by_one_view(view: Tensor) -> bool:
    """Tell whether this view alone holds its base, made inside an operation such as `linear`.

    Where torch does not count, nobody knows.
    """
    is_counted = hasattr(view, "_use_count") and view._base is not None
    if is_counted and is_of_trace(view):
        return _holders(view) == _holders(view.new_ones(1).requires_grad_().neg().view(1))
    return is_counted and _holders(view) == _holders_of_one()


def _holders(view: Tensor) -> tuple[int, int]:
    base = view._base
    in_python = sys.getrefcount(base)
    return in_python, base._use_count()  # type: ignore[union-attr]


@functools.cache
def _holders_of_one() -> tuple[int, int]:
    # How torch counts differs between its versions: so look at one of which it is known.
    with torch.enable_grad():
        return _holders(torch.ones(1, requires_grad=True).neg().view(1))


def is_of_trace(tensor: Tensor) -> bool:
    """Tell whether a tensor is one of a graph that torch.compile traces."""
    kind = type(tensor)
    return kind is not Tensor and kind.__name__ in ("FunctionalTensor", "FakeTensor")


def is_run_of_compiled(node: Any) -> bool:
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


def hook_node_before(node: Any, hook: Callable[[tuple[Tensor | None, ...]], Any]) -> None:
    """Call a hook with what comes back to a node of the graph, as long as the graph lives; what it
    returns, unless None, takes the place of that."""
    node.register_prehook(hook)


def hook_node(node: Any, hook: Callable[[tuple[Tensor | None, ...], Any], None]) -> None:
    """Call a hook with what flows on from a node of the graph, as long as the graph lives."""
    node.register_hook(hook)


def node_of_write(base: Tensor, n_writes: int) -> Any:
    """The node of the graph by which a view of this tensor was written to, `n_writes` versions ago.

    None if it was written to in another way.
    """
    node, found = base.grad_fn, None
    for _ in range(n_writes):
        if node is None or not node.name().endswith("CopySlices"):
            break
        found, node = node, node.next_functions[0][0]
    return found


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the user's run of autograd is over; from within a hook only."""
    if OUTER.number is not None:
        OUTER.at_end = (*OUTER.at_end, function)
        return
    torch.autograd.Variable._execution_engine.queue_callback(function)


def push_saved_tensors_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """From now on, in this thread, pack what autograd saves for backward."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    """Undo the last `push_saved_tensors_hooks` of this thread."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
