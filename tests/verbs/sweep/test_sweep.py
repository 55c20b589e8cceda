"""hl.sweep gives the numbers of the plain loop, on models of every kind, and leaves no trace."""

from __future__ import annotations

import copy
import pickle
import random
import re
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import hookline as hl
from hookline.files.sealed_json import checksum
from hookline.models import load_model
from hookline.models.torchvision_import import import_torchvision
from hookline.verbs.sweep import forwards
from hookline.verbs.sweep.rows_per_change import N_PERTURBED, NoRowsError, UnsplitOutput
from hookline.verbs.sweep.tape import replace_forwards

import_torchvision()  # which transformers may import
import transformers  # noqa: E402


def loop(model, inputs, clean, sites, metric, dim):
    """The loop that a user writes: one forward with a raw hook for each site and position."""
    run = call_of(model)
    rows = []
    with torch.no_grad():
        for path, port in sites:
            module = model.get_submodule(path)
            values = []
            hook = hooked(module, port, values.append)
            run(clean)
            hook.remove()
            (value,) = values
            row = []
            for position in range(value.shape[dim]):

                def put(tensor, position=position, value=value):
                    new = tensor.clone()
                    new.select(dim, position).copy_(value.select(dim, position))
                    return new

                hook = hooked(module, port, put)
                row.append(float(metric(run(inputs))))
                hook.remove()
            rows.append(row)
    longest = max(map(len, rows))
    return np.array([row + [np.nan] * (longest - len(row)) for row in rows])


def call_of(model):
    return lambda x: model(**x) if isinstance(x, dict) else model(x)


def hooked(module, port, function):
    """Call a function with a value; what it returns replaces the value."""

    def changed(value):
        first = value[0] if isinstance(value, tuple) else value
        new = function(first.clone() if function.__name__ == "append" else first)
        if new is None:
            return None
        return (new, *value[1:]) if isinstance(value, tuple) else new

    if port == "input":
        return module.register_forward_pre_hook(lambda module, args: changed(args))
    return module.register_forward_hook(lambda module, args, output: changed(output))


def ids(*shape, seed=0):
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def language(kind, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")
    return model(config(vocab_size=50, bos_token_id=0, eos_token_id=1, **options)).eval()


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
         "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 2}  # fmt: skip


def gpt2():
    model = language("GPT2", n_layer=3, n_embd=16, n_head=2, n_positions=16)
    return model, ids(1, 6), ids(1, 6, seed=1), ["transformer.h.0", "transformer.h.1.mlp",
                                                  "transformer.h.2"]  # fmt: skip


def llama(cache):
    model = language("Llama", **SMALL)
    inputs, clean = ({"input_ids": ids(1, 5, seed=n), "use_cache": cache} for n in (0, 1))
    return model, inputs, clean, ["model.layers.0", "model.layers.1.self_attn.o_proj",
                                  "model.layers.2.mlp:input"]  # fmt: skip


def mixtral():
    model = language("Mixtral", **SMALL, num_local_experts=4)
    return model, ids(1, 5), ids(1, 5, seed=1), ["model.layers.0.mlp", "model.layers.1"]


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2,
                                   num_heads=2, decoder_start_token_id=0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs, clean = (
        {"input_ids": ids(1, 5, seed=n), "decoder_input_ids": ids(1, 5, seed=7)} for n in (0, 1)
    )
    return model, inputs, clean, ["encoder.block.0.layer.1", "decoder.block.1.layer.2"]


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                    intermediate_size=32, image_size=16, patch_size=8)  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    return model, *torch.randn(2, 1, 3, 16, 16), ["vit.layers.0", "vit.layernorm"]


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    return model, *torch.randn(2, 1, 5, 16), ["layers.0", "layers.1.linear1", "layers.2"]


MODELS = {"gpt2": gpt2, "llama": lambda: llama(False), "llama, cache": lambda: llama(True),
          "mixtral": mixtral, "t5": t5, "vit": vit, "encoder": encoder}  # fmt: skip


def first_number(output):
    tensor = output if isinstance(output, torch.Tensor) else output.logits
    return tensor[..., -1, 3].sum() - tensor[..., -1, 5].sum()


def split(sites):
    return [(path, port or "output") for path, _, port in (site.partition(":") for site in sites)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:hl..* sees no fast path", "ignore:.*fast path")
def test_the_numbers_are_those_of_the_loop(name, left_as_found):
    model, inputs, clean, sites = MODELS[name]()
    metric = (lambda out: out.logits[0, 1]) if name == "vit" else first_number
    expected = loop(model, inputs, clean, split(sites), metric, 1)
    before = left_as_found(model)
    single = hl.sweep(model, inputs, sites, metric, clean=clean, each={"position": 1}, rows=1)
    shared = hl.sweep(model, inputs, sites, metric, clean=clean, each={"position": 1})
    assert left_as_found(model) == before
    # The fast path of an encoder's layer rounds otherwise.
    np.testing.assert_allclose(single.values, expected, rtol=0, atol=1e-6 * (name == "encoder"))
    np.testing.assert_allclose(shared.values, expected, rtol=0, atol=2e-6)
    assert shared.axes == ("site", "position")
    assert shared.labels["site"] == tuple(sites)
    assert shared.forwards < expected.size
    assert not [note for note in shared.notes if "hl.edit" in note]
    assert float(call_metric(model, clean, metric)) == shared.clean
    assert float(call_metric(model, inputs, metric)) == shared.baseline


def call_metric(model, inputs, metric):
    with torch.no_grad():
        return metric(call_of(model)(inputs))


@pytest.mark.parametrize("path", ["stem", "layer1.0.bn", "layer1.1.relu", "layer2.0", "pool"])
def test_in_place_layers_are_replayed_as_they_were(net, path):
    x, clean = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    metric = lambda out: out[0, 1]  # noqa: E731
    expected = loop(net, x, clean, [(path, "output")], metric, 1)
    for rows in (1, 4):
        sweep = hl.sweep(net, x, path, metric, clean=clean, each={"channel": 1}, rows=rows)
        np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6 * (rows > 1))
        assert not sweep.notes


class Doubled(nn.Module):
    """Write to the value in place, so that a second time would show."""

    def forward(self, x):
        return x.mul_(2)


class Aliased(nn.Module):
    """An in-place layer writes to a tensor that another module has handed on."""

    def __init__(self):
        super().__init__()
        self.first, self.same, self.side = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)
        self.twice, self.head = Doubled(), nn.Linear(4, 2)

    def forward(self, x):
        y = self.first(x)
        z = self.same(y)
        side = self.side(z)
        self.twice(y)
        return self.head(y + z) + self.head(side)


def test_a_tensor_of_two_modules_stays_one_tensor():
    torch.manual_seed(0)
    model = Aliased().eval()
    expected = loop(model, X, CLEAN, [("side", "output")], metric, 1)
    for rows in (1, 4):
        sweep = hl.sweep(model, X, "side", metric, clean=CLEAN, each={"unit": 1}, rows=rows)
        np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6 * (rows > 1))
        assert not sweep.notes


