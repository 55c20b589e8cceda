"""The kinds of runs, where several threads run the model."""

from __future__ import annotations

import torch
from torch import nn

from hookline.verbs.profile import runs_by_shape
from second_thread import Meanwhile, ToldLock


def test_first_runs_of_two_threads_at_once_are_one_kind(monkeypatch):
    lock, make = ToldLock(), runs_by_shape.RunKind
    monkeypatch.setattr(runs_by_shape, "fork_safe_lock", lambda: lock, raising=False)
    model, args = nn.Linear(2, 2), (torch.ones(1, 2),)
    kinds = runs_by_shape.RunKinds(model, {"": model}, wants_flops=True)
    meanwhile = Meanwhile(lambda: kinds.begin_run("", args, {}), lock)

    def slowly(*given, **options):
        meanwhile()
        return make(*given, **options)

    monkeypatch.setattr(runs_by_shape, "RunKind", slowly)
    kinds.begin_run("", args, {})
    meanwhile.end()
    assert [kind.n_runs for kind in kinds.kinds] == [2]
