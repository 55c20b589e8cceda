"""What a check keeps to repeat a run, where several threads run the model."""

from __future__ import annotations

import torch
from torch import nn

from hookline.verbs.check import run
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
    monkeypatch.setattr(run, "fork_safe_lock", lambda: lock, raising=False)
    changing, model = run.ChangingBuffers(), Slow(nn.BatchNorm1d(2))
    model.meanwhile = Meanwhile(lambda: found.append(changing.copies(model)), lock)
    mine = changing.copies(model)
    model.meanwhile.end()
    assert names(mine) == names(found[0]) == BUFFERS


def test_all_buffers_are_kept_until_a_run_has_ended():
    changing, model = run.ChangingBuffers(), nn.Identity()
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("count", torch.zeros(()))
    assert names(changing.copies(model)) == ["scale", "count"]
    assert names(changing.copies(model)) == ["scale", "count"]
    model.count += 1
    changing.learn()
    assert names(changing.copies(model)) == ["count"]