@pytest.mark.slow
def test_the_digits_net_is_swept_by_channel():
    demo = load_model("demo:digits")
    model, x = demo.model.eval(), torch.rand(2, 1, 12, 12)
    del x
    shape = next(iter(demo.model.parameters())).shape
    x, clean = torch.rand(2, 1, shape[1], 16, 16, generator=torch.Generator().manual_seed(0))
    metric = lambda out: out[0, 3]  # noqa: E731
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    expected = loop(model, x, clean, [(path, "output") for path in paths], metric, 1)
    sweep = hl.sweep(model, x, paths, metric, clean=clean, each={"channel": 1})
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=2e-5)
    assert sweep.forwards < np.isfinite(expected).sum() / 2


def test_a_shared_module_gives_each_call_its_own_record(looped):
    looped.eval()
    x = torch.randn(1, 2, generator=torch.Generator().manual_seed(0))
    changes = {f"block#{call}": [hl.edits.scale(k) for k in (0.0, 0.5, 2.0)] for call in range(3)}
    sweep = hl.sweep(looped, x, changes, lambda out: out[0, 0], rows=1)
    for number, (site, functions) in enumerate(changes.items()):
        for label, change in enumerate(functions):
            with hl.edit(looped, site, change), torch.no_grad():
                assert sweep.values[number, label] == float(looped(x)[0, 0])


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)).eval()


X = torch.tensor([[0.5, -1.0, 2.0, 0.25]])
CLEAN = torch.tensor([[1.5, 0.5, 2.0, -0.25]])


def metric(out):
    return out[0, 1]


def test_a_batch_of_several_rows_has_one_metric():
    model, x, clean = linear(), torch.randn(3, 4), torch.randn(3, 4)
    total = lambda out: out[:, 1].sum()  # noqa: E731
    expected = loop(model, x, clean, [("0", "output"), ("2", "output")], total, 1)
    sweep = hl.sweep(model, x, ["0", "2"], total, clean=clean, each={"unit": 1})
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)


def test_changes_have_labels_of_their_own_on_a_last_axis():
    changes = {nn.Linear: {"off": hl.edits.scale(0), "twice": hl.edits.scale(2)}}
    sweep = hl.sweep(linear(), X, changes, metric)
    assert sweep.axes == ("site", "change")
    assert sweep.labels == {"site": ("0", "2", "3"), "change": ("off", "twice")}
    assert sweep["3", "off"] == -sweep.baseline
    assert sweep["3"].tolist() == [-sweep.baseline, sweep.baseline]


@pytest.mark.parametrize("label", [0, 0.0, 0.5, "off"])
def test_a_single_label_that_is_given_has_an_axis(label):
    sweep = hl.sweep(linear(), X, {"0": {label: hl.edits.scale(0)}}, metric)
    assert sweep.labels == {"site": ("0",), "change": (label,)}
    assert hl.sweep(linear(), X, {"0": [hl.edits.scale(0)]}, metric).axes == ("site",)


@pytest.mark.parametrize("n", [5, 8, 9])
def test_a_change_that_is_left_over_has_a_forward_of_rows(n):
    model, scales = linear(), [k / 4 for k in range(n)]
    changes = {"2": [hl.edits.scale(scale) for scale in scales]}
    sweep = hl.sweep(model, X, changes, metric, rows=4)
    for label, scale in enumerate(scales):
        with torch.no_grad(), hl.edit(model, "2", hl.edits.scale(scale)):
            assert sweep[("2", label)] + sweep.baseline == pytest.approx(
                float(metric(model(X))), abs=1e-6
            )
    assert sweep.notes == []


def test_changes_of_several_sites_are_made_together():
    off = hl.edits.scale(0)
    model = linear()
    sweep = hl.sweep(model, X, [("both", {"0": off, "2": off}), ("first", {"0": off})], metric)
    assert (sweep.axes, sweep.labels) == (("change",), {"change": ("both", "first")})
    with hl.edit(model, ["0", "2"], off), torch.no_grad():
        assert sweep.values[0] == float(metric(model(X)))


def test_equal_parts_of_a_dimension_are_heads():
    model = linear()
    sweep = hl.sweep(model, X, {"0": hl.edits.scale(0)}, metric, each={"head": (-1, 3)})
    assert sweep.values.shape == (1, 3)
    mask = torch.ones(6)
    mask[2:4] = 0
    with hl.edit(model, "0", lambda t: t * mask), torch.no_grad():
        assert sweep.values[0, 1] == float(metric(model(X)))


def test_what_put_in_the_same_value_is_unmoved():
    clean = X.clone()
    clean[0, 0] = 7.0
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2)).eval()
    sweep = hl.sweep(model, X, "0", metric, clean=clean, each={"unit": 1})
    assert sweep.unmoved.tolist() == [[False, True, True, True]]
    assert sweep.effects[0, 1:].tolist() == [0, 0, 0]
    assert "3 changes put in the value that was there: unmoved." in str(sweep)
    with torch.no_grad():
        model[1].weight[1, 1] = 0
    idle = hl.sweep(model, X, "0", metric, clean=X + 1, each={"unit": 1})
    assert not idle.unmoved.any()
    assert "1 change moved the value and not the metric." in str(idle)


def test_a_whole_stream_at_the_last_layer_gives_the_clean_metric():
    sweep = hl.sweep(linear(), X, ["2", "3"], metric, clean=CLEAN)
    assert sweep.values[1] == sweep.clean
    assert sweep.normalised[1] == 1


def test_the_forward_stops_at_the_site_that_is_read():
    model = linear()
    calls = []
    model[3].register_forward_hook(lambda *_: calls.append(1))
    sweep = hl.sweep(model, X, "0", lambda t: t.norm(), clean=CLEAN, read="2", each={"unit": 1})
    assert not calls
    with torch.no_grad():
        assert sweep.baseline == float(model[2](model[1](model[0](X))).norm())
    read = hl.select(model, "2")
    again = hl.sweep(model, X, "0", lambda t: t.norm(), clean=CLEAN, read=read, each={"unit": 1})
    np.testing.assert_array_equal(again.values, sweep.values)
    with pytest.raises(hl.InputError, match=r"read must be a site that comes after .* got '0'"):
        hl.sweep(model, X, "2", lambda t: t.norm(), clean=CLEAN, read="0")


def test_sites_without_parts_in_common_have_no_change():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2)).eval()
    model.forward = lambda x: model[1](x) + model[0](x[:0]).sum()
    off = hl.edits.scale(0)
    sweep = hl.sweep(model, X, [{"0": off, "1": off}], metric, each={"row": 0})
    assert sweep.values.shape == (1, 1)
    assert sweep.rows == ()


def test_sites_of_other_sizes_leave_gaps():
    sweep = hl.sweep(linear(), X, ["2", "3"], metric, clean=CLEAN, each={"unit": 1})
    assert sweep.values.shape == (2, 6)
    assert np.isnan(sweep.values[1, 2:]).all()
    assert len(sweep.rows) == len(sweep.to_pandas()) == 8


def test_a_sweep_of_roundings_tells_what_each_layer_loses():
    model = linear()
    changes = {nn.Linear: {bits: hl.edits.round_to(bits) for bits in (2, 4, 8)}}
    sweep = hl.sweep(model, X, changes, metric)
    for site in ("0", "2", "3"):
        for bits in (2, 4, 8):
            with hl.edit(model, site, hl.edits.round_to(bits)), torch.no_grad():
                expected = float(metric(model(X)))
            assert sweep.values[sweep.labels["site"].index(site), (2, 4, 8).index(bits)] == (
                pytest.approx(expected, abs=1e-6)
            )


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("sites", [["0"], ["0", "2"]])
def test_noise_begins_again_in_each_forward(rows, sites):
    model, stds = linear(), (0.1, 0.2, 0.5, 1.0)
    noises = {std: hl.edits.noise(std, seed=0) for std in stds}
    sweep = hl.sweep(model, X, dict.fromkeys(sites, noises), metric, rows=rows)
    for site in sites:
        for std in stds:
            with hl.edit(model, site, hl.edits.noise(std, seed=0)), torch.no_grad():
                expected = float(metric(model(X)))
            assert sweep[site, std] + sweep.baseline == pytest.approx(expected, abs=1e-6)
    assert not sweep.notes


