"""Hooks on views and their bases, where several threads use one base."""

from __future__ import annotations

import torch

from hookline.engine.autograd import view_hooks
from hookline.engine.autograd.view_hooks import GradHook, hook_value_gradient
from second_thread import Meanwhile, ToldLock


class Slow(GradHook):
    """A hook, at which is looked while another thread hooks a view of the same base."""

    @property
    def func(self):
        self.meanwhile()


def test_views_of_one_base_are_hooked_in_two_threads_at_once(monkeypatch):
    lock, came = ToldLock(), []
    monkeypatch.setattr(view_hooks, "_lock", lock, raising=False)
    base = torch.ones(4, requires_grad=True) * 2
    slow = Slow(lambda grad: None)
    base.register_hook(slow)
    base.register_hook(lambda grad: None)
    first, second = base.view(2, 2), base.view(4)
    slow.meanwhile = Meanwhile(lambda: hook_value_gradient(second, came.append, came.clear), lock)
    hook_value_gradient(first, came.append, came.clear)
    slow.meanwhile.end()
    (first.sum() + second.sum()).backward()
    assert sorted(tuple(grad.shape) for grad in came) == [(2, 2), (4,)]
