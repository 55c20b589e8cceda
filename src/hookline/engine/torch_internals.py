"""Private names of torch that hookline touches, each behind one function.

Imports regime_internals. When torch moves one of them, this is the one file to mend;
`tests/engine/test_torch_internals.py` says for each what would break.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookline.engine.regime_internals import is_wrapped

HookDict = OrderedDict[Any, Callable[..., Any]]

# Wrappers that add a segment to every path below them, by where they are defined: compared by name,
# because importing `torch._dynamo` or `torch.distributed` to compare classes would cost a second.
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

# kind of hook -> the dictionary on a module that holds it
HOOK_DICTS: dict[str, str] = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "backward_pre": "_backward_pre_hooks",
    "backward": "_backward_hooks",
    "state_dict_pre": "_state_dict_pre_hooks",
    "state_dict": "_state_dict_hooks",
    "load_state_dict_pre": "_load_state_dict_pre_hooks",
    "load_state_dict": "_load_state_dict_post_hooks",
}


# The CPU's fused attention, for which torch's FLOP counter has no formula.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


_own_ids: list[int] = []


def own_hook_id(index: int) -> int:
    """The numbers under which hookline's hooks stand, which no hook of torch has or will have.

    Torch's own counter hands them out, each once; one serves in many dictionaries.
    """
    while len(_own_ids) <= index:
        _own_ids.append(new_hook_id())
    return _own_ids[index]


def new_hook_id() -> int:
    """A number for a hook that no other has."""
    number: int = RemovableHandle(OrderedDict()).id
    return number


def has_own_hooks(table: dict[Any, Any]) -> bool:
    """Whether a dictionary of hooks, or of marks on them, has some of hookline's."""
    return bool(table) and not table.keys().isdisjoint(_own_ids)


def hook_dict(module: nn.Module, kind: str) -> HookDict:
    """The ordered dictionary of hooks of this kind on this module.

    Writing to it directly costs a tenth of `register_forward_hook`, and is the only way to put a
    hook before or after particular others.
    """
    hooks: HookDict = module.__dict__[HOOK_DICTS[kind]]
    return hooks


def hook_flags(
    module: nn.Module, kind: str, *, with_kwargs: bool, always_call: bool
) -> list[dict[int, bool]]:
    """The dictionaries in which torch marks hooks that want kwargs or must always be called."""
    flags: list[dict[int, bool]] = []
    if with_kwargs:
        flags.append(module.__dict__[f"_{kind}_hooks_with_kwargs"])
    if always_call:
        flags.append(module.__dict__[f"_{kind}_hooks_always_called"])
    return flags


def discard_hooks_of(module: nn.Module, owner: object, is_alike: Callable[[object], bool]) -> None:
    """Take every hook of `owner` off this module, from within one of them.

    Of the hooks on state dicts torch walks over the living dictionary: they go when the last one
    is called, and then all that are alike.
    """
    for kind in HOOK_DICTS:
        hooks = hook_dict(module, kind)
        unwanted = [key for key, hook in hooks.items() if _owner(hook) is owner]
        if "state_dict" in kind and unwanted:
            is_last = unwanted[-1] == next(reversed(hooks))
            alike = [key for key, hook in hooks.items() if is_alike(_owner(hook))]
            unwanted = alike if is_last else []
        for key in unwanted:
            del hooks[key]
            for flag in ("with_kwargs", "always_called"):
                module.__dict__.get(f"_{kind}_hooks_{flag}", {}).pop(key, None)


def _owner(hook: Callable[..., Any]) -> object:
    # Load-state-dict pre-hooks come wrapped by torch.
    return getattr(getattr(hook, "hook", hook), "__self__", None)


