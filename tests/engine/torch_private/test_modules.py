"""The private names of torch that hookline leans on: each test says what breaks when one moves."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

import hookline as hl
from hookline.engine.torch_private import autograd, hooks, modes
from hookline.engine.torch_private import modules as internals
from hookline.engine.torch_private.graph import checkpoint, fused_ops
from second_thread import Meanwhile


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
    assert list(hooks.hook_dict(module, kind)) == [handle.id]
    assert type(hooks.hook_dict(module, kind)) is OrderedDict


def test_flags_lie_where_torch_reads_them():
    """If torch moves them, hooks lose their kwargs, or are skipped when a module raises."""
    module = nn.Linear(1, 1)
    pre = module.register_forward_pre_hook(lambda *a: None, with_kwargs=True)
    _, flags = hooks.hook_and_flag_dicts(module, "forward_pre", with_kwargs=True)
    assert pre.id in flags
    hook = module.register_forward_hook(lambda *a: None, with_kwargs=True, always_call=True)
    _, kwargs, always = hooks.hook_and_flag_dicts(
        module, "forward", with_kwargs=True, always_call=True
    )
    assert hook.id in kwargs
    assert hook.id in always


def test_ids_are_torchs_own(monkeypatch):
    """If the counter moves, two hooks could share an id and one would vanish."""
    monkeypatch.setattr(hooks, "_own_ids", [])
    module = nn.Linear(1, 1)
    mine = hooks.own_hook_id(3)
    theirs = module.register_forward_hook(lambda *a: None).id
    assert theirs == mine + 1


@pytest.mark.parametrize("kind", ["always-called forward", "state dict", "step"])
def test_torch_walks_over_the_living_hooks_of_a_kind(kind):
    """If it walks over a copy, what is removed meanwhile need not stay until its line ends."""
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    register, act = {
        "always-called forward": (
            partial(module.register_forward_hook, always_call=True),
            lambda: module(torch.ones(1, 9)),  # which fails
        ),
        "state dict": (module.register_state_dict_post_hook, module.state_dict),
        "step": (optimizer.register_step_post_hook, optimizer.step),
    }[kind]
    handle = register(lambda *_: handle.remove())
    register(lambda *_: None)
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        act()


def test_hooks_on_parameters_are_found():
    """If these attributes move, the inventory misses hooks on parameters."""
    parameter = nn.Parameter(torch.zeros(1))
    assert list(hooks.tensor_hooks(parameter)) == []
    parameter.register_hook(lambda grad: None)
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert [kind for kind, _ in hooks.tensor_hooks(parameter)] == ["grad", "accumulated"]


def test_wrappers_are_known_by_where_torch_defines_them():
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


def test_wrappers_that_need_processes_are_where_they_should_be():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for kind in (FullyShardedDataParallel, DistributedDataParallel):
        assert (kind.__module__, kind.__name__) in internals._WRAPPERS


def test_holders_without_a_forward_are_known():
    assert not internals.has_forward(nn.ModuleList())
    assert not internals.has_forward(nn.ModuleDict())
    assert internals.has_forward(nn.Identity())
    assert internals.has_forward(torch.jit.script(nn.ReLU()))
    patched = nn.ModuleList()
    patched.forward = lambda x: x
    assert internals.has_forward(patched)


def test_hooks_in_a_tensors_dictionary_are_called_in_its_order():
    """If torch keeps them elsewhere, gradients are not seen, or edits come after recorders."""
    log = []
    a = torch.ones(2, requires_grad=True) * 1
    autograd.hook_gradient(a, lambda grad: log.append("inner"), owner=1)
    autograd.hook_gradient(a, lambda grad: log.append("inner, too"), owner=1)
    autograd.hook_gradient(a, lambda grad: log.append("outer"), owner=2)
    a.sum().backward()
    assert log == ["outer", "inner", "inner, too"]
    leaf = torch.ones(2, requires_grad=True)
    assert not hooks.tensor_hook_dict(leaf, "grad")
    handles = [leaf.register_hook(lambda grad, k=k: log.append(k)) for k in range(2)]
    held = hooks.tensor_hook_dict(leaf, "grad")
    assert list(held) == [handle.id for handle in handles]
    held[handles[0].id] = held.pop(handles[0].id)
    leaf.sum().backward()
    assert log[3:] == [1, 0]


def test_each_run_of_autograd_has_a_number_and_an_end():
    """If these move, several backward passes are one, or what they left is kept."""
    a, seen = torch.ones(2, requires_grad=True), []

    def note(grad):
        seen.append(autograd.backward_number())
        autograd.at_end_of_backward(lambda: seen.append("end"))

    a.register_hook(note)
    for _ in range(2):
        a.sum().backward()
    assert seen[1::2] == ["end", "end"]
    assert seen[0] != seen[2]
    assert autograd.backward_number() == -1


def test_what_autograd_saves_is_packed_between_push_and_pop():
    """If the stack moves, line.saved packs nothing, or for ever."""
    a, packed = torch.ones(2, requires_grad=True), []
    autograd.push_saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t)
    try:
        a.exp()
    finally:
        autograd.pop_saved_tensors_hooks()
    a.exp()
    assert packed == [1]


def test_the_version_of_a_tensor_is_counted_without_its_memory():
    """If the counter is not shared any more, a view that is written to loses its gradient."""
    a = torch.ones(1000)
    counter = autograd.version_counter(a)
    before = counter._version
    a.add_(1)
    assert counter._version == before + 1
    assert counter.numel() == 0


def test_views_are_known_by_their_base():
    """If torch hides it, an in-place layer hides the gradient of the view before it."""
    base = torch.ones(4, requires_grad=True) * 1
    assert autograd.base_in_graph(base[:2]) is base
    assert autograd.base_in_graph(base) is None
    leaf = torch.ones(4, requires_grad=True)
    assert autograd.base_in_graph(leaf[:2]) is None


def test_all_hooks_of_an_owner_are_taken_off_with_their_marks():
    """If a dictionary moves, copies of hooked models keep dead hooks."""

    class Owner:
        def hook(self, *values):
            return None

    module, owner = nn.Linear(1, 1), Owner()
    module.register_forward_hook(owner.hook, with_kwargs=True, always_call=True)
    module.register_load_state_dict_pre_hook(owner.hook)
    kept = module.register_forward_hook(Owner().hook)
    hooks.discard_hooks_of(module, owner, lambda other: other is owner)
    assert list(module._forward_hooks) == [kept.id]
    assert not module._forward_hooks_with_kwargs
    assert not module._forward_hooks_always_called
    assert not module._load_state_dict_pre_hooks


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"nhead": 1},
                                     {"batch_first": False}, {"bias": False},
                                     {"activation": torch.tanh}])  # fmt: skip
def test_an_encoder_layer_run_as_one_operation_is_known(options, monkeypatch):
    """If torch's conditions change, lines that turn its fast path off do not say so, or wrongly."""
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(1), fused(*args))[1]
    )
    layer = nn.TransformerEncoderLayer(
        **{"d_model": 4, "nhead": 2, "dim_feedforward": 8, "batch_first": True, **options}
    )
    x = torch.zeros(2, 3, 4)
    padding = torch.zeros(2, 3).bool() if layer.self_attn.batch_first else torch.zeros(3, 2).bool()
    said = []
    for training in (False, True):
        for grad in (False, True):
            for kwargs in ({}, {"src_key_padding_mask": padding}):
                for given in (x, x[0]):
                    if given.dim() == 2 and kwargs:
                        continue
                    layer.train(training)
                    before = len(calls)
                    with torch.set_grad_enabled(grad):
                        layer(given, **kwargs)
                        said.append(fused_ops.may_run_fused(layer, (given,), kwargs))
                        assert said[-1] == (len(calls) > before)
    assert any(said) == (
        not options or "norm_first" in options or options == {"activation": "gelu"}
    )