def test_a_patch_finds_the_call_of_each_row(looped):
    looped.eval()
    with hl.record(looped, "block", copy=True) as run:
        looped(torch.ones(1, 2))
    x = torch.zeros(1, 2)
    sweep = hl.sweep(
        looped, x, {"block": hl.edits.patch(run)}, lambda out: out[0, 0],
        each={"row": 0, "unit": (1, 1)}, clean=torch.ones(1, 2),
    )  # fmt: skip
    assert sweep.values[0, 0, 0] == sweep.clean


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda out: out, r"metric must return one number, got Tensor\[1, 2\]"),
        (lambda out: out[0, 0].to("meta"), r"metric must return one number, got Tensor\[\]"),
        (lambda out: "7", "metric must return one number"),
        (lambda out: torch.tensor(1j), "metric must return one number"),
        (lambda out: 3.0, "metric must depend on what the model returns"),
        (lambda out: out[0, 0] * torch.nan, "metric must return a number for the unchanged run"),
        (3, "metric must be a function"),
    ],
)
def test_a_metric_that_gives_no_number_is_refused(function, said):
    with pytest.raises(hl.InputError, match=said):
        hl.sweep(linear(), X, "0", function, clean=CLEAN)


def test_inputs_without_rows_are_refused():
    with pytest.raises(hl.InputError, match="an output without elements"):
        hl.sweep(linear(), X[:0], {"0": hl.edits.scale(0)}, lambda out: out.sum())


def test_a_model_in_training_mode_is_refused():
    model = linear()
    model[1].train()
    for call in (hl.sweep, hl.attribute):
        with pytest.raises(hl.InputError, match="must be in eval mode, got '1' in training mode"):
            call(model, X, "0", metric, clean=CLEAN)
    assert model[1].training


def test_inputs_of_other_lengths_are_refused():
    model, _, _, sites = gpt2()
    for call in (hl.sweep, hl.attribute):
        with pytest.raises(
            hl.StructureError, match=r"clean run must have values of the same form .*h\.0"
        ):
            call(model, ids(1, 6), sites, first_number, clean=ids(1, 5))


@pytest.mark.parametrize("clean", [0, 0.5, None])
def test_a_baseline_that_is_no_input_is_refused(clean):
    for call in (hl.sweep, hl.attribute)[clean is None :]:  # a sweep needs no clean run
        with pytest.raises(hl.InputError, match="clean must be inputs of the model, got"):
            call(linear(), X, "0", metric, clean=clean)


def test_a_recording_in_place_of_the_clean_inputs_is_refused():
    model = linear()
    with hl.record(model, "0") as run:
        model(X)
    for call in (hl.sweep, hl.attribute):
        for clean in (run, run.passes[0]):
            with pytest.raises(hl.InputError, match="got a recording"):
                call(model, X, "0", metric, clean=clean)


def test_a_change_of_the_shape_is_refused(left_as_found):
    model = linear()
    before = left_as_found(model)
    with pytest.raises(hl.StructureError, match="change at 2 must keep the value's form"):
        hl.sweep(model, X, {"2": [lambda t: t[:, :3]] * 5}, metric)
    assert left_as_found(model) == before


@pytest.mark.parametrize(
    ("site", "each"), [("@z", {"head": (2, 5)}), ("@pattern", {"position": 1})]
)
def test_an_axis_of_attention_has_the_dimension_of_its_name(site, each):
    model = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 4)
    with pytest.raises(hl.InputError, match=r"must be dimension [12] at @.*heads in dimension 1"):
        hl.sweep(model, (x, x, x), {site: hl.edits.scale(0)}, lambda out: out[0].sum(), each=each)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"each": {"unit": 2}}, r"each\['unit'\] must be a dimension of the value at 0, got 2"),
        ({"each": {"unit": (1, 4)}}, "equal parts, got 4 parts of 6"),
        ({"each": {"site": 1}}, "each axis must have a name of its own"),
        ({"each": {"half": (1, 2), "unit": -1}}, "each axis must have a dimension of its own"),
        ({"each": 1}, "each must be a dict"),
        ({"rows": 0}, "rows must be a positive integer"),
        ({"read": "*"}, "read must be one site"),
    ],
)
def test_an_invalid_argument_is_refused(arguments, said):
    with pytest.raises(hl.InputError, match=said):
        hl.sweep(linear(), X, "0", metric, clean=CLEAN, **arguments)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
        hl.sweep(linear(), X, "0", metric, clean=CLEAN, row=3)


@pytest.mark.parametrize("changes", [{}, [], 7, {"0": 3}, {"0": []}, [{}], [("a", 3)]])
def test_changes_of_another_form_are_refused(changes):
    with pytest.raises(hl.InputError, match=r"Give \{site: change\}"):
        hl.sweep(linear(), X, changes, metric)


def test_the_label_of_a_change_is_text_or_a_number():
    halves = [(share, {"0": hl.edits.scale(share)}) for share in (0.5, 1.0)]
    assert hl.sweep(linear(), X, halves, metric)[1.0] == 0
    with pytest.raises(
        hl.InputError, match=r"label .* must be text or a number, got tuple\(0, 1\)"
    ):
        hl.sweep(linear(), X, [((0, 1), {"0": hl.edits.scale(0)})], metric)


def test_a_gradient_is_refused():
    with pytest.raises(hl.InputError, match="changes values of the forward, got 0:grad_output"):
        hl.sweep(linear(), X, {"0:grad_output": hl.edits.scale(0)}, metric)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_a_model_that_draws_random_numbers_is_refused(draw):
    class Noisy(nn.Module):
        def forward(self, x):
            return x + float(draw())

    state = torch.get_rng_state()
    model = nn.Sequential(nn.Linear(4, 2), Noisy()).eval()
    torch.set_rng_state(state)
    with pytest.raises(hl.InputError, match="must give the same metric twice"):
        hl.sweep(model, X, {"0": hl.edits.scale(0)}, metric)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_of_a_hook_around_the_sweep_is_refused():
    model, own = linear(), torch.Generator()
    with (
        hl.edit(model, "0", hl.edits.noise(1.0, seed=0)),
        pytest.raises(hl.InputError, match="a hook on it such as an edit, draws random numbers"),
    ):
        hl.sweep(model, X, {"1": hl.edits.scale(0.5)}, metric)
    with hl.edit(model, "0", hl.edits.scale(2.0)):
        assert hl.sweep(model, X, {"1": hl.edits.scale(1.0)}, metric).effects[0] == 0
    model[0].register_forward_hook(
        lambda module, args, output: output + torch.rand(output.shape, generator=own)
    )
    with pytest.raises(hl.InputError, match="must give the same metric twice"):
        hl.sweep(model, X, {"1": hl.edits.scale(0.5)}, metric)


