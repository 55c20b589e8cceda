"""Traps of raw hooks: what is never called, what is skipped, and in which order the rest comes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from hookline.models._torchvision_import import import_torchvision

X = torch.linspace(-1, 1, 12).view(4, 3)


class Fails(nn.Module):
    """Raises what it is told to."""

    error: BaseException | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.trap(31)
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_forward_that_raises_skips_hooks_that_put_things_back(error):
    model, inside, told = nn.Sequential(nn.Linear(3, 3), Fails()), [], []
    handles = [
        model.register_forward_pre_hook(lambda module, args: inside.append("pass")),
        model.register_forward_hook(lambda module, args, output: inside.pop() and None),
        model.register_forward_hook(
            lambda module, args, output: told.append(output), always_call=True
        ),
    ]
    with hl.record(model, "0") as run:
        for model[1].error in (error, None):
            try:
                model(X)
            except type(error):
                pass
    for handle in handles:
        handle.remove()
    assert inside == ["pass"]  # a state that only the hook after the forward would have ended
    if isinstance(error, ValueError):
        assert told[0] is None  # for an output
    else:
        assert len(told) == 1  # not called at all
    assert [one.failed for one in run.passes] == [True, False]
    for one in run.passes:
        assert torch.equal(one["0"], model[0](X))


class Bypasses(nn.Module):
    """Uses modules and operations in all the ways that hooks do not see."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.direct, self.weights_of = nn.Linear(3, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = F.relu(self.direct.forward(x)) @ self.weights_of.weight
        for block in self.blocks:
            x = block(x) + x
        return self.attention(x[None], x[None], x[None])[0]


REASONS = {
    "direct": r"direct: not reached in this forward, or its \.forward was called directly",
    "weights_of": r"weights_of: not reached in this forward",
    "attention.out_proj": "uses out_proj's weights without calling it; select its parent",
}


@pytest.mark.trap(33)
@pytest.mark.parametrize("path", REASONS)
def test_hooks_on_what_is_not_called_never_fire_in_silence(path):
    model, fired = Bypasses(), []
    handle = model.get_submodule(path).register_forward_hook(lambda *_: fired.append(1))
    model(X)
    handle.remove()
    assert not fired
    with pytest.warns(hl.HooklineWarning, match=REASONS[path]):
        with hl.record(model, path) as run:
            model(X)
    with pytest.raises(hl.NotRecordedError, match=f"{path} was selected, but has no value"):
        run[path]


@pytest.mark.trap(33)
def test_who_selects_modules_of_functions_is_told_there_are_none():
    model = Bypasses()
    assert not [module for module in model.modules() if isinstance(module, nn.ReLU)]  # and no word
    with pytest.raises(hl.SelectionError, match="ReLU"):
        hl.record(model, nn.ReLU)
    with pytest.raises(hl.SelectionError, match="matches no module of LSTM"):
        hl.record(nn.LSTM(3, 4), "cell")  # torch runs all of it as one operation


@pytest.mark.trap(33)
def test_a_hook_on_a_module_list_never_fires():
    model, fired = Bypasses(), []
    handle = model.blocks.register_forward_hook(lambda *_: fired.append(1))
    model(X)
    handle.remove()
    assert not fired
    with pytest.raises(hl.SelectionError, match=r"has no forward.\nSelect what it holds: 'blocks"):
        hl.record(model, "blocks")


@pytest.mark.trap(34)
def test_a_process_wide_hook_misses_what_is_in_the_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model, seen = nn.TransformerEncoder(layer, 1).eval(), []
    x = X.view(1, 3, 4)

    def hook(module, args, output):
        seen.append(type(module))

    handle = nn.modules.module.register_module_forward_hook(hook)
    with torch.no_grad():
        model(x)
    handle.remove()
    assert nn.TransformerEncoderLayer in seen
    assert nn.Linear not in seen
    line = hl.attach(hl.EVERYWHERE)
    line.forward(nn.Linear, lambda *_: None)
    with torch.no_grad():
        model(x)
    with pytest.warns(hl.HooklineWarning, match="did not see the modules"):
        line.remove()
    with pytest.warns(hl.HooklineWarning, match="turned off torch's fast path"):
        with torch.no_grad(), hl.record(model, "layers.0.linear1") as run:
            model(x)
    assert run["layers.0.linear1"].shape == (1, 3, 8)


@pytest.mark.trap(35)
def test_attention_patterns_are_none_under_sdpa_or_empty():
    import_torchvision()  # transformers imports it, and cannot where its operators are missing
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16,
    )  # fmt: skip
    model, ids, kept = transformers.LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3]]), []
    handle = model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: kept.append(output[1])
    )
    with torch.no_grad():
        assert model(ids, output_attentions=True).attentions == ()  # asked for, and not there
        handle.remove()
        assert kept == [None]
        site = "model.layers.0.self_attn:output[1]"
        with hl.record(model, site) as run:
            model(ids)
        assert run[site] is None  # what flowed: the pattern was never computed
        model.set_attn_implementation("eager")
        with hl.record(model, site) as run:
            pattern = model(ids, output_attentions=True).attentions[0]
    assert torch.equal(run[site], pattern)


@pytest.mark.trap(37)
def test_a_recorder_before_the_edit_sees_the_unedited_value():
    model, kept = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), []
    handles = [
        model[0].register_forward_hook(lambda module, args, output: kept.append(output)),
        model[0].register_forward_hook(lambda module, args, output: output * 0),
    ]
    out = model(X)
    for handle in handles:
        handle.remove()
    assert torch.equal(out, model[1](torch.zeros(4, 3)))
    assert kept[0].any()  # is not what the next module got
    with hl.record(model, "0") as run, hl.edit(model, "0", hl.edits.scale(0.0)):
        assert torch.equal(model(X), out)
    assert not run["0"].any()


@pytest.mark.trap(38)
@pytest.mark.parametrize("stray", [True, "", (), 0])
def test_whatever_a_hook_returns_becomes_the_output(stray):
    model = nn.Sequential(nn.Linear(3, 3))
    handle = model[0].register_forward_hook(lambda *_: stray)
    assert model(X) is stray
    handle.remove()
    with pytest.raises(hl.StructureError, match="which would become the output") as failed:
        with hl.attach(model) as line:
            line.forward("0", lambda *_: stray)
            model(X)
    assert "0:forward (Linear)" in failed.value.__notes__[0]
    with pytest.raises(hl.StructureError), hl.edit(model, "0", lambda value: stray):
        model(X)


@pytest.mark.trap(38)
def test_a_list_that_a_pre_hook_returns_becomes_one_argument():
    model = nn.Sequential(nn.Linear(3, 3))
    handle = model[0].register_forward_pre_hook(lambda module, args: [args[0]])
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        model(X)
    handle.remove()
    with pytest.raises(hl.StructureError, match="which would become one argument"):
        with hl.attach(model) as line:
            line.forward_pre("0", lambda module, args: [args[0]])
            model(X)
