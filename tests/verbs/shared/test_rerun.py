"""Runs that are repeated: what they began with, and how far the second run is like the first."""

from __future__ import annotations

import math
import random
import sys
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.statistics.finiteness import probe_sum
from hookline.verbs.shared import rerun
from hookline.verbs.shared.rerun import RunComparison
from meeting import Meanwhile, ToldLock

BUFFERS = ["running_mean", "running_var", "num_batches_tracked"]


class Slow(nn.Sequential):
    """A model whose modules are listed while another thread begins a run, too."""

    def modules(self):
        self.meanwhile()
        return super().modules()


def names(copies):
    return [name for _, name, _ in copies]


def test_runs_of_two_threads_at_once_keep_the_buffers(monkeypatch):
    lock, found = ToldLock(), []
    monkeypatch.setattr(rerun, "fork_safe_lock", lambda: lock, raising=False)
    changing, model = rerun.ChangingBuffers(), Slow(nn.BatchNorm1d(2))
    model.meanwhile = Meanwhile(lambda: found.append(changing.copies(model)), lock)
    mine = changing.copies(model)
    model.meanwhile.end()
    assert names(mine) == names(found[0]) == BUFFERS


def test_all_buffers_are_kept_until_a_run_has_ended():
    changing, model = rerun.ChangingBuffers(), nn.Identity()
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("count", torch.zeros(()))
    assert names(changing.copies(model)) == ["scale", "count"]
    assert names(changing.copies(model)) == ["scale", "count"]
    model.count += 1
    changing.learn()
    assert names(changing.copies(model)) == ["count"]


# A repeated run counts only as far as its outputs are those of the first run.
PATHS = ["", "a", "b"]


def likeness_of(*sums, measure=probe_sum):
    return RunComparison([(number, torch.tensor(value), measure) for number, value in sums], PATHS)


def compared(comparison, *outputs, dtype=torch.float32):
    for count, (path, value) in enumerate(outputs):
        comparison.compare(path, torch.tensor([value], dtype=dtype), count)
    comparison.end(set(PATHS))
    return comparison.difference


def test_equal_runs_are_alike():
    assert compared(likeness_of((1, 2.0), (0, 3.0)), ("a", 2.0), ("", 3.0)) is None
    nan = likeness_of((1, math.nan), (0, math.inf))
    assert compared(nan, ("a", math.nan), ("", math.inf)) is None


@pytest.mark.parametrize("again", [2.1, math.nan, math.inf, -2.0])
def test_the_first_output_that_differs_is_named(again):
    assert compared(likeness_of((1, 2.0), (2, 2.0)), ("a", 2.0), ("b", again)) == "b"
    assert compared(likeness_of((1, math.nan)), ("a", 2.0)) == "a"


def test_rounding_is_no_difference():
    assert compared(likeness_of((1, 2.0)), ("a", 2.000001)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_greater_in_half_precision(dtype):
    first, again = likeness_of((1, 2.001)), ("a", 2.0)
    assert compared(first, again, dtype=dtype) == (None if dtype.itemsize == 2 else "a")


def test_calls_that_one_run_alone_makes_are_a_difference():
    assert compared(likeness_of((1, 2.0), (1, 2.0)), ("a", 2.0)) == "a#1"
    assert compared(likeness_of((1, 2.0)), ("a", 2.0), ("a", 2.0)) == "a#1"
    assert compared(likeness_of((1, 2.0)), ("b", 5.0), ("a", 2.0)) is None


def test_of_compiled_code_only_nan_is_compared():
    assert compared(likeness_of((1, 2.0), measure=None), ("a", 3.0)) is None
    assert compared(likeness_of((1, 2.0), measure=None), ("a", math.nan)) == "a"


def test_an_operation_counts_up_to_the_last_value_in_common():
    comparison = likeness_of((1, math.nan), (2, 1.0))
    compared(comparison, ("a", math.nan), ("b", 2.0))
    assert comparison.difference == "b"
    assert comparison.proves(0)
    assert not comparison.proves(1)


def test_all_random_states_are_put_back():
    model = nn.Identity()
    model.generator = torch.Generator()

    def draw():
        return [
            random.random(),
            np.random.random(),
            torch.rand(()).item(),
            torch.rand((), generator=model.generator).item(),
        ]

    with rerun.restore_state([model]):
        first = draw()
    assert draw() == first


def test_numpys_random_state_is_put_back_before_its_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    states = rerun.RandomStates()
    first = np.random.random()
    states.restore()
    assert np.random.random() == first


def test_gradients_leave_grad_as_it_is():
    weight = torch.ones(2, requires_grad=True)
    weight.grad = before = torch.zeros(2)
    for use_reentrant in (True, False):
        output = checkpoint(lambda x: (x * weight).sum(), weight * 2, use_reentrant=use_reentrant)
        assert rerun.gradients([output])[0].tolist() == [4.0, 4.0]
        assert weight.grad is before
        assert before.tolist() == [0.0, 0.0]


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
    with rerun.restore_after_run(model):
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
    with rerun.restore_after_run(model):
        model[0].register_forward_hook(lambda *_: None, **{flag: True})
        model[0].register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        with hl.record(model, "0"):
            model(torch.ones(1))
    assert {name: dict(vars(model[0])[name]) for name in before} == before


def test_parameters_are_put_back_where_a_forward_writes_to_them():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with rerun.parameters_restored(model), torch.no_grad():
        model.weight += 1
    assert torch.equal(model.weight, before)


def test_blocks_of_several_threads_leave_modes_and_buffers(monkeypatch):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()).train()
    buffers = dict(model.named_buffers())

    def act():
        with rerun.eval_without_side_effects(model):
            assert not model.training

    lock = ToldLock()
    monkeypatch.setattr(rerun, "_one_at_a_time", lock)
    meanwhile = Meanwhile(act, lock)
    with rerun.eval_without_side_effects(model):
        meanwhile()
        assert not any(module.training for module in model.modules())
    meanwhile.end()
    assert all(module.training for module in model.modules())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_modes_that_another_block_holds_are_left_to_it():
    model = nn.Dropout().train()
    with rerun.in_eval_mode([model]):
        with rerun.restore_state([model]):
            pass
        assert not model.training
    first, second = rerun.in_eval_mode([model]), rerun.restore_state([model])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as another thread does
    second.__exit__(None, None, None)
    assert model.training