class AsOften(nn.Module):
    """Runs a block as often as the first number of the inputs says."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(int(x[0, 0])):
            x = self.block(x)
        return x


def test_a_call_that_the_clean_run_lacks_is_refused():
    torch.manual_seed(0)
    model, once, twice = AsOften().eval(), torch.ones(1, 4), torch.tensor([[2.0, 0, 0, 0]])
    with pytest.raises(hl.NotRecordedError, match="got 1 call in the clean run, and more"):
        hl.sweep(model, twice, "block", metric, clean=once)
    sweep = hl.sweep(model, twice, "block#0", metric, clean=once)
    with torch.no_grad():
        assert sweep.values[0] == float(metric(model.block(model.block(once))))
    assert hl.sweep(model, once, "block", metric, clean=twice).clean == sweep.baseline


def test_a_site_that_is_not_reached_is_refused_with_why(left_as_found):
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)}).eval()
    model.forward = lambda x: model["used"](x).relu()
    before = left_as_found(model)
    changes = {"used": hl.edits.scale(0), "unused": hl.edits.scale(0)}
    with pytest.raises(
        hl.NotRecordedError, match="unused was selected, but has no value: not reached"
    ):
        hl.sweep(model, X, changes, metric)
    assert left_as_found(model) == before


def test_a_site_that_is_reached_in_later_runs_alone_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.later, self.n_runs = nn.Linear(4, 2), nn.Identity(), 0

        def forward(self, x):
            self.n_runs += 1
            x = self.first(x)
            return x if self.n_runs == 1 else self.later(x)

    with pytest.raises(hl.InputError, match="later in the second run alone"):
        hl.sweep(Late().eval(), X, {"later": hl.edits.scale(0)}, metric)


# -- what is shared, and what is not ---------------------------------------------------------------


class Routed(nn.Module):
    """Each token goes to one of three experts; an expert without tokens is not called."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                out[chosen == number] = expert(flat[chosen == number])
        return out.view_as(x) + x


def test_experts_that_are_called_now_and_then_are_replayed_right():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Routed(), nn.Linear(4, 4), Routed(), nn.Linear(4, 2))
    model.eval()
    x, clean = torch.randn(2, 1, 6, 4)
    total = lambda out: out[0, -1, 0] + out[0, 0, 1]  # noqa: E731
    sites = ["0", "1", "1.router", "2", "3", "3.router"]
    expected = loop(model, x, clean, split(sites), total, 1)
    expected[[2, 5]] = loop(model, x, clean, split(["1.router", "3.router"]), total, 0)[:, :6]
    for rows in (1, 6):
        position = hl.sweep(
            model, x, ["0", "1", "2", "3"], total, clean=clean, each={"position": 1}, rows=rows
        )
        np.testing.assert_allclose(position.values, expected[[0, 1, 3, 4]], rtol=0, atol=1e-6)
        token = hl.sweep(
            model, x, ["1.router", "3.router"], total, clean=clean, each={"token": 0}, rows=rows
        )
        np.testing.assert_allclose(token.values, expected[[2, 5]], rtol=0, atol=1e-6)


class Mixing(nn.Module):
    """Rows of a batch see one another."""

    def forward(self, x):
        return x - x.mean(0)


class Attending(nn.Module):
    """Rows of a batch see those that are like them."""

    def forward(self, x):
        return x + (x @ x.T).softmax(-1) @ x


class Counting(nn.Module):
    """Each run changes the next."""

    def __init__(self):
        super().__init__()
        self.n_runs = 0

    def forward(self, x):
        self.n_runs += 1
        return x


def test_rows_that_see_one_another_have_forwards_of_their_own():
    model = nn.Sequential(nn.Linear(4, 6), Mixing(), nn.Linear(6, 2)).eval()
    x, clean = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    sweep = hl.sweep(model, x, ["0", "2"], metric, clean=clean, each={"unit": 1})
    expected = loop(model, x, clean, [("0", "output"), ("2", "output")], metric, 1)
    np.testing.assert_array_equal(sweep.values, expected)
    assert any("whole forward" in note or "own forward" in note for note in sweep.notes)


def test_rows_that_see_those_alike_have_forwards_of_their_own():
    for seed in range(4):  # in half of them, the row is unlike one that is large
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), Attending(), nn.Linear(6, 2)).eval()
        factors = [hl.edits.scale(factor) for factor in (0.5, 0.0, 2.0, -1.0, 10.0)]
        sweep = hl.sweep(model, torch.randn(1, 4), {"0": factors}, metric)
        assert any("own forward" in note for note in sweep.notes)


def chain(seed=0):
    """Blocks in a row, whose outputs are all that is handed on."""
    torch.manual_seed(seed)
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())  # noqa: E731
    return nn.Sequential(nn.Linear(4, 6), block(), block(), nn.Linear(6, 2)).eval()


def test_changes_at_several_sites_share_a_forward():
    model, sites = chain(), ["0", "1", "2"]
    sweep = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1})
    expected = loop(model, X, CLEAN, split(sites), metric, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    # The clean one, the unchanged one, one to compare, and one for all.
    assert sweep.forwards == 4
    assert not sweep.notes
    single = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1}, rows=1)
    np.testing.assert_array_equal(single.values, expected)


