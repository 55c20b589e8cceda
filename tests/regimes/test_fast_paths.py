"""Layers that torch runs as one operation: encoders in eval mode, without gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

import hookline as hl


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    nested = not options.get("norm_first", False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


@pytest.fixture
def x():
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def padding():
    return torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()


@contextlib.contextmanager
def nested_tensors():
    """torch says of its own encoder that nested tensors are a prototype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        yield


@pytest.fixture
def without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.fixture
def fused_calls(monkeypatch):
    calls = []
    fused = torch._transformer_encoder_layer_fwd

    def counted(*args):
        calls.append(1)
        return fused(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    return calls


OFF = r"turned off torch's fast path of layers\.0.*\n.*set_fastpath_enabled\(False\)"


@pytest.mark.trap(34)
@pytest.mark.cell(
    "TransformerEncoder, torch's fast path on",
    "record",
    "raw hooks",
    "edit",
    note="A hook inside an encoder layer turns off this layer's fast path, which may change"
    " the last bits of the output. A warning says so.",
)
def test_a_hook_inside_turns_the_fast_path_off_and_that_is_said(x, padding, fused_calls):
    model = encoder(norm_first=True)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
        assert len(fused_calls) == 2
        handle = model.layers[0].register_forward_hook(lambda *a: None)
        raw = model(x, src_key_padding_mask=padding)  # other bits, without a word
        handle.remove()
        assert len(fused_calls) == 3
        for kind in ("record", "edit", "attach"):
            line = {
                "record": lambda: hl.record(model, "layers.0.linear1"),
                "edit": lambda: hl.edit(model, "layers.0", lambda t: t),
                "attach": lambda: hl.attach(model),
            }[kind]()
            if kind == "attach":
                line.forward("layers.0", lambda *a: None)
            hooked = model(x, src_key_padding_mask=padding)
            with pytest.warns(hl.HooklineWarning, match=OFF):
                line.remove()
            assert "note: hl." in " ".join(str(line.report()).split())
            assert torch.equal(hooked, raw)
        assert len(fused_calls) == 6  # the other layer's, each time
        assert torch.equal(model(x, src_key_padding_mask=padding), plain)
    assert not torch.equal(raw, plain)
    assert torch.allclose(raw, plain, atol=1e-5)


@pytest.mark.usefixtures("without_fast_path")
@pytest.mark.cell("TransformerEncoder, torch's fast path off", "record", "watch", "statistics")
@pytest.mark.parametrize("norm_first", [True, False])
def test_without_the_fast_path_bits_are_the_models_own_unsaid(x, padding, norm_first, capsys):
    model = encoder(norm_first=norm_first)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
        with (
            hl.record(model) as run,
            hl.watch(model),
            hl.record(model, "**.linear2", keep=torch.mean) as means,
        ):
            hooked = model(x, src_key_padding_mask=padding)
    assert torch.equal(plain, hooked)
    assert torch.equal(means["layers.1.linear2"], run["layers.1.linear2"].mean())
    capsys.readouterr()


@pytest.mark.cell("TransformerEncoder, with gradients", "record", "gradients")
def test_with_gradients_is_no_fast_path_and_nothing_is_said(x):
    model, bare = encoder(), encoder()
    plain = bare(x)
    plain.sum().backward()
    with (
        hl.record(model, "layers.*", ports=("output", "grad_output")) as run,
        hl.edit(model, "layers.0:grad_output", lambda g: g.clone()),
        hl.clip(model, total_norm=float("inf")),
    ):
        hooked = model(x)
        hooked.sum().backward()
    assert torch.equal(plain, hooked)
    assert torch.equal(model.layers[0].linear1.weight.grad, bare.layers[0].linear1.weight.grad)
    assert len(run) == 4


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_it_is_said_also_after_something_else_was_compiled(x):
    """Then a line gives modules forwards of their own, for which they are not taken."""
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    model = encoder()
    with torch.no_grad(), pytest.warns(hl.HooklineWarning, match="turned off torch's fast path"):
        with hl.record(model, "layers.0.linear1"):
            model(x)


def test_what_is_not_in_a_layer_leaves_the_fast_path_on(x, fused_calls):
    model = nn.Sequential(nn.Linear(16, 16), encoder()).eval()
    with torch.no_grad(), hl.record(model, ["0", "1", ":input"]) as run:
        model(x)
    assert len(fused_calls) == 2
    assert len(run) == 3


def test_a_layer_hooked_by_others_had_no_fast_path_to_turn_off(x):
    model = encoder()
    model.layers[0].norm1.register_forward_hook(lambda *a: None)
    with torch.no_grad(), hl.record(model, "layers.0"):
        model(x)


def test_a_copy_sheds_the_hooks_and_has_its_fast_path(x, fused_calls):
    model = encoder()
    with torch.no_grad():
        line = hl.record(model, "layers.0")
        other = copy.deepcopy(model)
        other(x)
        assert not len(hl.inventory(other))
        other(x)
        with pytest.warns(hl.HooklineWarning, match="did not run"):
            line.remove()
    assert len(fused_calls) == 1 + 2


@pytest.mark.trap(34)
@pytest.mark.cell(
    "TransformerEncoder, torch's fast path on",
    "record",
    note="With a padding mask, the values inside the encoder are nested tensors; padded if"
    " operations in it are selected.",
)
def test_nested_tensors_inside_the_encoder_are_recorded(x, padding, tmp_path):
    model = encoder()
    with torch.no_grad(), nested_tensors():
        plain = model(x, src_key_padding_mask=padding)
        with pytest.warns(hl.HooklineWarning, match=OFF):
            with hl.record(model, ["layers.0", "layers.1", ""]) as run:
                hooked = model(x, src_key_padding_mask=padding)
    assert torch.allclose(hooked, plain, atol=1e-5)
    nested = run["layers.0"]
    assert nested.is_nested
    assert [tuple(one.shape) for one in nested.unbind()] == [(3, 16), (5, 16)]
    assert torch.equal(run[""][0, :3], run["layers.1"].unbind()[0])
    run.save(tmp_path / "run")
    assert any("layers.0" in lost for lost in run.lost)  # said, not silently left out


@pytest.mark.trap(34)
@pytest.mark.parametrize("selector", ["layers.1.self_attn@pattern", "layers.1@add#0"])
def test_operations_of_padded_inputs_are_those_unfused(x, padding, selector):
    model = encoder()
    with torch.no_grad():
        with pytest.warns(hl.HooklineWarning, match=r"\(root\) .*takes no hooks on operations"):
            with hl.record(model, selector) as run:
                hooked = model(x, src_key_padding_mask=padding)
        names = {row.site for row in hl.operations(model, (x, None, padding), "layers.1")}
        fires = hl.doctor(model, {"src": x, "src_key_padding_mask": padding}, selector)
        with nested_tensors():
            plain = model(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with hl.record(model, selector) as unfused:
                expected = model(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(run[selector], unfused[selector])
    assert torch.equal(hooked, expected)
    assert torch.allclose(hooked[~padding], plain[~padding], atol=1e-5)
    assert {"layers.1@add#0", "layers.1@add#1", "layers.1@relu"} <= names
    assert [site.verdict for site in fires.sites] == ["fires"]


class Around(nn.Module):
    """A model whose forward calls a function of torch itself, beside an encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding).relu()


@pytest.mark.trap(34)
def test_an_operation_outside_an_encoder_says_what_it_turns_off(x, padding):
    model = Around().eval()
    with torch.no_grad(), nested_tensors():
        plain = model(x, padding)
        said = r"fast path of encoder, encoder\.layers\.0, encoder\.layers\.1 .* at padding"
        with pytest.warns(hl.HooklineWarning, match=said), hl.record(model, "@relu") as run:
            hooked = model(x, padding)
        assert torch.equal(run["@relu"], hooked)
        assert torch.allclose(hooked[~padding], plain[~padding], atol=1e-5)
        model.encoder.layers[0].norm1.register_forward_hook(lambda *values: None)
        with hl.record(model.encoder, ""):  # none is lost where no operation has a hook
            model(x, padding)


@pytest.mark.parametrize("selector", ["0.layers.0@relu", "1.layers.0.linear1@linear"])
def test_operations_of_a_layer_that_two_encoders_share(x, padding, selector):
    class Both(nn.Sequential):
        def forward(self, x):
            for part in self:
                x = part(x, src_key_padding_mask=padding)
            return x

    model = Both(encoder(), encoder())
    model[1].layers[0] = model[0].layers[0]
    kept = []
    with torch.no_grad(), nested_tensors():
        with pytest.warns(hl.HooklineWarning, match=r"turned off.*TransformerEncoder "):
            with hl.record(model, selector) as run:
                model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            linear = model[0].layers[0].linear1
            with linear.register_forward_hook(lambda module, args, output: kept.append(output)):
                model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    shared = run.calls(selector)
    assert len(shared) == 2
    for got, want in zip(shared, kept, strict=True):
        torch.testing.assert_close(got, want.relu() if "relu" in selector else want)


@pytest.mark.trap(34)
def test_an_encoder_keeps_its_fast_path_after_a_failed_run(x, padding, fused_calls):
    model = encoder()
    handle = model.layers[1].linear1.register_forward_hook(lambda *values: 1 / 0)
    with torch.no_grad(), nested_tensors():
        with contextlib.suppress(ZeroDivisionError), hl.record(model, "layers.0@add#0"):
            model(x, src_key_padding_mask=padding)
        handle.remove()
        model(x, src_key_padding_mask=padding)
    assert len(fused_calls) == 2


@pytest.mark.trap(34)
@pytest.mark.cell(
    "TransformerEncoder, torch's fast path on", "raw hooks", refused="HooklineWarning",
    note="Hooks by `hl.attach(hl.EVERYWHERE)` are not called on modules inside an encoder"
    " layer. A `HooklineWarning` says so.",
)  # fmt: skip
def test_everywhere_says_that_it_does_not_see_into_fused_layers(x):
    model = nn.Sequential(nn.Linear(16, 16), encoder()).eval()
    by_hand, seen = [], []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: by_hand.append(type(m)))
    with torch.no_grad():
        line = hl.attach(hl.EVERYWHERE)
        line.forward(nn.Linear, lambda module, args, output: seen.append(module))
        model(x)
        with pytest.warns(hl.HooklineWarning, match="did not see the modules"):
            line.remove()
        handle.remove()
        assert nn.TransformerEncoderLayer in by_hand
        assert by_hand.count(nn.Linear) == 1  # of what is in the layers, nothing, and not a word
        assert seen == [model[0]]
        assert "note: torch ran encoder layers as one operation" in " ".join(
            str(line.report()).split()
        )
        with hl.attach(hl.EVERYWHERE) as line:  # the layers themselves are seen
            line.forward(nn.TransformerEncoderLayer, lambda m, args, out: seen.append(m))
            model(x)
        assert len(seen) == 3
    with hl.attach(hl.EVERYWHERE) as line:  # with gradients, nothing is fused
        line.forward(nn.Linear, lambda module, args, output: seen.append(module))
        model(x)
    assert len(seen) == 8


@pytest.mark.trap(33)
@pytest.mark.cell("MultiheadAttention", "record", "gradients", "edit")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_attention_gives_its_bits_and_its_out_proj_is_explained(x, need_weights, grad):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)

    torch.manual_seed(0)
    model = Model().eval()
    with torch.set_grad_enabled(grad):
        plain, weights = model(x)
        with hl.record(model, ["attention", "attention:input"]) as run:
            hooked, _ = model(x)
        assert torch.equal(plain, hooked)
        assert torch.equal(run["attention:output[0]"], plain)
        assert (run["attention"][1] is None) == (weights is None) == (not need_weights)
        with hl.edit(model, "attention:output[0]", hl.edits.scale(0.0)):
            assert not model(x)[0].any()
        with pytest.warns(hl.HooklineWarning, match="out_proj's weights without calling it"):
            with hl.edit(model, "attention.out_proj", hl.edits.scale(0.0)):
                model(x)


def test_a_summary_of_an_encoder_counts_what_is_in_the_layers(x):
    rows = {row.path: row for row in hl.summary(encoder(), x).rows}
    assert rows["layers.0.linear1"].calls == 1
    assert rows["layers.0.self_attn.out_proj"].calls == 0