def test_tracing_by_fx_is_noticed():
    """If torch moves its flag, what hooks do becomes part of traced code."""
    import torch.fx

    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append(modes.running_tracer())
            return x

    model = Model()
    model(torch.zeros(1))
    torch.fx.symbolic_trace(model)
    assert seen == [None, "torch.fx.symbolic_trace"]
    assert modes.running_tracer() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_told_of_and_their_second_run_is_ours(reentrant):
    """If torch builds them in another way, what it computes again is taken for calls of its own."""
    told = []

    def begin(recompute, is_reentrant):
        def again(*args):
            told.append(("again", checkpoint.is_recomputing(), autograd.OUTER.number))
            return recompute(*args)

        told.append(is_reentrant)
        return again, lambda: told.append("end")

    inner = nn.Linear(1, 1)
    hook = inner.register_forward_hook(
        lambda *_: told.append(("runs", checkpoint.is_recomputing()))
    )
    patch = checkpoint.CheckpointPatch(begin)
    patch.start()
    try:
        y = checkpointing.checkpoint(
            nn.Sequential(inner, nn.Tanh()), torch.ones(1, requires_grad=True),
            use_reentrant=reentrant,
        )  # fmt: skip
        numbers = []
        y.register_hook(lambda _: numbers.append(autograd.backward_number()))
        y.sum().backward()
    finally:
        patch.stop()
        hook.remove()
    second = ("again", True, numbers[0] if reentrant else None)
    if not reentrant:  # seen from the frame in which torch unpacks, it has not begun
        second = ("again", False, None)
    assert told == [reentrant, ("runs", False), "end", second, ("runs", True)]
    assert "apply" not in vars(checkpointing.CheckpointFunction)


