"""The private names of torch that hookline leans on: each test says what breaks when one moves."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from hookline.engine import torch_internals as internals


@pytest.mark.parametrize(
    ("kind", "register"),
    [
        ("forward_pre", "register_forward_pre_hook"),
        ("forward", "register_forward_hook"),
        ("backward_pre", "register_full_backward_pre_hook"),
        ("backward", "register_full_backward_hook"),
        ("state_dict_pre", "register_state_dict_pre_hook"),
        ("state_dict", "register_state_dict_post_hook"),
        ("load_state_dict_pre", "register_load_state_dict_pre_hook"),
        ("load_state_dict", "register_load_state_dict_post_hook"),
    ],
)
def test_each_kind_of_hook_lies_in_its_dictionary(kind, register):
    """If torch renames one, attaching or the inventory misses that kind."""
    module = nn.Linear(1, 1)
    handle = getattr(module, register)(lambda *a: None)
    assert list(internals.hook_dict(module, kind)) == [handle.id]
    assert type(internals.hook_dict(module, kind)) is OrderedDict


def test_flags_lie_where_torch_reads_them():
    """If torch moves them, hooks lose their kwargs, or are skipped when a module raises."""
    module = nn.Linear(1, 1)
    pre = module.register_forward_pre_hook(lambda *a: None, with_kwargs=True)
    (flags,) = internals.hook_flags(module, "forward_pre", with_kwargs=True, always_call=False)
    assert pre.id in flags
    hook = module.register_forward_hook(lambda *a: None, with_kwargs=True, always_call=True)
    kwargs, always = internals.hook_flags(module, "forward", with_kwargs=True, always_call=True)
    assert hook.id in kwargs
    assert hook.id in always


def test_ids_are_torchs_own():
    """If the counter moves, two hooks could share an id and one would vanish."""
    module = nn.Linear(1, 1)
    mine = internals.own_hook_id(987_654)
    theirs = module.register_forward_hook(lambda *a: None).id
    assert theirs == mine + 1


def test_torch_leaves_a_mark_of_process_wide_hooks_and_hookline_removes_it():
    """When torch stops leaving it, `forget_global_hook` can go."""
    tables = torch.nn.modules.module
    handle = tables.register_module_forward_hook(lambda *a: None, with_kwargs=True)
    assert dict(internals.global_hooks())["forward"] is tables._global_forward_hooks[handle.id]
    internals.forget_global_hook(handle)
    assert not tables._has_any_global_hook()


def test_hooks_on_parameters_are_found():
    """If these attributes move, the inventory misses hooks on parameters."""
    parameter = nn.Parameter(torch.zeros(1))
    assert list(internals.tensor_hooks(parameter)) == []
    parameter.register_hook(lambda grad: None)
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert [kind for kind, _ in internals.tensor_hooks(parameter)] == ["grad", "accumulated"]


def test_wrappers_are_known_by_the_place_where_torch_defines_them():
    """If torch moves a wrapper, its prefix comes back into every path."""
    inner = nn.Linear(1, 1)
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as checkpointing

    for wrapper in (
        nn.DataParallel(inner),
        torch.optim.swa_utils.AveragedModel(inner),
        torch.compile(inner, backend="eager"),
        checkpointing.CheckpointWrapper(inner),
    ):
        assert type(internals.unwrap(wrapper)) is nn.Linear


def test_wrappers_that_need_processes_are_where_they_are_said_to_be():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for kind in (FullyShardedDataParallel, DistributedDataParallel):
        assert (kind.__module__, kind.__name__) in internals._WRAPPERS


def test_compiled_modules_are_known():
    inner = nn.Linear(1, 1)
    assert not internals.is_compiled(inner)
    assert internals.is_compiled(torch.compile(inner, backend="eager"))
    inner.compile(backend="eager")
    assert internals.is_compiled(inner)


def test_holders_without_a_forward_are_known():
    assert not internals.has_forward(nn.ModuleList())
    assert not internals.has_forward(nn.ModuleDict())
    assert internals.has_forward(nn.Identity())
    assert internals.has_forward(torch.jit.script(nn.ReLU()))
    patched = nn.ModuleList()
    patched.forward = lambda x: x
    assert internals.has_forward(patched)


def test_hooks_written_into_a_tensors_own_dictionary_are_called_in_its_order():
    """If torch keeps them elsewhere, gradients are not seen, or edits come after recorders."""
    log = []
    a = torch.ones(2, requires_grad=True) * 1
    internals.hook_gradient(a, lambda grad: log.append("inner"), owner=1)
    internals.hook_gradient(a, lambda grad: log.append("inner, too"), owner=1)
    internals.hook_gradient(a, lambda grad: log.append("outer"), owner=2)
    a.sum().backward()
    assert log == ["outer", "inner", "inner, too"]
    leaf = torch.ones(2, requires_grad=True)
    assert not internals.tensor_hook_dict(leaf, "grad")
    handles = [leaf.register_hook(lambda grad, k=k: log.append(k)) for k in range(2)]
    hooks = internals.tensor_hook_dict(leaf, "grad")
    assert list(hooks) == [handle.id for handle in handles]
    hooks[handles[0].id] = hooks.pop(handles[0].id)
    leaf.sum().backward()
    assert log[3:] == [1, 0]


def test_each_run_of_autograd_has_a_number_and_an_end():
    """If these move, several backward passes are one, or what they left is kept."""
    a, seen = torch.ones(2, requires_grad=True), []

    def note(grad):
        seen.append(internals.backward_number())
        internals.at_end_of_backward(lambda: seen.append("end"))

    a.register_hook(note)
    for _ in range(2):
        a.sum().backward()
    assert seen[1::2] == ["end", "end"]
    assert seen[0] != seen[2]
    assert internals.backward_number() == -1


def test_what_autograd_saves_is_packed_between_push_and_pop():
    """If the stack moves, line.saved packs nothing, or for ever."""
    a, packed = torch.ones(2, requires_grad=True), []
    internals.push_saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t)
    try:
        a.exp()
    finally:
        internals.pop_saved_tensors_hooks()
    a.exp()
    assert packed == [1]


def test_the_version_of_a_tensor_is_counted_without_its_memory():
    """If the counter is not shared any more, a view that is written to loses its gradient."""
    a = torch.ones(1000)
    counter = internals.version_counter(a)
    before = counter._version
    a.add_(1)
    assert counter._version == before + 1
    assert counter.numel() == 0


def test_views_are_known_by_their_base():
    """If torch hides it, an in-place layer hides the gradient of the view before it."""
    base = torch.ones(4, requires_grad=True) * 1
    assert internals.base_of_view(base[:2]) is base
    assert internals.base_of_view(base) is None
    leaf = torch.ones(4, requires_grad=True)
    assert internals.base_of_view(leaf[:2]) is None


def test_all_hooks_of_an_owner_are_taken_off_with_their_marks():
    """If a dictionary moves, copies of hooked models keep dead hooks."""

    class Owner:
        def hook(self, *values):
            return None

    module, owner = nn.Linear(1, 1), Owner()
    module.register_forward_hook(owner.hook, with_kwargs=True, always_call=True)
    module.register_load_state_dict_pre_hook(owner.hook)
    kept = module.register_forward_hook(Owner().hook)
    internals.discard_hooks_of(module, owner, lambda other: other is owner)
    assert list(module._forward_hooks) == [kept.id]
    assert not module._forward_hooks_with_kwargs
    assert not module._forward_hooks_always_called
    assert not module._load_state_dict_pre_hooks


def test_what_wraps_the_tensors_of_torch_func_can_be_taken_off():
    """If one moves, recordings hold wrappers, or take a past transform for one that runs."""
    seen = []

    def look(tensor):
        assert internals.is_wrapped(tensor)
        assert internals.is_of_running_transform(tensor)
        seen.append((internals.transform(), tensor))
        return tensor.sum()

    batch = torch.ones(3, 2)
    assert internals.transform() is None
    torch.func.vmap(look, in_dims=1)(batch)
    torch.func.grad(look)(batch)
    (vmap, one), (grad, whole) = seen
    assert (vmap, grad) == ("Vmap", "Grad")
    assert internals.is_mapped(one)
    assert not internals.is_mapped(whole)
    assert not internals.is_of_running_transform(one)
    assert not internals.is_of_running_transform(whole)
    assert internals.unwrapped(one)[1] == 1
    assert torch.equal(internals.unwrapped(one)[0], batch)
    assert internals.unwrapped(whole)[1] is None
    assert not internals.is_wrapped(internals.unwrapped(whole)[0])


def test_under_vmap_only_what_is_wrapped_counts_its_versions():
    """When torch counts them on the wrapper, too, `regime.innermost` can go."""

    def write(tensor):
        inner, _ = internals.unwrapped(tensor)
        before = tensor._version, inner._version
        tensor.add_(1)
        assert (tensor._version, inner._version) == (before[0], before[1] + 1)
        return tensor

    torch.func.vmap(write)(torch.ones(3, 2))


def test_who_makes_a_graph_is_known():
    """If one moves, a line is baked into that tracer's graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    found = []

    class Model(nn.Module):
        def forward(self, x):
            found.append(internals.tracer())
            return x * 2

    model, x = Model(), torch.ones(2)
    model(x)
    torch.export.export(model, (x,), strict=False)
    torch.jit.trace(model, (x,), check_trace=False)
    make_fx(model)(x)
    torch.fx.symbolic_trace(model)
    names = ["torch.export", "torch.jit.trace", "make_fx", "torch.fx.symbolic_trace"]
    assert list(dict.fromkeys(found)) == [None, *names]


def test_a_traced_module_says_what_it_holds():
    """If torch keeps it elsewhere, a line cannot be made on a model that holds one."""
    model = nn.Sequential(nn.Linear(2, 2))
    traced = torch.jit.trace(model, torch.ones(1, 2))
    (held,) = internals.children(traced).items()
    assert held[0] == "0"
    assert [name for name, _ in internals.parameters(held[1]).items()] == ["weight", "bias"]