@pytest.mark.parametrize(
    "seen",
    [
        lambda t: t * t.abs().amin(), lambda t: t + t[len(t) // 2], lambda t: t - t.mean(0),
        lambda t: t + t.roll(1, 0), lambda t: (t / t.abs().amax() * 9).round() * t.abs().amax() / 9,
    ],
)  # fmt: skip
def test_rows_that_join_are_noticed_where_they_see_others(seen):
    for seed in range(4):
        model = chain(seed)
        model[1].register_forward_hook(lambda module, args, out: seen(out))
        sweep, alone = (
            hl.sweep(model, X, ["0", "1.0", "2"], metric, clean=CLEAN, each={"unit": 1}, rows=rows)
            for rows in (6, 1)
        )
        assert_forwards_of_their_own(sweep, alone)


def test_changes_share_a_forward_where_a_row_of_zeros_raises():
    def refuse_zeros(module, args, out):
        if not out.any(1).all():
            raise ValueError("a vector must have a direction, got zeros")

    model = chain()
    model[0].register_forward_hook(refuse_zeros)
    sweep = hl.sweep(model, X, ["0", "1"], metric, clean=CLEAN, each={"unit": 1})
    assert not sweep.notes


def test_rows_that_see_the_last_one_are_noticed_in_half():
    model = chain(7).half()
    model[1].register_forward_hook(lambda module, args, out: out + 0.2 * out[-1:])
    sites, inputs = ["0", "1.0", "2"], {"clean": CLEAN.half(), "each": {"unit": 1}}
    sweep = hl.sweep(model, X.half(), sites, metric, **inputs)
    assert "Each change has its own forward" in sweep.notes[0]


def test_rows_that_join_are_marked_where_they_are_unmoved():
    model, clean = chain(), X.clone()
    clean[0, 0] += 1
    with torch.no_grad():
        model[0].weight[1:, 0] = 0  # only unit 0 moves
    sweep = hl.sweep(model, X, ["0", "1"], metric, clean=clean, each={"unit": 1})
    assert sweep.unmoved[0].tolist() == [False] + [True] * 5
    assert not sweep.unmoved[1].any()


@pytest.mark.parametrize(("name", "size"), [("_OUTPUT_BYTES", 2 * 4), ("_SITE_BYTES", 6 * 4)])
@pytest.mark.parametrize("most", [0, 11, 12, 17, 23, 24])
def test_the_size_of_values_bounds_what_shares_a_forward(monkeypatch, name, size, most):
    monkeypatch.setattr(forwards, name, most * size)
    model, sites, n_rows = chain(), ["0", "1", "2", "2.0"], []
    hook = model[3].register_forward_hook(lambda module, args, out: n_rows.append(len(out)))
    sweep = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1})
    hook.remove()
    expected = loop(model, X, CLEAN, split(sites), metric, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    n_sites = most // 6
    # Theirs and the inputs' own; and where all share one, those that tell whether rows are apart.
    n_others = N_PERTURBED if n_sites == 4 else 1
    assert max(n_rows) == (6 * n_sites + n_others if n_sites > 1 else 6)


class Masked(nn.Module):
    """Adds what was made of the inputs, a batch of one, which any number of rows may take."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        mask, value = (x > 0).float(), x
        for layer in self.layers:
            value = layer(value) * mask
        return value


def test_rows_join_where_a_mask_of_the_inputs_is_shared():
    torch.manual_seed(0)
    model, sites = Masked().eval(), ["layers.0", "layers.1", "layers.2"]
    sweep = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1})
    expected = loop(model, X, CLEAN, split(sites), metric, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    assert sweep.forwards == 4


class Residual(nn.Module):
    """A sum with what lies before the site: rows cannot join at the site."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.inner(x)


class Stale(nn.Module):
    """Rows are counted before the site: those that join would be cut in two."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        n = x.shape[0]
        x = self.outer(self.inner(x).reshape(n, -1, 6).cumsum(1))
        return x.reshape(-1, 6)


@pytest.mark.parametrize("block", [Residual, Stale])
def test_rows_that_cannot_join_have_forwards_of_their_own(block):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), block(), block(), nn.Linear(6, 2)).eval()
    sites = ["0", "1.inner", "2.inner"]
    sweep = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1})
    expected = loop(model, X, CLEAN, split(sites), metric, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    assert not sweep.notes


def test_forwards_of_later_sites_leave_out_what_lies_before(monkeypatch):
    monkeypatch.setattr(forwards, "_SITE_BYTES", 12 * 24)  # two sites in each
    model, sites = chain(), ["0", "1.0", "1", "2.0", "2"]
    calls = {1: [], 2: []}
    for number, rows in calls.items():  # no hook, which would have to be called
        linear = model[number][0]
        linear.forward = lambda x, run=linear.forward, r=rows: r.append(len(x)) or run(x)
    sweep = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1})
    expected = loop(model, X, CLEAN, split(sites), metric, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    n_by_hand = len(sites) * 7  # the clean run, and six
    # Two of the inputs, one for rows apart, two to compare, and three for five sites.
    assert sweep.forwards == 8
    assert [len(rows) - n_by_hand for rows in calls.values()] == [6, 7]


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_a_change_is_raised_also_where_rows_join(error, left_as_found):
    model = chain()
    before = left_as_found(model)

    def fail(value):
        raise error("of the change")

    changes = {"0": [hl.edits.scale(k) for k in (0.0, 2.0)], "1": [hl.edits.scale(0), fail, fail]}
    with pytest.raises(error, match="of the change"):
        hl.sweep(model, X, changes, metric)
    assert left_as_found(model) == before


@pytest.mark.parametrize("n", [1, 5])
def test_a_change_that_writes_to_the_value_is_refused(n):
    with pytest.raises(hl.StructureError, match=r"(change|edit) at 2 wrote in place"):
        hl.sweep(linear(), X, {"2": [lambda t: t.zero_()] * n}, metric)


class TimeMajor(nn.Module):
    """The rows of a batch are neighbours in the value of a layer: a cut would mix tokens."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        merged = x.transpose(0, 1).reshape(-1, 6)
        return self.inner(merged).view(x.shape[1], x.shape[0], 6).transpose(0, 1).cumsum(1)


def test_rows_that_are_not_in_one_piece_are_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), TimeMajor(), nn.Linear(6, 2)).eval()
    x, clean = torch.randn(2, 1, 5, 4)
    total = lambda out: out[0, :, 1].square().sum()  # noqa: E731
    sites = ["0", "1.inner", "2"]
    sweep = hl.sweep(model, x, sites, total, clean=clean, each={"unit": -1})
    expected = loop(model, x, clean, split(sites), total, -1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-5)
    assert len(sweep.notes) == 1
    assert "Some changes have a whole forward each" in sweep.notes[0]


def test_a_model_with_state_runs_whole(left_as_found):
    model = nn.Sequential(nn.Linear(4, 6), Counting(), nn.Linear(6, 2)).eval()
    sweep = hl.sweep(model, X, "0", metric, clean=CLEAN, each={"unit": 1})
    assert sweep.notes == ["One forward a change: each run changes the model's state (1.n_runs)."]
    assert sweep.forwards == 3 + sweep.values.size  # the second run shows that it goes on
    assert model[1].n_runs == 0