def test_the_end_of_a_backward_is_that_of_the_users_own():
    """If it were that of one inside a checkpoint, clipping would come before the sum is there."""
    patch = checkpoint.CheckpointPatch(lambda run, _: (run, lambda: None))
    patch.start()
    weight, seen = torch.ones(1, requires_grad=True), []

    def at_end():
        seen.append((weight.grad.clone(), autograd.outer_backward_number()))

    def arrived(_):
        inside = autograd.outer_backward_number() != autograd.backward_number()
        autograd.at_end_of_backward(at_end) if inside else None

    weight.register_post_accumulate_grad_hook(arrived)
    try:
        x = torch.ones(1, requires_grad=True)
        for _ in range(2):
            x = checkpointing.checkpoint(lambda t: t * weight, x, use_reentrant=True)
        x.sum().backward()
    finally:
        patch.stop()
    assert [grad.item() for grad, _ in seen] == [2.0, 2.0]


def test_what_is_done_aside_is_not_counted():
    """If torch renames it, a selective checkpoint takes one operation for another."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Counts():
        with checkpoint.outside_checkpoint(True):
            torch.ones(1) + 1
        assert not seen
        with checkpoint.outside_checkpoint(None):
            torch.ones(1)
    assert len(seen) == 1


def test_a_traced_module_says_what_it_holds():
    """If torch keeps it elsewhere, a line cannot be made on a model that holds one."""
    model = nn.Sequential(nn.Linear(2, 2))
    traced = torch.jit.trace(model, torch.ones(1, 2))
    (held,) = internals.children(traced).items()
    assert held[0] == "0"
    assert [name for name, _ in internals.own_parameters(held[1]).items()] == ["weight", "bias"]


def test_tensor_tables_name_each_module_once():
    """If torch moves these tables, memory that changes without a word is not known."""
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.Linear(2, 2)))
    model.register_module("none", None)
    found = internals.tensor_tables(model)
    assert {id(module) for module, _, _ in found} == {id(module) for module in model.modules()}
    assert len(found) == 4
    names = {id(module): ([*own], [*held]) for module, own, held in found}
    assert names[id(shared)] == (
        ["weight", "bias"], ["running_mean", "running_var", "num_batches_tracked"]
    )  # fmt: skip


def test_a_walk_sees_through_wrappers_and_asks_a_type_once(monkeypatch):
    """If a wrapper is renamed, every path below it gets a segment."""
    inner, bare = nn.Linear(1, 1), set()
    inner.compile(backend="eager")
    wrapped = nn.DataParallel(inner)
    assert internals.unwrap_to_children(wrapped, bare) == (inner, [inner], {})
    assert bare == set()
    internals.unwrap_to_children(inner, bare)
    assert bare == {nn.Linear}
    monkeypatch.setattr(internals, "wrapper_chain", None)  # not to be asked again
    assert internals.unwrap_to_children(nn.Linear(1, 1), bare)[1:] == ([], {})


class Slow:
    """A foreign hook, at whose owner is looked while another thread runs the module."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    @property
    def __self__(self):
        self.meanwhile()

    def __call__(self, *_):
        pass


def test_two_threads_at_once_may_run_a_copy_of_a_hooked_model():
    model = nn.Linear(1, 1)
    with hl.record(model):
        twin = copy.deepcopy(model)
        model(torch.ones(1, 1))
    meanwhile = Meanwhile(lambda: twin(torch.ones(1, 1)))
    twin.register_forward_hook(Slow(meanwhile), prepend=True)
    twin(torch.ones(1, 1))
    meanwhile.end()
    assert len(twin._forward_hooks) == 1