def global_hooks() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every process-wide module hook, as (kind, hook)."""
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        table: HookDict = getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
        for hook in table.values():
            yield kind, hook


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


class _Last(tuple[int, int]):
    """The key of a hook that stays behind those of its owner that come later."""

    __slots__ = ()


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
    """Whether the function that computed a tensor saved it for its own backward, as tanh does.

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
    if not is_wrapped(tensor) and not is_of_trace(
        tensor
    ):  # inside a transform of torch.func no memory can be exchanged
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
    """Whether nobody but this view holds its base: one made inside an operation, as `linear` does.

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
    """Whether a tensor stands for one in a graph that torch.compile traces."""
    return type(tensor).__name__ in ("FunctionalTensor", "FakeTensor")


# The class of nodes whose backward is written in Python: that of compiled code is one of them.
PYTHON_NODE = torch.autograd.function.BackwardCFunction


def node_of_compiled(tensor: Tensor) -> Any:
    """The node of the graph that is the run of compiled code which returned a tensor; else None."""
    node = tensor.grad_fn
    is_of_python = isinstance(node, PYTHON_NODE)
    return node if is_of_python and type(node).__name__.startswith("CompiledFunction") else None


def is_written_by_compiled(tensor: Tensor) -> bool:
    """Whether compiled code wrote to a tensor, or its base, and nobody else since."""
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


def tensor_hooks(tensor: torch.Tensor) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every hook on a tensor's gradient, as (kind, hook)."""
    for kind in ("grad", "accumulated"):
        for hook in (tensor_hook_dict(tensor, kind) or {}).values():
            yield kind, hook


def tensor_hook_dict(tensor: Tensor, kind: str) -> HookDict | None:
    """The dictionary of a tensor's hooks of this kind; None if there never was one."""
    name = "_backward_hooks" if kind == "grad" else "_post_accumulate_grad_hooks"
    hooks: HookDict | None = getattr(tensor, name, None)
    return hooks


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


def _own(module: nn.Module, name: str) -> Any:
    found = module.__dict__.get(name)
    return getattr(module, name) if found is None else found  # a traced module holds another


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Direct children by name; `named_children` would drop an object's second name."""
    # As `_own`, written out: a walk over a model asks it of each module.
    found: dict[str, nn.Module | None] | None = module.__dict__.get("_modules")
    return module._modules if found is None else found


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a module has no children and does not hold its compiled call."""
    attributes = module.__dict__
    return not attributes.get("_modules", True) and "_compiled_call_impl" not in attributes


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name; `named_parameters` would drop a tied one's name."""
    found: dict[str, nn.Parameter | None] = _own(module, "_parameters")
    return found


def buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name; assigning to it replaces one."""
    found: dict[str, torch.Tensor | None] = _own(module, "_buffers")
    return found


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside torch's wrappers: compiled, parallel, averaged, checkpointed, sharded."""
    return unwrapping(module)[-1]


def unwrapping(module: nn.Module) -> list[nn.Module]:
    """List torch's wrappers around a module, the outermost first, and the module itself."""
    found = [module]
    while True:
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPER_NAMES:
                attribute = _WRAPPERS.get((kind.__module__, kind.__name__))
                if attribute is not None:
                    break
        else:
            return found
        inner = children(module).get(attribute)
        if inner is None:
            return found
        found.append(module := inner)


def is_scripted(module: nn.Module) -> bool:
    """Whether torch would take hooks on this module and never call them."""
    return isinstance(module, torch.jit.ScriptModule)


def runs_fused(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch runs this encoder layer as one operation, if nothing in it has a hook.

    The conditions are those that `nn.TransformerEncoderLayer.forward` goes through.
    """
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return False
    attention: Any = layer.self_attn
    given = dict(zip(("src", "src_mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    src = given.get("src")
    is_masked = any(given.get(name) is not None for name in ("src_mask", "src_key_padding_mask"))
    if (
        layer.training
        or type(layer).forward is not nn.TransformerEncoderLayer.forward
        or not torch.backends.mha.get_fastpath_enabled()
        or not isinstance(src, Tensor)
        or src.dim() != 3
        or (src.is_nested and is_masked)
        or torch.is_autocast_enabled()
    ):
        return False
    tensors = [src, *layer.parameters()]
    return bool(
        attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
        and not torch.overrides.has_torch_function(tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called at all: `ModuleList` and other mere holders can not."""
    return not is_holder(type(module)) or "forward" in module.__dict__


def is_holder(kind: type) -> bool:
    """Tell whether a class has no forward. A scripted module's belongs to its instances."""
    return getattr(kind, "forward", None) is nn.Module.forward
