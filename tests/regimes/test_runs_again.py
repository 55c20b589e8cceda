"""Verbs that run the model themselves: in each regime they give the numbers of torch's own hooks.

The regimes are entries of tests/rerun_regimes.py. Models are in eval mode.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hookline as hl
from by_torch import seen_by_torch
from rerun_regimes import each_again


def unwrapped(model):
    """The model inside a wrapper whose prefix no path has."""
    wrapped = [getattr(model, name, None) for name in ("_orig_mod", "module")]
    return next((inner for inner in wrapped if isinstance(inner, nn.Module)), model)


def warned_of(text):
    return pytest.warns(hl.HooklineWarning, match=text) if text else nullcontext()


def metric(out):
    return out.float().flatten()[0] * 2 - out.float().flatten()[-1]


def by_hand(again, inputs, change=None):
    """The metric of the plain model, and the output of the layer."""
    model = (again.plain or again.make)().eval()
    with again.around(), seen_by_torch(model, again.path, change=change) as seen:
        number = metric(model(inputs))
    return number.detach(), seen[0]


@each_again("sweep")
def test_a_sweep_measures_what_a_loop_of_hooks_does(again):
    inputs, clean = again.inputs
    goal = by_hand(again, clean)[1]
    n_parts = min(goal.shape[1], 4)

    def put_back(part, value):
        changed = value.clone()
        changed[:, part] = goal[:, part].to(value.dtype)
        return changed

    expected = [by_hand(again, inputs, partial(put_back, part))[0] for part in range(n_parts)]
    model = again.make().eval()
    with again.around(), warned_of(again.warning):
        effects = hl.sweep(model, inputs, again.path, metric, clean=clean, each={"part": 1})
    found = torch.tensor(effects.values[0, :n_parts])
    assert_close(found, torch.stack(expected).double(), rtol=1e-4, atol=1e-5, check_dtype=False)
    assert len({round(number.item(), 4) for number in found}) > 1


@each_again("attribute")
def test_an_attribution_is_the_gradient_times_the_difference(again):
    inputs, clean = again.inputs
    goal = by_hand(again, clean)[1]
    leaves = []

    def as_leaf(value):
        leaves.append(value.detach().requires_grad_())
        return leaves[-1]

    plain = (again.plain or again.make)().eval()
    with again.around(), torch.inference_mode(False), torch.enable_grad():
        with seen_by_torch(plain, again.path, change=as_leaf):
            metric(plain(inputs)).backward()
    (leaf,) = leaves
    model = again.make().eval()
    with again.around():
        estimate = hl.attribute(model, inputs, again.path, metric, clean=clean)
    expected = (goal - leaf.detach()).float() * leaf.grad.float()
    close = {"rtol": 1e-2, "atol": 1e-2} if again.name == "autocast" else {}
    assert_close(estimate.scores[again.path].float(), expected, **close)
    assert expected.abs().max() > 1e-3


@each_again("shadow")
def test_a_shadow_names_the_layer_that_computes_otherwise(again):
    original, port = again.make().eval(), again.make().eval()
    layer = unwrapped(port).get_submodule(again.path)
    with layer.register_forward_hook(lambda module, args, output: output * 1.125):
        with again.around():
            shadow = hl.shadow(original, port, again.inputs[0])
    assert shadow.suspect == again.path
    assert shadow[again.path].local == pytest.approx(0.125, rel=1e-2)
    assert hl.shadow(original, again.make().eval(), again.inputs[0]).ok