def test_a_record_that_is_wrong_is_noticed():
    class Hidden(nn.Module):
        """What the first module leaves for the last is not in any output."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
            box = []
            self.first.register_forward_hook(lambda module, args, out: box.append(args[0]))
            self.take = box.pop

        def forward(self, x):
            value = self.last(self.first(x))
            return value + self.take().sum()

    model = Hidden().eval()
    sweep = hl.sweep(model, X, "last", metric, clean=CLEAN, each={"unit": 1})
    np.testing.assert_array_equal(
        sweep.values, loop(model, X, CLEAN, [("last", "output")], metric, 1)
    )


def test_a_compiled_model_is_swept_eagerly():
    model = linear()
    expected = hl.sweep(model, X, ["0", "2"], metric, clean=CLEAN, each={"unit": 1}).values
    sweep = hl.sweep(
        torch.compile(model, backend="eager"), X, ["0", "2"], metric, clean=CLEAN, each={"unit": 1}
    )
    np.testing.assert_array_equal(sweep.values, expected)


class WritesToInput(nn.Module):
    """A layer in place, whose input is read afterwards; with a block around it or without."""

    def __init__(self, block):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()) if block else nn.ReLU(True)
        self.third, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.third(self.second(x)) + x)


class FillsList(nn.Module):
    """Two blocks that hand on their values in a list, or the like, that they are given."""

    class Block(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.linear = nn.Linear(n, 6)

        def forward(self, x, values):
            values.append(self.linear(x).tanh())
            return values[-1]

    def __init__(self, kind):
        super().__init__()
        self.first, self.third, self.last = self.Block(4), self.Block(6), nn.Linear(6, 2)
        self.kind = kind

    def forward(self, x):
        values = self.kind()
        self.third(self.first(x, values), values)
        return self.last(sum(values[number] for number in range(len(values))))


class WritesToSum(WritesToInput):
    """The same, where what is written to is the output of no module."""

    def forward(self, x):
        x = self.first(x) * 2 + 1
        return self.last(self.third(self.second(x)) + x)


class Values:
    """An object that holds a list."""

    def __init__(self):
        self.all = []

    def append(self, value):
        self.all.append(value)

    def __getitem__(self, number):
        return self.all[number]

    def __len__(self):
        return len(self.all)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: WritesToInput(False), lambda: WritesToInput(True),
        lambda: WritesToSum(False), lambda: WritesToSum(True), lambda: FillsList(list),
        lambda: FillsList(Values),
    ],
)  # fmt: skip
def test_what_a_call_writes_to_its_inputs_is_not_left_out(make, rows):
    torch.manual_seed(0)
    model = make().eval()
    sites = ["first", "third", "last"]
    expected = loop(model, X, CLEAN, split(sites), metric, 1)
    sweep = hl.sweep(model, X, sites, metric, clean=CLEAN, each={"unit": 1}, rows=rows)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)


class WritesUnseen(WritesToInput):
    """Writes that torch does not count: in the model itself, or in a module that is left out."""

    class Halve(nn.Module):
        def forward(self, x):
            x.data.mul_(0.5)
            return x + 0

    def __init__(self, write):
        super().__init__(False)
        self.second, self.write = self.Halve() if write is None else nn.Tanh(), write

    def forward(self, x):
        x = self.first(x)
        if self.write is not None:
            self.write(x)
        return self.last(self.third(self.second(x)) + x)


WRITES = {
    "data": lambda x: x.data.mul_(0.5), "numpy": lambda x: np.negative(x.numpy(), out=x.numpy()),
    "a part": lambda x: x.data[:, 0].zero_(), "module": None,
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_torch_does_not_count_are_noticed(write, rows):
    torch.manual_seed(0)
    model, sites = WritesUnseen(WRITES[write]).eval(), ["first", "second", "third", "last"]
    changes = {site: {f: hl.edits.scale(f) for f in (0.0, 2.0, 3.0)} for site in sites}
    sweep = hl.sweep(model, X, changes, metric, rows=rows)
    for site in sites:
        for factor in (0.0, 2.0, 3.0):
            with hl.edit(model, site, hl.edits.scale(factor)), torch.no_grad():
                expected = float(metric(model(X)))
            assert sweep[site, factor] + sweep.baseline == pytest.approx(expected, abs=1e-6)
    assert sweep.notes[0].startswith(
        "Whole forwards: the model writes to outputs of modules unseen"
    )


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_call_inside_of_one_that_is_left_out_counts(rows):
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"shared": shared, "block": nn.Sequential(shared, nn.ReLU())}).eval()
    model.forward = lambda x: model["shared"](model["block"](x))
    sweep = hl.sweep(model, X, ["block", "shared#1"], metric, clean=CLEAN, rows=rows)
    with torch.no_grad():
        clean = model["shared"](model["block"](CLEAN))
    assert sweep["shared#1"] + sweep.baseline == pytest.approx(float(metric(clean)))
    parts = hl.sweep(
        model, X, ["block", "shared#1"], metric, clean=CLEAN, each={"unit": 1}, rows=rows
    )
    assert parts["shared#1", 1] == pytest.approx(sweep["shared#1"])


@pytest.mark.parametrize("rows", [1, 16])
def test_a_later_call_does_not_take_the_number_of_one_left_out(rows):
    torch.manual_seed(0)
    act = nn.Tanh()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), act) for _ in range(4))).eval()
    large = {"a": hl.edits.scale(9.0), "b": hl.edits.add(9.0)}  # of these one is checked
    changes = {
        "3": large,
        "0.0": large,
        "0.1#1": {"a": hl.edits.scale(0.0), "b": hl.edits.add(0.1)},
    }
    sweep = hl.sweep(model, X, changes, metric, rows=rows)
    for name, change in changes["0.1#1"].items():
        with hl.edit(model, "0.1#1", change), torch.no_grad():
            expected = float(metric(model(X)))
        assert sweep["0.1#1", name] + sweep.baseline == pytest.approx(expected, abs=1e-6)


class GradientInside(nn.Module):
    def __init__(self, gradient):
        super().__init__()
        self.gradient, self.first, self.second = gradient, nn.Linear(4, 4), nn.Tanh()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def energy(self, x):
        return (self.second(self.first(x)) * x).square().sum()

    def forward(self, x):
        return self.head(self.gradient(self.energy, self.stem(x)))


def by_autograd(energy, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(energy(x), x)[0]


def by_dual_numbers(energy, x):
    with forward_ad.dual_level():
        energy = energy(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(energy).tangent.expand(1, 4)


def by_transform(energy, x):
    return torch.func.grad(energy)(x)


@pytest.mark.parametrize("gradient", [by_autograd, by_dual_numbers, by_transform])
def test_a_gradient_inside_the_model_misses_no_call(gradient):
    torch.manual_seed(0)
    model = GradientInside(gradient).eval()
    factors = {"head": (90.0, 80.0), "stem": (90.0, 80.0), "second": (0.5, 2.0)}
    changes = {site: {f: hl.edits.scale(f) for f in factors[site]} for site in factors}
    sweep = hl.sweep(model, X, changes, metric, rows=1)
    for factor in factors["second"]:
        with hl.edit(model, "second", hl.edits.scale(factor)), torch.no_grad():
            expected = float(metric(model(X)))
        assert sweep["second", factor] + sweep.baseline == pytest.approx(expected, rel=1e-5)


class Kept(NamedTuple):
    value: torch.Tensor
    others: list


def test_a_metric_may_read_what_has_no_rows_of_its_own():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 20), nn.Linear(20, 20)
    model = nn.ModuleDict({"first": first, "second": second}).eval()

    def forward(x):
        value = first(x)
        return Kept(second(value), [value, value.mean(), {"n": len(value)}])

    model.forward = forward
    readers = {
        "of another site": lambda out: out.value.sum() + out.others[0].sum(),
        "a mean over the batch": lambda out: out.others[1] * 2,
        "a number": lambda out: out.value[0, 0] * out.others[2]["n"],
    }
    for name, read in readers.items():
        expected = loop(model, X, CLEAN, split(["first", "second"]), read, 1)
        sweep = hl.sweep(model, X, ["first", "second"], read, clean=CLEAN, each={"unit": 1})
        np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("read", [lambda part: part.sum(), torch.sum, lambda part: 2 * part, float])
def test_reading_what_cannot_be_cut_raises_the_error_for_it(read):
    with pytest.raises(NoRowsError):
        read(UnsplitOutput())


def test_an_output_without_a_batch_has_forwards_of_its_own():
    model = nn.Sequential(nn.Identity()).eval()
    model.forward = lambda x: model[0](x).relu().amax(0)
    x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    sweep = hl.sweep(model, x, "0", torch.sum, clean=x * 0, each={"unit": 1})
    assert sweep.values.tolist() == [[3.0, 5.0, 4.0, 6.0]]


def test_the_change_with_the_largest_effect_is_checked():
    model = nn.Sequential(nn.Identity()).eval()

    def forward(x):
        x = model[0](x)
        return x if x.sum() > 0 else -10 * x  # which rows of a batch decide together

    model.forward = forward
    changes = [lambda t: t * 0 - 1, lambda t: t * 2, lambda t: t + 2, lambda t: t + 1]
    sweep = hl.sweep(model, torch.ones(1, 4), {"0": changes}, lambda out: out[0, 0])
    assert sweep.values.tolist() == [[10.0, 2.0, 3.0, 2.0]]
    assert "Each change has its own forward" in sweep.notes[0]


class Quantised(nn.Module):
    """Round to whole parts of the largest value: of the whole batch, or of each row."""

    def __init__(self, dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        step = x.abs().amax(self.dims, keepdim=True) / 15
        return (x / step).round() * step


@pytest.mark.parametrize("dims", [(0, 1), 1])
def test_a_scale_of_the_whole_batch_keeps_rows_apart(dims):
    """The largest unit stands in the part that is not compared with whole forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Quantised(dims), nn.Linear(40, 2)).eval()
    x = torch.rand(1, 40)
    x[0, 3] = 5.0
    sweep = hl.sweep(model, x, "0", metric, clean=x * 0, each={"unit": 1})
    expected = loop(model, x, x * 0, [("0", "output")], metric, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    assert bool(sweep.notes) is (dims == (0, 1))


class Collecting(nn.Module):
    """Return what hooks collect in its blocks, as transformers does with attentions."""

    def __init__(self, *, lazy):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.collected, self.is_hooked = [], False
        if not lazy:
            self.hook()

    def hook(self):
        for block in self.blocks:
            block[1].register_forward_hook(lambda *call: self.collected.append(call[-1]))
        self.is_hooked = True

    def forward(self, x):
        if not self.is_hooked:
            self.hook()
        self.collected.clear()
        for block in self.blocks:
            x = x + block(x)
        return {"last": x, "collected": dict(enumerate(self.collected))}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
def test_what_hooks_collect_inside_a_module_is_not_left_out(rows, lazy, left_as_found):
    model = Collecting(lazy=lazy).eval()
    total = lambda out: sum(  # noqa: E731
        (n + 1) * part[0, 1] for n, part in enumerate(out["collected"].values())
    )
    sites, before = ["blocks.0", "blocks.1", "blocks.2"], left_as_found(model)
    sweep = hl.sweep(model, X, sites, total, clean=CLEAN, each={"unit": 1}, rows=rows)
    assert not sweep.notes
    assert left_as_found(model) == before
    expected = loop(model, X, CLEAN, split(sites), total, 1)
    np.testing.assert_allclose(sweep.values, expected, rtol=0, atol=1e-6)
    assert len(model(X)["collected"]) == 3


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(4, 4), Residual()

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return x


@pytest.mark.parametrize("edited", ["block.linear#0", "block@add#0"])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_calls_that_an_edit_around_the_sweep_counts_are_run(rows, edited):
    model, edits = Repeated().eval(), [hl.edits.scale(factor) for factor in (0.0, 0.5, 2.0)]
    changes = [
        (f"{site} {n}", {site: edit})
        for site in ("first", "block#2", "block:input#2")
        for n, edit in enumerate(edits)
    ]
    with hl.edit(model, edited, hl.edits.add(1.0)):
        sweep = hl.sweep(model, X, changes, lambda out: out[0, 0], rows=rows)
        for (label, change), value in zip(changes, sweep.values, strict=True):
            with hl.edit(model, change):
                assert value == pytest.approx(model(X)[0, 0].item(), abs=1e-6), label


class SeesRows(nn.Module):
    """A net whose rows see one another, with a class that is masked."""

    def __init__(self, seen, low=-1.0):
        super().__init__()
        self.first, self.last, self.seen, self.low = nn.Linear(4, 8), nn.Linear(8, 3), seen, low

    def forward(self, x):
        value = self.first(x)
        output = self.last(torch.tanh(value + self.seen(value)))
        return torch.cat([output, output.new_full((len(output), 1), self.low)], 1)


def assert_forwards_of_their_own(sweep, single):
    np.testing.assert_allclose(sweep.values, single.values, rtol=0, atol=1e-6)
    assert "Each change has its own forward" in sweep.notes[0]


@pytest.mark.parametrize(
    ("dtype", "low"),
    [
        (torch.float32, -1e4), (torch.float32, torch.finfo(torch.float32).min),
        (torch.bfloat16, -30.0),
    ],
)  # fmt: skip
def test_a_masked_class_does_not_hide_rows_that_see_one_another(dtype, low):
    torch.manual_seed(0)
    model = SeesRows(lambda t: -0.9 * t.mean(0, keepdim=True), low).eval().to(dtype)
    chance = lambda out: out.float().softmax(-1)[0, 1]  # noqa: E731
    x, clean = X.to(dtype), CLEAN.to(dtype)
    shared, single = (
        hl.sweep(model, x, "first", chance, clean=clean, each={"unit": 1}, rows=rows)
        for rows in (16, 1)
    )
    assert_forwards_of_their_own(shared, single)


@pytest.mark.parametrize("seen", [lambda t: t[:1], lambda t: t[-1:], lambda t: t.cumsum(0) - t])
@pytest.mark.parametrize("order", [1, -1])
def test_a_row_that_all_others_see_is_noticed(seen, order):
    torch.manual_seed(0)
    factors = (4.0, 0.0, 0.5, 2.0, -1.0)[::order]  # the first has the largest effect
    changes = {"first": {factor: hl.edits.scale(factor) for factor in factors}}
    model = SeesRows(seen).eval()
    shared, single = (hl.sweep(model, X, changes, metric, rows=rows) for rows in (16, 1))
    assert_forwards_of_their_own(shared, single)


@pytest.mark.parametrize("moved", [[1, 4], [0], [23]])
def test_unmoved_changes_are_not_those_that_are_checked(moved):
    torch.manual_seed(0)
    model = SeesRows(lambda t: -0.9 * t.mean(0, keepdim=True)).eval()
    changes = {n: hl.edits.scale(2.0 if n in moved else 1.0) for n in range(24)}
    shared, single = (hl.sweep(model, X, {"first": changes}, metric, rows=rows) for rows in (16, 1))
    assert_forwards_of_their_own(shared, single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_alone_lets_changes_share_a_forward(dtype):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 100)).eval().to(dtype)
    x, clean = torch.randn(2, 1, 64).to(dtype)
    for read in (lambda out: out[0, 1] - out[0, 2], lambda out: out.float().softmax(-1)[0, 1]):
        sweep = hl.sweep(model, x, ["0.0", "5.0"], read, clean=clean, each={"unit": 1})
        assert not sweep.notes
    tiny = {"0.0": [hl.edits.scale(1 + 1e-6 * n) for n in range(9)]}
    assert not hl.sweep(model, x, tiny, lambda out: out[0, 1] - out[0, 2]).notes


