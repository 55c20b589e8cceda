"""EVERYWHERE: any model, this context only."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

import hookline as hl


def test_modules_of_every_model_are_seen():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward_pre(nn.Linear, lambda module, args: seen.append("pre"))
        line.forward([nn.Linear, nn.ReLU], lambda module, args, out: seen.append(type(module)))
        nn.Sequential(nn.Linear(1, 1), nn.ReLU())(torch.zeros(1))
        nn.Linear(1, 1)(torch.zeros(1))
    nn.Linear(1, 1)(torch.zeros(1))
    assert seen == ["pre", nn.Linear, nn.ReLU, "pre", nn.Linear]
    assert not hl.inventory(nn.Linear(1, 1))


def test_values_can_be_replaced_everywhere():
    layer = nn.Linear(1, 1)
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward_pre(None, lambda module, args: (args[0] * 0,))
        line.forward(None, lambda module, args, kwargs, out: out + 1, with_kwargs=True)
        assert layer(torch.ones(1)).item() == layer.bias.item() + 1


def test_another_thread_sees_nothing():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        line.forward(None, lambda module, args, out: seen.append(threading.get_ident()))
        thread = threading.Thread(target=nn.Linear(1, 1), args=(torch.zeros(1),))
        thread.start()
        thread.join()
        nn.Linear(1, 1)(torch.zeros(1))
    assert seen == [threading.get_ident()]


def test_async_tasks_are_apart():
    seen = {"a": 0, "b": 0}

    async def train(name, gate, other):
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward(None, lambda *a: seen.__setitem__(name, seen[name] + 1))
            for _ in range(3):
                nn.Linear(1, 1)(torch.zeros(1))
                other.set()
                await gate.wait()
                gate.clear()
            other.set()

    async def both():
        one, two = asyncio.Event(), asyncio.Event()
        await asyncio.gather(train("a", one, two), train("b", two, one))

    asyncio.run(both())
    assert seen == {"a": 3, "b": 3}


def test_torchs_process_wide_hooks_are_there_only_while_needed():
    tables = torch.nn.modules.module
    outer = hl.attach(hl.EVERYWHERE)
    assert not tables._has_any_global_hook()
    outer.forward(None, lambda *a: None)
    with hl.attach(hl.EVERYWHERE) as inner:
        inner.forward(None, lambda *a: None)
        assert len(tables._global_forward_hooks) == 1
    assert len(tables._global_forward_hooks) == 1
    outer.remove()
    assert not tables._has_any_global_hook()


def test_what_has_no_meaning_everywhere_is_refused():
    with hl.attach(hl.EVERYWHERE) as line:
        with pytest.raises(hl.SelectionError, match="modules have no paths"):
            line.forward("layer1.*", print)
        with pytest.raises(hl.AttachError, match="no keyword arguments"):
            line.forward_pre(None, print, with_kwargs=True)
        with pytest.raises(hl.AttachError, match="always_call"):
            line.forward(None, print, always_call=True)
    with pytest.raises(hl.AttachError, match="record needs a model"):
        hl.record(hl.EVERYWHERE)


def test_a_hook_that_is_refused_leaves_nothing_on_torch():
    line = hl.attach(hl.EVERYWHERE)
    with pytest.raises(hl.SelectionError):
        line.forward("layer*", print)
    assert not torch.nn.modules.module._has_any_global_hook()
    assert line.taps == []
