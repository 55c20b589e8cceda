"""Many tensors by one call: each test says what breaks when torch's private functions move."""

from __future__ import annotations

import torch

from counted_operations import CountedOperations
from hookline.engine import copy_all, subtract_from_all


def test_many_tensors_are_copied_by_one_call():
    sources = [torch.randn(n) for n in range(4)] + [torch.ones(2, 3).double().t()]
    targets = [torch.zeros_like(source) for source in sources]
    with CountedOperations() as counted:
        copy_all(targets, sources)
    assert counted.count == 1
    assert all(map(torch.equal, targets, sources))


def test_many_differences_are_those_of_sub():
    befores = [torch.tensor([0.1, -0.0, float("inf"), float("nan"), 1e-45]), torch.ones(1) + 0j]
    afters = [torch.tensor([0.3, -0.0, float("inf"), 1.0, 0.0]), torch.zeros(1) + 1j]
    expected = [torch.sub(after, before) for after, before in zip(afters, befores, strict=True)]
    subtract_from_all(afters, befores)
    for difference, other in zip(befores, expected, strict=True):
        torch.testing.assert_close(difference, other, rtol=0, atol=0, equal_nan=True)


def test_no_tensors_are_no_error():
    copy_all([], [])
    subtract_from_all([], [])


class WithoutLists(torch.Tensor):
    """A subclass that does not know calls with lists."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "foreach" in function.__name__:
            raise NotImplementedError
        return super().__torch_function__(function, types, args, kwargs)


def test_subclasses_need_not_know_calls_with_lists():
    afters = [torch.ones(2).as_subclass(WithoutLists), torch.ones(3)]
    befores = [torch.zeros(2).as_subclass(WithoutLists), torch.zeros(3)]
    subtract_from_all(afters, befores)
    assert all(map(torch.equal, befores, afters))
    copy_all(afters, [torch.zeros(2).as_subclass(WithoutLists), torch.zeros(3)])
    assert not any(after.any() for after in afters)