# -- no trace --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_the_model_as_it_was(error, left_as_found):
    model = linear()
    before = left_as_found(model)
    calls = []

    def failing(out):
        calls.append(1)
        if len(calls) >= 9:
            raise error
        return out[0, 1]

    with pytest.raises(error):
        hl.sweep(model, X, ["0", "2"], failing, clean=CLEAN, each={"unit": 1})
    assert left_as_found(model) == before


def test_another_thread_and_a_copy_get_the_original_forward():
    model = linear()
    expected = model(X)
    results = []
    with replace_forwards(model.modules(), lambda module, forward, args, kwargs: "recorded"):
        assert model(X) == "recorded"
        thread = threading.Thread(target=lambda: results.append(model(X)))
        thread.start()
        thread.join()
        clones = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(results[0], expected)
    with torch.no_grad():
        model[0].weight.zero_()
    for clone in clones:
        assert torch.equal(clone(X), expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_sweeps_in_two_threads_take_turns(left_as_found):
    model, results = linear(), []
    before = left_as_found(model)

    def run():
        results.append(hl.sweep(model, X, ["0", "2"], metric, clean=CLEAN, each={"unit": 1}).values)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left_as_found(model) == before
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_inference_mode_changes_nothing(net):
    x, clean = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    one = lambda out: out[0, 1]  # noqa: E731
    expected = hl.sweep(net, x, "layer*.*", one, clean=clean, each={"channel": 1})
    estimate = hl.attribute(net, x, "layer*.*", one, clean=clean)
    with torch.inference_mode():
        x, clean = x.clone(), clean.clone()
        sweep = hl.sweep(net, x, "layer*.*", one, clean=clean, each={"channel": 1})
        again = hl.attribute(net, x, "layer*.*", one, clean=clean)
    np.testing.assert_array_equal(sweep.values, expected.values)
    np.testing.assert_array_equal(again.effects, estimate.effects)


def test_gradients_and_inputs_are_left_alone():
    model = linear()
    model(X).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    x = X.clone()
    net = nn.Sequential(nn.ReLU(inplace=True), model).eval()
    hl.sweep(net, x, "1.0", metric, clean=CLEAN.clone(), each={"unit": 1})
    assert torch.equal(x, X)
    after = [parameter.grad for parameter in model.parameters()]
    assert all(a is b for a, b in zip(grads, after, strict=True))


# -- on disk ---------------------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on(tmp_path):
    model, n_runs = linear(), []

    def stop(module, args):
        n_runs.append(1)
        if len(n_runs) == 10:
            raise KeyboardInterrupt

    options = {"clean": CLEAN, "each": {"unit": 1}, "rows": 3}
    arguments = {**options, "to": tmp_path / "sweep"}
    sites = ["0", "2", "3"]
    with pytest.raises(KeyboardInterrupt), model.register_forward_pre_hook(stop):
        hl.sweep(model, X, sites, metric, **arguments)
    rest = hl.sweep(model, X, sites, metric, **arguments)
    whole = hl.sweep(model, X, sites, metric, **options)
    np.testing.assert_allclose(rest.values, whole.values, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(rest.unmoved, whole.unmoved)
    assert rest.forwards < whole.forwards
    again = hl.sweep(model, X, sites, metric, **arguments)
    assert again.forwards == 3  # the clean one, the unchanged one, and one to compare
    with pytest.raises(hl.FolderError, match="other inputs"):
        hl.sweep(model, X + 1, sites, metric, **arguments)


def scaled(*factors):
    return {"0": [hl.edits.scale(factor) for factor in factors]}


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        (scaled(0, 0.5, 2), scaled(0, 0.9, 2)),  # the last is the same
        ([(1, {"0": abs}), (2, {"2": abs})], [(1, {"2": abs}), (2, {"2": abs})]),
        ({"0": [lambda t: t * 2, torch.neg]}, {"0": [lambda t: t * 3, torch.neg]}),
    ],
)
def test_numbers_of_other_changes_are_not_taken_over(changes, others, tmp_path):
    model = linear()
    first = hl.sweep(model, X, changes, metric, to=tmp_path)
    assert hl.sweep(model, X, changes, metric, to=tmp_path).values.tolist() == first.values.tolist()
    with pytest.raises(hl.FolderError, match="other changes"):
        hl.sweep(model, X, others, metric, to=tmp_path)


