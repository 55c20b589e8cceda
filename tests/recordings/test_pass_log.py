"""The log of a pass: looked up also while it grows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


def test_a_look_up_during_a_pass_sees_what_has_fired_until_then():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    seen = []

    def look(module, args, output):
        found = {key: run[key] for key in ("0", "1", "2") if key in run}
        seen.append((list(found), run.passes[0].order, len(run)))

    for layer in model:
        layer.register_forward_hook(look)
    with hl.record(model, "*") as run:
        model(torch.ones(1, 2))
    # A value is recorded after the hooks that were there before.
    assert seen == [([], [], 0), (["0"], ["0"], 1), (["0", "1"], ["0", "1"], 2)]
    assert run.passes[0].order == ["0", "1", "2"]


def test_a_missing_key_is_a_part_only_of_a_value_that_has_it():
    class Parts(nn.Module):
        def forward(self, x):
            return {"mean": x, "spread": x}

    model = nn.Sequential(nn.Identity(), Parts())
    with hl.record(model, ["0", "1"]) as run:
        model(torch.ones(1, 2))
    with pytest.raises(hl.NotRecordedError, match=r"\nWrite '1:output\.mean'\.$"):
        run["1.mean"]
    for key in ("1.median", "0.mean"):
        with pytest.raises(hl.NotRecordedError, match="was never selected; recorded: 2") as caught:
            run[key]
        assert "part" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("n_calls", [3, 300])  # long passes are looked up in another way
def test_calls_that_come_after_a_look_up_are_counted_on(n_calls):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(2, 2)

        def forward(self, x):
            for k in range(n_calls):
                x = self.block(x)
                assert len(run.calls("block")) == k + 1
                assert torch.equal(run[f"block#{k}"], x)
            return x

    model = Loop()
    with hl.record(model, "block") as run:
        model(torch.ones(1, 2))
    with pytest.raises(hl.AmbiguousError, match=f"ran {n_calls} times"):
        run["block"]


def test_each_of_many_calls_is_looked_up_also_while_more_come():
    """A long log is grouped once, and again when it has grown."""
    layer, n_calls = nn.Linear(2, 2), 300

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            for k in range(n_calls):
                x = self.layer(x) + k
                if k in (270, 280):  # past 256 entries
                    seen.append(run[f"layer#{k}"])
            return x

    seen = []
    model = Loop()
    with hl.record(model, "layer", ports=("output", "grad_output")) as run:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    values, gradients = run.calls("layer"), run.calls("layer:grad_output")
    assert len(values) == len(gradients) == n_calls
    for k in range(n_calls):
        assert torch.equal(run[f"layer#{k}"], values[k])
        assert torch.equal(run[f"layer:grad_output#{k}"], gradients[k])
    assert torch.equal(torch.stack(seen), torch.stack([values[270], values[280]]))
    with pytest.raises(hl.NotRecordedError):
        run[f"layer#{n_calls}"]
