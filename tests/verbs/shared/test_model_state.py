"""A model is as it was after a run in a block."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.shared import model_state
from hookline.verbs.shared.model_state import (
    eval_without_side_effects,
    in_eval_mode,
    restore_after_run,
    restore_modes_buffers_rng,
    restore_parameters,
)
from second_thread import Meanwhile, ToldLock


class Noting(nn.Module):
    """A model that writes what it sees into whatever a module can hold."""

    def __init__(self):
        super().__init__()
        self.seen, self.by_name, self.kinds = [], {"inner": [0]}, {1}
        self.last, self.mean = deque([1, 2], 2), torch.zeros(3)
        self.same = self.mean  # one tensor under two names
        with torch.inference_mode():
            self.fixed = torch.ones(2)

    def forward(self, x):
        self.seen.append(x)
        self.by_name["x"] = x
        self.by_name["inner"].append(1)
        self.kinds.add(2)
        self.last.append(3)
        self.mean += 1
        with torch.inference_mode():
            self.fixed.mul_(2)
        self.add_module("late", nn.Linear(1, 1))
        return x


def test_what_a_forward_writes_to_its_module_is_put_back():
    model = Noting()
    held = {name: (value, repr(value)) for name, value in vars(model).items()}
    with restore_after_run(model):
        model(torch.ones(1))
        assert len(model.seen) == 1
        assert model.mean.tolist() == [1, 1, 1]
    assert {name: (value, repr(value)) for name, value in vars(model).items()} == held
    assert model.same is model.mean
    assert model.last.maxlen == 2


@pytest.mark.parametrize("flag", ["with_kwargs", "always_call"])
def test_hooks_that_a_forward_registers_are_removed(flag):
    model = nn.Sequential(nn.ReLU())
    model[0].register_forward_hook(lambda *_: None)
    before = {name: dict(value) for name, value in vars(model[0]).items() if "_hooks" in name}
    with restore_after_run(model):
        model[0].register_forward_hook(lambda *_: None, **{flag: True})
        model[0].register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        with hl.record(model, "0"):
            model(torch.ones(1))
    assert {name: dict(vars(model[0])[name]) for name in before} == before


def test_parameters_are_put_back_where_a_forward_writes_to_them():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with restore_parameters(model), torch.no_grad():
        model.weight += 1
    assert torch.equal(model.weight, before)


def test_blocks_of_several_threads_leave_modes_and_buffers(monkeypatch):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()).train()
    buffers = dict(model.named_buffers())

    def act():
        with eval_without_side_effects(model):
            assert not model.training

    lock = ToldLock()
    monkeypatch.setattr(model_state, "_one_at_a_time", lock)
    meanwhile = Meanwhile(act, lock)
    with eval_without_side_effects(model):
        meanwhile()
        assert not any(module.training for module in model.modules())
    meanwhile.end()
    assert all(module.training for module in model.modules())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_modes_that_another_block_holds_are_left_to_it():
    model = nn.Dropout().train()
    with in_eval_mode([model]):
        with restore_modes_buffers_rng([model]):
            pass
        assert not model.training
    first, second = in_eval_mode([model]), restore_modes_buffers_rng([model])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as another thread does
    second.__exit__(None, None, None)
    assert model.training