strength = {"of a change": 9.0}  # which no fingerprint of the change tells


def test_the_largest_stored_effect_is_measured_again(monkeypatch, tmp_path):
    changes = {"0": [lambda t: t * strength["of a change"], lambda t: t * 1.01]}
    hl.sweep(linear(), X, changes, metric, to=tmp_path)
    hl.sweep(linear(), X, changes, metric, to=tmp_path)
    monkeypatch.setitem(strength, "of a change", 8.0)
    with pytest.raises(hl.FolderError, match="other changes"):
        hl.sweep(linear(), X, changes, metric, to=tmp_path)


@pytest.mark.parametrize(("name", "value"), [("each", {"unit": -1}), ("rows", 1)])
def test_numbers_of_another_grid_or_way_are_not_taken_over(name, value, tmp_path):
    options = {"clean": CLEAN, "each": {"unit": 1}, "to": tmp_path}
    hl.sweep(linear(), X, "0", metric, **options)
    with pytest.raises(hl.FolderError, match=f"other {name}"):
        hl.sweep(linear(), X, "0", metric, **{**options, name: value})


def test_numbers_of_another_setting_are_not_taken_over(tmp_path):
    model = linear()
    model.most = 1.0  # which the unchanged run does not come to
    hl.sweep(model, X, scaled(2, 3), metric, to=tmp_path)
    model.most = 2.0
    with pytest.raises(hl.FolderError, match="other model"):
        hl.sweep(model, X, scaled(2, 3), metric, to=tmp_path)


def test_values_of_another_clean_run_are_not_taken_over(tmp_path):
    options = {"to": tmp_path, "each": {"unit": 1}}
    last = lambda out: out[0, 1]  # noqa: E731  # of the first row alone
    x = torch.cat([X, X])
    hl.sweep(linear(), x, "0", last, clean=torch.cat([CLEAN, X]), **options)
    with pytest.raises(hl.FolderError, match="other clean inputs"):
        hl.sweep(linear(), x, "0", last, clean=torch.cat([CLEAN, CLEAN]), **options)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (r'"results": .*', '"results": [[[0], 1.0, true]]'),
        (r'"results": .*', '"results": [[[0], "0x1p0", "true"]]'),
        (r'"results": .*', '"results": [[0], "0x1p0", true]'),
        (r'"job": .*', '"job": null,'),
        (r'"job": .*', '"job": ' + "[" * 100_000),
    ],
)
def test_a_damaged_folder_of_a_sweep_says_what_to_do(text, other, tmp_path):
    hl.sweep(linear(), X, scaled(2, 3), metric, to=tmp_path)
    body = re.sub(text, other, (tmp_path / "manifest.json").read_text())
    sealed = re.sub(r'"checksum": "\w+"', '"checksum": "' + "0" * 16 + '"', body)
    digits = checksum(sealed.encode())
    (tmp_path / "manifest.json").write_text(sealed.replace("0" * 16, digits, 1))
    with pytest.raises(hl.FolderError, match=r"is damaged: .*\n.*in a new folder"):
        hl.sweep(linear(), X, scaled(2, 3), metric, to=tmp_path)


def test_a_folder_of_other_changes_or_files_is_refused(tmp_path):
    model = linear()
    options = {"to": tmp_path / "sweep", "each": {"unit": 1}}
    hl.sweep(model, X, {"0": hl.edits.scale(2)}, metric, **options)
    with pytest.raises(hl.FolderError, match="other changes"):
        hl.sweep(model, X, {"0": hl.edits.scale(3)}, metric, **options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("mine")
    with pytest.raises(hl.FolderError, match="must be empty or hold a sweep"):
        hl.sweep(model, X, {"0": hl.edits.scale(2)}, metric, to=tmp_path / "other")


def test_effects_on_an_infinite_metric_are_nan_without_a_warning():
    model = nn.Sequential(nn.Identity(), nn.ReLU()).eval()
    x = torch.ones(1, 2)
    effects = hl.sweep(model, x, ["0"], lambda out: out.sum() * 1e39, clean=2 * x)
    assert np.isnan(effects.effects).all()
    assert "+nan" in str(effects)
