"""record: values, structures, what is kept of them, and the model's own numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from thoroughness import examples
from zoo import Sized


def test_recorded_values_are_the_forwards_own_to_the_last_bit(net, image):
    expected = {}
    x = image
    expected["stem"] = x = net.stem(x)
    for layer in ("layer1", "layer2"):
        for k, block in enumerate(getattr(net, layer)):
            expected[f"{layer}.{k}.conv"] = block.conv(x)
            expected[f"{layer}.{k}"] = x = block(x)
    with hl.record(net, list(expected)) as run:
        y = net(image)
    assert torch.equal(y, net(image))
    assert set(run) == set(expected)
    for site, value in expected.items():
        assert torch.equal(run[site], value)


def test_two_layers_around_a_relu6_give_the_forwards_features():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.second = nn.Linear(4, 3), nn.ReLU6(), nn.Linear(3, 2)
            for parameter in self.parameters():
                nn.init.ones_(parameter)

        def forward(self, x):
            a = self.first(x)
            b = self.act(a)
            return [x, a, b, self.second(b)]

    model, x = Two(), torch.full((2, 4), 0.1)
    with hl.record(model, nn.Linear, ports=("input", "output")) as run:
        in1, out1, in2, out2 = model(x)
    assert list(run) == ["first:input", "first", "second:input", "second"]
    for site, value in zip(run, (in1, out1, in2, out2), strict=True):
        assert (run[site] - value).abs().max() == 0
    with hl.record(model, [nn.Linear, nn.ReLU6]) as run:
        model(x)
    assert list(run) == ["first", "act", "second"]
    assert torch.equal(run["act"], in2)


def test_recording_takes_no_randomness_and_changes_no_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).train()
    x = torch.ones(8, 4)
    torch.manual_seed(3)
    plain = model(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with hl.record(model, ports=("input", "output")):
        hooked = model(x)
    assert torch.equal(plain, hooked)
    assert torch.equal(after, torch.get_rng_state())
    assert model.training


@pytest.mark.trap(17)
def test_a_value_overwritten_in_place_is_never_returned(net, image):
    kept = []
    handle = net.layer1[0].bn.register_forward_hook(
        lambda module, args, output: kept.append(output.detach())
    )
    with hl.record(net) as run:
        net(image)
    handle.remove()
    with pytest.raises(hl.OverwrittenError, match=r"bn was overwritten in place.*\n.*copy=True"):
        run["layer1.0.bn"]
    with hl.record(net, copy=True) as run:
        net(image)
    block = net.layer1[0]
    assert torch.equal(run["layer1.0.bn"], block.bn(block.conv(net.stem(image))))
    assert torch.equal(run["layer1.0.relu"], run["layer1.0.bn"].relu())
    assert not torch.equal(run["layer1.0.relu"], run["layer1.0.bn"])
    assert torch.equal(kept[0], run["layer1.0.relu"])  # another layer's output, without a word


def test_an_input_overwritten_in_place_is_never_returned():
    model = nn.Sequential(nn.ReLU(inplace=True))
    with hl.record(model, "0:input") as run:
        model(torch.tensor([-1.0, 1.0]))
    with pytest.raises(hl.OverwrittenError):
        run["0:input"]


def test_a_part_of_a_nested_value_overwritten_is_never_returned():
    class Pair(nn.Module):
        def forward(self, x):
            return (x + 1, {"b": x * 2})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            _, named = self.pair(x)
            named["b"] += 1
            return named["b"]

    model = Outer()
    with hl.record(model, "pair") as run:
        model(torch.ones(2))
    with pytest.raises(hl.OverwrittenError):
        run["pair"]
    with hl.record(model, "pair", copy=True) as run:
        model(torch.ones(2))
    assert run["pair:output[1].b"].tolist() == [2.0, 2.0]


def test_inference_tensors_are_copied_in_time(net, image):
    with torch.inference_mode(), hl.record(net, ports=("input", "output")) as run:
        net(image)
    block = net.layer1[0]
    with torch.no_grad():
        assert torch.equal(run["layer1.0.bn"], block.bn(block.conv(net.stem(image))))
        assert torch.equal(run["layer1.0.relu:input"], run["layer1.0.bn"])


def test_values_are_detached_unless_the_graph_is_wanted(net, image):
    with hl.record(net, "stem") as run:
        net(image).sum().backward()
    assert not run["stem"].requires_grad
    with hl.record(net, "stem", detach=False) as run:
        y = net(image)
    (grad,) = torch.autograd.grad(y.sum(), run["stem"])
    assert grad.shape == run["stem"].shape


def test_every_structure_is_kept_with_its_types(holder):
    x = torch.ones(2, requires_grad=True)
    with hl.record(holder, "inner", ports=("input", "output")) as run:
        real = holder(x)
    kept = run["inner"]
    assert type(kept) is type(real)
    assert type(kept["pair"]) is type(real["pair"])
    assert type(kept["out"]) is type(real["out"])
    assert kept["pair"].right[0].tolist() == [2.0, 2.0]
    assert kept["pair"].right[1] is None
    assert kept["text"] == "kept"
    assert kept["out"].extra["n"] == 3
    assert not kept["out"].extra["deep"][0].requires_grad
    given = run["inner:input"]
    assert list(given) == ["x", "rest", "scale", "mask"]
    assert given["rest"][0].tolist() == [1.0, 1.0]
    assert given["scale"] == 2.0


def test_leaves_of_any_structure_can_be_selected(holder):
    x = torch.ones(2)
    sites = [
        "inner:output.pair.left", "inner:output.pair[1][0]", "inner:output.out.extra.deep[0]",
        "inner:input.mask", "inner:input.rest[0]",
    ]  # fmt: skip
    with hl.record(holder, sites) as run:
        holder(x)
    values = [run[site].tolist() for site in sites]
    assert values == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [True, True], [1.0, 1.0]]


def test_a_leaf_that_is_not_there_raises_where_it_is_asked_for(holder):
    with hl.record(holder, "inner:output[9]"), pytest.raises(hl.SiteError) as caught:
        holder(torch.ones(2))
    assert "inner:output[9] has no leaf [9]" in str(caught.value)
    assert "'pair', 'out', 'text'" in str(caught.value)


def test_a_lone_tensor_given_by_keyword_is_that_tensor():
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.record(model, "0:input") as run:
        model[0](input=torch.ones(1, 2))
    assert run["0:input"].tolist() == [[1.0, 1.0]]


def test_keep_device_and_dtype_shape_what_is_kept(net, image):
    with hl.record(net, "layer1.*", keep=lambda t: t[:, 0], device="cpu", dtype=torch.float16) as r:
        net(image)
    assert r["layer1.0"].dtype is torch.float16
    assert r["layer1.0"].shape == (2, 8, 8)
    with hl.record(net, "fc", keep=lambda t: t.argmax(-1), dtype=torch.float16) as r:
        net(image)
    assert r["fc"].dtype is torch.int64
    with hl.record(net, "fc", keep=lambda t: float(t.mean())) as r:
        y = net(image)
    assert r["fc"] == float(y.detach().mean())


def test_wrong_options_are_refused_before_the_model_runs(net, left_as_found):
    before = left_as_found(net)
    with pytest.raises(hl.AttachError, match=r"dtype must be a torch.dtype, got 'float16'"):
        hl.record(net, dtype="float16")
    with pytest.raises(
        hl.AttachError, match=r"device must be a torch.device or its name, got 'nowhere'"
    ):
        hl.record(net, device="nowhere")
    assert left_as_found(net) == before


@pytest.mark.trap(41)
def test_a_stored_slice_keeps_the_whole_a_recorded_one_does_not():
    model, kept = nn.Sequential(nn.Identity()), []
    handle = model[0].register_forward_hook(lambda module, args, output: kept.append(output[:1]))
    with hl.record(model, "0", keep=lambda t: t[:1]) as run:
        model(torch.zeros(1000, 10))
    handle.remove()
    assert kept[0].untyped_storage().nbytes() == 40 * 1000
    assert run["0"].untyped_storage().nbytes() == 40


@pytest.mark.parametrize(
    ("keep", "selector", "leaf"),
    [
        (lambda t: t[:, 0], "lstm", "lstm:output[0]"),
        (lambda t: t.mean(), "lstm:input", "lstm:input.input"),
        (lambda t: t[0].norm(dim=5), "lstm:output[1]", None),
        (lambda t: t.squeeze(0)[0], "lstm:output[1]#0", "lstm:output[1][0]#0"),
    ],
)
def test_a_keep_that_takes_a_leaf_has_it_proposed(keep, selector, leaf):
    model = nn.ModuleDict({"lstm": nn.LSTM(2, 3)})
    state = torch.zeros(1, 3), torch.zeros(1, 3)
    model.forward = lambda: model["lstm"](torch.zeros(4, 2), state)
    if leaf is None:  # it fails on each tensor, too
        with hl.record(model, selector, keep=keep), pytest.raises(IndexError) as failed:
            model()
        assert any("keep= was called with" in note for note in failed.value.__notes__)
        return
    with hl.record(model, selector, keep=keep), pytest.raises(hl.StructureError) as refused:
        model()
    assert str(refused.value).startswith(f"keep= must take the value at {selector}, got ")
    assert str(refused.value).endswith(f"\nSelect the leaf that keep= takes: {leaf!r}.")
    with hl.record(model, leaf, keep=keep) as run:
        model()
    assert run[leaf].numel()


@pytest.mark.trap(41)
def test_a_stored_output_keeps_the_graph_a_recorded_one_does_not():
    model, kept = Sized(), []
    handle = model.head.register_forward_hook(lambda module, args, output: kept.append(output))
    for _ in range(3):
        model(torch.ones(4, 3))
    handle.remove()
    assert model.n_alive() == 3  # for four numbers each
    kept.clear()
    assert model.n_alive() == 0
    with hl.record(model, "head") as run:
        for _ in range(3):
            model(torch.ones(4, 3))
    assert len(run.passes) == 3
    assert model.n_alive() == 0


@pytest.mark.trap(41)
def test_a_dict_of_modules_keeps_the_model_a_recording_does_not():
    def recorded(how):
        model = Sized()
        if how == "by hand":
            kept = {}
            handle = model.head.register_forward_hook(
                lambda module, args, output: kept.update({module: output.detach()})
            )
            model(torch.ones(4, 3))
            handle.remove()
        else:
            with hl.record(model, "head") as kept:
                model(torch.ones(4, 3))
        return kept, weakref.ref(model.head)

    kept, model = recorded("by hand")
    gc.collect()
    assert model() is not None
    assert len(kept) == 1
    kept, model = recorded("by a line")
    gc.collect()
    assert model() is None
    assert len(kept) == 1


def test_a_keep_that_fails_names_the_site_and_what_it_got(holder):
    with hl.record(holder, "inner", keep=lambda t: t[:, -1]):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            holder(torch.ones(2))
    assert any("keep= was called with OrderedDict(" in note for note in caught.value.__notes__)
    assert any("at inner (Nested)" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_memory_stays_flat_when_recordings_are_dropped(net, image):
    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def once():
        with hl.record(net, ports=("input", "output")):
            net(image).sum().backward()

    once()
    before = tensors()
    for _ in range(20):
        once()
    assert tensors() <= before  # fewer, where what other tests left goes meanwhile


def test_a_line_without_a_with_block_is_ended_by_remove(net, image, left_as_found):
    before = left_as_found(net)
    line = hl.record(net, "fc")
    y = net(image)
    line.remove()
    net(image)
    assert left_as_found(net) == before
    assert torch.equal(line.recording["fc"], y)
    assert "1 fired" in " ".join(str(line.report()).split())


def test_unknown_ports_and_selectors_leave_nothing_behind(net, left_as_found):
    before = left_as_found(net)
    with pytest.raises(hl.SelectionError):
        hl.record(net, "fc", ports="gradient")
    with pytest.raises(hl.SelectionError):
        hl.record(net, "nothing")
    assert left_as_found(net) == before


@st.composite
def nested(draw, depth=2):
    kind = draw(st.sampled_from(["leaf", "seq", "seq", "add"] if depth else ["leaf"]))
    if kind == "leaf":
        return draw(st.sampled_from([nn.Linear, nn.ReLU, nn.Identity]))
    return (kind, draw(st.lists(nested(depth=depth - 1), min_size=1, max_size=3)))


class Add(nn.Module):
    """A container with a real branch, whose shared input an in-place child would corrupt."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


