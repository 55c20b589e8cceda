"""Memory that changes without a word: which tensors share it with a model's parameters."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.memory import unversioned_memory
from hookline.engine.memory.unversioned_memory import (
    CACHE_LINE_BITS,
    UnversionedMemory,
    first_cache_lines,
    is_freed,
    returns_new_memory,
)


class Current:
    unversioned = None


def has(model, tensor):
    return UnversionedMemory(model, len(list(model.modules()))).contains(Current(), tensor)


def test_parameters_and_buffers_are_unversioned_others_not():
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
    for tensor in (*model.parameters(), *model.buffers()):
        assert has(model, tensor)
        assert has(model, tensor.detach())
        assert has(model, tensor.data.view(-1)[-1:])
    assert not has(model, torch.zeros(40, 40))
    assert not has(model, model[0].weight.detach().clone())


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.double(),
        lambda model: model.load_state_dict(nn.Linear(40, 40).state_dict(), assign=True),
        lambda model: model.register_parameter("bias", nn.Parameter(torch.zeros(40))),
    ],
    ids=["moved", "assigned", "replaced"],
)
def test_parameters_moved_since_the_last_pass_are_found(move):
    model = nn.Linear(40, 40)
    known = UnversionedMemory(model, 1)
    kept = [model.weight, model.bias]  # so that no new one can lie where they did
    assert known.contains(Current(), model.bias.detach())
    move(model)
    assert known.contains(Current(), model.bias.detach())
    assert len(kept) == 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_parameters_of_a_scripted_part_are_known_in_each_pass():
    model = nn.Sequential(torch.jit.script(nn.Linear(40, 40)))
    known = UnversionedMemory(model, 2)
    for _ in range(2):
        assert known.contains(Current(), model[0].weight.detach())
        assert not known.contains(Current(), torch.zeros(40, 40))


def test_a_layer_that_is_added_between_two_lines_is_found():
    model = nn.Sequential(nn.Linear(40, 40))
    assert has(model, model[0].weight.detach())
    model.append(nn.Linear(40, 40))
    assert has(model, model[1].weight.detach())


def test_what_moved_without_a_witness_is_refused_at_the_look_up():
    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(40))

        def forward(self, x):
            return self.weight.detach()

    layers = [nn.Linear(40, 40) for _ in range(8)]
    model = nn.Sequential(*layers[:4], Gives(), *layers[4:])
    x = torch.zeros(40)
    with hl.record(model, "4") as run:
        model(x)
        model[4].weight.data = torch.ones(40)
        model(x)
    assert run.passes[0]["4"].sum() == 0
    with pytest.raises(hl.OverwrittenError, match="shares memory with a parameter"):
        run.passes[1]["4"]


def test_a_model_is_not_held_by_what_is_known_of_its_memory():
    model = nn.Linear(4, 4)
    known = UnversionedMemory(model, 1)
    assert known.contains(Current(), model.weight)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not known.contains(Current(), torch.zeros(40))
    assert not any(one is None for one, _ in unversioned_memory._memories.items())


def test_only_layers_with_memory_of_their_own_are_trusted():
    assert returns_new_memory(nn.Linear)
    assert returns_new_memory(nn.Conv2d)

    class Own(nn.Linear):
        def forward(self, x):
            return self.weight

    for kind in (Own, nn.Identity, nn.ReLU, nn.Flatten, nn.Module):
        assert not returns_new_memory(kind)
    model = nn.Linear(2, 2)
    model.forward = lambda x: model.weight.detach()
    with torch.no_grad(), hl.record(model) as run:
        model(torch.zeros(2))
    before = model.weight.clone()
    model.weight.data.fill_(7.0)
    assert torch.equal(run[""], before)


class Gives(nn.Module):
    """Gives its buffer, or a view of its parameter, instead of what it is called with."""

    def __init__(self, gives):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.register_buffer("state", torch.zeros(40))
        self.gives = gives

    def forward(self, x):
        return self.gives(self)


@pytest.mark.parametrize(
    "gives",
    [lambda own: own.state, lambda own: own.weight.detach(), lambda own: own.weight.detach()[24:]],
    ids=["buffer", "parameter", "view"],
)
@pytest.mark.parametrize("selector", ["*", "1", "{1,2}"])
def test_weights_that_modules_hand_on_are_copied_at_each(gives, selector):
    model = nn.Sequential(Gives(gives), nn.Identity(), nn.Dropout()).eval()
    with torch.no_grad(), hl.record(model, selector) as run:
        model(torch.zeros(40))
    for held in (model[0].weight.data, model[0].state):
        held.numpy().fill(7.0)  # torch's version counter is not told
    assert len(run.sites) == len(run)
    assert all(not value.any() for value in run.values())


def test_what_a_module_hands_on_is_refused_once_changed():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

    model = nn.Sequential(Block(), nn.Identity(), nn.Identity())
    with torch.no_grad(), hl.record(model) as run:
        output = model(torch.ones(4))
        assert run["1"].data_ptr() == run["0"].data_ptr() == output.data_ptr()
        assert run.passes[0]._pass.unversioned is None  # nobody had to know the model's memory
        output.zero_()
    assert len(run.sites) == 5
    for site in run.sites:
        with pytest.raises(hl.OverwrittenError):
            run[site]


def test_memory_is_told_apart_by_lines_and_freed_memory_is_known():
    tensor = torch.zeros(64)
    assert list(first_cache_lines(tensor)) == [tensor.data_ptr() >> CACHE_LINE_BITS]
    assert list(first_cache_lines(tensor[40:])) == [tensor.data_ptr() >> CACHE_LINE_BITS]
    assert not is_freed(tensor)
    tensor.untyped_storage().resize_(0)
    assert is_freed(tensor)


def test_modules_that_are_equal_and_have_no_hash_are_told_apart():
    class Equal(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(40))

        def __eq__(self, other):
            return True

        __hash__ = None

    model = nn.ModuleList()
    model._modules.update({"0": Equal(), "1": Equal()})
    for part in model._modules.values():
        assert has_unhashed(model, part.weight)


def has_unhashed(model, tensor):
    return UnversionedMemory(model, 3).contains(Current(), tensor.detach())
