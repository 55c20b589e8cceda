"""record at the ports that flow backward: the values are autograd's own, to the last bit."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import hookline as hl
from hookline.models.packages import import_package
from zoo import Sized

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Out:
    hidden: torch.Tensor
    rest: object = None


def leaves(value):
    """The leaves of a value in order: written anew, so as not to test the engine by itself."""
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in leaves(part)]
    if is_dataclass(value):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name))]
    return [value]


def reference(model, forward):
    """What plain hooks and torch.autograd.grad give for the outputs of every call."""
    calls: dict[str, list[list[object]]] = {}

    def note(path):
        def hook(module, args, output):
            # At once: a tensor that is changed in place later has another edge by then.
            edges = [
                get_gradient_edge(leaf) if torch.is_tensor(leaf) and leaf.requires_grad else None
                for leaf in leaves(output)
            ]
            calls.setdefault(path, []).append(edges)

        return hook

    handles = [m.register_forward_hook(note(path)) for path, m in model.named_modules()]
    loss = forward(model)
    for handle in handles:
        handle.remove()
    edges = [edge for found in calls.values() for call in found for edge in call if edge]
    grads = iter(torch.autograd.grad(loss, edges, allow_unused=True))
    return {
        path: [[next(grads) if edge else None for edge in call] for call in found]
        for path, found in calls.items()
    }


def same(found, expected):
    if expected is None:
        return found is None
    return found is not None and torch.equal(found, expected)


def assert_gradients_are_autograds(model, forward):
    state = torch.get_rng_state()
    expected = reference(model, forward)
    torch.set_rng_state(state)
    with hl.record(model, list(expected), ports="grad_output") as run:
        forward(model).backward()
    n_grads = 0
    for path, calls in expected.items():
        if not any(grad is not None for call in calls for grad in call):
            continue
        recorded = run.calls(f"{path}:grad_output")
        assert len(recorded) == len(calls)
        for found, wanted in zip(recorded, calls, strict=True):
            assert len(leaves(found)) == len(wanted), path
            assert all(map(same, leaves(found), wanted)), path
            n_grads += sum(grad is not None for grad in wanted)
    assert n_grads


class Structured(nn.Module):
    """Gives what it computes in a structure; the outer model takes it apart again."""

    def __init__(self, build):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.build = build

    def forward(self, x):
        return self.build(self.one(x), self.two(x))


class Summing(nn.Module):
    def __init__(self, build):
        super().__init__()
        self.inner = Structured(build)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        found = [leaf for leaf in leaves(self.inner(x)) if torch.is_tensor(leaf)]
        return self.head(sum(leaf.float() for leaf in found))


STRUCTURES = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, None, b],
    "dict": lambda a, b: {"a": a, "n": 3, "b": b},
    "nested": lambda a, b: (a, {"deep": [b, (a * 2, "text")]}),
    "named": lambda a, b: Pair(a, (b, None)),
    "dataclass": lambda a, b: Out(a, {"b": b, "mask": b > 0}),
    "twice": lambda a, b: (a, a, b),
    "views": lambda a, b: torch.cat([a, b], -1).chunk(2, -1),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_gradients_of_a_structure_are_autograds_in_form(kind):
    torch.manual_seed(0)
    model, x = Summing(STRUCTURES[kind]), torch.randn(4, 3)
    assert_gradients_are_autograds(model, lambda m: m(x).square().sum())
    with hl.record(model, "inner", ports=("output", "grad_output")) as run:
        model(x).square().sum().backward()
    found, output = run["inner:grad_output"], run["inner"]
    assert type(found) is type(output)
    for grad, value in zip(leaves(found), leaves(output), strict=True):
        assert grad is None or grad.shape == value.shape


@pytest.mark.trap(18)
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.trap(44)
def test_the_gradients_of_in_place_layers_are_autograds(net, image, mode):
    getattr(net, mode)()
    net.requires_grad_(True)
    assert_gradients_are_autograds(net, lambda m: m(image).square().sum())
    kept = []
    handle = net.layer1[0].bn.register_forward_hook(lambda m, args, output: kept.append(output))
    with hl.record(net, "layer1.0.bn:grad_output") as run:
        loss = net(image).square().sum()
        (of_later_value,) = torch.autograd.grad(loss, kept, retain_graph=True)
        loss.backward()
    handle.remove()
    assert not torch.allclose(of_later_value, run["layer1.0.bn:grad_output"])


def test_the_gradients_of_a_shared_module_are_kept_call_by_call(looped):
    x = torch.randn(5, 2)
    assert_gradients_are_autograds(looped, lambda m: m(x).square().sum())
    with hl.record(looped, "block:grad_output") as run:
        looped(x).sum().backward()
    third = looped.head.weight.expand(5, 2)
    assert torch.equal(run["block:grad_output#2"], third)
    second = third @ looped.block.weight
    assert torch.allclose(run["block:grad_output#1"], second)
    with pytest.raises(hl.AmbiguousError, match="ran 3 times"):
        run["block:grad_output"]


def test_the_gradients_of_recurrence_and_attention_are_autograds():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    lstm = nn.ModuleDict({"lstm": nn.LSTM(4, 4, batch_first=True)})
    lstm.forward = lambda x: lstm["lstm"](x)[1][0]
    assert_gradients_are_autograds(lstm, lambda m: m(x).square().sum())
    with hl.record(lstm, "lstm:grad_output") as run:
        lstm(x).square().sum().backward()
    out, (h, c) = run["lstm:grad_output"]
    assert out is None
    assert c is None
    assert torch.equal(h, 2 * lstm(x))
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    assert_gradients_are_autograds(layer, lambda m: m(x).square().sum())


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.slow
def test_the_gradients_in_a_language_model_are_autograds(kind):
    transformers = import_package("transformers", "the tests")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "GPT2":
        config = transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2, **small)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=16, intermediate_size=32, num_attention_heads=2,
            num_key_value_heads=1, **small,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(12).reshape(2, 6)
    assert_gradients_are_autograds(model, lambda m: m(ids, labels=ids).loss)


def test_the_gradients_beside_frozen_layers_are_autograds(net, image):
    net.requires_grad_(False)
    net.layer2.requires_grad_(True)
    assert_gradients_are_autograds(net, lambda m: m(image).square().sum())
    with hl.record(net, ["stem:grad_output", "layer2:grad_output"]) as run:
        net(image).square().sum().backward()
    assert run["stem:grad_output"] is None
    why = run.report().why
    assert [str(site) for site in why] == ["stem:grad_output"]
    assert "frozen parameters" in " ".join(str(run.report()).split())


def test_both_backwards_of_a_gradient_penalty_are_autograds(looped):
    x = torch.randn(5, 2, requires_grad=True)

    def penalty(model):
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return grad.square().sum()

    edges = []
    handle = looped.block.register_forward_hook(
        lambda module, args, output: edges.append(get_gradient_edge(output))
    )
    first = torch.autograd.grad(looped(x).tanh().sum(), edges)
    edges.clear()
    second = torch.autograd.grad(penalty(looped), edges, allow_unused=True)
    handle.remove()
    with hl.record(looped, "block:grad_output") as run:
        penalty(looped).backward()
    backwards = run.passes[0].backwards
    assert len(backwards) == 2
    for backward, expected in zip(backwards, (first, second), strict=True):
        assert all(map(torch.equal, backward.calls("block:grad_output"), expected))


def test_a_gradient_kept_with_its_graph_can_be_differentiated(looped):
    x = torch.randn(5, 2, requires_grad=True)
    with hl.record(looped, "head:grad_input", detach=False) as run:
        y = looped(x).tanh().sum()
        torch.autograd.grad(y, x, create_graph=True)
    kept = run["head:grad_input"]
    assert kept.requires_grad
    (again,) = torch.autograd.grad(kept.sum(), x)
    assert again.abs().sum() > 0
    with hl.record(looped, "head:grad_input") as run:
        torch.autograd.grad(looped(x).tanh().sum(), x, create_graph=True)
    assert not run["head:grad_input"].requires_grad


def test_what_is_kept_of_a_gradient_is_chosen_as_of_a_value(net, image):
    options = {"keep": lambda g: g.mean((2, 3)), "dtype": torch.float64}
    with hl.record(net, "layer1:grad_output") as whole, hl.record(
        net, "layer1:grad_output", **options
    ) as part:  # fmt: skip
        net(image).sum().backward()
    expected = whole["layer1:grad_output"].mean((2, 3)).double()
    assert torch.equal(part["layer1:grad_output"], expected)


# -- parameters and tensors by name ---------------------------------------------------------------


def test_the_gradients_of_parameters_are_a_bare_runs_by_pass(net, image):
    net.train()
    with hl.record(net, ports="grad") as run:
        for k in range(2):
            net.zero_grad()
            net(image + k).square().sum().backward()
            one = run.passes[k]
            found = dict(net.named_parameters())
            assert list(one) == [f"{name}:grad" for name in found]
            assert all(torch.equal(one[f"{n}:grad"], p.grad) for n, p in found.items())
    with pytest.raises(hl.AmbiguousError, match="each of 2 passes"):
        run["fc.weight:grad"]


def test_accumulated_gradients_are_recorded_before_adding_up(looped):
    with hl.record(looped, "head.weight:grad") as run:
        for scale in (1.0, 2.0):
            (scale * looped(torch.ones(1, 2)).sum()).backward()
    assert torch.equal(run.stack("head.weight:grad").sum(0), looped.head.weight.grad)
    assert torch.equal(run.passes[1]["head.weight:grad"], 2 * run.passes[0]["head.weight:grad"])


@pytest.mark.trap(39)
def test_a_stored_grad_changes_when_clipped_a_recorded_one_not():
    model, kept = nn.Sequential(nn.Linear(3, 1)), []
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    with hl.record(model, "0.weight:grad") as run:
        model(torch.ones(4, 3)).square().sum().backward()
    handle.remove()
    before = kept[0].clone()
    nn.utils.clip_grad_norm_(model.parameters(), before.norm().item() / 2)
    assert not torch.allclose(kept[0], before)
    model.zero_grad(set_to_none=False)
    assert not kept[0].any()
    assert torch.equal(run["0.weight:grad"], before)


@pytest.mark.trap(21)
def test_a_tied_parameters_gradient_is_one_site_with_aliases():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    kept = {}
    handles = [
        parameter.register_hook(lambda grad, name=name: kept.update({name: grad}))
        for name, parameter in model.named_parameters()
    ]
    with hl.record(model, ports="grad") as run:
        model(torch.randn(2, 3)).square().sum().backward()
    for handle in handles:
        handle.remove()
    assert "1.weight" not in kept  # by hand, who asks for it finds nothing
    assert torch.equal(kept["0.weight"], model[0].weight.grad)
    assert list(run) == ["0.weight:grad", "0.bias:grad", "1.bias:grad"]
    assert torch.equal(run["0.weight:grad"], model[0].weight.grad)
    assert torch.equal(run["1.weight:grad"], model[0].weight.grad)


def test_gradients_of_tensors_by_name_are_autograds():
    a = torch.ones(3, requires_grad=True)
    b = a * 2
    with hl.record({"a": a, "b": b}) as run:
        b.square().mean().backward()
    assert torch.equal(run["a:grad"], a.grad)
    assert torch.equal(run["b:grad"], 2 * b.detach() / 3)
    assert not b._backward_hooks
    with pytest.raises(hl.AttachError, match=r"'c' needs no gradient.*\n.*requires_grad_"):
        hl.record({"c": torch.ones(2)})


# -- how backward is called -----------------------------------------------------------------------


def test_gradients_asked_of_autograd_are_recorded_grad_is_left(looped):
    x = torch.ones(1, 2, requires_grad=True)
    with hl.record(looped, ["head:grad_output", "block:grad_input#0"]) as run:
        (expected,) = torch.autograd.grad(looped(x).sum(), x)
    assert torch.equal(run["block:grad_input#0"], expected)
    assert torch.equal(run["head:grad_output"], torch.ones(1, 1))
    assert all(p.grad is None for p in (*looped.parameters(), x))


def test_a_backward_for_some_inputs_records_what_it_reaches(looped):
    sites = ["head:grad_output", "block:grad_output#2", "block.bias:grad"]
    with pytest.warns(hl.HooklineWarning, match=r"block:grad_output#2: no gradient flowed back"):
        with hl.record(looped, sites) as run:
            looped(torch.ones(1, 2)).sum().backward(inputs=[looped.head.weight])
    assert list(run) == ["head:grad_output"]
    assert looped.block.weight.grad is None


def test_one_backward_of_several_passes_gives_each_pass_its_own(looped):
    weights = (1.0, 2.0, 3.0)
    with hl.record(looped, ["head:grad_output", "head.bias:grad"]) as run:
        losses = [w * looped(torch.ones(1, 2)).sum() for w in weights]
        sum(losses).backward()
    found = [one["head:grad_output"].item() for one in run.passes]
    assert found == [1.0, 2.0, 3.0]
    # A parameter has one gradient of all of them: the latest pass has it.
    assert [list(one) for one in run.passes][:2] == [["head:grad_output"]] * 2
    assert run["head.bias:grad"].item() == 6.0


def test_a_backward_in_another_thread_is_with_its_forward(looped):
    line = hl.record(looped, ["head:grad_output", "head.bias:grad"], every_thread=True)
    loss = looped(torch.ones(1, 2)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    line.remove()
    assert line.recording["head:grad_output"].item() == 1.0
    assert line.recording["head.bias:grad"].item() == 1.0
    with hl.record(looped, "head:grad_output") as run:
        loss = looped(torch.ones(1, 2)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    # What flowed forward in the block is the block's, whoever calls backward.
    assert run["head:grad_output"].item() == 1.0


# -- where there is none --------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_reason_and_remedy_are_said_twice(net, image, without, port):
    with pytest.warns(hl.HooklineWarning, match=r"no_grad\(\) or inference_mode\(\); run it with"):
        with hl.record(net, f"fc:{port}") as run, without():
            net(image)
    with pytest.raises(hl.NotRecordedError, match=r"no_grad\(\) or inference_mode\(\); run it"):
        run[f"fc:{port}"]


@pytest.mark.parametrize("site", ["fc:grad_output", "fc:grad_input", "fc.bias:grad"])
def test_a_forward_without_backward_says_that_none_was_called(net, image, site):
    with pytest.warns(hl.HooklineWarning, match=r"call backward\(\) inside the block"):
        with hl.record(net, site) as run:
            net(image)
    with pytest.raises(hl.NotRecordedError, match=r"call backward\(\) inside the block"):
        run[site]


def test_a_frozen_parameter_is_said_to_be_frozen(net, image):
    net.fc.bias.requires_grad_(False)
    with pytest.warns(hl.HooklineWarning, match=r"fc.bias:grad: it is frozen.*requires_grad_\(\)"):
        with hl.record(net, "fc.*", ports="grad") as run:
            net(image).sum().backward()
    with pytest.raises(hl.NotRecordedError, match="frozen"):
        run["fc.bias:grad"]
    assert run["fc.weight:grad"].shape == (5, 4)


def test_what_needs_no_gradient_is_none_without_a_warning(net, image):
    with hl.record(net, ["stem:grad_input", "fc:grad_input"]) as run:
        net(image).sum().backward()
    assert run["stem:grad_input"] is None
    assert run["fc:grad_input"] is not None
    assert "an input without requires_grad" in " ".join(str(run.report()).split())


WRITES = {
    "the base": lambda base, view: base.mul_(3),
    "the view": lambda base, view: view.mul_(3),
    "without a graph": lambda base, view: base.detach().mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:hl.record. 1 of 1 site never fired")
def test_a_named_tensor_whose_base_is_written_to_has_the_reason(write):
    base = torch.ones(4, requires_grad=True) * 2
    view = base[:2]
    before = view * 1  # through which a hook on the view is called, with a part
    with hl.record({"b": view}) as run:
        WRITES[write](base, view)
        (view.sum() + base.sum() + before.sum()).backward()
    assert "it is a view that was written to in place" in " ".join(str(run.report()).split())
    with pytest.raises(hl.NotRecordedError, match=r"drops a view's hooks; .* \.clone\(\)"):
        run["b:grad"]


@pytest.mark.filterwarnings("ignore:hl.edit. 1 of 1 site never fired")
def test_editing_a_named_tensor_with_a_written_base_is_refused():
    base = torch.ones(4, requires_grad=True) * 2
    view = base[:2]
    before = view * 1
    with hl.edit({"b": view}, "b", lambda grad: grad * 2):
        base.mul_(3)
        with pytest.raises(hl.AttachError, match="b:grad cannot be changed: it is a view"):
            (before.sum() + base.sum()).backward()


def test_a_part_of_a_gradient_behind_whole_ones_is_told_of():
    base = torch.ones(4, requires_grad=True) * 2
    view = base[:2]
    before = (view * 1).sum()
    with hl.record({"b": view}) as run:
        before.backward(retain_graph=True)
        base.mul_(3)
        with pytest.warns(hl.HooklineWarning, match="b:grad has no gradient: it is a view"):
            (before + base.sum()).backward()
    assert run["b:grad"].tolist() == [1.0, 1.0]


def test_a_view_by_name_that_nobody_writes_to_has_its_gradient():
    base = torch.ones(4, requires_grad=True) * 2
    view = base[:2]
    with hl.record({"b": view, "base": base}) as run:
        (view * 2).sum().backward()
    assert run["b:grad"].tolist() == [2.0, 2.0]
    assert run["base:grad"].tolist() == [2.0, 2.0, 0.0, 0.0]


def test_what_stands_where_no_gradient_came():
    """As docs/recording.md says of a missing gradient."""
    model = nn.ModuleDict(
        {"frozen": nn.Linear(2, 2), "used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)}
    )
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: (model["used"](model["frozen"](x)), model["idle"](x))[0]
    with (
        pytest.warns(hl.HooklineWarning, match="5 of 12 sites never fired"),
        hl.record(model, "*", ports=("grad_output", "grad_input", "grad")) as run,
    ):
        model(torch.ones(1, 2)).sum().backward()
    assert run["frozen:grad_output"] is None
    assert run["used:grad_input"] is None
    assert run["used.weight:grad"].shape == (2, 2)
    for key, why in (("frozen.weight:grad", "it is frozen"), ("idle:grad_output", "depends on it")):
        with pytest.raises(hl.NotRecordedError, match=why):
            run[key]


@pytest.mark.trap(41)
def test_a_tensor_hook_that_closes_over_its_tensor_is_not_freed():
    model, by_hand = Sized(), Sized()

    def hook(module, args, output):
        output.register_hook(lambda grad: grad * output.sign())

    handle = by_hand.act.register_forward_hook(hook)
    by_hand(torch.ones(4, 3)).sum().backward()
    handle.remove()
    assert by_hand.n_alive() == 1
    with (
        hl.record(model, "act:grad_output"),
        hl.edit(model, "act:grad_output", lambda grad: grad.sign()),
    ):
        model(torch.ones(4, 3)).sum().backward()
    assert model.n_alive() == 0


def test_tensors_are_swapped_while_their_gradients_are_recorded():
    model = nn.Linear(3, 2)
    torch.__future__.set_swap_module_params_on_conversion(True)  # as always for DTensors
    try:
        with hl.record(model, ports=("output", "grad")) as run:
            model.double()
            with pytest.warns(hl.HooklineWarning, match="were swapped"):
                model(torch.ones(1, 3).double()).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert run["(root)"].dtype == torch.float64