def build(spec):
    if isinstance(spec, tuple):
        parts = [build(part) for part in spec[1]]
        return nn.Sequential(*parts) if spec[0] == "seq" else Add(parts)
    return nn.Linear(3, 3) if spec is nn.Linear else spec()


@settings(deadline=None, max_examples=examples(60))
@given(nested(depth=3), st.data())
def test_random_models_with_random_hooks_compute_the_same(spec, data):
    torch.manual_seed(0)
    model = nn.Sequential(build(spec))
    x = torch.randn(2, 3)
    plain = model(x)
    reference = {}
    handles = [
        module.register_forward_hook(lambda m, a, o, path=path: reference.setdefault(path, o))
        for path, module in model.named_modules()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    chosen = data.draw(st.sets(st.sampled_from(sorted(reference)), min_size=1))
    with hl.record(model, list(chosen)) as run:
        assert torch.equal(model(x), plain)
    for path in chosen:
        assert torch.equal(run[path], reference[path])
    assert not hl.inventory(model)


@pytest.mark.parametrize(
    "run", [lambda *a, **k: hl.record(*a, "", **k), lambda m, **k: hl.features(m, None, "", **k)]
)
def test_an_option_that_there_is_not_is_refused(net, run):
    said = r"argument 'cpoy'\. Did you mean copy=\?\nGive some of .*keep=, device=, .*copy=\.$"
    with pytest.raises(TypeError, match=said):
        run(net, cpoy=True)


def test_an_option_is_compared_with_all_arguments(net):
    with pytest.raises(TypeError, match=r"'port'\. Did you mean ports=\?\nGive some of ports=, "):
        hl.record(net, "", port="input")


@pytest.mark.parametrize("name", ["cat", "save", "sites"])
def test_a_line_taken_for_its_recording_says_where_that_is(looped, name):
    line = hl.record(looped, "head")
    with line:
        looped(torch.ones(1, 2))
    with pytest.raises(AttributeError, match=f"or line.recording.{name}"):
        getattr(line, name)
    assert not hasattr(line, "__deepcopy__")
