"""Runs that are repeated: what they began with, and how far the second run is like the first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookline.statistics.finiteness import probe_sum
from hookline.verbs.shared import rerun
from hookline.verbs.shared.rerun import RunComparison
from second_thread import Meanwhile, ToldLock

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
    model.meanwhile = Meanwhile(lambda: found.append(changing.copy_changing(model)), lock)
    mine = changing.copy_changing(model)
    model.meanwhile.end()
    assert names(mine) == names(found[0]) == BUFFERS


def test_all_buffers_are_kept_until_a_run_has_ended():
    changing, model = rerun.ChangingBuffers(), nn.Identity()
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("count", torch.zeros(()))
    assert names(changing.copy_changing(model)) == ["scale", "count"]
    assert names(changing.copy_changing(model)) == ["scale", "count"]
    model.count += 1
    changing.find_changed()
    assert names(changing.copy_changing(model)) == ["count"]


# A repeated run counts only as far as its outputs are those of the first run.
PATHS = ["", "a", "b"]


def likeness_of(*sums, measure=probe_sum):
    return RunComparison([(number, torch.tensor(value), measure) for number, value in sums], PATHS)


def compared(comparison, *outputs, dtype=torch.float32):
    for count, (path, value) in enumerate(outputs):
        comparison.compare_output(path, torch.tensor([value], dtype=dtype), count)
    comparison.check_missing_calls(set(PATHS))
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
    assert comparison.are_equal_until(0)
    assert not comparison.are_equal_until(1)
